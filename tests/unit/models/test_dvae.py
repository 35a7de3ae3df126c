"""The dVAE has the released layout, names and sizes, and maps pixels as Equation 3 says."""

from dataclasses import replace

import pytest
import torch

from limner.models.dvae import DVAEConfig, map_pixels, unmap_pixels

SMALL = DVAEConfig(size=16, width=8, groups=3, vocab=20, code_width=8)


def test_the_papers_parameter_counts():
    with torch.device("meta"):
        model = DVAEConfig().build()
    millions = [sum(p.numel() for p in part.parameters()) / 1e6 for part in (model.encoder, model.decoder)]
    assert [round(m, 1) for m in millions] == [53.8, 43.8]


def test_names_and_shapes_of_the_released_code():
    with torch.device("meta"):
        model = DVAEConfig().build()
    encoder, decoder = model.encoder.state_dict(), model.decoder.state_dict()
    assert encoder["blocks.input.w"].shape == (256, 3, 7, 7)
    assert encoder["blocks.group_1.block_1.res_path.conv_1.w"].shape == (64, 256, 3, 3)
    assert encoder["blocks.group_4.block_2.res_path.conv_4.w"].shape == (2048, 512, 1, 1)
    assert encoder["blocks.group_2.block_1.id_path.w"].shape == (512, 256, 1, 1)
    assert "blocks.group_1.block_1.id_path.w" not in encoder
    assert encoder["blocks.output.conv.w"].shape == (8192, 2048, 1, 1)
    assert decoder["blocks.input.w"].shape == (128, 8192, 1, 1)
    assert decoder["blocks.group_1.block_1.id_path.w"].shape == (2048, 128, 1, 1)
    assert decoder["blocks.group_1.block_1.res_path.conv_1.w"].shape == (512, 128, 1, 1)
    assert decoder["blocks.group_4.block_2.res_path.conv_4.w"].shape == (256, 64, 3, 3)
    assert decoder["blocks.output.conv.w"].shape == (6, 256, 1, 1)
    assert decoder["blocks.output.conv.b"].shape == (6,)


def test_pixel_map_is_equation_3_and_invertible():
    pixels = torch.arange(256, dtype=torch.uint8)
    mapped = map_pixels(pixels)
    assert mapped[0].item() == pytest.approx(0.1)
    assert mapped[255].item() == pytest.approx(0.9)
    assert torch.equal(unmap_pixels(mapped), pixels)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_shapes_follow_the_number_of_groups(groups):
    config = DVAEConfig(size=16, width=8, groups=groups, vocab=20, code_width=8)
    model = config.build()
    side = 16 // 2 ** (groups - 1)
    pixels = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    assert config.grid == (side, side)
    assert model.encode(pixels).shape == (2, 20, side, side)
    tokens = model.tokenize(pixels)
    assert tokens.shape == (2, side * side)
    pictures = model.decode_tokens(tokens)
    assert pictures.shape == pixels.shape
    assert pictures.dtype == torch.uint8


def test_a_size_not_divisible_by_the_stride_raises():
    with pytest.raises(ValueError, match="size must be a multiple of the stride, 4, not 18"):
        DVAEConfig(size=18, groups=3)


def test_default_gain_is_the_released_codes():
    assert SMALL.build().encoder.blocks.group_1.block_1.gain == 1 / (3 * 2) ** 2


def test_without_context_a_code_is_of_its_patch_alone():
    torch.manual_seed(0)
    far, near = (replace(SMALL, size=32, context_groups=k).build() for k in (None, 0))
    near.load_state_dict(far.state_dict())  # the same parameters by name
    a = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    b = a.clone()
    b[:, :, 20:24, 8:12] = 255 - b[:, :, 20:24, 8:12]  # the patch of 4 x 4 pixels in row 5, column 2
    changed = (near.encode(a) != near.encode(b)).any(1)
    assert changed[:, 5, 2].all()
    assert changed.sum() == len(a)
    assert (far.encode(a) != far.encode(b)).any(1).sum() > len(a)
    alone = near.encode(a[:, :, 20:24, 8:12])
    torch.testing.assert_close(alone[:, :, 0, 0], near.encode(a)[:, :, 5, 2])
