"""Distractors differ in one word, or in two words or phrases that changed places; all words stand where they could."""

import numpy as np
from hypothesis import given, strategies as st

from limner.data.distractors import Distractors
from limner.worlds import captions, judge, rendering, scenes
from limner.worlds.truth import falsehood


def sayings(n: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [captions.describe(scenes.sample_scene(rng), rng) for _ in range(n)]


SCENES = Distractors(sayings(6_000))


@given(st.integers(0, 10_000))
def test_one_word_differs_or_the_same_words_stand_elsewhere(seed: int) -> None:
    (caption,) = sayings(1, seed)
    distractor = SCENES.distract(caption, np.random.default_rng(seed))
    assert distractor is not None
    old, new = caption.replace(",", " ,").split(), distractor.replace(",", " ,").split()
    assert old != new
    assert sorted(old) == sorted(new) or sum(a != b for a, b in zip(old, new, strict=True)) == 1


def test_words_are_exchanged_words_swapped_and_phrases_turned_round_equally_often() -> None:
    caption, rng = "a large red circle above a small blue square", np.random.default_rng(0)
    found = [SCENES.distract(caption, rng) for _ in range(600)]
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
def test_turned_captions_are_false(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scene = scenes.sample_scene(rng, count=2)
    if turned := next(SCENES._turn(captions.describe(scene, rng), rng), None):
        claims = captions.parse(turned)
        assert claims is not None and not claims.hold(scene)


def test_a_list_is_not_turned_round() -> None:
    pets = Distractors(["a big dog and a small cat", "a small cat and a big dog", "a big dog chases a small cat"] * 9)
    rng = np.random.default_rng(0)
    assert not list(pets._turn("a big dog and a small cat", rng))
    assert not list(pets._turn("a big dog chases a small cat", rng))  # nothing has ever chased a dog
    pets = Distractors(["a big dog chases a small cat", "a small cat chases a big dog"] * 9)
    assert next(pets._turn("A big dog chases a small cat", rng)) == "A small cat chases a big dog"


def names_held_out(claims: captions.Claims, background: str | None) -> bool:
    looks = [look for look in claims.looks if None not in look]
    return background is not None and any(scenes.held_out(look, background) for look in looks)


def test_distractors_of_scenes_are_false_and_name_nothing_held_out() -> None:
    rng = np.random.default_rng(0)
    for _ in range(800):
        scene = scenes.sample_scene(rng)
        wrong = SCENES.distract(captions.describe(scene, rng), rng, falsehood({"scene": scene.to_dict()}))
        claims = captions.parse(wrong or "")
        assert claims is not None and not claims.hold(scene)
        assert not names_held_out(claims, claims.background)


def test_distractors_of_pairs_are_false_and_name_nothing_held_out() -> None:
    rng = np.random.default_rng(0)
    sample = [scenes.sample_pair(rng) for _ in range(1_500)]
    made, found = Distractors([captions.describe_pair(pair, rng) for pair in sample]), 0
    for pair in sample[:80]:
        wrong = made.distract(captions.describe_pair(pair, rng), rng, falsehood({"pair": pair.to_dict()}))
        if wrong is None:  # "upside down" has no word to exchange
            continue
        claims, found = captions.parse_pair(wrong), found + 1
        assert claims is not None and not judge.pair_holds(claims, rendering.render_pair(pair))
        if claims.top:
            assert not names_held_out(claims.top, claims.top.background)
            if color := claims.color:
                looks = tuple((size, fill, color, shape) for size, fill, _, shape in claims.top.looks)
                assert not names_held_out(captions.Claims(looks=looks), claims.top.background)
    assert found > 60


def test_a_red_thing_colored_red_is_a_red_thing() -> None:
    thing = scenes.Thing(shape="circle", color="red", size="small", fill="solid", x=2, y=1)
    top = scenes.Scene(things=(thing,), background="pink", height=6)
    flipped = falsehood({"pair": scenes.Pair(top=top, transform="recolored", color="red").to_dict()})
    assert flipped is not None
    said = "the exact same small red circle on a pink background on the top {} at the bottom"
    assert not flipped(said.format("colored red"))
    assert flipped(said.format("upside down"))  # it is not in the middle of its panel
    assert flipped(said.format("colored blue")) and flipped(said.format("as a sketch"))


def test_of_held_out_samples_any_false_caption_will_do() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        scene = scenes.sample_scene(rng, count=2, split="held-out")
        wrong = falsehood({"scene": scene.to_dict()})
        assert wrong is not None and not wrong(captions.describe(scene, rng))
        assert wrong(" ".join(("a", *scene.things[0].look)) + f" on a {scene.background} background")


def test_metadata_of_strangers_holds_no_truth() -> None:
    scene = scenes.sample_scene(np.random.default_rng(0), count=1).to_dict()
    odd = [{}, {"scene": "a beach"}, {"scene": None}, {"scene": {"things": 3}}, {"pair": [1]}, {"pair": {"top": scene}}]
    odd += [{"scene": {**scene, **change}} for change in (
        {"background": "sea"}, {"background": []}, {"width": 10**9}, {"height": -1}, {"things": [{}]}, {"other": 1},
        {"things": [{**scene["things"][0], "x": 1e300}]}, {"things": [{**scene["things"][0], "y": float("nan")}]},
        {"things": [{**scene["things"][0], "size": "huge"}]}, {"things": [{**scene["things"][0], "x": "1"}]},
        {"things": [{**scene["things"][0], "x": float("inf")}]}, {"things": scene["things"] * 10**4},
    )]  # fmt: skip
    assert all(falsehood(meta) is None for meta in odd)
    assert falsehood({"scene": scene}) is not None


def test_a_list_in_another_order_says_the_same() -> None:
    pets = Distractors(["a cat, a dog and a bird", "a dog, a bird and a cat", "a bird, a cat and a dog"] * 9)
    for seed in range(60):
        wrong = pets.distract("a cat, a dog and a bird", np.random.default_rng(seed))
        assert wrong is None or sorted(wrong.replace(",", "").split()) != sorted(
            ["a", "cat", "a", "dog", "and", "a", "bird"]
        )


def test_what_held_out_samples_say_is_no_distractor() -> None:
    captions = [f"{who}: {tone} skin" for who in ("cook", "pilot", "judge") for tone in ("light", "dark")]
    made = Distractors(captions[:-1] * 9, [captions[-1].title()])
    found = {made.distract("judge: light skin", np.random.default_rng(seed)) for seed in range(100)}
    assert found == {"cook: light skin", "pilot: light skin"}


def test_without_alternatives_there_is_none() -> None:
    assert Distractors(["a dog runs"] * 9).distract("a dog runs", np.random.default_rng(0)) is None
    pets = Distractors(["A dog, running"] * 9 + ["a cat, running"] * 9)
    assert pets.distract("A dog, running", np.random.default_rng(0)) == "A cat, running"
