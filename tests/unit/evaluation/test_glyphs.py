"""Evaluation of monochrome icons: nearest icon of the style, classifier of styles, copies, and missing icons."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from limner.errors import UserError
from limner.evaluation.glyphs import StyleRanks, evaluate, evaluate_variants, style_accuracy, style_data
from limner.evaluation.icon_classifier import IconClassifierConfig, train_classifier
from limner.evaluation.icon_pictures import Icons
from limner.evaluation.nearest_neighbor import ReferenceSet, ReferenceSettings
from limner.evaluation.result import save_results
from limner.retrieval import Examples
from limner.sampling.engine import Candidates
from limner.sampling.generation_config import UNSET, Sampler
from tiny import tiny_pipe

SHAPES = ["bar", "box", "cross", "disk", "ell", "wedge"]
STYLES = {"a thin": (1, 0, 255), "a bold": (5, 0, 255), "b": (3, 255, 0), "c": (5, 0, 150)}  # width, ink, ground
COMBINATIONS = {("box", "a thin"), ("disk", "b")}  # a has a bold box, b lacks a disk


def glyph(shape: str, style: str) -> torch.Tensor:
    """A shape in strokes, uint8 [3, 24, 24]."""
    width, ink, ground = STYLES[style]
    image = Image.new("L", (24, 24), ground)
    pen = ImageDraw.Draw(image)
    lines = {"bar": [(3, 12, 21, 12)], "box": [(5, 5, 19, 5), (19, 5, 19, 19), (19, 19, 5, 19), (5, 19, 5, 5)],
             "cross": [(12, 3, 12, 21), (3, 12, 21, 12)], "ell": [(6, 4, 6, 20), (6, 20, 20, 20)],
             "wedge": [(4, 20, 12, 4), (12, 4, 20, 20)]}  # fmt: skip
    if shape == "disk":
        pen.ellipse((4, 4, 20, 20), outline=ink, width=width)
    for line in lines.get(shape, ()):
        pen.line(line, fill=ink, width=width)
    return torch.from_numpy(np.array(image)).repeat(3, 1, 1)


@pytest.fixture(scope="module")
def icons():
    cells = [(shape, style) for shape in SHAPES for style in STYLES]
    references = ReferenceSet(
        torch.stack([glyph(*cell) for cell in cells]),
        [f"{shape}, {style}" for shape, style in cells],
        [shape for shape, _ in cells],
        [shape for shape, _ in cells],
        ["combination" if cell in COMBINATIONS else "train" for cell in cells],
    )
    sets = [style.split()[0] for _, style in cells]
    styles, looks = [style for _, style in cells], [style.split()[-1] for _, style in cells]
    return Icons(references, styles, sets, looks, ReferenceSet(torch.empty(0), [], [], [], []), [])


@pytest.fixture(scope="module")
def classifier(icons, tmp_path_factory):
    config = IconClassifierConfig(width=8, steps=200, batch_size=32, lr=5e-3)
    return train_classifier(style_data(icons), tmp_path_factory.mktemp("classifier"), config)


def pixels(image: Image.Image) -> list:
    return np.asarray(image).transpose(2, 0, 1).tolist()


class Artist:
    """Stub of a pipeline that draws `draws(shape, style)` as the best candidate and white as the other."""

    def __init__(self, draws, condition_blocks=0):
        self.draws, self.name, self.dvae, self.device = draws, "artist", tiny_pipe().dvae, torch.device("cpu")
        self.prior = SimpleNamespace(config=SimpleNamespace(condition_blocks=condition_blocks))
        self.examples = None

    def candidates(self, captions, count, *, seed, sampler=Sampler(), prompt_tokens=None, progress=None):
        pictures = torch.full((len(captions), count, 3, 24, 24), 255, dtype=torch.uint8)
        for row, caption in enumerate(captions):
            pictures[row, 0] = self.draws(*caption.split(", "))
        scores = torch.zeros(len(captions), count)
        scores[:, 0] = 1
        if progress:
            progress(len(captions) * count)
        return Candidates(pictures, scores, torch.zeros(len(captions), count, 36, dtype=torch.long), [])


def rates(icons, classifier, draws, split="combination"):
    results = evaluate(Artist(draws), icons, classifier, split, ReferenceSettings(candidates=2))
    return [{row: {key: rate.value for key, rate in r.items()} for row, r in x.rows.items()} for x in results]


def test_correct_drawings_are_right(icons, classifier):
    result, _ = rates(icons, classifier, glyph)
    assert result["best of 2"] == {"subject": 1, "top 5": 1, "style": 1, "both": 1}
    assert result["any candidate"]["subject"] == pytest.approx(0.5, abs=0.26)
    assert result["real pictures"]["both"] == 1


def test_another_style_or_another_subject_is_wrong(icons, classifier):
    style, _ = rates(icons, classifier, lambda shape, _: glyph(shape, "c"))
    assert style["best of 2"]["style"] == 0 == style["best of 2"]["both"]
    subject, _ = rates(icons, classifier, lambda _, style: glyph("cross", style))
    assert subject["best of 2"]["subject"] == 0 and subject["best of 2"]["style"] == 1


def test_a_copy_has_the_subject_in_another_style(icons, classifier):
    result, _ = rates(icons, classifier, glyph)
    assert result["copies from nearest style"]["style"] == 0
    assert result["copies from nearest style"]["subject"] > 0


@pytest.mark.parametrize("condition_blocks", [0, 1])
def test_a_model_that_follows_a_picture_is_asked_for_other_looks_of_unseen_sets(icons, condition_blocks):
    class Follower(Artist):
        """Draws the subject of the picture that it is given, in the look of the caption."""

        def like(self, image):
            self.given = [*getattr(self, "given", []), icons.references.pictures.tolist().index(pixels(image))]
            return torch.full((1, 72), self.given[-1])

        def candidates(self, captions, count, *, prompt_tokens=None, **settings):
            subjects = [icons.references.keys[int(row[0])] for row in prompt_tokens]
            looks = [caption.removeprefix("the same, ") for caption in captions]
            asked = [f"{shape}, a {look}" for shape, look in zip(subjects, looks, strict=True)]
            return super().candidates(asked, count, **settings)

    splits = ["set" if name == "a" else "train" for name in icons.sets]
    unseen = replace(icons, references=replace(icons.references, splits=splits))
    follower = Follower(glyph, condition_blocks)
    results = evaluate_variants(follower, unseen, ReferenceSettings(candidates=2))
    assert len(results) == condition_blocks
    assert evaluate_variants(follower, icons, ReferenceSettings(candidates=2)) == []
    for result in results:
        assert len(result.cases) == 2 * len(SHAPES)  # thin from bold, and bold from thin
        assert result.rows["best of 2"]["subject"].value == 1
        assert result.rows["the given icons"]["subject"].value < 1
        for i, row in zip(follower.given, result.sheet, strict=True):
            (drawn, _), (real, _), (given, label) = row.pictures
            assert label == "given" and pixels(given) == icons.references.pictures[i].tolist()
            assert drawn.tobytes() == real.tobytes() != given.tobytes()
            assert row.caption == f"the same, {'bold' if icons.looks[i] == 'thin' else 'thin'}"


def test_a_model_with_training_pictures_also_draws_from_captions_alone(icons, classifier):
    class Retriever(Artist):
        def candidates(self, *arguments, prompt_tokens=None, **settings):
            self.draws = glyph if prompt_tokens is None else lambda *_: glyph("cross", "b")
            assert prompt_tokens is None or (prompt_tokens == UNSET).all()
            return super().candidates(*arguments, **settings)

    retriever = Retriever(glyph, condition_blocks=1)
    retriever.examples = Examples(np.zeros((1, 36), np.uint16), ["disk"], [""])
    settings, done = ReferenceSettings(candidates=2), []
    result = evaluate(retriever, icons, classifier, "combination", settings, done.append)[0]
    assert sum(done) == 2 * 2 * len(result.cases)
    assert result.rows["best of 2"]["both"].value == 1
    assert result.rows["best of 2, from captions alone"]["both"].value == 0
    assert retriever.examples


def test_icons_that_the_set_lacks_are_reported_alone(icons, classifier):
    both, lacking = evaluate(Artist(glyph), icons, classifier, "combination", ReferenceSettings(candidates=2))
    assert len(both.cases) == 2 and [case["caption"] for case in lacking.cases] == ["disk, b"]
    assert lacking.rows["best of 2"]["subject"].total == 1
    assert "icons that the set lacks, 1 captions of 1 subjects" in lacking.table()
    assert len(evaluate(Artist(glyph), icons, classifier, "train", ReferenceSettings(candidates=2))) == 1
    assert [row.caption for row in both.sheet] == [case["caption"] for case in both.cases] and not lacking.sheet
    for row in both.sheet:
        (drawn, _), (real, label) = row.pictures
        assert row.right and label == "real" and drawn.tobytes() == real.tobytes()


def test_ranks_count_nearer_icons_of_the_style_and_equal_icons_do_not_count(icons):
    ranks, cell = StyleRanks(icons), [(s, t) for s in SHAPES for t in STYLES]
    target = cell.index(("cross", "c"))
    assert ranks(glyph("cross", "c")[None], [target]).tolist() == [0]
    assert ranks(glyph("bar", "c")[None], [target]).item() > 0
    twice = Icons(
        ReferenceSet(icons.references.pictures[[target, target, 0]], ["x"] * 3, ["x"] * 3, ["x"] * 3, ["train"] * 3),
        ["c"] * 3, ["c"] * 3, [""] * 3, icons.pairs, [],
    )  # fmt: skip
    assert StyleRanks(twice)(glyph("cross", "c")[None].repeat(2, 1, 1, 1), [0, 1]).tolist() == [0, 0]
    assert StyleRanks(twice).chances([0])["subject"] == pytest.approx(1 / 3)


def test_ranks_equal_a_direct_comparison(icons):
    pictures = torch.randint(0, 256, (40, 3, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pictures[:, 1:] = pictures[:, :1]
    targets = [i % len(icons.styles) for i in range(40)]
    expected = []
    for picture, t in zip(pictures.double(), targets, strict=True):
        errors = (icons.references.pictures.double() - picture).square().sum((1, 2, 3))
        expected.append(
            sum(e < errors[t] for e, style in zip(errors, icons.styles, strict=True) if style == icons.styles[t])
        )
    assert StyleRanks(icons)(pictures, targets).tolist() == expected


def test_the_classifier_sees_only_training_icons(icons, classifier):
    data = style_data(icons)
    held_out = icons.references.split_indices("combination")
    assert len(data) == len(icons.styles) - len(held_out)
    for i in held_out:
        assert not (data.pictures == icons.references.pictures[i]).flatten(1).all(1).any()
    assert style_accuracy(classifier, icons) == 1


def test_tables_fit_and_json_is_written(icons, classifier, tmp_path):
    results = evaluate(Artist(glyph), icons, classifier, "combination", ReferenceSettings(candidates=2))
    assert all(len(line) <= 80 for result in results for line in result.table().splitlines())
    save_results(tmp_path / "glyphs.json", results, classifier={"style": 1.0})
    assert len(json.loads((tmp_path / "glyphs.json").read_text())["results"]) == 2


def test_data_without_held_out_combinations_raises(icons, classifier):
    trained = replace(icons, references=replace(icons.references, splits=["train"] * len(icons.styles)))
    with pytest.raises(UserError, match="lacks held-out combinations"):
        style_accuracy(classifier, trained)
