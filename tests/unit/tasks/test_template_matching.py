"""Template matching finds objects in dense scenes and off the lattice."""

from dataclasses import replace

import numpy as np

from limner.tasks import rendering, scene_reader, scenes, verify
from limner.tasks.scenes import EXTENT, Scene, SceneObject
from sample_scenes import mixed_scenes


def exactly(scene, picture):
    read = scene_reader.read(picture).scene
    return read is not None and verify.scenes_match(read, scene, tolerance=1e-6)


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
