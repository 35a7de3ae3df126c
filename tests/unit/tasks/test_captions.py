"""Captions say what is so, and are read as what they say."""

from dataclasses import replace

import numpy as np
import pytest

from limner.tasks import captions, scenes
from limner.tasks.captions import Claims
from limner.tasks.scenes import BACKGROUNDS, COLORS, FILLS, SHAPES, SIZES
from sample_scenes import ONE, SCENE, TWO, pairs, world


def fully_said(scene, rng):
    """A caption that leaves out neither sizes nor the background."""
    while True:
        caption = captions.describe(scene, rng)
        claims = captions.parse(caption)
        assert claims is not None, caption
        if claims.background and all(None not in look for look in claims.looks):
            return caption


def test_captions_say_what_is_so():
    rng = np.random.default_rng(1)
    for scene in world(400, seed=1):
        for _ in range(3):
            caption = captions.describe(scene, rng)
            claims = captions.parse(caption)
            assert claims is not None and claims.hold(scene), caption


def test_captions_vary():
    rng = np.random.default_rng(0)
    ways = {captions.describe(SCENE, rng) for _ in range(200)}
    assert len(ways) > 20
    assert any("to the left of" in c for c in ways) and any("below" in c for c in ways)
    assert any("background" not in c for c in ways)
    assert any("small" not in c for c in ways) and any("solid" in c for c in ways)


def mutations(scene, rng):
    """Every scene that differs in one respect, from thing `k` of a scene."""
    k = int(rng.integers(len(scene.things)))
    thing = scene.things[k]
    for name, values in (("shape", SHAPES), ("color", COLORS), ("fill", FILLS), ("size", SIZES)):
        for value in values:
            if value != getattr(thing, name):
                changed = replace(thing, **{name: value})
                yield replace(scene, things=(*scene.things[:k], changed, *scene.things[k + 1 :]))
    for background in BACKGROUNDS:
        if background != scene.background:
            yield replace(scene, background=background)
    yield replace(scene, things=scene.things[:k] + scene.things[k + 1 :])
    yield replace(scene, things=(*scene.things, thing))


def test_a_scene_with_one_thing_wrong_keeps_no_full_caption():
    rng = np.random.default_rng(2)
    for scene in world(60, seed=2):
        claims = captions.parse(fully_said(scene, rng))
        assert claims is not None and claims.hold(scene)
        assert not any(claims.hold(other) for other in mutations(scene, rng))


@pytest.mark.parametrize(
    ("caption", "holds"),
    [
        ("a small red circle above a large blue square on a gray background", True),
        ("a large blue square below a small red circle", True),
        ("a red circle to the left of a blue square", True),
        ("There is a solid blue square and a red circle on gray.", True),
        ("a red circle below a blue square", False),
        ("a red circle right of a blue square", False),
        ("a large red circle above a large blue square", False),
        ("a striped red circle and a blue square", False),
        ("a red circle", False),
        ("two red circles", False),
        ("a red circle, a red circle and a blue square", False),
        ("a red circle and a blue square on a teal background", False),
    ],
)
def test_claims(caption, holds):
    claims = captions.parse(caption)
    assert claims is not None and claims.hold(SCENE) is holds


def test_counts_and_unsaid_attributes():
    claims = captions.parse("three striped white crosses, pink background")
    assert claims == Claims(looks=((None, "striped", "white", "cross"),) * 3, background="pink")
    claims = captions.parse("two small red circles and a large blue square")
    assert claims == Claims(looks=(ONE.look, ONE.look, TWO.look))


@pytest.mark.parametrize(
    "caption",
    [
        "",
        "a cat",
        "a circle",
        "red circle",
        "a shiny red circle",
        "a red blue circle",
        "five red circles",
        "three red circles and two blue squares",
        "a red circle above a blue square left of a green cross",
        "a red circle above a blue square and a green cross",
        "the exact same scene on the top as a sketch at the bottom",
    ],
)
def test_captions_of_other_worlds_are_not_parsed(caption):
    assert captions.parse(caption) is None


def test_relations_of_places():
    assert captions.relations_of(ONE, TWO) == ["above", "left of"]
    assert captions.relations_of(TWO, ONE) == ["below", "right of"]
    assert captions.relations_of(ONE, replace(ONE, x=6)) == ["left of"]
    for scene in world(200, seed=3, count=2):
        for relation in captions.relations_of(*scene.things):
            looks = tuple(t.look for t in scene.things)
            assert Claims(looks=looks, relation=relation).hold(scene)


def test_in_order_the_upper_or_left_thing_is_said_first_more_often_and_stays_true():
    rng = np.random.default_rng(0)
    for in_order, low, high in ((0.0, 0.42, 0.58), (0.7, 0.8, 0.9), (1.0, 1.0, 1.0)):
        first = []
        for _ in range(300):
            scene = scenes.sample_scene(rng, count=2, identical=0)
            claims = captions.parse(captions.describe(scene, rng, in_order))
            assert claims is not None and claims.hold(scene)
            first.append(claims.relation in ("above", "left of"))
        assert low <= sum(first) / len(first) <= high


def test_pair_captions_are_parsed():
    rng = np.random.default_rng(0)
    for pair in pairs(200):
        caption = captions.describe_pair(pair, rng)
        claims = captions.parse_pair(caption)
        assert claims is not None and (claims.transform, claims.color) == (pair.transform, pair.color)
        assert claims.top is None if "scene" in caption else claims.top.hold(pair.top)
    for other in ("a red circle", "the exact same cat on the top upside down at the bottom",
                  "the exact same scene on the top colored mauve at the bottom"):  # fmt: skip
        assert captions.parse_pair(other) is None
