"""Scenes, pairs and captions that tests draw, and ways to spoil their pictures."""

import io

import numpy as np
from PIL import Image

from limner.tasks import captions, scenes
from limner.tasks.scenes import Scene, SceneObject

ONE = SceneObject(shape="circle", color="red", size="small", fill="solid", x=2, y=3)
TWO = SceneObject(shape="square", color="blue", size="large", fill="solid", x=6, y=7)
SCENE = Scene(objects=(ONE, TWO), background="gray")


def random_scenes(n, seed=0, **options):
    rng = np.random.default_rng(seed)
    return [scenes.sample_scene(rng, **options) for _ in range(n)]


def mixed_scenes(n, seed=0, **options):
    """Scenes, alternately of the two splits."""
    rng = np.random.default_rng(seed)
    return [scenes.sample_scene(rng, split=("train", "held-out")[i % 2], **options) for i in range(n)]


def pairs(n, seed=0):
    rng = np.random.default_rng(seed)
    return [scenes.sample_pair(rng, split=("train", "held-out")[i % 2]) for i in range(n)]


def random_captions(n: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [captions.describe(scenes.sample_scene(rng), rng) for _ in range(n)]


def blur(picture, sigma):
    kernel = np.exp(-0.5 * (np.arange(-8, 9) / sigma) ** 2)
    soft = np.pad(picture.astype(np.float64), ((8, 8), (8, 8), (0, 0)), mode="edge")
    for axis in (0, 1):
        soft = np.lib.stride_tricks.sliding_window_view(soft, 17, axis) @ (kernel / kernel.sum())
    return to_uint8(soft)


def to_uint8(values):
    return np.rint(values).clip(0, 255).astype(np.uint8)


def noise(picture, sigma, seed=0):
    return to_uint8(picture + np.random.default_rng(seed).normal(0, sigma, picture.shape))


def cast(picture, levels):
    return to_uint8(picture + np.random.default_rng(int(picture.sum())).uniform(-levels, levels, 3))


def jpeg(picture, quality):
    data = io.BytesIO()
    Image.fromarray(picture).save(data, "JPEG", quality=quality, subsampling=0)
    return np.asarray(Image.open(data))


def halved(picture):
    small = Image.fromarray(picture).resize((24, 24), Image.Resampling.BOX)
    return np.asarray(small.resize((48, 48), Image.Resampling.BICUBIC))
