"""The scene parser rejects objects that are malformed, bitten, off the palette or overlapping."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageDraw

from limner.tasks import rendering, scene_reader
from limner.tasks.scenes import BACKGROUNDS, COLORS, EXTENT, SHAPES, UNITS, Scene, SceneObject
from sample_scenes import to_uint8


def polygon(*points):
    return lambda draw, at, paint: draw.polygon([at(x, y) for x, y in points], fill=paint)


def star(draw, at, paint):
    angles = -np.pi / 2 + np.arange(10) * np.pi / 5
    radii = np.where(np.arange(10) % 2, 0.22, 0.5)
    points = [at(0.5 + r * np.cos(a), 0.5 + r * np.sin(a)) for r, a in zip(radii, angles, strict=True)]
    draw.polygon(points, fill=paint)


def bars(vertical):
    def draw_bars(draw, at, paint):
        for k in range(0, 10, 2):
            a, b = at(k / 10, 0), at(k / 10 + 0.08, 1)
            draw.rectangle((a, b) if vertical else (a[::-1], b[::-1]), fill=paint)

    return draw_bars


MALFORMED = {
    "triangle, apex down": polygon((0, 0), (1, 0), (0.5, 1)),
    "triangle, apex right": polygon((0, 0), (1, 0.5), (0, 1)),
    "right triangle": polygon((0, 0), (1, 1), (0, 1)),
    "bar": polygon((0, 0.25), (1, 0.25), (1, 0.75), (0, 0.75)),
    "L": polygon((0, 0), (0.4, 0), (0.4, 0.6), (1, 0.6), (1, 1), (0, 1)),
    "T": polygon((0, 0), (1, 0), (1, 0.4), (0.7, 0.4), (0.7, 1), (0.3, 1), (0.3, 0.4), (0, 0.4)),
    "star": star,
    "upright stripes": bars(vertical=True),
    "ellipse": lambda draw, at, paint: draw.ellipse((*at(0, 0.2), *at(1, 0.8)), fill=paint),
    "half circle": lambda draw, at, paint: draw.pieslice((*at(0, 0), *at(1, 1)), 0, 180, fill=paint),
    "bitten circle": lambda draw, at, paint: draw.pieslice((*at(0, 0), *at(1, 1)), 45, 315, fill=paint),
    "circle of no size": lambda draw, at, paint: draw.ellipse((*at(0.1, 0.1), *at(0.9, 0.9)), fill=paint),
    "square of no size": lambda draw, at, paint: draw.rectangle((*at(0.12, 0.12), *at(0.88, 0.88)), fill=paint),
    "huge circle": lambda draw, at, paint: draw.ellipse((*at(-0.3, -0.3), *at(1.3, 1.3)), fill=paint),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_objects_are_unknown(name):
    for color in ("red", "white", "black", "yellow"):
        for background in ("gray", "brown"):
            canvas = Image.new("RGB", (480, 480), BACKGROUNDS[background])
            MALFORMED[name](ImageDraw.Draw(canvas), lambda x, y: (120 + 200 * x, 160 + 200 * y), COLORS[color])
            assert scene_reader.read(np.asarray(canvas.reduce(10))).scene is None


def erased(scene, item, angle, radius):
    """The picture with a disk of `radius` pixels around the outline wiped to the background, and the share of
    the object that was erased."""
    side, over = 4 * EXTENT[item.size], 4
    alpha = np.zeros((48, 48))
    alpha[4 * item.y :, 4 * item.x :][:side, :side] = rendering.alpha_mask(item.shape, item.size, item.fill, 4)
    inside = rendering.alpha_mask(item.shape, item.size, "solid", 4) > 0.5
    steps = np.arange(side // 2)
    ys, xs = (side / 2 + np.outer([np.sin(angle), np.cos(angle)], steps)).astype(int)
    reach = steps[inside[ys, xs]].max()
    fine = (np.arange(48 * over) + 0.5) / over
    cy, cx = (4 * at + side / 2 + reach * turn for at, turn in ((item.y, np.sin(angle)), (item.x, np.cos(angle))))
    disk = (fine[:, None] - cy) ** 2 + (fine - cx) ** 2 <= radius**2
    disk = disk.reshape(48, over, 48, over).mean((1, 3))
    picture = rendering.render(scene) * (1 - disk[..., None]) + disk[..., None] * BACKGROUNDS[scene.background]
    return to_uint8(picture), (alpha * disk).sum() / alpha.sum()


@pytest.mark.parametrize(("fill", "least"), [("solid", 0.085), ("outlined", 0.17)])
def test_bitten_objects_are_unknown(fill, least):
    rng, tried = np.random.default_rng(7), 0
    while tried < 60:
        background, color = rng.choice(list(BACKGROUNDS)), rng.choice(list(COLORS))
        size, shape = ("small", "large")[tried % 3 == 0], ("circle", *SHAPES)[tried % 6]
        x, y = (int(v) for v in rng.integers(0, UNITS - EXTENT[size] + 1, 2))
        item = SceneObject(shape=shape, color=color, size=size, fill=fill, x=x, y=y)
        scene = Scene(objects=(item,), background=background)
        picture, share = erased(scene, item, rng.uniform(0, 2 * np.pi), rng.uniform(1.5, 5))
        if least <= share <= 0.22:  # an object bitten to half may look like another one
            tried += 1
            assert scene_reader.read(picture).scene != scene, (item, share)


def test_colors_between_the_palette_are_unknown():
    for a, b in (("red", "blue"), ("yellow", "orange"), ("white", "black"), ("green", "purple")):
        picture = rendering.render(Scene(objects=(), background="pink"))
        picture[9:27, 9:27] = np.mean([COLORS[a], COLORS[b]], 0)
        assert scene_reader.read(picture).scene is None


def test_overlapping_objects_are_unknown():
    square = SceneObject(shape="square", color="red", size="large", fill="solid", x=2, y=2)
    for dx, dy in ((2, 0), (3, 3), (1, 2)):
        other = replace(square, shape="circle", color="blue", x=2 + dx, y=2 + dy)
        picture = rendering.render(Scene(objects=(square, other), background="gray"))
        assert scene_reader.read(picture).scene is None
