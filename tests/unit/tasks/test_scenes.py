"""Scenes: layout, counts, and the held-out split."""

import itertools
import json

import numpy as np
import pytest

from limner.tasks import scenes
from limner.tasks.scenes import COLORS, EXTENT, FILLS, SHAPES, UNITS, ScenePair
from sample_scenes import SCENE, random_scenes


@pytest.mark.parametrize("height", [UNITS, UNITS // 2])
def test_objects_lie_on_the_lattice_a_unit_apart(height):
    for scene in random_scenes(200, height=height, count=2) + random_scenes(200, count=4):
        for i, a in enumerate(scene.objects):
            assert a.x == int(a.x) and a.y == int(a.y)
            assert 0 <= a.x <= UNITS - EXTENT[a.size] and 0 <= a.y <= scene.height - EXTENT[a.size]
            for b in scene.objects[:i]:
                dx = max(b.x - a.x - EXTENT[a.size], a.x - b.x - EXTENT[b.size])
                dy = max(b.y - a.y - EXTENT[a.size], a.y - b.y - EXTENT[b.size])
                assert max(dx, dy) >= 1


def test_samples_have_the_count_and_split_asked_for():
    for split in ("train", "held-out"):
        for count in (1, 2, 3, 4):
            assert {(len(s.objects), s.split) for s in random_scenes(30, count=count, split=split)} == {(count, split)}
    assert {len(s.objects) for s in random_scenes(100)} == {1, 2, 3, 4}


def test_same_seed_same_scenes():
    assert random_scenes(20, seed=7) == random_scenes(20, seed=7) != random_scenes(20, seed=8)


def test_objects_of_equal_looks_have_equal_attributes():
    for scene in random_scenes(300):
        assert len({t.attributes for t in scene.objects}) in (1, len(scene.objects))


def test_one_combination_in_forty_is_held_out_and_none_of_four_attributes():
    every = list(itertools.product(scenes.SIZES, FILLS, COLORS, SHAPES, scenes.BACKGROUNDS))
    held = {one for one in every if scenes.held_out(one[:4], one[4])}
    assert len(held) == len(every) // 40
    for left_out in range(5):
        seen = {one[:left_out] + one[left_out + 1 :] for one in set(every) - held}
        assert seen == {one[:left_out] + one[left_out + 1 :] for one in every}


def test_dense_scenes_are_full_and_keep_the_split():
    rng = np.random.default_rng(0)
    for split in ("train", "held-out"):
        dense_scenes = [scenes.sample_dense_scene(rng, split=split) for _ in range(20)]
        assert {c.split for c in dense_scenes} == {split}
        assert np.mean([len(c.objects) for c in dense_scenes]) > 4


@pytest.mark.parametrize(
    "make", [lambda: SCENE, lambda: ScenePair(top=random_scenes(1, height=6, count=1)[0], transform="sketch")]
)
def test_truth_goes_through_json(make):
    truth = make()
    assert type(truth).from_dict(json.loads(json.dumps(truth.to_dict()))) == truth


def test_neither_panel_of_a_training_pair_shows_a_held_out_combination():
    rng = np.random.default_rng(3)
    for _ in range(300):
        pair = scenes.sample_pair(rng, split="train")
        assert pair.top.split == "train"
        assert pair.bottom is None or pair.bottom.split == "train"
    assert {scenes.sample_pair(rng, split="held-out").split for _ in range(20)} == {"held-out"}
