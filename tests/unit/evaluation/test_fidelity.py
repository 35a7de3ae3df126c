"""Fidelity of a tiny model's drawings, from data to table and page."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from limner.cli import main
from limner.data.open_source import open_source
from limner.errors import UserError
from limner.evaluation.confidence import drawing_seed
from limner.evaluation.features import extract
from limner.evaluation.fidelity import FidelitySettings, evaluate, fidelity_task, summary
from limner.metrics.features import Features
from limner.metrics.fidelity import compare
from tiny import tiny_pipe

COUNT = 48


class Corners:
    """Mean colors of the quarters of a picture, as features and as logits."""

    name, version = "corners", "1"

    def features(self, pixels):
        means = torch.nn.functional.adaptive_avg_pool2d(pixels.float() / 255, 2).flatten(1)
        return Features(means, means)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pictures with two captions each."""
    folder = tmp_path_factory.mktemp("data") / "pictures"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(COUNT):
        Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"picture {i}\nnumber {i}")
    return folder


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipe()


SETTINGS = FidelitySettings(captions=20, best_of=(1, 4), blur=(0.0, 2.0), replicates=50, seed=3)


@pytest.fixture(scope="module")
def evaluated(pipe, data):
    task = fidelity_task(open_source(data), SETTINGS)
    with pytest.warns(UserWarning, match="20 pictures are few for 12 features: a FID has a bias of about"):
        results = evaluate(pipe, Corners(), task, SETTINGS, check_picture=lambda picture, caption: picture.mean() > 0)
    return task, results


def test_drawings_are_compared_with_pictures_of_other_captions(evaluated):
    task, _ = evaluated
    assert len(task.captions) == len(task.own) == len(task.rest) == 20
    assert not set(task.own) & set(task.rest) and task.reference is task.rest
    for caption, i in zip(task.captions, task.own, strict=True):
        assert caption in task.source.captions(int(i))


def test_a_result_has_values_intervals_floor_and_names_its_extractor(evaluated, pipe, data):
    task, results = evaluated
    assert [(r.settings["best_of"], r.settings["blur"]) for r in results] == [(1, 0), (1, 2), (4, 0), (4, 2)]
    names = ["kid", "fid", "is", "precision", "recall", "density", "coverage"]
    assert list(results[0].rows) == [*(f"{name}[corners]" for name in names), "score", "right"]
    for result in results:
        for name, row in result.rows.items():
            estimate = row["drawings"]
            assert estimate.low <= estimate.value <= estimate.high
            assert ("floor" in row) == ("[corners]" in name)
        assert result.rows["right"]["drawings"].value == 1 and 0.5 < result.rows["right"]["drawings"].low < 1
    assert results[0].settings["extractor"] == "corners" and results[0].settings["version"] == "1"
    source = open_source(data)
    own, rest = (pixels_of(source, indices) for indices in (task.own, task.rest))
    floor = compare(extract(Corners(), [own])[0], extract(Corners(), [rest])[0], "corners")
    for name, value in floor.items():
        assert results[0].rows[name]["floor"].value == pytest.approx(value.item(), rel=1e-6)


def pixels_of(source, indices):
    paths = [source.meta(int(i))["path"] for i in indices]
    return torch.stack([torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) for path in paths])


def test_best_of_n_are_the_best_of_the_first_candidates(evaluated, pipe):
    task, results = evaluated
    seeds = [drawing_seed(SETTINGS.seed, i) for i in range(20)]
    drawn = pipe.candidates(task.captions, 4, seed=seeds)
    scores = {n: float(drawn.scores[:, :n].max(1).values.mean()) for n in (1, 4)}
    best = drawn.pictures[torch.arange(20), drawn.scores.argmax(1)]
    for result in results:
        assert result.rows["score"]["drawings"].value == pytest.approx(scores[result.settings["best_of"]], abs=1e-4)
    real = extract(Corners(), [pixels_of(task.source, task.rest)])[0]
    expected = compare(extract(Corners(), [best])[0], real, "corners")["kid[corners]"].item()
    assert results[2].rows["kid[corners]"]["drawings"].value == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_a_blur_acts_on_both_sides(evaluated):
    _, results = evaluated
    for name in ("fid[corners]",):
        sharp, soft = (result.rows[name] for result in results[:2])
        assert soft["drawings"].value != sharp["drawings"].value and soft["floor"].value != sharp["floor"].value


def test_the_summary_has_a_row_of_each_condition(evaluated):
    _, results = evaluated
    table = summary(results)
    assert list(table.rows) == [f"best of {n}, blur {radius}" for n in (1, 4) for radius in (0, 2)]
    assert list(table.rows["best of 1, blur 0"])[:2] == ["kid", "fid"] and "features of corners" in table.title


def test_papers_compare_with_all_pictures_and_draw_any_caption(data):
    settings = FidelitySettings(captions=90, reference="all", seed=1)
    task = fidelity_task(open_source(data), settings)
    assert len(task.captions) == len(set(task.captions)) == 90  # of 96: two for each picture
    assert sorted(task.reference) == list(range(COUNT)) and not set(task.own) & set(task.rest)
    assert fidelity_task(open_source(data), FidelitySettings(reference="all")).captions != task.captions


def test_the_papers_reference_is_both_halves(pipe, data):
    settings = FidelitySettings(captions=12, best_of=(1,), reference="all", replicates=20)
    task = fidelity_task(open_source(data), settings)
    with pytest.warns(UserWarning, match="12 pictures are few"):
        (result,) = evaluate(pipe, Corners(), task, settings)
    seeds = [drawing_seed(settings.seed, i) for i in range(12)]
    drawn = extract(Corners(), [pipe.candidates(task.captions, 1, seed=seeds).pictures[:, 0]])[0]
    real = extract(Corners(), [pixels_of(task.source, task.reference)])[0]
    expected = compare(drawn, real, "corners")["fid[corners]"].item()
    assert result.rows["fid[corners]"]["drawings"].value == pytest.approx(expected, rel=1e-3)
    assert result.settings["real"] == COUNT


def test_one_readable_sample_is_too_few(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match="fidelity needs two or more readable samples"):
        fidelity_task(open_source(tmp_path), FidelitySettings())


def test_the_command_prints_a_table_and_writes_json_and_a_page(pipe, data, tmp_path, capsys):
    bundle = str(pipe.save_pretrained(tmp_path / "tiny"))
    paths = ["-o", str(tmp_path / "scores.json"), "--page", str(tmp_path / "page.html")]
    options = ["--captions", "12", "--best-of", "1", "2", "--blur", "0", "1", "--extractor", "clip"]
    assert main(["evaluate", "fidelity", bundle, str(data), *options, *paths]) == 0
    out, err = capsys.readouterr()
    assert "best of 2, blur 1" in out and "12 drawings and 12 real pictures, features of clip:tiny/24" in out
    assert "12 pictures are few for 8 features" in err
    saved = json.loads((tmp_path / "scores.json").read_text())
    (summary,) = saved["results"]
    assert len(summary["cases"]) == 4 and summary["settings"]["extractor"] == "clip:tiny/24"
    assert {"value", "low", "high"} <= set(summary["cases"][0]["rows"]["kid[clip:tiny/24]"]["drawings"])
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 2 * 7 and "http" not in page.replace("http://www.w3.org/2000/svg", "")
    np.savez(tmp_path / "reference.npz", mu=np.zeros(8), sigma=np.eye(8))
    words = ["evaluate", "fidelity", bundle, str(data), "--captions", "12", "--extractor", "clip"]
    words += ["--best-of", "1", "--reference", str(tmp_path / "reference.npz")]
    assert main([*words, "-o", str(tmp_path / "file.json")]) == 0
    assert "statistics of other pictures; floor: 12" in capsys.readouterr().out
    (result,) = json.loads((tmp_path / "file.json").read_text())["results"]
    assert list(result["rows"]) == ["fid[clip:tiny/24]", "score"]
    assert main([*words, "--blur", "1"]) == 2
    assert "--blur needs real pictures" in capsys.readouterr().err
    assert main(["evaluate", "fidelity", bundle, str(data), "--captions", "3", "--extractor", "clip"]) == 2
    assert "3 drawings are too few to compare: give at least 10" in capsys.readouterr().err
