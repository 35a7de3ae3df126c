"""A picture satisfies its caption; pictures that differ from it in a named attribute do not. Pairs hold if their lower
panel is what the transform makes of the upper one, and only then."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from limner.errors import UserError
from limner.tasks import captions, rendering, verify
from limner.tasks.captions import ParsedCaption
from limner.tasks.scenes import BACKGROUNDS, COLORS, FILLS, SHAPES, TRANSFORMS, Scene, SceneObject, ScenePair
from sample_scenes import blur, jpeg, mixed_scenes, noise, pairs, random_scenes


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
        for count in ("two", "three", "four"):
            assert verify.satisfies(rendering.render(scene), f"{count} {noun}") is (count == word)


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


def test_a_faint_object_in_a_gray_panel_is_seen():
    item = SceneObject(shape="circle", color="black", size="small", fill="solid", x=1, y=1)
    pair = ScenePair(top=Scene(objects=(item,), background="beige", height=6), transform="grayscale")
    picture = rendering.render_pair(pair)
    assert verify.pair_holds(pair, picture)
    picture[30:42, 30:42] -= 20
    assert not verify.pair_holds(pair, picture)


def test_a_gray_panel_is_compared_if_an_object_extends_past_the_frame():
    item = SceneObject(shape="square", color="black", size="small", fill="solid", x=9, y=3)
    pair = ScenePair(top=Scene(objects=(item,), background="beige", height=6), transform="grayscale")
    top, bottom = np.split(rendering.render_pair(pair), 2)
    shifted = np.concatenate([np.roll(panel, 1, (0, 1)) for panel in (top, bottom)])
    read, _ = verify.read_pair(shifted, "grayscale")
    assert read.scene is not None and (read.objects[0].x, read.objects[0].y) == (9.25, 3.25)
    assert verify.is_gray_of(shifted, read.scene)
    assert not verify.is_gray_of(np.concatenate([shifted[:24], bottom]), read.scene)


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
    output = [verify.satisfies(x, captions.describe_pair(p, rng)) for p, x in zip(sample, pictures, strict=True)]
    assert np.mean(output) >= floor


def test_no_other_transform_holds():
    for pair in pairs(20, seed=4):
        picture = rendering.render_pair(pair)
        for transform in TRANSFORMS:
            wrong = captions.ParsedPairCaption(transform=transform, color="red" if transform == "recolored" else None)
            if (transform, wrong.color) != (pair.transform, pair.color):
                twin = ScenePair(top=pair.top, transform=transform, color=wrong.color)
                same = (rendering.render_pair(twin) == picture).all()  # a red object, recolored red
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
    top, bottom = verify.read_pair(picture, "upside down")
    assert top.scene == bottom.scene == pair.top
