"""Pairs hold if their lower panel is what the transform makes of the upper one, and only then."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from limner.tasks import captions, pair_reader, rendering, verify
from limner.tasks.scenes import TRANSFORMS, Scene, SceneObject, ScenePair
from sample_scenes import blur, jpeg, noise, pairs


def test_a_faint_object_in_a_gray_panel_is_seen():
    item = SceneObject(shape="circle", color="black", size="small", fill="solid", x=1, y=1)
    pair = ScenePair(top=Scene(objects=(item,), background="beige", height=6), transform="grayscale")
    picture = rendering.render_pair(pair)
    assert verify.pair_holds(pair, picture)
    picture[30:42, 30:42] -= 20
    assert not verify.pair_holds(pair, picture)


DEGRADED_PAIRS = {
    "fresh": (lambda p: p, 1.0),
    "blur 1.0": (lambda p: blur(p, 1.0), 0.95),
    "noise 10": (lambda p: noise(p, 10), 0.95),
    "jpeg 50": (lambda p: jpeg(p, 50), 0.95),
}


@pytest.mark.parametrize("name", DEGRADED_PAIRS)
def test_pairs_hold(name):
    degrade, floor = DEGRADED_PAIRS[name]
    rng = np.random.default_rng(1)
    sample = pairs(40, seed=3)
    pictures = [degrade(rendering.render_pair(pair)) for pair in sample]
    assert np.mean([verify.pair_holds(p, x) for p, x in zip(sample, pictures, strict=True)]) >= floor
    said = [verify.satisfies(x, captions.describe_pair(p, rng)) for p, x in zip(sample, pictures, strict=True)]
    assert np.mean(said) >= floor


def test_no_other_transform_holds():
    for pair in pairs(20, seed=4):
        picture = rendering.render_pair(pair)
        for transform in TRANSFORMS:
            wrong = captions.ParsedPairCaption(transform=transform, color="red" if transform == "recolored" else None)
            if (transform, wrong.color) != (pair.transform, pair.color):
                twin = ScenePair(top=pair.top, transform=transform, color=wrong.color)
                same = (rendering.render_pair(twin) == picture).all()  # a red thing, recolored red
                assert verify.pair_holds(wrong, picture) is bool(same)


def test_no_other_bottom_holds():
    sample = pairs(30, seed=6)
    for pair, other in pairwise(sample):
        if other.top == pair.top:
            continue
        mixed = np.concatenate([rendering.render_pair(pair)[:24], rendering.render_pair(other)[24:]])
        assert not verify.pair_holds(pair, mixed)


def test_a_pair_claim_is_about_the_top_too():
    pair = ScenePair(
        top=Scene(
            objects=(SceneObject(shape="triangle", color="green", size="small", fill="solid", x=4, y=2),),
            background="gray",
            height=6,
        ),
        transform="upside down",
    )
    picture = rendering.render_pair(pair)
    assert verify.satisfies(picture, "the exact same small green triangle on the top upside down at the bottom")
    assert not verify.satisfies(picture, "the exact same small red triangle on the top upside down at the bottom")
    assert not verify.pair_holds(replace(pair, top=replace(pair.top, background="pink")), picture)
    top, bottom = pair_reader.read_pair(picture, "upside down")
    assert top.scene == bottom.scene == pair.top
