"""Distractors of pictures with known contents are false and name no held-out combination."""

import numpy as np
import pytest

from limner.data.hard_negative_captions import Distractors
from limner.tasks import captions, rendering, scenes, verify
from limner.tasks.verify import falsity_test
from sample_scenes import random_captions


@pytest.fixture(scope="module")
def distractors() -> Distractors:
    return Distractors(random_captions(6_000))


def names_held_out(claims: captions.ParsedCaption, background: str | None) -> bool:
    attributes = [named for named in claims.attributes if None not in named]
    return background is not None and any(scenes.held_out(named, background) for named in attributes)


def test_distractors_of_scenes_are_false_and_name_nothing_held_out(distractors: Distractors) -> None:
    rng = np.random.default_rng(0)
    for _ in range(800):
        scene = scenes.sample_scene(rng)
        wrong = distractors.make_negative(captions.describe(scene, rng), rng, falsity_test({"scene": scene.to_dict()}))
        claims = captions.parse(wrong or "")
        assert claims is not None and not claims.matches(scene)
        assert not names_held_out(claims, claims.background)


def test_distractors_of_pairs_are_false_and_name_nothing_held_out() -> None:
    rng = np.random.default_rng(0)
    sample = [scenes.sample_pair(rng) for _ in range(1_500)]
    made, found = Distractors([captions.describe_pair(pair, rng) for pair in sample]), 0
    for pair in sample[:80]:
        wrong = made.make_negative(captions.describe_pair(pair, rng), rng, falsity_test({"pair": pair.to_dict()}))
        if wrong is None:  # no word of "upside down" can be replaced
            continue
        claims, found = captions.parse_pair(wrong), found + 1
        assert claims is not None and not verify.pair_holds(claims, rendering.render_pair(pair))
        if claims.top:
            assert not names_held_out(claims.top, claims.top.background)
            if color := claims.color:
                attributes = tuple((size, fill, color, shape) for size, fill, _, shape in claims.top.attributes)
                assert not names_held_out(captions.ParsedCaption(attributes=attributes), claims.top.background)
    assert found > 60


def test_a_red_object_recolored_red_is_unchanged() -> None:
    item = scenes.SceneObject(shape="circle", color="red", size="small", fill="solid", x=2, y=1)
    top = scenes.Scene(objects=(item,), background="pink", height=6)
    flipped = falsity_test({"pair": scenes.ScenePair(top=top, transform="recolored", color="red").to_dict()})
    assert flipped is not None
    caption = "the exact same small red circle on a pink background on the top {} at the bottom"
    assert not flipped(caption.format("colored red"))
    assert flipped(caption.format("upside down"))  # it is not in the middle of its panel
    assert flipped(caption.format("colored blue")) and flipped(caption.format("as a sketch"))


def test_held_out_samples_accept_any_false_caption() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        scene = scenes.sample_scene(rng, count=2, split="held-out")
        wrong = falsity_test({"scene": scene.to_dict()})
        assert wrong is not None and not wrong(captions.describe(scene, rng))
        assert wrong(" ".join(("a", *scene.objects[0].attributes)) + f" on a {scene.background} background")


def test_other_metadata_gives_no_test() -> None:
    scene = scenes.sample_scene(np.random.default_rng(0), count=1).to_dict()
    odd = [{}, {"scene": "beach"}, {"scene": None}, {"scene": {"objects": 3}}, {"pair": [1]}, {"pair": {"top": scene}}]
    odd += [{"scene": {**scene, **change}} for change in (
        {"background": "sea"}, {"background": []}, {"width": 10**9}, {"height": -1}, {"objects": [{}]}, {"other": 1},
        {"objects": [{**scene["objects"][0], "x": 1e300}]}, {"objects": [{**scene["objects"][0], "y": float("nan")}]},
        {"objects": [{**scene["objects"][0], "size": "huge"}]}, {"objects": [{**scene["objects"][0], "x": "1"}]},
        {"objects": [{**scene["objects"][0], "x": float("inf")}]}, {"objects": scene["objects"] * 10**4},
    )]  # fmt: skip
    assert all(falsity_test(meta) is None for meta in odd)
    assert falsity_test({"scene": scene}) is not None
