"""Faint objects and large artifacts become detections; noise and small artifacts do not."""

from dataclasses import replace

import numpy as np

from limner.tasks import rendering, scene_reader
from limner.tasks.scenes import BACKGROUNDS, COLORS, Scene, SceneObject
from sample_scenes import mixed_scenes, noise, to_uint8


def test_small_artifacts_are_forgiven_and_large_ones_are_not():
    scene = Scene(
        objects=(SceneObject(shape="circle", color="blue", size="large", fill="solid", x=0, y=0),), background="beige"
    )
    for side, forgiven in ((1, True), (3, True), (5, False), (10, False)):
        picture = rendering.render(scene)
        picture[35 : 35 + side, 33 : 33 + side] = 0
        assert (scene_reader.read(picture).scene == scene) is forgiven


def test_noise_makes_no_things():
    for i, paint in enumerate(BACKGROUNDS.values()):
        flat = np.broadcast_to(np.array(paint, np.uint8), (48, 48, 3))
        for sigma in (10, 30):
            assert scene_reader.read(noise(flat, sigma, seed=i)).detections == ()


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
