"""Distractors differ in one word, or in two swapped words or phrases; each word occurs in its context elsewhere."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from limner.data.hard_negative_captions import Distractors
from limner.tasks import captions, scenes
from sample_scenes import random_captions


@pytest.fixture(scope="module")
def distractors() -> Distractors:
    return Distractors(random_captions(6_000))


@given(st.integers(0, 10_000))
def test_one_word_differs_or_the_same_words_stand_elsewhere(distractors: Distractors, seed: int) -> None:
    (caption,) = random_captions(1, seed)
    distractor = distractors.make_negative(caption, np.random.default_rng(seed))
    assert distractor is not None
    old, new = caption.replace(",", " ,").split(), distractor.replace(",", " ,").split()
    assert old != new
    assert sorted(old) == sorted(new) or sum(a != b for a, b in zip(old, new, strict=True)) == 1


def test_words_are_exchanged_words_swapped_and_phrases_turned_round_equally_often(distractors: Distractors) -> None:
    caption, rng = "a large red circle above a small blue square", np.random.default_rng(0)
    found = [distractors.make_negative(caption, rng) for _ in range(600)]
    swapped = [wrong for wrong in found if wrong and sorted(wrong.split()) == sorted(caption.split())]
    turned = "a small blue square above a large red circle"
    assert set(swapped) - {turned} == {
        "a small red circle above a large blue square",
        "a large blue circle above a small red square",
        "a large red square above a small blue circle",
    }
    assert 350 < len(swapped) < 450
    assert 150 < swapped.count(turned) < 250


@given(st.integers(0, 10_000))
def test_captions_with_swapped_phrases_are_false(distractors: Distractors, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scene = scenes.sample_scene(rng, count=2)
    if turned := next(distractors.swap_phrases(captions.describe(scene, rng), rng), None):
        claims = captions.parse(turned)
        assert claims is not None and not claims.matches(scene)


def test_a_list_is_not_turned_round() -> None:
    pets = Distractors(["a big dog and a small cat", "a small cat and a big dog", "a big dog chases a small cat"] * 9)
    rng = np.random.default_rng(0)
    assert not list(pets.swap_phrases("a big dog and a small cat", rng))
    assert not list(pets.swap_phrases("a big dog chases a small cat", rng))  # nothing has ever chased a dog
    pets = Distractors(["a big dog chases a small cat", "a small cat chases a big dog"] * 9)
    assert next(pets.swap_phrases("A big dog chases a small cat", rng)) == "A small cat chases a big dog"


def test_a_list_in_another_order_says_the_same() -> None:
    pets = Distractors(["a cat, a dog and a bird", "a dog, a bird and a cat", "a bird, a cat and a dog"] * 9)
    for seed in range(60):
        wrong = pets.make_negative("a cat, a dog and a bird", np.random.default_rng(seed))
        assert wrong is None or sorted(wrong.replace(",", "").split()) != sorted(
            ["a", "cat", "a", "dog", "and", "a", "bird"]
        )


def test_a_long_list_of_tags_is_not_turned_round_tag_by_tag() -> None:
    rng = np.random.default_rng(0)
    tags = [f"tag{i}" for i in range(200)]
    lists = [", ".join(rng.permutation(tags)[:120]) for _ in range(40)]
    many = Distractors(lists)
    assert not list(many.swap_phrases(lists[0], rng))  # there are 50 million pairs of phrases, all of them lists
    assert many.make_negative(lists[0], rng) is not None


def test_captions_of_held_out_samples_are_no_distractors() -> None:
    captions = [f"{who}: {tone} skin" for who in ("cook", "pilot", "nurse") for tone in ("light", "dark")]
    made = Distractors(captions[:-1] * 9, [captions[-1].title()])
    found = {made.make_negative("nurse: light skin", np.random.default_rng(seed)) for seed in range(100)}
    assert found == {"cook: light skin", "pilot: light skin"}


def test_without_alternatives_there_is_none() -> None:
    assert Distractors(["a dog runs"] * 9).make_negative("a dog runs", np.random.default_rng(0)) is None
    pets = Distractors(["A dog, running"] * 9 + ["a cat, running"] * 9)
    assert pets.make_negative("A dog, running", np.random.default_rng(0)) == "A cat, running"
