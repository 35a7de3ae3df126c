"""Area resizing against its definition, and the two listings against a literal reading of them."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from limner.data.area_resize import area_resize, area_weights
from limner.data.augment import augment_dvae, augment_none, augment_prior, get_augment, resize_bicubic
from limner.errors import UserError

SIDE = st.integers(1, 70)


def dense_weights(n_in, n_out):
    """The length of the overlap of output cell i and input cell j, over that of the output cell."""
    weights = np.zeros((n_out, n_in))
    for i in range(n_out):
        for j in range(n_in):  # in units of 1 / n_out, so that all is exact
            left, right = max(i * n_in, j * n_out), min((i + 1) * n_in, (j + 1) * n_out)
            weights[i, j] = max(0, right - left) / n_in
    return weights


def exact(image, height, width):
    down, across = dense_weights(image.shape[0], height), dense_weights(image.shape[1], width)
    return np.einsum("ij,jkc,lk->ilc", down, image.astype(np.float64), across, optimize=True)


def pictures(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@given(n_in=SIDE, n_out=SIDE)
@settings(max_examples=60, deadline=None)
def test_weights_are_overlap_lengths(n_in, n_out):
    weights = area_weights(n_in, n_out)
    assert np.allclose(weights, dense_weights(n_in, n_out), atol=1e-12)
    assert np.allclose(weights.sum(1), 1)
    assert np.allclose(weights.sum(0), n_out / n_in)  # all input pixels have equal weight


@given(h=SIDE, w=SIDE, height=SIDE, width=SIDE, seed=st.integers(0, 9), data=st.data())
@settings(max_examples=60, deadline=None)
def test_resize_is_exact_and_a_window_is_a_part_of_it(h, w, height, width, seed, data):
    image = pictures(h, w, seed)
    full = area_resize(image, height, width)
    assert full.dtype == np.uint8 and full.shape == (height, width, 3)
    assert np.abs(full - exact(image, height, width)).max() <= 0.5 + 1e-4
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    rows, columns = data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))
    part = area_resize(image, height, width, (top, left, rows, columns))
    true = exact(image, height, width)[top : top + rows, left : left + columns]
    tie = np.abs(true % 1 - 0.5) < 1e-4  # which float32 may round either way
    assert np.array_equal(part[~tie], full[top : top + rows, left : left + columns][~tie])
    assert np.abs(part - true).max() <= 0.5 + 1e-4


def test_large_pictures_in_several_products():
    image = pictures(900, 3000)
    assert np.abs(area_resize(image, 37, 90) - exact(image, 37, 90)).max() <= 0.5 + 1e-4
    assert np.array_equal(area_resize(np.full_like(image, 255), 300, 1001), np.full((300, 1001, 3), 255))


@pytest.mark.parametrize("gathered", [1, 700, 1 << 14])
def test_a_picture_is_gathered_in_parts_to_save_memory(gathered, monkeypatch):
    image = pictures(300, 500)
    whole = area_resize(image, 40, 33, (3, 2, 30, 29))
    monkeypatch.setattr("limner.data.area_resize.MAX_GATHERED_VALUES", gathered)
    assert np.array_equal(area_resize(image, 40, 33, (3, 2, 30, 29)), whole)


class Script:
    """Plays back chosen draws, and keeps the bounds that were asked for."""

    def __init__(self, choose):
        self.choose, self.asked = choose, []

    def integers(self, low, high):
        self.asked.append((low, high))
        return low if self.choose == "low" else high - 1

    def random(self):
        self.asked.append("flip")
        return 0.0 if self.choose == "low" else 0.9


def listing_1(image, size, rng):
    """Listing 1, line by line. tf.random.uniform excludes its upper end; so does `integers`."""
    h, w = image.shape[:2]
    s_min = min(h, w)
    y, x = rng.integers(0, h - s_min + 1), rng.integers(0, w - s_min + 1)  # tf.image.random_crop
    image = image[y : y + s_min, x : x + s_min]
    t_min = min(s_min, round(9 / 8 * size))
    t_max = min(s_min, round(12 / 8 * size))
    t = rng.integers(t_min, t_max + 1)
    image = np.rint(np.clip(exact(image, t, t), 0, 255)).astype(np.uint8)
    y, x = rng.integers(0, t - size + 1), rng.integers(0, t - size + 1)
    image = image[y : y + size, x : x + size]
    return image[:, ::-1] if rng.random() < 0.5 else image


def listing_2(image, size, rng):
    h, w = image.shape[:2]
    s_min = min(h, w)
    off_h = rng.integers(3 * (h - s_min) // 8, max(3 * (h - s_min) // 8 + 1, 5 * (h - s_min) // 8))
    off_w = rng.integers(3 * (w - s_min) // 8, max(3 * (w - s_min) // 8 + 1, 5 * (w - s_min) // 8))
    image = image[off_h : off_h + s_min, off_w : off_w + s_min]
    t_max = min(s_min, round(9 / 8 * size))
    t = rng.integers(size, t_max + 1)
    image = np.rint(np.clip(exact(image, t, t), 0, 255)).astype(np.uint8)
    y, x = rng.integers(0, t - size + 1), rng.integers(0, t - size + 1)
    return image[y : y + size, x : x + size]


def assert_same(ours, theirs):
    """Equal but where float32 and float64 fall on two sides of a tie."""
    difference = np.abs(ours.astype(int) - theirs)
    assert difference.max() <= 1 and difference.mean() < 0.01


@pytest.mark.parametrize("shape", [(40, 40), (17, 40), (61, 33), (16, 16), (90, 21), (19, 18)])
@pytest.mark.parametrize(("ours", "theirs"), [(augment_dvae, listing_1), (augment_prior, listing_2)])
def test_the_listings(ours, theirs, shape):
    image, size = pictures(*shape), 16
    for choose in ("low", "high"):
        a, b = Script(choose), Script(choose)
        assert_same(ours(image, size, a), theirs(image, size, b))
        assert a.asked == b.asked  # the same bounds in the same order
    for seed in range(5):
        rngs = np.random.default_rng(seed), np.random.default_rng(seed)
        assert_same(ours(image, size, rngs[0]), theirs(image, size, rngs[1]))
        assert rngs[0].random() == rngs[1].random()


@pytest.mark.parametrize("name", ["dvae", "prior", "none", "bicubic"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (16, 3), (15, 300)])
def test_pictures_below_the_target_are_scaled_up(name, shape):
    out = get_augment(name)[0](np.full((*shape, 3), 77, np.uint8), 16, np.random.default_rng(0))
    assert out.shape == (16, 16, 3) and (out == 77).all()


def test_none_is_the_central_square():
    image = pictures(32, 96)
    assert np.array_equal(augment_none(image, 32), image[:, 32:64])
    with pytest.raises(UserError, match="dvae, prior, none, bicubic"):
        get_augment("mixup")


@pytest.mark.parametrize("shape", [(50, 81), (300, 40), (33, 33), (20, 31), (224, 500)])
def test_bicubic_resizes_the_shorter_side_and_crops_the_center(shape):
    """The reference resizes the whole picture, as torchvision's `Resize` and `CenterCrop` do."""
    image, size = pictures(*shape), 32
    height, width = shape
    sides = (size, int(size * height / width)) if width <= height else (int(size * width / height), size)
    resized = np.asarray(Image.fromarray(image).resize(sides, Image.Resampling.BICUBIC))
    top, left = (round((side - size) / 2.0) for side in resized.shape[:2])
    expected = resized[top : top + size, left : left + size]
    difference = np.abs(resize_bicubic(image, size).astype(int) - expected)
    assert difference.max() <= 1 and difference.mean() < 0.01


def test_bicubic_does_not_resize_beyond_the_crop():
    assert resize_bicubic(np.full((1, 60_000, 3), 9, np.uint8), 224).shape == (224, 224, 3)  # 9 GB when resized whole
