"""Distractors differ in one word, which stands in that place elsewhere in the data."""

import numpy as np
from hypothesis import given, strategies as st

from limner.data import scenes
from limner.data.distractors import Distractors


def captions(n: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [scenes.describe(scenes.sample_scene(rng), rng) for _ in range(n)]


SCENES = Distractors(captions(2_000))


@given(st.integers(0, 10_000))
def test_one_word_differs_and_comes_from_the_data(seed: int) -> None:
    (caption,) = captions(1, seed)
    distractor = SCENES.exchange(caption, np.random.default_rng(seed))
    assert distractor is not None
    old, new = caption.split(), distractor.split()
    assert len(old) == len(new) and sum(a != b for a, b in zip(old, new, strict=True)) == 1


def test_nearly_all_distractors_of_scenes_are_false() -> None:
    rng, false = np.random.default_rng(0), 0
    for _ in range(300):
        scene = scenes.sample_scene(rng)
        wrong = SCENES.exchange(scenes.describe(scene, rng), rng)
        claims = wrong and scenes.parse(wrong)
        false += not (claims and claims.hold(scene))
    assert false > 270


def test_without_alternatives_there_is_none() -> None:
    assert Distractors(["a dog runs"] * 9).exchange("a dog runs", np.random.default_rng(0)) is None
    pets = Distractors(["A dog, running"] * 9 + ["a cat, running"] * 9)
    assert pets.exchange("A dog, running", np.random.default_rng(0)) == "A cat, running"
