"""The scene parser reads clean pictures exactly, degraded ones nearly always, and rejects blends, malformed objects,
other paints, and faint objects.

Each floor is a little below the share measured on a larger sample.
"""

from dataclasses import replace

import numpy as np
import pytest

from limner.tasks import captions, rendering, scene_reader, scenes, verify
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
        assert reading.doubt < 0.05


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


def test_four_small_squares_are_no_large_one():
    square = SceneObject(shape="square", color="red", size="small", fill="solid", x=0, y=0)
    objects = tuple(replace(square, x=x, y=y) for x in (2, 6) for y in (3, 7))
    scene = Scene(objects=objects, background="pink")
    assert exactly(scene, rendering.render(scene))


def test_dense_scenes_are_read():
    rng = np.random.default_rng(0)
    dense_scenes = [scenes.sample_dense_scene(rng) for _ in range(25)]
    assert all(exactly(scene, rendering.render(scene)) for scene in dense_scenes)


def test_objects_may_lie_off_the_lattice():
    rng = np.random.default_rng(0)
    for scene in mixed_scenes(25, count=2):
        objects = tuple(
            replace(t, **{k: np.clip(getattr(t, k) + rng.integers(-1, 2) / 4, 0, 12 - EXTENT[t.size]) for k in "xy"})
            for t in scene.objects
        )
        moved = replace(scene, objects=objects)
        assert exactly(moved, rendering.render(moved))


def test_unknown_backgrounds():
    circle = SceneObject(shape="circle", color="red", size="large", fill="solid", x=3, y=3)
    for paint in ((140, 50, 170), (20, 20, 20), (0, 255, 255)):
        picture = np.empty((48, 48, 3), np.uint8)
        picture[:] = paint
        alpha = rendering.alpha_mask("circle", "large", "solid", 4)[..., None]
        picture[12:32, 12:32] = alpha * COLORS["red"] + (1 - alpha) * picture[12:32, 12:32]
        assert scene_reader.read(picture).scene is None
        assert not verify.satisfies(picture, "a large red circle")
    assert verify.satisfies(rendering.render(Scene(objects=(circle,), background="teal")), "a large red circle")


def test_small_artifacts_are_forgiven_and_large_ones_are_not():
    scene = Scene(
        objects=(SceneObject(shape="circle", color="blue", size="large", fill="solid", x=0, y=0),), background="beige"
    )
    for side, forgiven in ((1, True), (3, True), (5, False), (10, False)):
        picture = rendering.render(scene)
        picture[35 : 35 + side, 33 : 33 + side] = 0
        assert (scene_reader.read(picture).scene == scene) is forgiven


def test_noise_makes_no_objects():
    for i, (name, paint) in enumerate(BACKGROUNDS.items()):
        flat = np.broadcast_to(np.array(paint, np.uint8), (48, 48, 3))
        for sigma in (10, 30):
            assert scene_reader.read(noise(flat, sigma, seed=i)).scene == Scene(objects=(), background=name)


def test_faint_objects_are_detected():
    rng = np.random.default_rng(8)
    for i, scene in enumerate(mixed_scenes(60, seed=31, count=2)):
        real, faint = scene.objects if i % 2 else scene.objects[::-1]
        alone = replace(scene, objects=(real,))
        contrast = np.linalg.norm(np.subtract(COLORS[faint.color], BACKGROUNDS[scene.background]))
        opacity = max(rng.uniform(0.15, 0.4), 25 / contrast)
        picture = to_uint8((1 - opacity) * rendering.render(alone) + opacity * rendering.render(scene).astype(float))
        assert scene_reader.read(rendering.render(alone)).scene == alone
        assert scene_reader.read(picture).scene is None, (faint, opacity)
