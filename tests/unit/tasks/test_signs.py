"""The reader of signs reads every sign, also a noisy one, and nothing else."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from limner.tasks.signs import CELL, INKS, SIZE, Sign, read_sign, render_sign, sample_sign, sample_word

WORDS = st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=SIZE // CELL[1])


def draw(word, ink="red", seed=0):
    return render_sign(Sign(word, ink), np.random.default_rng(seed))


@given(WORDS, st.sampled_from(sorted(INKS)), st.integers(0, 99))
def test_every_sign_is_read_despite_noise(word, ink, seed):
    picture = draw(word, ink, seed)
    assert (picture != 255).any() and read_sign(picture) == Sign(word, ink)
    noise = np.random.default_rng(seed).normal(0, 8, picture.shape)
    assert read_sign(np.clip(picture + noise, 0, 255).astype(np.uint8)) == Sign(word, ink)


@given(WORDS, WORDS)
def test_two_words_two_colors_or_half_letters_are_not_a_sign(one, other):
    half = SIZE // 2
    signs = [draw(one, seed=seed) for seed in range(30)]
    lines = {int((picture != 255).any((1, 2)).argmax()) // CELL[0]: picture for picture in signs}
    assert len(lines) == 3
    second = draw(other, "blue", seed=0)
    line = int((second != 255).any((1, 2)).argmax()) // CELL[0]
    assert read_sign(np.minimum(second, lines[(line + 1) % 3])) is None  # one in each color
    red = draw(other, seed=0)
    assert read_sign(np.minimum(red, lines[(line + 1) % 3])) is None  # two words of one color
    gray = np.full((SIZE, SIZE, 3), 255, np.uint8)
    gray[:half, : CELL[1]] = 0
    assert read_sign(gray) is None


@pytest.mark.parametrize("level", [0, 255])
def test_an_empty_picture_says_nothing(level):
    assert read_sign(np.full((SIZE, SIZE, 3), level, np.uint8)) is None


def test_signs_say_what_was_asked():
    rng = np.random.default_rng(0)
    words = [sample_word(rng) for _ in range(500)]
    assert {len(word) for word in words} == {4, 5, 6} and len(set(words)) > 400
    signs = [sample_sign(rng, words[:3]) for _ in range(200)]
    assert {sign.word for sign in signs} == set(words[:3]) and {sign.ink for sign in signs} == set(INKS)
    assert all(sign.word in sign.caption and sign.ink in sign.caption for sign in signs)
