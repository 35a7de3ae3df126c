"""Ghosts and large artefacts are seen; noise and small artefacts are not."""

from dataclasses import replace

import numpy as np

from limner.tasks import rendering, scene_reader
from limner.tasks.scenes import BACKGROUNDS, COLORS, Scene, Thing
from sample_scenes import mixed_world, noise, to_uint8


def test_small_artefacts_are_forgiven_and_large_ones_are_not():
    scene = Scene(
        things=(Thing(shape="circle", color="blue", size="large", fill="solid", x=0, y=0),), background="beige"
    )
    for side, forgiven in ((1, True), (3, True), (5, False), (10, False)):
        picture = rendering.render(scene)
        picture[35 : 35 + side, 33 : 33 + side] = 0
        assert (scene_reader.read(picture).scene == scene) is forgiven


def test_noise_makes_no_things():
    for i, paint in enumerate(BACKGROUNDS.values()):
        flat = np.broadcast_to(np.array(paint, np.uint8), (48, 48, 3))
        for sigma in (10, 30):
            assert scene_reader.read(noise(flat, sigma, seed=i)).sightings == ()


def test_ghosts_are_seen():
    rng = np.random.default_rng(8)
    for i, scene in enumerate(mixed_world(60, seed=31, count=2)):
        real, ghost = scene.things if i % 2 else scene.things[::-1]
        alone = replace(scene, things=(real,))
        contrast = np.linalg.norm(np.subtract(COLORS[ghost.color], BACKGROUNDS[scene.background]))
        opacity = max(rng.uniform(0.15, 0.4), 25 / contrast)
        picture = to_uint8((1 - opacity) * rendering.render(alone) + opacity * rendering.render(scene).astype(float))
        assert scene_reader.read(rendering.render(alone)).scene == alone
        assert scene_reader.read(picture).scene is None, (ghost, opacity)
