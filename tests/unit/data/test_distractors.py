"""Distractors differ in one word, or in two that changed places; each stands there elsewhere in the data."""

import numpy as np
from hypothesis import given, strategies as st

from limner.data import scenes
from limner.data.distractors import Distractors


def captions(n: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [scenes.describe(scenes.sample_scene(rng), rng) for _ in range(n)]


SCENES = Distractors(captions(6_000))


@given(st.integers(0, 10_000))
def test_one_word_differs_or_two_changed_places(seed: int) -> None:
    (caption,) = captions(1, seed)
    distractor = SCENES.distract(caption, np.random.default_rng(seed))
    assert distractor is not None
    old, new = caption.replace(",", " ,").split(), distractor.replace(",", " ,").split()
    changed = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
    assert len(changed) == 1 or (len(changed) == 2 and changed[0] == changed[1][::-1])


def test_words_of_two_things_change_places_as_often_as_a_word_is_exchanged() -> None:
    caption, rng = "a large red circle above a small blue square", np.random.default_rng(0)
    found = [SCENES.distract(caption, rng) for _ in range(400)]
    swapped = [wrong for wrong in found if wrong and sorted(wrong.split()) == sorted(caption.split())]
    assert 150 < len(swapped) < 250
    assert set(swapped) == {
        "a small red circle above a large blue square",
        "a large blue circle above a small red square",
        "a large red square above a small blue circle",
    }


def test_nearly_all_distractors_of_scenes_are_false() -> None:
    rng, false = np.random.default_rng(0), 0
    for _ in range(300):
        scene = scenes.sample_scene(rng)
        wrong = SCENES.distract(scenes.describe(scene, rng), rng)
        claims = wrong and scenes.parse(wrong)
        false += not (claims and claims.hold(scene))
    assert false > 260


def test_without_alternatives_there_is_none() -> None:
    assert Distractors(["a dog runs"] * 9).distract("a dog runs", np.random.default_rng(0)) is None
    pets = Distractors(["A dog, running"] * 9 + ["a cat, running"] * 9)
    assert pets.distract("A dog, running", np.random.default_rng(0)) == "A cat, running"
