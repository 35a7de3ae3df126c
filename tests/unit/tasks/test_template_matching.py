"""The stencils that explain most are found, in crowds and off the lattice."""

from dataclasses import replace

import numpy as np

from limner.tasks import rendering, scene_reader, scenes, verify
from limner.tasks.scenes import EXTENT, Scene, Thing
from sample_scenes import mixed_world


def exactly(scene, picture):
    read = scene_reader.read(picture).scene
    return read is not None and verify.alike(read, scene, tolerance=1e-6)


def test_four_small_squares_are_no_large_one():
    square = Thing(shape="square", color="red", size="small", fill="solid", x=0, y=0)
    things = tuple(replace(square, x=x, y=y) for x in (2, 6) for y in (3, 7))
    assert exactly(Scene(things=things, background="pink"), rendering.render(Scene(things=things, background="pink")))


def test_crowds_are_read():
    rng = np.random.default_rng(0)
    crowds = [scenes.sample_crowd(rng) for _ in range(25)]
    assert all(exactly(crowd, rendering.render(crowd)) for crowd in crowds)


def test_things_may_lie_off_the_lattice():
    rng = np.random.default_rng(0)
    for scene in mixed_world(25, count=2):
        things = tuple(
            replace(t, **{k: np.clip(getattr(t, k) + rng.integers(-1, 2) / 4, 0, 12 - EXTENT[t.size]) for k in "xy"})
            for t in scene.things
        )
        moved = replace(scene, things=things)
        assert exactly(moved, rendering.render(moved))
