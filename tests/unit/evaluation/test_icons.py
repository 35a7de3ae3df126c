"""Verdicts on icons by the classifier, by pixels, and for the copying baseline; tables and grids."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor

from limner.data.open_source import open_source
from limner.errors import UserError
from limner.evaluation.icon_classifier import IconClassifierConfig, train_classifier
from limner.evaluation.icon_pictures import (
    FRAME,
    GAP,
    LEFT,
    SIDE,
    TOP,
    Icons,
    StyleDistance,
    draw_cells,
    grid_cells,
    render_grid,
)
from limner.evaluation.icons import accuracy, enlarge_middle, evaluate, evaluate_pairs
from limner.evaluation.nearest_neighbor import ReferenceSet, ReferenceSettings
from limner.evaluation.result import save_results
from limner.sampling.engine import Candidates
from limner.sampling.generation_config import Sampler
from tiny import tiny_pipe
from toy_icons import HELD_OUT, STYLES, SUBJECTS, UNSEEN, pair, picture, write_toy_icons

SMALL = IconClassifierConfig(width=8, steps=80, batch_size=20, lr=1e-2)


@pytest.fixture(scope="module")
def icons(tmp_path_factory):
    return Icons.from_source(open_source(write_toy_icons(tmp_path_factory.mktemp("data") / "icons")), 24)


@pytest.fixture(scope="module")
def classifier(icons, tmp_path_factory):
    return train_classifier(icons.labeled, tmp_path_factory.mktemp("classifiers"), SMALL)


def tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class Artist:
    """Stub of a pipeline: candidate 0 is a flat circle, candidate 1 `draws(caption)`; `likes` has the best score.

    The dVAE and the tokens of upper halves come from a tiny pipeline.
    """

    def __init__(self, draws, likes=1):
        self.draws, self.likes, self.pipe, self.prompts = draws, likes, tiny_pipe(), []
        self.name, self.dvae, self.device, self.prime = "artist", self.pipe.dvae, self.pipe.device, self.pipe.prime

    def candidates(self, captions, count, *, seed, sampler=Sampler(), prompt_tokens=None, progress=None):
        pictures = tensor(picture("circle", "flat")).repeat(len(captions), count, 1, 1, 1)
        scores = torch.zeros(len(captions), count)
        for row, caption in enumerate(captions):
            pictures[row, 1] = self.draws(caption)
        scores[:, self.likes] = 1
        self.prompts.append(prompt_tokens)
        return Candidates(pictures, scores, torch.zeros(len(captions), count, 36, dtype=torch.long), [])


def depicted(caption: str) -> torch.Tensor:
    subject, style = caption.removeprefix("a ").split(", ")
    return tensor(picture(subject, style))


def test_the_data_has_splits_by_reason_and_held_out_pairs(icons):
    references = icons.references
    assert len(references.pictures) == len(SUBJECTS) * len(STYLES)
    (held,) = references.split_indices("combination")
    assert (references.families[held], icons.styles[held]) == HELD_OUT
    assert [references.families[i] for i in references.split_indices("subject")] == [UNSEEN] * len(STYLES)
    assert references.captions[held] == "a cross, night"
    assert sorted(zip(icons.pairs.splits, icons.pairs.families, icons.pair_styles, strict=True)) == [
        ("style", "circle", "dark"), ("style", "square", "dark"),
        ("upside down", "circle", "flat"), ("upside down", "square", "flat"),
    ]  # fmt: skip


def test_data_without_subjects_raises(icons, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a caption")
    with pytest.raises(UserError, match="no sample has a subject and a style"):
        Icons.from_source(open_source(tmp_path), 24)


def test_correct_drawings_are_right_and_a_single_style_is_right_only_in_the_subject(icons, classifier):
    settings = ReferenceSettings(candidates=2, repeats=3)
    right = evaluate(Artist(depicted), icons, classifier, "combination", settings)[0].rows
    assert right["best of 2"]["subject and style"].value == 1
    assert right["best of 2, nearest picture"]["subject and style"].value == 1
    assert right["any candidate"]["subject and style"].value == 0.5
    assert right["real pictures"]["subject and style"].total == 3
    flat = Artist(lambda caption: depicted(caption.replace("night", "flat").replace("dark", "flat")))
    trained_on = evaluate(flat, icons, classifier, "train", ReferenceSettings(candidates=2))[0].rows["best of 2"]
    wrong_style = np.mean([icons.styles[i] in ("night", "dark") for i in icons.references.split_indices("train")])
    assert trained_on["subject"].value > 0.9
    assert trained_on["style"].value == pytest.approx(1 - wrong_style, abs=0.1)
    assert trained_on["subject and style"].value <= trained_on["style"].value
    worst = evaluate(Artist(depicted, likes=0), icons, classifier, "train", ReferenceSettings(candidates=2))[0].rows
    assert worst["best of 2"]["subject and style"].value < 0.25 < worst["any candidate"]["subject and style"].value


def test_a_copy_is_the_training_picture_of_the_subject_in_the_nearest_style(icons, classifier):
    distance = StyleDistance(icons)
    assert distance("night", "dark") == distance("dark", "night")
    assert min((style for style in STYLES if style != "night"), key=lambda style: distance("night", style)) == "dark"
    shapes = [s for s in SUBJECTS if s not in (UNSEEN, HELD_OUT[0])]  # in training in both styles
    squares = [
        (tensor(picture(s, "night")).double() - tensor(picture(s, "dark")).double()).square().mean() for s in shapes
    ]
    assert distance("night", "dark") == pytest.approx(float(torch.stack(squares).mean()), rel=1e-5)
    (held,), (copied,) = (
        icons.references.split_indices("combination"),
        icons.nearest_style_copies(icons.references.split_indices("combination")),
    )
    assert (icons.references.families[copied], icons.styles[copied]) == (HELD_OUT[0], "dark")
    assert icons.nearest_style_copies(icons.references.split_indices("subject")) == [None] * len(STYLES)
    rates = evaluate(Artist(depicted), icons, classifier, "combination", ReferenceSettings(candidates=2))[0].rows
    copy = rates["copies from nearest style"]
    assert (copy["subject"].value, copy["style"].value, copy["subject and style"].value) == (1, 0, 0)
    assert held not in icons.nearest_style_copies(icons.references.split_indices("train"))


def test_copies_take_the_same_skin_tone_if_there_is_one():
    pictures = torch.zeros(6, 3, 4, 4, dtype=torch.uint8)
    keys = ["hand", "hand, dark", "hand", "hand, dark", "hand, dark", "hand, light"]
    splits = ["train"] * 4 + ["combination"] * 2
    references = ReferenceSet(pictures, keys, keys, ["hand"] * 6, splits)
    no_pairs = ReferenceSet(pictures[:0], [], [], [], [])
    icons = Icons(references, ["a", "a", "b", "b", "c", "c"], ["set"] * 6, [""] * 6, no_pairs, [])
    distance = StyleDistance(icons)
    assert (distance("a", "b"), distance("a", "c")) == (0, np.inf)  # c is not in training
    assert icons.nearest_style_copies([4, 5]) == [1, 0]


def test_verdicts_on_pairs_depend_on_the_lower_half_below_the_real_upper_half(icons, classifier):
    def draws(caption):
        subject = caption.removeprefix("the exact same ").split()[0]
        flat = picture(subject, "flat")
        turned = flat.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        return tensor(pair(flat, turned if "upside" in caption else picture(subject, "dark")))

    artist, settings = Artist(draws), ReferenceSettings(candidates=2)
    (style,) = evaluate_pairs(artist, icons, classifier, "style", settings)
    assert style.rows["best of 2"]["subject and style"].value == 1
    assert style.rows["real lower halves"]["subject and style"].value == 1
    (prompt,) = artist.prompts
    assert prompt.shape == (2, 36) and torch.all(prompt[:, :18] >= 0) and torch.all(prompt[:, 18:] < 0)
    other = replace(icons, pairs=replace(icons.pairs, pictures=icons.pairs.pictures.clone()))
    other.pairs.pictures[:, :, 12:] //= 2
    evaluate_pairs(artist, other, classifier, "style", settings)
    assert torch.equal(artist.prompts[-1], prompt)  # prompts are independent of the lower halves
    (turned,) = evaluate_pairs(artist, icons, classifier, "upside down", settings)
    assert turned.rows["best of 2"]["right"].value == 1
    assert turned.rows["chance"]["right"].value == 0.5
    other = Artist(lambda caption: draws(caption.replace("circle", "square")))
    assert evaluate_pairs(other, icons, classifier, "upside down", settings)[0].rows["best of 2"]["right"].value == 0.5
    top = Artist(lambda caption: draws(caption).flip(1))  # correct half at the wrong position
    assert evaluate_pairs(top, icons, classifier, "style", settings)[0].rows["best of 2"]["style"].value == 0


def test_the_middle_of_a_lower_half_is_enlarged():
    half = torch.zeros(1, 3, 12, 24, dtype=torch.uint8)
    half[..., 6:18] = 200
    assert torch.all(enlarge_middle(half) == 200)
    assert enlarge_middle(half).shape == (1, 3, 24, 24)


def test_tables_and_json_agree(icons, classifier, tmp_path):
    settings = ReferenceSettings(captions=3, candidates=2)
    results = evaluate(Artist(depicted), icons, classifier, "train", settings)
    results += evaluate_pairs(tiny_pipe(), icons, classifier, "upside down", settings)
    assert min(accuracy(classifier, icons).values()) > 0.9
    save_results(tmp_path / "icons.json", results)
    written = json.loads((tmp_path / "icons.json").read_text())
    for part, result in zip(written["results"], results, strict=True):
        table = result.table()
        assert max(map(len, table.splitlines())) <= 80
        respect = next(iter(part["rows"]["chance"]))
        for row, rates in part["rows"].items():
            if row == "chance":
                continue
            mean = np.mean([case[row][respect] for case in part["cases"]])
            assert mean == pytest.approx(rates[respect]["value"], abs=1e-3)
            assert row in table and f"{mean:.1%}" in table
    assert len(written["results"][0]["cases"]) == 3
    assert re.search(r"^chance +5.00%", results[0].table(), re.M)
    assert results[0].title.startswith("training captions, 3 captions of ")


@pytest.mark.parametrize("real", [False, True])
def test_a_grid_frames_held_out_cells_and_places_each_drawing(icons, real):
    chosen = grid_cells(icons, ["square", "cross"])
    assert list(chosen) == [(subject, style) for subject in ("square", "cross") for style in sorted(STYLES)]
    drawings = draw_cells(Artist(depicted), icons, chosen, 2, seed=0)
    assert all(torch.equal(d, icons.references.pictures[i]) for d, i in zip(drawings, chosen.values(), strict=True))
    drawings = 255 - drawings  # distinct from the real pictures
    sheet = render_grid(icons, chosen, drawings, real)
    offset = SIDE + GAP // 3
    width = (offset if real else 0) + SIDE + GAP
    for place, ((subject, style), i) in enumerate(chosen.items()):
        x = LEFT + sorted(STYLES).index(style) * width
        y = TOP + ["square", "cross"].index(subject) * (SIDE + GAP)
        for which, pixels in enumerate((drawings[place], icons.references.pictures[i])[: 2 if real else 1]):
            cell = sheet.crop((x + which * offset, y, x + which * offset + SIDE, y + SIDE)).resize((24, 24), 0)
            assert torch.equal(tensor(cell), pixels)
        around = [(x - 3, y), (x, y - 3), (x + width - GAP + 2, y), (x, y + SIDE + 2)]
        frame = [sheet.getpixel(at) == ImageColor.getrgb(FRAME) for at in around]
        assert frame == [(subject, style) == HELD_OUT] * 4


def test_a_grid_has_subjects_with_a_held_out_style_or_the_named_ones(icons):
    assert {subject for subject, _ in grid_cells(icons)} == {HELD_OUT[0]}
    with pytest.raises(UserError, match="unknown subject 'squares': did you mean 'square'"):
        grid_cells(icons, ["squares"])
    with pytest.raises(UserError, match="unknown subject 'zzz': choose "):
        grid_cells(icons, ["zzz"])
