"""A dVAE of patches: nearest codes, k-means, and a decoder that works on any size."""

from dataclasses import replace

import pytest
import torch

from limner.models.dvae import map_pixels
from limner.models.patch_dvae import KMEANS_ITERS, PatchDVAEConfig, kmeans, nearest_code
from limner.objectives.reconstruction_loss import ReconstructionLoss
from limner.validation import InvalidSetting

SMALL = PatchDVAEConfig(size=16, patch=4, vocab=12, width=8, blocks=1)


def squares(n: int, seed: int = 0) -> torch.Tensor:
    """Pictures of patches in five colors, uint8 [n, 3, 16, 16]."""
    generator = torch.Generator().manual_seed(seed)
    colors = torch.tensor([[0, 0, 0], [255, 0, 0], [0, 200, 90], [40, 40, 255], [255, 255, 255]], dtype=torch.uint8)
    chosen = colors[torch.randint(5, (n, 4, 4), generator=generator)]
    return chosen.permute(0, 3, 1, 2).repeat_interleave(4, 2).repeat_interleave(4, 3)


def test_a_token_is_the_nearest_code():
    model = SMALL.build()
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=generator)
    model.codes.copy_(map_pixels(torch.randint(0, 256, (12, 48), dtype=torch.uint8, generator=generator)))
    tokens = model.tokenize(pixels).view(3, 4, 4)
    for b, y, x in ((0, 0, 0), (1, 2, 3), (2, 3, 1)):
        patch = map_pixels(pixels[b, :, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4]).flatten()
        assert tokens[b, y, x] == (model.codes - patch).square().sum(1).argmin()


def test_more_points_than_are_compared_at_once():
    points, codes = torch.randn(2_500, 6), torch.randn(40, 6)
    assert torch.equal(nearest_code(points, codes), torch.cdist(points.double(), codes.double()).argmin(1))


def test_centers_find_each_group_of_points():
    generator = torch.Generator().manual_seed(0)
    groups = 10 * torch.randn(7, 5, generator=generator)
    points = groups.repeat(40, 1) + 0.01 * torch.randn(280, 5, generator=generator)
    rounds = []
    codes = kmeans(points, 20, generator, rounds.append)
    assert len(rounds) == KMEANS_ITERS
    assert (points - codes[nearest_code(points, codes)]).norm(dim=1).max() < 0.1


def test_fitted_codes_and_an_untrained_decoder_give_back_what_they_were_fitted_to():
    model = SMALL.build()
    model.fit_codebook(squares(50), torch.Generator().manual_seed(0))
    unseen = squares(8, seed=1)
    again = model.decode_tokens(model.tokenize(unseen))
    assert again.shape == unseen.shape
    assert (again.int() - unseen.int()).abs().float().mean() < 8


def test_contrast_decides_which_patches_are_clustered():
    flat = torch.randint(0, 256, (200, 3, 1, 1), dtype=torch.uint8).expand(-1, -1, 16, 16).clone()
    edge = torch.zeros(3, 4, 4, dtype=torch.uint8)
    edge[:, :, 2:] = 255
    flat[:, :, :4, :4] = edge  # one patch in sixteen
    model = SMALL.build()
    model.fit_codebook(flat, torch.Generator().manual_seed(0), samples=200)
    assert (model.codes - map_pixels(edge).flatten()).abs().amax(1).min() < 1e-5


def test_flat_areas_have_codes_of_one_color():
    """Colors next to edges in most pictures do not leave traces in their codes."""
    generator = torch.Generator().manual_seed(0)
    pictures = squares(100)
    edges = torch.rand(100, 1, 16, 16, generator=generator) < 0.05
    pictures = torch.where(edges, 255 - pictures, pictures)
    model = replace(SMALL, vocab=64).build()
    model.fit_codebook(pictures, generator)
    spread = model.codes.unflatten(1, (3, -1)).std(2).amax(1)
    assert (spread == 0).sum() == 5  # an eighth of 64 are more than there are colors
    plain = squares(8, seed=1)
    found = model.codes[model.tokenize(plain)]
    patches = map_pixels(plain).unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(8, 16, 48)
    assert (found - patches).abs().max() < 1e-6  # so near that rounding never chooses another


@pytest.mark.parametrize("vocab", [2, 3, 8])
def test_a_small_vocabulary_has_codes_of_both_kinds(vocab):
    colors = torch.randint(256, (4, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels = colors.repeat_interleave(4, 2).repeat_interleave(4, 3)  # 64 colors
    pixels[:, :, :4] = torch.randint(256, (4, 3, 4, 16), dtype=torch.uint8)
    model = replace(SMALL, vocab=vocab).build()
    model.fit_codebook(pixels, torch.Generator().manual_seed(1))
    assert model.codes.isfinite().all() and len(model.codes.unique(dim=0)) == vocab


def test_the_decoder_learns_what_pasted_patches_miss():
    torch.manual_seed(0)
    model = SMALL.build()
    generator = torch.Generator().manual_seed(0)
    ramps = (torch.arange(16).view(1, 1, 1, 16) * 8 + torch.randint(0, 100, (64, 1, 1, 1), generator=generator)).expand(
        -1, 3, 16, -1
    )
    batch = {"pixels": ramps.to(torch.uint8).contiguous()}
    model.fit_codebook(batch["pixels"], generator)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        loss, metrics = ReconstructionLoss()(model, batch, 0, None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert 1 < metrics["codes"] <= 12
    assert not model.codes.requires_grad


@pytest.mark.parametrize(("l1_from", "drawn"), [(None, 90), (200, 40)])
def test_where_codes_leave_two_colors_open_the_last_error_decides(l1_from, drawn):
    """Three pictures with one code have levels 40, 40 and 190: their mean is 90, their median 40."""
    torch.manual_seed(0)
    model = SMALL.build()
    model.codes.fill_(0.9)
    model.codes[0] = map_pixels(torch.tensor(140, dtype=torch.uint8))
    levels = torch.tensor([40, 40, 190], dtype=torch.uint8).view(3, 1, 1, 1)
    batch = {"pixels": levels.expand(-1, 3, 16, 16).contiguous()}
    assert model.tokenize(batch["pixels"]).unique().tolist() == [0]
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(400):
        loss, _ = ReconstructionLoss(l1_from=l1_from)(model, batch, step, None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pictures = model.decode_tokens(torch.zeros(1, 16, dtype=torch.long)).float()
    assert pictures.mean().item() == pytest.approx(drawn, abs=3) and pictures.std() < 3


def test_half_a_picture_has_half_the_grid():
    model = SMALL.build()
    model.fit_codebook(squares(50), torch.Generator().manual_seed(0))
    pixels = squares(2)
    upper = model.tokenize(pixels[:, :, :8])
    assert torch.equal(upper, model.tokenize(pixels)[:, :8])
    assert model.decode_tokens(upper, (2, 4)).shape == (2, 3, 8, 16)


def test_sizes_that_do_not_fit():
    with pytest.raises(InvalidSetting, match="multiple of patch, 5, not 16"):
        PatchDVAEConfig(size=16, patch=5)


def test_refinements_are_small_at_first_and_depend_on_adjacent_patches() -> None:
    torch.manual_seed(0)
    plain = SMALL.build()
    refined = replace(SMALL, pixel_blocks=1).build()
    refined.load_state_dict(plain.state_dict(), strict=False)
    for model in (plain, refined):
        model.codes.uniform_(0.2, 0.8, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(0, SMALL.vocab, (2, 4, 4))
    torch.testing.assert_close(refined.decode(tokens), plain.decode(tokens), atol=0.1, rtol=0)

    joined = torch.full((1, 3, 16, 16), 0.5, requires_grad=True)
    refined.refine(joined)[0, :, 4, 4].sum().backward()  # the first pixel of a patch
    assert joined.grad is not None and joined.grad[0, :, 3, 3].abs().sum() > 0  # the last one of the patch before


def test_without_refinements_weights_have_the_names_that_bundles_have() -> None:
    assert not [name for name in SMALL.build().state_dict() if name.startswith("refine")]
