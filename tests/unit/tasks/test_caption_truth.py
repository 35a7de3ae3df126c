"""Where the facts of a picture are known, a distractor is false of it and names nothing held out."""

import numpy as np

from limner.data.hard_negative_captions import Distractors
from limner.tasks import captions, rendering, scenes, verify
from limner.tasks.caption_truth import falsehood
from sample_scenes import sayings

SCENES = Distractors(sayings(6_000))


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
        assert claims is not None and not verify.pair_holds(claims, rendering.render_pair(pair))
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
