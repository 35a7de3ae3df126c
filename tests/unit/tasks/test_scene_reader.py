"""The scene parser reads clean pictures exactly, degraded ones nearly always, and rejects blends.

Each floor is a little below the share measured on a larger sample.
"""

from dataclasses import replace

import numpy as np
import pytest

from limner.tasks import captions, rendering, scene_reader, verify
from limner.tasks.scenes import BACKGROUNDS, COLORS, EXTENT, FILLS, SHAPES, SIZES, UNITS, Scene, SceneObject
from sample_scenes import blur, cast, halved, jpeg, mixed_scenes, noise, to_uint8


def exactly(scene, picture):
    read = scene_reader.read(picture).scene
    return read is not None and verify.scenes_match(read, scene, tolerance=1e-6)


def test_fresh_scenes_are_read_exactly():
    sample = mixed_scenes(1000)
    read = sum(exactly(scene, rendering.render(scene)) for scene in sample)
    assert read >= 0.995 * len(sample)  # measured: 4,000 of 4,000


def test_every_object_on_every_background_is_read_with_hardly_a_doubt():
    backgrounds = list(BACKGROUNDS)
    attributes = [(s, c, z, f) for s in SHAPES for c in COLORS for z in SIZES for f in FILLS]
    for i, (shape, color, size, fill) in enumerate(attributes):
        far = UNITS - EXTENT[size]
        item = SceneObject(shape=shape, color=color, size=size, fill=fill, x=i % (far + 1), y=(far, 0, 3)[i % 3])
        scene = Scene(objects=(item,), background=backgrounds[i % 5])
        reading = scene_reader.read(rendering.render(scene))
        assert reading.scene == scene
        assert reading.detections[0].doubt < 0.05 and abs(reading.detections[0].residual) < 0.01


@pytest.mark.parametrize("size", [12, 24, 36, 60, 96, 240])
def test_any_size_of_picture(size):
    assert all(exactly(scene, rendering.render(scene, size)) for scene in mixed_scenes(12, seed=size))


def test_an_empty_scene():
    reading = scene_reader.read(rendering.render(Scene(objects=(), background="teal")))
    assert reading.scene == Scene(objects=(), background="teal")


def test_other_shapes_raise_an_error():
    for shape in ((48, 48), (48, 48, 4), (50, 50, 3), (48, 36, 3), (24, 24 * 3, 3)):
        with pytest.raises(ValueError):
            scene_reader.read(np.zeros(shape, np.uint8))


DEGRADATIONS = {
    # name: (degradation, floor, share measured on 600 scenes)
    "blur 0.6": (lambda p: blur(p, 0.6), 0.99, 1.0),
    "blur 1.0": (lambda p: blur(p, 1.0), 0.99, 1.0),
    "blur 1.5": (lambda p: blur(p, 1.5), 0.97, 1.0),
    "noise 10": (lambda p: noise(p, 10), 0.99, 1.0),
    "noise 20": (lambda p: noise(p, 20), 0.98, 1.0),
    "cast 20": (lambda p: cast(p, 20), 0.98, 0.998),
    "half size": (halved, 0.99, 1.0),
    "jpeg 50": (lambda p: jpeg(p, 50), 0.98, 1.0),
    "jpeg 20": (lambda p: jpeg(p, 20), 0.85, 0.937),
    "all together": (lambda p: cast(noise(blur(p, 0.8), 6), 12), 0.98, 1.0),
}


@pytest.mark.parametrize("name", DEGRADATIONS)
def test_degraded_scenes_are_read(name):
    degrade, floor, _ = DEGRADATIONS[name]
    sample = mixed_scenes(60, seed=5)
    readings = [(scene, scene_reader.read(degrade(rendering.render(scene))).scene) for scene in sample]
    right = sum(read is not None and verify.scenes_match(read, scene) for scene, read in readings)
    misread = sum(read is not None and not verify.scenes_match(read, scene) for scene, read in readings)
    assert right >= floor * len(readings)
    assert misread <= 0.02 * len(readings)  # degraded objects become unknown, not other objects


@pytest.mark.parametrize("share", [0.5, 0.6])
def test_blends_of_two_scenes_are_neither(share):
    first, second = mixed_scenes(30, seed=11), mixed_scenes(30, seed=12)
    rng = np.random.default_rng(0)
    kept = 0
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        b = replace(b, background=a.background) if i % 2 else b
        blend = to_uint8(share * rendering.render(a) + (1 - share) * rendering.render(b).astype(float))
        kept += verify.satisfies(blend, captions.describe(a, rng)) or verify.satisfies(blend, captions.describe(b, rng))
    assert kept <= 1
