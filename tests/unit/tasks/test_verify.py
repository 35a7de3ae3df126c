"""A right picture keeps what its caption says; one that differs in anything said does not."""

from dataclasses import replace

import numpy as np
import pytest

from limner.errors import UserError
from limner.tasks import captions, rendering, verify
from limner.tasks.captions import Claims
from limner.tasks.scenes import BACKGROUNDS, COLORS, FILLS, SHAPES
from sample_scenes import mixed_world, world


def wrong_ones(scene, rng):
    """Scenes that differ from one in one respect that its caption may have said."""
    k = int(rng.integers(len(scene.things)))
    thing = scene.things[k]

    def changed(**change):
        return replace(scene, things=(*scene.things[:k], replace(thing, **change), *scene.things[k + 1 :]))

    yield changed(shape=rng.choice([s for s in SHAPES if s != thing.shape]))
    yield changed(color=rng.choice([c for c in COLORS if c != thing.color]))
    yield changed(fill=rng.choice([f for f in FILLS if f != thing.fill]))
    if thing.size == "large":
        yield changed(size="small")
    yield replace(scene, background=rng.choice([b for b in BACKGROUNDS if b != scene.background]))
    yield replace(scene, things=scene.things[:k] + scene.things[k + 1 :])


def test_right_pictures_satisfy_and_wrong_ones_do_not():
    rng = np.random.default_rng(4)
    for scene in mixed_world(50, seed=21):
        claims = None
        while claims is None or claims.background is None or None in claims.looks[0]:
            caption = captions.describe(scene, rng)
            claims = captions.parse(caption)
        assert verify.satisfies(rendering.render(scene), caption)
        for wrong in wrong_ones(scene, rng):
            assert not verify.satisfies(rendering.render(wrong), caption), (caption, wrong)


def test_relations_and_counts():
    for scene in mixed_world(40, seed=22, count=2):
        a, b = (" ".join(t.look) for t in scene.things)
        for relation in ("above", "below", "left of", "right of"):
            looks = tuple(t.look for t in scene.things)
            truth = Claims(looks=looks, relation=relation).hold(scene)
            assert verify.satisfies(rendering.render(scene), f"a {a} {relation} a {b}") is truth
    for count, word in enumerate(("one", "two", "three", "four"), 1):
        scene = mixed_world(1, seed=count, count=count, identical=1.0)[0]
        _, fill, color, shape = scene.things[0].look
        noun = f"{fill} {color} {'crosse' if shape == 'cross' else shape}s"
        for said in ("two", "three", "four"):
            assert verify.satisfies(rendering.render(scene), f"{said} {noun}") is (said == word)


def test_captions_that_cannot_be_read_are_the_users_mistake():
    with pytest.raises(UserError, match="an armchair"):
        verify.satisfies(np.zeros((48, 48, 3), np.uint8), "an armchair in the shape of an avocado")


def test_scenes_are_the_same_in_any_order_and_within_half_a_unit():
    (scene,) = world(1, count=3)
    first, *rest = scene.things
    assert verify.alike(scene, replace(scene, things=(*rest, replace(first, x=first.x + 0.4))))
    assert not verify.alike(scene, replace(scene, things=(*rest, replace(first, x=first.x + 0.6))))
    assert not verify.alike(scene, replace(scene, things=tuple(rest)))
    other = "circle" if first.shape != "circle" else "square"
    assert not verify.alike(scene, replace(scene, things=(*rest, replace(first, shape=other))))
    assert not verify.alike(scene, replace(scene, background="brown" if scene.background != "brown" else "teal"))
