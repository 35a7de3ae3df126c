"""Each image tokenizer has what the rest of limner asks of one."""

import pytest
import torch

from limner.models.dvae import DVAEConfig
from limner.models.image_tokenizer import ImageTokenizer
from limner.models.patch_dvae import PatchDVAEConfig

CONFIGS = [
    DVAEConfig(size=16, groups=2, width=8, blocks=1, vocab=10, code_width=8),
    PatchDVAEConfig(size=16, patch=4, width=8, blocks=1, vocab=10),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_tokens_fill_the_grid_and_decode_to_pictures(config):
    model = config.build()
    assert isinstance(model, ImageTokenizer)
    (rows, columns), pixels = config.grid, torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    tokens = model.tokenize(pixels)
    assert tokens.shape == (3, rows * columns) and tokens.dtype == torch.int64
    assert tokens.min() >= 0 and tokens.max() < config.vocab
    pictures = model.decode_tokens(tokens)
    assert pictures.shape == pixels.shape and pictures.dtype == torch.uint8
    assert torch.equal(model.decode_tokens(tokens, config.grid), pictures)
    half = model.decode_tokens(tokens[:, : rows // 2 * columns], (rows // 2, columns))
    assert half.shape == (3, 3, 8, 16)


@pytest.mark.parametrize("config", CONFIGS)
def test_only_fixed_codes_are_fitted(config):
    model = config.build()
    pixels = torch.randint(0, 256, (20, 3, 16, 16), dtype=torch.uint8)
    codes, rounds = model.fixed_codes(), []
    if codes is None:
        with pytest.raises(NotImplementedError):
            model.fit_codebook(pixels, torch.Generator(), rounds.append)
        assert all(p.requires_grad for p in model.parameters())
    else:
        before = codes.clone()
        model.fit_codebook(pixels, torch.Generator().manual_seed(0), rounds.append)
        assert not torch.equal(model.fixed_codes(), before) and sum(rounds) > 1
        assert len(codes) == config.vocab and not codes.requires_grad
