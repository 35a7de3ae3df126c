"""The synthetic world: layout, the held-out split, pixels, and captions that say what is so."""

import hashlib
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from limner.worlds import captions, rendering, scenes
from limner.worlds.captions import Claims
from limner.worlds.scenes import (
    BACKGROUNDS,
    COLORS,
    EXTENT,
    FILLS,
    SHAPES,
    SIZES,
    TRANSFORMS,
    UNITS,
    Pair,
    Scene,
    Thing,
)

ONE = Thing(shape="circle", color="red", size="small", fill="solid", x=2, y=3)
TWO = Thing(shape="square", color="blue", size="large", fill="solid", x=6, y=7)
SCENE = Scene(things=(ONE, TWO), background="gray")


def world(n, seed=0, **options):
    rng = np.random.default_rng(seed)
    return [scenes.sample_scene(rng, **options) for _ in range(n)]


def fully_said(scene, rng):
    """A caption that leaves out neither sizes nor the background."""
    while True:
        caption = captions.describe(scene, rng)
        claims = captions.parse(caption)
        assert claims is not None, caption
        if claims.background and all(None not in look for look in claims.looks):
            return caption


# ---------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("height", [UNITS, UNITS // 2])
def test_things_lie_on_the_lattice_a_unit_apart(height):
    for scene in world(200, height=height, count=2) + world(200, count=4):
        for i, a in enumerate(scene.things):
            assert a.x == int(a.x) and a.y == int(a.y)
            assert 0 <= a.x <= UNITS - EXTENT[a.size] and 0 <= a.y <= scene.height - EXTENT[a.size]
            for b in scene.things[:i]:
                dx = max(b.x - a.x - EXTENT[a.size], a.x - b.x - EXTENT[b.size])
                dy = max(b.y - a.y - EXTENT[a.size], a.y - b.y - EXTENT[b.size])
                assert max(dx, dy) >= 1


def test_samples_have_the_count_and_split_asked_for():
    for split in ("train", "held-out"):
        for count in (1, 2, 3, 4):
            assert {(len(s.things), s.split) for s in world(30, count=count, split=split)} == {(count, split)}
    assert {len(s.things) for s in world(100)} == {1, 2, 3, 4}


def test_same_seed_same_scenes():
    assert world(20, seed=7) == world(20, seed=7) != world(20, seed=8)


def test_things_that_look_alike_are_all_alike():
    for scene in world(300):
        assert len({t.look for t in scene.things}) in (1, len(scene.things))


def test_one_combination_in_forty_is_held_out_and_none_of_four_attributes():
    every = list(itertools.product(scenes.SIZES, FILLS, COLORS, SHAPES, scenes.BACKGROUNDS))
    held = {one for one in every if scenes.held_out(one[:4], one[4])}
    assert len(held) == len(every) // 40
    for left_out in range(5):
        seen = {one[:left_out] + one[left_out + 1 :] for one in set(every) - held}
        assert seen == {one[:left_out] + one[left_out + 1 :] for one in every}


def test_crowds_are_full_and_keep_the_split():
    rng = np.random.default_rng(0)
    for split in ("train", "held-out"):
        crowds = [scenes.sample_crowd(rng, split=split) for _ in range(20)]
        assert {c.split for c in crowds} == {split}
        assert np.mean([len(c.things) for c in crowds]) > 4


@pytest.mark.parametrize("make", [lambda: SCENE, lambda: Pair(top=world(1, height=6, count=1)[0], transform="sketch")])
def test_truth_goes_through_json(make):
    truth = make()
    assert type(truth).from_dict(json.loads(json.dumps(truth.to_dict()))) == truth


# ---------------------------------------------------------------------------- pictures


def test_pixels_are_pinned():
    # Models are trained on exactly these pixels; a change here makes them, and every figure, worthless.
    digest = hashlib.sha256()
    looks = itertools.product(SHAPES, FILLS, SIZES, COLORS)
    for i, (shape, fill, size, color) in enumerate(looks):
        thing = Thing(shape=shape, color=color, size=size, fill=fill, x=i % 7, y=i % 5)
        digest.update(rendering.render(Scene(things=(thing,), background=list(BACKGROUNDS)[i % 5])))
    assert digest.hexdigest()[:16] == "0f569b108f46a362"


@pytest.mark.parametrize("size", [12, 48, 96])
def test_a_picture_shows_paint_where_the_things_are(size):
    picture = rendering.render(SCENE, size)
    assert picture.shape == (size, size, 3) and picture.dtype == np.uint8
    unit = size // UNITS
    assert tuple(picture[0, 0]) == BACKGROUNDS["gray"]
    for thing in SCENE.things:
        x, y = (int(c * unit) for c in thing.center)
        assert tuple(picture[y, x]) == COLORS[thing.color]


def test_sizes_that_are_no_multiple_of_the_lattice_are_refused():
    with pytest.raises(ValueError, match="50"):
        rendering.render(SCENE, 50)


def test_stencils_are_opacities_and_all_differ():
    for size in SIZES:
        stencils = [rendering.stencil(s, size, f, 4) for s in SHAPES for f in FILLS]
        assert all(s.shape == (4 * EXTENT[size],) * 2 and s.min() >= 0 and s.max() == 1 for s in stencils)
        flat = np.stack(stencils).reshape(len(stencils), -1)
        energy = (flat**2).sum(1)
        distance = ((flat[:, None] - flat) ** 2).sum(-1) / np.minimum.outer(energy, energy)
        assert (distance + np.eye(len(flat))).min() > 0.02


def test_fills_take_away_from_the_solid_shape():
    for shape in SHAPES:
        for size in SIZES:
            solid, striped, outlined = (rendering.stencil(shape, size, fill, 4) for fill in FILLS)
            assert (striped <= solid).all() and (outlined <= solid).all()
            stripes = striped.any(1)
            assert not (stripes[2::4] | stripes[3::4]).any()  # half a unit on, half a unit off


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_lower_panels(transform):
    top = Scene(things=(replace(ONE, y=1), replace(TWO, y=1, fill="striped")), background="teal", height=6)
    pair = Pair(top=top, transform=transform, color="green" if transform == "recolored" else None)
    upper, lower = np.split(rendering.render_pair(pair), 2)
    assert (upper == rendering.render(top)).all()
    if transform == "upside down":
        assert (lower == upper[::-1]).all()
    elif transform == "grayscale":
        assert (lower == lower[..., :1]).all()
        assert abs(lower[..., 0] - upper @ [0.299, 0.587, 0.114]).max() <= 0.5 + 1e-6
    elif transform == "sketch":
        assert tuple(lower[0, 0]) == COLORS["white"] and (lower == lower[..., :1]).all()
    else:
        x, y = (int(c * 4) for c in replace(ONE, y=1).center)
        assert tuple(lower[y, x]) == COLORS["green"] and (lower[0, 0] == upper[0, 0]).all()


# ---------------------------------------------------------------------------- words


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


def test_neither_panel_of_a_training_pair_shows_a_held_out_combination():
    rng = np.random.default_rng(3)
    for _ in range(300):
        pair = scenes.sample_pair(rng, split="train")
        assert pair.top.split == "train"
        assert pair.bottom is None or pair.bottom.split == "train"
    assert {scenes.sample_pair(rng, split="held-out").split for _ in range(20)} == {"held-out"}


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
