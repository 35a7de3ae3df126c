"""Icons: what is right is told apart from what is not, by the judge, by pixels and for what is copied."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor

from limner.data.open_source import open_source
from limner.errors import UserError
from limner.evaluation import icon_grid
from limner.evaluation.icon_classifier import JudgeConfig, trained
from limner.evaluation.icon_pictures import HeldOutPairs, Icons
from limner.evaluation.icon_result import save
from limner.evaluation.icons import IconSettings, accuracy, enlarged, evaluate, evaluate_pairs
from limner.evaluation.nearest_neighbor import Gallery
from limner.pipeline import Candidates
from limner.sampling.generation_config import Sampler
from tiny import tiny_pipe
from toy_icons import HELD_OUT, STYLES, SUBJECTS, UNSEEN, pair, picture, write_toy_icons

SMALL = JudgeConfig(width=8, steps=80, batch_size=20, lr=1e-2)


@pytest.fixture(scope="module")
def icons(tmp_path_factory):
    return Icons.of(open_source(write_toy_icons(tmp_path_factory.mktemp("data") / "icons")), 24)


@pytest.fixture(scope="module")
def judge(icons, tmp_path_factory):
    return trained(icons.labelled, tmp_path_factory.mktemp("judges"), SMALL)


def tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class Artist:
    """Draws a flat circle, and then what `draws` makes of a caption; the contrastive score prefers the one that `likes`
    says.

    A pipeline of tiny models otherwise, so that its dVAE and the tokens of upper halves are real.
    """

    def __init__(self, draws, likes=1):
        self.draws, self.likes, self.pipe, self.given_tops = draws, likes, tiny_pipe(), []
        self.name, self.dvae, self.device, self.given = "artist", self.pipe.dvae, self.pipe.device, self.pipe.given

    def candidates(self, captions, count, *, seed, sampler=Sampler(), given=None, progress=None):
        made = tensor(picture("circle", "flat")).repeat(len(captions), count, 1, 1, 1)
        scores = torch.zeros(len(captions), count)
        for row, caption in enumerate(captions):
            made[row, 1] = self.draws(caption)
        scores[:, self.likes] = 1
        self.given_tops.append(given)
        return Candidates(made, scores, torch.zeros(len(captions), count, 36, dtype=torch.long), sampler)


def says(caption: str) -> torch.Tensor:
    subject, style = caption.removeprefix("a ").split(", ")
    return tensor(picture(subject, style))


def test_the_data_is_read_with_what_is_held_out_and_why(icons):
    gallery = icons.gallery
    assert len(gallery.pictures) == len(SUBJECTS) * len(STYLES)
    (held,) = gallery.choose("combination")
    assert (gallery.families[held], icons.styles[held]) == HELD_OUT
    assert [gallery.families[i] for i in gallery.choose("subject")] == [UNSEEN] * len(STYLES)
    assert gallery.captions[held] == "a cross, night"
    assert sorted(zip(icons.pairs.kinds, icons.pairs.subjects, icons.pairs.styles, strict=True)) == [
        ("style", "circle", "dark"), ("style", "square", "dark"),
        ("upside down", "circle", "flat"), ("upside down", "square", "flat"),
    ]  # fmt: skip


def test_data_without_subjects_is_refused(icons, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a caption")
    with pytest.raises(UserError, match="no sample has a subject and a style"):
        Icons.of(open_source(tmp_path), 24)


def test_an_artist_who_draws_what_is_asked_is_right_and_one_who_has_one_style_only_in_the_subject(icons, judge):
    settings = IconSettings(candidates=2, repeats=3)
    right = evaluate(Artist(says), icons, judge, "combination", settings).rates()
    assert right["best of 2"]["subject and style"].value == 1
    assert right["best of 2, nearest picture"]["subject and style"].value == 1
    assert right["any candidate"]["subject and style"].value == 0.5
    assert right["real pictures"]["subject and style"].total == 3
    flat = Artist(lambda caption: says(caption.replace("night", "flat").replace("dark", "flat")))
    trained_on = evaluate(flat, icons, judge, "train", IconSettings(candidates=2)).rates()["best of 2"]
    wrong = np.mean([icons.styles[i] in ("night", "dark") for i in icons.gallery.choose("train")])
    assert trained_on["subject"].value > 0.9
    assert trained_on["style"].value == pytest.approx(1 - wrong, abs=0.1)
    assert trained_on["subject and style"].value <= trained_on["style"].value
    worst = evaluate(Artist(says, likes=0), icons, judge, "train", IconSettings(candidates=2)).rates()
    assert worst["best of 2"]["subject and style"].value < 0.25 < worst["any candidate"]["subject and style"].value


def test_a_copy_is_the_trained_picture_of_the_subject_in_the_nearest_style(icons, judge):
    distances = icons.distances()
    assert distances["night", "dark"] == distances["dark", "night"]
    assert min((style for style in STYLES if style != "night"), key=lambda style: distances["night", style]) == "dark"
    shapes = [s for s in SUBJECTS if s not in (UNSEEN, HELD_OUT[0])]  # which training has in both
    squares = [
        (tensor(picture(s, "night")).double() - tensor(picture(s, "dark")).double()).square().mean() for s in shapes
    ]
    assert distances["night", "dark"] == pytest.approx(float(torch.stack(squares).mean()), rel=1e-5)
    (held,), (copied,) = icons.gallery.choose("combination"), icons.copies(icons.gallery.choose("combination"))
    assert (icons.gallery.families[copied], icons.styles[copied]) == (HELD_OUT[0], "dark")
    assert icons.copies(icons.gallery.choose("subject")) == [None] * len(STYLES)
    found = evaluate(Artist(says), icons, judge, "combination", IconSettings(candidates=2)).rates()
    copy = found["copied from the nearest style"]
    assert (copy["subject"].value, copy["style"].value, copy["subject and style"].value) == (1, 0, 0)
    assert held not in icons.copies(icons.gallery.choose("train"))


def test_copies_take_the_same_skin_tone_if_there_is_one():
    pictures = torch.zeros(6, 3, 4, 4, dtype=torch.uint8)
    keys = ["hand", "hand, dark", "hand", "hand, dark", "hand, dark", "hand, light"]
    splits = ["train"] * 4 + ["combination"] * 2
    gallery = Gallery(pictures, keys, keys, ["hand"] * 6, splits)
    icons = Icons(gallery, ["a", "a", "b", "b", "c", "c"], HeldOutPairs(pictures[:0], [], [], [], []))
    assert icons.distances() == {("a", "b"): 0, ("b", "a"): 0}
    assert icons.copies([4, 5]) == [1, 0]


def test_pairs_are_judged_by_their_lower_half_below_the_real_upper_one(icons, judge):
    def draws(caption):
        subject = caption.removeprefix("the exact same ").split()[0]
        flat = picture(subject, "flat")
        turned = flat.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        return tensor(pair(flat, turned if "upside" in caption else picture(subject, "dark")))

    artist, settings = Artist(draws), IconSettings(candidates=2)
    style = evaluate_pairs(artist, icons, judge, "style", settings)
    assert style.rates()["best of 2"]["subject and style"].value == 1
    assert style.rates()["real lower halves"]["subject and style"].value == 1
    (given,) = artist.given_tops
    assert given.shape == (2, 36) and torch.all(given[:, :18] >= 0) and torch.all(given[:, 18:] < 0)
    other = replace(icons, pairs=replace(icons.pairs, pictures=icons.pairs.pictures.clone()))
    other.pairs.pictures[:, :, 12:] //= 2
    evaluate_pairs(artist, other, judge, "style", settings)
    assert torch.equal(artist.given_tops[-1], given)  # which do not know what was below
    turned = evaluate_pairs(artist, icons, judge, "upside down", settings)
    assert turned.rates()["best of 2"]["right"].value == 1
    assert turned.chance == {"right": 0.5}
    other = Artist(lambda caption: draws(caption.replace("circle", "square")))
    assert evaluate_pairs(other, icons, judge, "upside down", settings).rates()["best of 2"]["right"].value == 0.5
    top = Artist(lambda caption: draws(caption).flip(1))  # the right half, but above
    assert evaluate_pairs(top, icons, judge, "style", settings).rates()["best of 2"]["style"].value == 0


def test_a_lower_half_is_enlarged_from_its_middle():
    half = torch.zeros(1, 3, 12, 24, dtype=torch.uint8)
    half[..., 6:18] = 200
    assert torch.all(enlarged(half) == 200)
    assert enlarged(half).shape == (1, 3, 24, 24)


def test_tables_and_json_say_the_same(icons, judge, tmp_path):
    settings = IconSettings(captions=3, candidates=2)
    results = [evaluate(Artist(says), icons, judge, "train", settings)]
    results += [evaluate_pairs(tiny_pipe(), icons, judge, "upside down", settings)]
    save(tmp_path / "icons.json", accuracy(judge, icons), results)
    written = json.loads((tmp_path / "icons.json").read_text())
    assert written["judge"]["subject and style"] > 0.9
    for part, result in zip(written["results"], results, strict=True):
        assert max(map(len, result.table().splitlines())) < 80
        respect = next(iter(part["chance"]))
        for way, rates in part["rates"].items():
            mean = np.mean([case[way][respect] for case in part["cases"]])
            assert mean == pytest.approx(rates[respect]["rate"], abs=1e-3)
            assert f"{way} " in result.table() and f"{mean:.1%}" in result.table()
    assert len(written["results"][0]["cases"]) == 3
    assert f"chance{'':27} 5.00%" in results[0].table()
    alike = replace(results[0], captions=["a square"] * 3)  # in two styles the same words may ask for two pairs
    assert ", 3 captions of" in alike.table()


@pytest.mark.parametrize("real", [False, True])
def test_a_grid_frames_what_is_held_out_and_shows_each_drawing_in_its_place(icons, real):
    chosen = icon_grid.cells(icons, ["square", "cross"])
    assert list(chosen) == [(subject, style) for subject in ("square", "cross") for style in sorted(STYLES)]
    drawings = icon_grid.draw(Artist(says), icons, chosen, 2, seed=0)
    assert all(torch.equal(d, icons.gallery.pictures[i]) for d, i in zip(drawings, chosen.values(), strict=True))
    drawings = 255 - drawings  # to tell them from the real ones
    sheet = icon_grid.sheet(icons, chosen, drawings, real)
    side, gap = icon_grid.SIDE, icon_grid.GAP
    beside = side + gap // 3
    width = (beside if real else 0) + side + gap
    for place, ((subject, style), i) in enumerate(chosen.items()):
        x = icon_grid.LEFT + sorted(STYLES).index(style) * width
        y = icon_grid.TOP + ["square", "cross"].index(subject) * (side + gap)
        for which, pixels in enumerate((drawings[place], icons.gallery.pictures[i])[: 2 if real else 1]):
            there = sheet.crop((x + which * beside, y, x + which * beside + side, y + side)).resize((24, 24), 0)
            assert torch.equal(tensor(there), pixels)
        around = [(x - 3, y), (x, y - 3), (x + width - gap + 2, y), (x, y + side + 2)]
        frame = [sheet.getpixel(at) == ImageColor.getrgb(icon_grid.FRAME) for at in around]
        assert frame == [(subject, style) == HELD_OUT] * 4


def test_a_grid_shows_what_has_a_held_out_style_or_is_named(icons):
    assert {subject for subject, _ in icon_grid.cells(icons)} == {HELD_OUT[0]}
    with pytest.raises(UserError, match="no subject 'squares': did you mean 'square'"):
        icon_grid.cells(icons, ["squares"])
    with pytest.raises(UserError, match="no subject 'zzz': there are "):
        icon_grid.cells(icons, ["zzz"])
