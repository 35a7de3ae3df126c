"""A picture satisfies its caption; pictures that differ from it in a named attribute do not."""

from dataclasses import replace

import numpy as np
import pytest

from limner.errors import UserError
from limner.tasks import captions, rendering, verify
from limner.tasks.captions import ParsedCaption
from limner.tasks.scenes import BACKGROUNDS, COLORS, FILLS, SHAPES
from sample_scenes import mixed_scenes, random_scenes


def wrong_ones(scene, rng):
    """Scenes that differ from one in one respect that its caption can name."""
    k = int(rng.integers(len(scene.objects)))
    item = scene.objects[k]

    def changed(**change):
        return replace(scene, objects=(*scene.objects[:k], replace(item, **change), *scene.objects[k + 1 :]))

    yield changed(shape=rng.choice([s for s in SHAPES if s != item.shape]))
    yield changed(color=rng.choice([c for c in COLORS if c != item.color]))
    yield changed(fill=rng.choice([f for f in FILLS if f != item.fill]))
    if item.size == "large":
        yield changed(size="small")
    yield replace(scene, background=rng.choice([b for b in BACKGROUNDS if b != scene.background]))
    yield replace(scene, objects=scene.objects[:k] + scene.objects[k + 1 :])


def test_right_pictures_satisfy_and_wrong_ones_do_not():
    rng = np.random.default_rng(4)
    for scene in mixed_scenes(50, seed=21):
        claims = None
        while claims is None or claims.background is None or None in claims.attributes[0]:
            caption = captions.describe(scene, rng)
            claims = captions.parse(caption)
        assert verify.satisfies(rendering.render(scene), caption)
        for wrong in wrong_ones(scene, rng):
            assert not verify.satisfies(rendering.render(wrong), caption), (caption, wrong)


def test_relations_and_counts():
    for scene in mixed_scenes(40, seed=22, count=2):
        a, b = (" ".join(t.attributes) for t in scene.objects)
        for relation in ("above", "below", "left of", "right of"):
            attributes = tuple(t.attributes for t in scene.objects)
            truth = ParsedCaption(attributes=attributes, relation=relation).matches(scene)
            assert verify.satisfies(rendering.render(scene), f"a {a} {relation} a {b}") is truth
    for count, word in enumerate(("one", "two", "three", "four"), 1):
        scene = mixed_scenes(1, seed=count, count=count, identical=1.0)[0]
        _, fill, color, shape = scene.objects[0].attributes
        noun = f"{fill} {color} {'crosse' if shape == 'cross' else shape}s"
        for said in ("two", "three", "four"):
            assert verify.satisfies(rendering.render(scene), f"{said} {noun}") is (said == word)


def test_captions_that_cannot_be_read_are_the_users_mistake():
    with pytest.raises(UserError, match="an armchair"):
        verify.satisfies(np.zeros((48, 48, 3), np.uint8), "an armchair in the shape of an avocado")


def test_scenes_are_the_same_in_any_order_and_within_half_a_unit():
    (scene,) = random_scenes(1, count=3)
    first, *rest = scene.objects
    assert verify.scenes_match(scene, replace(scene, objects=(*rest, replace(first, x=first.x + 0.4))))
    assert not verify.scenes_match(scene, replace(scene, objects=(*rest, replace(first, x=first.x + 0.6))))
    assert not verify.scenes_match(scene, replace(scene, objects=tuple(rest)))
    other = "circle" if first.shape != "circle" else "square"
    assert not verify.scenes_match(scene, replace(scene, objects=(*rest, replace(first, shape=other))))
    assert not verify.scenes_match(scene, replace(scene, background="brown" if scene.background != "brown" else "teal"))
