"""Pictures of scenes: their pixels are pinned, and show paint where the objects are."""

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import pytest

from limner.tasks import rendering
from limner.tasks.scenes import (
    BACKGROUNDS,
    COLORS,
    EXTENT,
    FILLS,
    SHAPES,
    SIZES,
    TRANSFORMS,
    UNITS,
    Scene,
    SceneObject,
    ScenePair,
)
from sample_scenes import ONE, SCENE, TWO


def test_pixels_are_pinned():
    # Models are trained on exactly these pixels; a change here makes them, and every figure, worthless.
    digest = hashlib.sha256()
    attributes = itertools.product(SHAPES, FILLS, SIZES, COLORS)
    for i, (shape, fill, size, color) in enumerate(attributes):
        item = SceneObject(shape=shape, color=color, size=size, fill=fill, x=i % 7, y=i % 5)
        digest.update(rendering.render(Scene(objects=(item,), background=list(BACKGROUNDS)[i % 5])))
    assert digest.hexdigest()[:16] == "df588684efe5f7b3"


@pytest.mark.parametrize("size", [12, 48, 96])
def test_a_picture_shows_paint_where_the_objects_are(size):
    picture = rendering.render(SCENE, size)
    assert picture.shape == (size, size, 3) and picture.dtype == np.uint8
    unit = size // UNITS
    assert tuple(picture[0, 0]) == BACKGROUNDS["gray"]
    for item in SCENE.objects:
        x, y = (int(c * unit) for c in item.center)
        assert tuple(picture[y, x]) == COLORS[item.color]


def test_sizes_that_the_lattice_does_not_divide_raise_an_error():
    with pytest.raises(ValueError, match="50"):
        rendering.render(SCENE, 50)


def test_masks_are_opacities_and_all_differ():
    for size in SIZES:
        masks = [rendering.alpha_mask(s, size, f, 4) for s in SHAPES for f in FILLS]
        assert all(s.shape == (4 * EXTENT[size],) * 2 and s.min() >= 0 and s.max() == 1 for s in masks)
        flat = np.stack(masks).reshape(len(masks), -1)
        energy = (flat**2).sum(1)
        distance = ((flat[:, None] - flat) ** 2).sum(-1) / np.minimum.outer(energy, energy)
        assert (distance + np.eye(len(flat))).min() > 0.02


def test_fills_take_away_from_the_solid_shape():
    for shape in SHAPES:
        for size in SIZES:
            solid, striped, outlined = (rendering.alpha_mask(shape, size, fill, 4) for fill in FILLS)
            assert (striped <= solid).all() and (outlined <= solid).all()
            rows = np.arange(len(solid)) // 4 % 2
            assert (striped[rows == 0] == solid[rows == 0]).all() and not striped[rows == 1].any()


def test_small_objects_differ_by_the_light_of_fifteen_pixels():
    # Stripes of half a unit left 10 of 144 pixels between diamonds and crosses, and dVAEs took one for the other.
    masks = [rendering.alpha_mask(shape, "small", fill, 4) for shape in SHAPES for fill in FILLS]
    assert min(abs(a - b).sum() for a, b in itertools.combinations(masks, 2)) > 15


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_lower_panels(transform):
    top = Scene(objects=(replace(ONE, y=1), replace(TWO, y=1, fill="striped")), background="teal", height=6)
    pair = ScenePair(top=top, transform=transform, color="green" if transform == "recolored" else None)
    upper, lower = np.split(rendering.render_pair(pair), 2)
    assert (upper == rendering.render(top)).all()
    if transform == "upside down":
        assert (lower == upper[::-1]).all()
    elif transform == "grayscale":
        assert (lower == lower[..., :1]).all()
        assert abs(lower[..., 0] - upper @ [0.299, 0.587, 0.114]).max() <= 0.5 + 1e-6
    elif transform == "sketch":
        assert tuple(lower[0, 0]) == COLORS["white"] and (lower == lower[..., :1]).all()
    else:
        x, y = (int(c * 4) for c in replace(ONE, y=1).center)
        assert tuple(lower[y, x]) == COLORS["green"] and (lower[0, 0] == upper[0, 0]).all()
