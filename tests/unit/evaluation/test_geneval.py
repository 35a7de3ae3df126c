"""Prompts of GenEval's tasks ask for what they say, and only that is checked."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from limner.evaluation.geneval import DRAWINGS, TASKS, evaluate, is_right, sample_prompts
from limner.tasks import captions, scenes
from limner.tasks.scenes import SceneObject
from tiny import tiny_pipe

PROMPTS = sample_prompts(120, seed=3)
RED = SceneObject(shape="circle", color="red", size="small", fill="solid", x=1, y=1)
BLUE = SceneObject(shape="square", color="blue", size="large", fill="striped", x=6, y=6)


def first(tag):
    return next(prompt for prompt in PROMPTS if prompt.tag == tag)


def scene_of(prompt):
    """A scene that shows everything in the prompt, also what is not checked."""
    claims, rng = captions.parse(prompt.prompt), np.random.default_rng(0)
    while True:
        scene = scenes.sample_scene(rng, count=len(claims.attributes), split="held-out", identical=0)
        named = [
            replace(item, shape=shape, color=color, fill=fill, size=size or item.size)
            for item, (size, fill, color, shape) in zip(scene.objects, claims.attributes, strict=True)
        ]
        scene = replace(scene, objects=tuple(named), background=claims.background or scene.background)
        if claims.matches(scene):
            return scene


def test_every_prompt_is_right_for_its_scene_and_wrong_without_an_object():
    assert Counter(prompt.tag for prompt in PROMPTS) == dict.fromkeys(TASKS, 20)
    for prompt in PROMPTS:
        objects = scene_of(prompt).objects
        assert is_right(prompt, objects), prompt
        assert not is_right(prompt, objects[1:]), prompt
        assert len(objects) == sum(item["count"] for item in prompt.include)


@pytest.mark.parametrize(
    ("tag", "objects", "expected"),
    [
        ("single_object", [RED], True),
        ("single_object", [replace(RED, color="white"), BLUE], True),  # neither color nor other objects are checked
        ("colors", [replace(RED, color="white")], False),
        ("counting", [RED, RED], True),
        ("counting", [RED, RED, BLUE], True),
        ("counting", [RED, RED, RED], False),  # excluded
        ("two_object", [replace(RED, color="blue"), replace(BLUE, color="red")], True),
        ("color_attr", [replace(RED, color="blue"), replace(BLUE, color="red")], False),
        ("color_attr", [replace(RED, size="large"), replace(BLUE, fill="solid")], True),
        ("position", [RED, BLUE], True),
        ("position", [replace(RED, x=9), replace(BLUE, x=1)], False),
    ],
)
def test_a_task_checks_what_it_is_about(tag, objects, expected):
    circle, square = {"class": "circle", "count": 1}, {"class": "square", "count": 1}
    include = {
        "single_object": (circle,),
        "colors": ({**circle, "color": "red"},),
        "counting": ({**circle, "count": 2},),
        "two_object": (circle, square),
        "color_attr": ({**circle, "color": "red"}, {**square, "color": "blue"}),
        "position": (square, {**circle, "position": ["left of", 0]}),
    }[tag]
    exclude = ({"class": "circle", "count": 3},) if tag == "counting" else ()
    assert is_right(first(tag)._replace(include=include, exclude=exclude), objects) is expected


def test_drawings_are_written_in_genevals_layout(tmp_path):
    result = evaluate(tiny_pipe(), PROMPTS[:7], candidates=5, seed=1, folder=tmp_path)
    assert list(result.rows) == [*TASKS, "overall"] and len(result.cases) == 7
    shares = [result.rows[tag]["right"].value for tag in TASKS]
    assert result.rows["overall"]["right"].value == pytest.approx(np.mean(shares))
    folders = sorted(tmp_path.iterdir())
    assert [folder.name for folder in folders] == [f"{i:05d}" for i in range(7)]
    for folder, prompt in zip(folders, PROMPTS, strict=False):
        found = json.loads((folder / "metadata.jsonl").read_text())
        assert (found["tag"], found["prompt"], tuple(found["include"])) == (prompt.tag, prompt.prompt, prompt.include)
        pictures = sorted((folder / "samples").iterdir())
        assert len(pictures) == DRAWINGS and Image.open(pictures[0]).size == (24, 24)
    with pytest.raises(ValueError, match="at least 4"):
        evaluate(tiny_pipe(), PROMPTS[:1], candidates=3)
