"""The contrastive model's towers: patch dropout, sizes of published models, options that change no other model."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from limner.models.contrastive import SIZES, CLIPConfig
from limner.models.patch_embedding import drop_patches, sinusoids
from limner.validation import InvalidSetting

SMALL = CLIPConfig(text_vocab=30, text_len=6, size=16, patch=4, width=16, depth=2, heads=2, embedding=8)


def pictures(n=3):
    return torch.randint(0, 256, (n, 3, 16, 16), dtype=torch.uint8)


def test_dropped_patches_are_others_for_each_picture_and_never_the_class_token():
    torch.manual_seed(0)
    x = torch.arange(17.0).expand(40, 17)[..., None].contiguous()
    kept = drop_patches(x, 8)[..., 0]
    assert kept.shape == (40, 9) and (kept[:, 0] == 0).all()
    assert all(len(set(row)) == 9 for row in kept.tolist())
    assert len({frozenset(row) for row in kept.tolist()}) > 30
    counts = torch.bincount(kept[:, 1:].long().flatten(), minlength=17)
    assert counts[0] == 0 and counts[1:].min() >= 10  # of 20 on average


def test_patches_are_dropped_in_training_only():
    torch.manual_seed(0)
    plain, model = SMALL.build(), replace(SMALL, patch_dropout=0.5).build()
    model.load_state_dict(plain.state_dict())
    images = pictures()
    assert torch.equal(plain.eval().encode_image(images), model.eval().encode_image(images))
    model.train()
    seen = []
    model.image_blocks[0].register_forward_hook(lambda _, inputs, output: seen.append(output.shape[1]))
    first, second = model.encode_image(images), model.encode_image(images)
    assert seen == [9, 9] and not torch.equal(first, second)


def test_with_all_patches_kept_the_order_does_not_matter():
    """Positions travel with their patches."""
    torch.manual_seed(0)
    model = SMALL.build().eval()
    images = pictures()
    expected = model.encode_image(images)
    model.image_blocks[0].register_forward_pre_hook(lambda _, args: (drop_patches(args[0], 16), *args[1:]))
    torch.testing.assert_close(model.encode_image(images), expected)


def block_input(model):
    captured = []
    model.image_blocks[0].register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    model.encode_image(pictures())
    return captured[0].detach()


def test_the_papers_form_normalizes_the_input_of_the_blocks_and_has_learned_positions_only():
    """Radford et al. 2021; Wortsman et al. 2023, §3.2. The class token is normalized, too."""
    torch.manual_seed(0)
    x = block_input(SMALL.build().eval())
    torch.testing.assert_close(x.mean(-1), torch.zeros(3, 17), atol=1e-6, rtol=0)
    torch.testing.assert_close(x.var(-1, unbiased=False), torch.ones(3, 17), atol=0.05, rtol=0)


def test_the_options_omit_the_norm_and_add_sinusoids():
    torch.manual_seed(0)
    model = replace(SMALL, ln_pre=False, sinusoids=True).build().eval()
    plain = replace(SMALL, ln_pre=False).build().eval()
    plain.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    x = block_input(model)
    torch.manual_seed(1)
    added = x - block_input(plain)
    torch.testing.assert_close(added, F.pad(sinusoids(4, 16), (0, 0, 1, 0)).expand(3, -1, -1))


def test_a_text_tower_of_its_own_size():
    model = replace(SMALL, text_tower=(8, 3, 1), layer_scale=True, qk_norm=True).build()
    assert len(model.text_blocks) == 3 and len(model.image_blocks) == 2
    assert model.encode_text(torch.randint(0, 30, (2, 6))).shape == model.encode_image(pictures(2)).shape == (2, 8)
    with pytest.raises(InvalidSetting, match="multiple of heads"):
        replace(SMALL, text_tower=(8, 3, 3))


@pytest.mark.parametrize(("name", "millions"), [("B", 151.3), ("L", 427.6), ("H", 986.1)])
def test_sizes_are_those_of_openclip(name, millions):
    """Parameters of the published models, whose vocabulary has 49,408 words."""
    with torch.device("meta"):
        model = replace(SIZES[name], text_vocab=49_408).build()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.003)


def test_the_tiny_size_is_for_scenes():
    model = SIZES["tiny"].build().eval()
    assert model.encode_image(torch.zeros(1, 3, 48, 48, dtype=torch.uint8)).shape == (1, 128)
