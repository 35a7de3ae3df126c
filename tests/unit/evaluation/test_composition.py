"""Captions are full and from the requested split; rates match the verdicts."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from limner.evaluation.composition import (
    CompositionSettings,
    composition_results,
    pair_cases,
    sample_captions,
    sample_pairs,
    scene_cases,
    score,
)
from limner.evaluation.confidence import TEST_SEEDS_FROM, drawing_seed
from limner.evaluation.generate_batches import attribute_key, verdicts
from limner.evaluation.result import save_results, tables
from limner.sampling.engine import Candidates
from limner.sampling.generation_config import Sampler
from limner.tasks import captions, rendering, scenes
from limner.tasks.verify import satisfies


@pytest.mark.parametrize("split", ["held-out", "train"])
def test_captions_are_full_and_from_the_requested_split(split):
    captioned = sample_captions(split, (1, 2), 24, seed=3)
    assert [len(scene.objects) for _, scene in captioned] == [1, 2] * 12
    for caption, scene in captioned:
        claims = captions.parse(caption)
        assert claims is not None
        assert claims.background == scene.background
        assert all(None not in look for look in claims.attributes)
        assert claims.matches(scene)
        assert scene.split == split


def test_caption_i_depends_only_on_the_seed_and_i():
    long, short = sample_captions(n=10, seed=1), sample_captions(n=4, seed=1)
    assert long[:4] == short
    assert sample_captions(n=4, seed=2) != short


def test_evaluations_share_no_seeds():
    seeds = [
        {drawing_seed(seed, i) for i in range(5_000)} for seed in (0, 1, 2, 999, TEST_SEEDS_FROM, TEST_SEEDS_FROM + 1)
    ]
    assert len(set.union(*seeds)) == 6 * 5_000
    assert 0 <= drawing_seed(2**63 - 1, 10**6 - 1) < 2**63  # valid for `limner draw`


def test_the_cluster_of_a_caption_is_its_held_out_combination():
    for split, most in (("held-out", 30), ("train", 1_170)):
        names = [attribute_key(scene) for _, scene in sample_captions(split, (1, 2, 3), 400, seed=2)]
        held = [scenes.held_out(tuple(look.split()), ground) for look, ground in (n.split(" on ") for n in names)]
        assert all(held) if split == "held-out" else not any(held)
        assert len(set(names)) <= most
    assert len(set(names)) > 300  # nearly independent
    for _, pair in sample_pairs(n=60, seed=2):
        look, ground = attribute_key(*filter(None, (pair.top, pair.bottom))).split(" on ")
        assert scenes.held_out(tuple(look.split()), ground)


def as_tensor(pictures):
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)


class Painter:
    """Stub of a pipeline: some candidates are the real scene, the rest are empty."""

    name, defaults = "painter", SimpleNamespace(sampler=Sampler())

    def __init__(self, captioned, right, marks):
        self.scenes = {caption: (scene, r, m) for (caption, scene), r, m in zip(captioned, right, marks, strict=True)}
        self.seeds = []

    def candidates(self, captions, count, *, seed, sampler, prompt_tokens, progress):
        assert prompt_tokens is None
        self.seeds += seed
        pictures, marks = [], []
        for caption in captions:
            scene, right, mark = self.scenes[caption]
            real, empty = (rendering.render(s) for s in (scene, scenes.Scene(objects=(), background=scene.background)))
            pictures.append(as_tensor([real if r else empty for r in right]))
            marks.append(torch.tensor(mark))
        for _ in captions:
            progress(count)
        return Candidates(torch.stack(pictures), torch.stack(marks), torch.zeros(0), [])


def example():
    captioned = sample_captions("held-out", (1, 2), 4, seed=0)
    assert len({caption for caption, _ in captioned}) == 4
    right = [[0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 1]]
    marks = [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.0, 0.5, 0.1], [0.1, 0.2, 0.9]]
    return captioned, right, marks


def test_best_of_k_is_the_highest_score_among_the_first_k():
    captioned, right, marks = example()
    painter, advanced, drawn = Painter(captioned, right, marks), [], []
    settings = CompositionSettings(candidates=3, best_of=(1, 2, 3, 64), seed=5)
    cases = scene_cases(captioned)
    results = score(painter, cases, settings, progress=advanced.append, on_drawn=lambda *case: drawn.append(case))
    assert [case[0] for case in drawn] == [0, 1, 2, 3]
    assert [case[3].tolist() for case in drawn] == [[bool(r) for r in row] for row in right]
    everything, one, two = ({name: row["right"] for name, row in result.rows.items()} for result in results)
    assert [everything[f"best of {k}"].right for k in (1, 2, 3)] == [1, 2, 2]
    assert [everything[f"any of {k}"].right for k in (1, 2, 3)] == [1, 2, 3]
    assert "best of 64" not in everything
    assert [kind["best of 3"].right for kind in (one, two)] == [0, 2]
    assert everything["any candidate"].value == pytest.approx(3 / 12)
    assert everything["best of 2 minus best of 1"].value == pytest.approx(1 / 4)
    assert sum(advanced) == 12
    assert painter.seeds == [5_000_000, 5_000_001, 5_000_002, 5_000_003]  # one per caption
    arrays = np.array(right, bool), np.array(marks, np.float32)
    assert composition_results(painter, cases, *arrays, settings) == results


def test_the_file_has_all_groups_and_cases_and_the_table_agrees(tmp_path):
    captioned, right, marks = example()
    settings = CompositionSettings(candidates=3, best_of=(1, 3))
    results = score(Painter(captioned, right, marks), scene_cases(captioned), settings, progress=lambda _: None)
    save_results(tmp_path / "result.json", results)
    everything, one, two = json.loads((tmp_path / "result.json").read_text())["results"]
    assert everything["rows"]["best of 3"]["right"]["value"] == 0.5
    assert one["rows"]["best of 3"]["right"]["total"] == 2
    assert everything["cases"][2]["seed"] == 2 and everything["cases"][0]["right"] == [1] and not two["cases"]
    for text in (
        "all, 4 captions",
        "1 object, 2",
        "2 objects, 2",
        "best of 3",
        "any of 3",
        "best of 3 minus best of 1",
    ):
        assert text in tables(results)
    assert all(len(line) < 80 for line in tables(results).splitlines())


def test_equal_pictures_get_equal_verdicts():
    (caption, scene), *_ = sample_captions(n=1, seed=4)
    real, other = rendering.render(scene), rendering.render(sample_captions(n=1, seed=6)[0][1])
    assert satisfies(real, caption)
    assert not satisfies(other, caption)
    assert verdicts(as_tensor([other, real, other, real]), partial(satisfies, caption=caption)).tolist() == [
        False,
        True,
        False,
        True,
    ]


class Copier:
    """Stub of a pipeline with prompts: candidate 0 is the real pair, candidate 1 repeats the upper half below."""

    name, defaults = "copier", SimpleNamespace(sampler=Sampler())
    dvae = SimpleNamespace(config=SimpleNamespace(grid=(12, 12), size=48))

    def prime(self, image, keep_rows):
        assert keep_rows == 6
        return torch.from_numpy(np.array(image)).flatten()[None]

    def candidates(self, captions, count, *, seed, sampler, prompt_tokens, progress):
        real = prompt_tokens.view(len(captions), 48, 48, 3).permute(0, 3, 1, 2)
        twice = torch.cat([real[:, :, :24], real[:, :, :24]], 2)
        return Candidates(torch.stack([real, twice], 1), torch.zeros(len(captions), 2), torch.zeros(0), [])


def test_a_pair_is_right_if_its_lower_half_shows_the_transform_of_the_caption():
    captioned = sample_pairs(n=12, seed=1)
    assert captioned[:3] == sample_pairs(n=3, seed=1)
    cases = pair_cases(Copier(), captioned)
    results = score(Copier(), cases, CompositionSettings(candidates=2, best_of=(1, 2)))
    assert {case["kind"] for case in results[0].cases} == {pair.transform for _, pair in captioned}
    assert {"sketch", "upside down", "grayscale"} <= {result.title.split(",")[0] for result in results}
    assert [case["right"] for case in results[0].cases] == [[0]] * 12  # only the real pair
