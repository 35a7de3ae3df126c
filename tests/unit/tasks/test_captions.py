"""Captions describe their scenes, and parsing recovers what they describe."""

from dataclasses import replace

import numpy as np
import pytest

from limner.tasks import captions, scenes
from limner.tasks.captions import ParsedCaption
from limner.tasks.scenes import BACKGROUNDS, COLORS, FILLS, SHAPES, SIZES
from sample_scenes import ONE, SCENE, TWO, pairs, random_scenes


def fully_said(scene, rng):
    """A caption that leaves out neither sizes nor the background."""
    while True:
        caption = captions.describe(scene, rng)
        claims = captions.parse(caption)
        assert claims is not None, caption
        if claims.background and all(None not in named for named in claims.attributes):
            return caption


def test_captions_are_true():
    rng = np.random.default_rng(1)
    for scene in random_scenes(400, seed=1):
        for _ in range(3):
            caption = captions.describe(scene, rng)
            claims = captions.parse(caption)
            assert claims is not None and claims.matches(scene), caption


def test_captions_vary():
    rng = np.random.default_rng(0)
    ways = {captions.describe(SCENE, rng) for _ in range(200)}
    assert len(ways) > 20
    assert any("to the left of" in c for c in ways) and any("below" in c for c in ways)
    assert any("background" not in c for c in ways)
    assert any("small" not in c for c in ways) and any("solid" in c for c in ways)


def mutations(scene, rng):
    """Every scene that differs in one respect, in object `k`."""
    k = int(rng.integers(len(scene.objects)))
    item = scene.objects[k]
    for name, values in (("shape", SHAPES), ("color", COLORS), ("fill", FILLS), ("size", SIZES)):
        for value in values:
            if value != getattr(item, name):
                changed = replace(item, **{name: value})
                yield replace(scene, objects=(*scene.objects[:k], changed, *scene.objects[k + 1 :]))
    for background in BACKGROUNDS:
        if background != scene.background:
            yield replace(scene, background=background)
    yield replace(scene, objects=scene.objects[:k] + scene.objects[k + 1 :])
    yield replace(scene, objects=(*scene.objects, item))


def test_a_scene_with_one_object_wrong_keeps_no_full_caption():
    rng = np.random.default_rng(2)
    for scene in random_scenes(60, seed=2):
        claims = captions.parse(fully_said(scene, rng))
        assert claims is not None and claims.matches(scene)
        assert not any(claims.matches(other) for other in mutations(scene, rng))


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
    assert claims is not None and claims.matches(SCENE) is holds


def test_counts_and_unnamed_attributes():
    claims = captions.parse("three striped white crosses, pink background")
    assert claims == ParsedCaption(attributes=((None, "striped", "white", "cross"),) * 3, background="pink")
    claims = captions.parse("two small red circles and a large blue square")
    assert claims == ParsedCaption(attributes=(ONE.attributes, ONE.attributes, TWO.attributes))


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
def test_captions_of_other_data_sets_are_not_parsed(caption):
    assert captions.parse(caption) is None


def test_relations_of_places():
    assert captions.spatial_relations(ONE, TWO) == ["above", "left of"]
    assert captions.spatial_relations(TWO, ONE) == ["below", "right of"]
    assert captions.spatial_relations(ONE, replace(ONE, x=6)) == ["left of"]
    for scene in random_scenes(200, seed=3, count=2):
        for relation in captions.spatial_relations(*scene.objects):
            attributes = tuple(t.attributes for t in scene.objects)
            assert ParsedCaption(attributes=attributes, relation=relation).matches(scene)


def test_in_order_the_upper_or_left_object_is_named_first_more_often_and_captions_stay_true():
    rng = np.random.default_rng(0)
    for in_order, low, high in ((0.0, 0.42, 0.58), (0.7, 0.8, 0.9), (1.0, 1.0, 1.0)):
        first = []
        for _ in range(300):
            scene = scenes.sample_scene(rng, count=2, identical=0)
            claims = captions.parse(captions.describe(scene, rng, in_order))
            assert claims is not None and claims.matches(scene)
            first.append(claims.relation in ("above", "left of"))
        assert low <= sum(first) / len(first) <= high


def test_pair_captions_are_parsed():
    rng = np.random.default_rng(0)
    for pair in pairs(200):
        caption = captions.describe_pair(pair, rng)
        claims = captions.parse_pair(caption)
        assert claims is not None and (claims.transform, claims.color) == (pair.transform, pair.color)
        assert claims.top is None if "scene" in caption else claims.top.matches(pair.top)
    for other in ("a red circle", "the exact same cat on the top upside down at the bottom",
                  "the exact same scene on the top colored mauve at the bottom"):  # fmt: skip
        assert captions.parse_pair(other) is None
