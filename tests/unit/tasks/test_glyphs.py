"""Joint data set of monochrome icons: names, looks, captions, a split without leaks, and the written shards."""

import io
import warnings
from collections import Counter, defaultdict

import numpy as np
import pytest
from PIL import Image

from icon_sets import SQUARE, archive
from limner.cli.data import main as data_command
from limner.data.open_source import open_source
from limner.errors import UserError
from limner.tasks import iconify
from limner.tasks.build_glyphs import GlyphDataSettings, write_glyphs
from limner.tasks.glyphs import HELD_OUT_SETS, Glyph, NameParser, assign_splits, captions, describe_style, glyphs_of
from limner.tasks.iconify import Icon


def bar(seed: int, thickness: int) -> str:
    """A horizontal bar whose place depends on the seed."""
    x, y = seed % 16 / 4, seed // 16 / 4
    return f'<path fill="currentColor" d="M{x} {y}h14v{thickness}h-14z"/>'


def a_set(prefix, names, *, thickness=2, title=None, spdx="MIT", **fields):
    """The JSON of a set with these names, whose pictures depend on the first word and the number of words."""
    subjects = sorted({name.split("-")[0] for name in names})
    info = {"name": title or prefix.title(), "author": {"name": "A. Painter"}, "license": {"spdx": spdx}}
    info |= {key: fields.pop(key) for key in ("category", "palette", "hidden") if key in fields}
    bodies = {name: bar(subjects.index(name.split("-")[0]), thickness + name.count("-")) for name in names}
    icons = {name: {"body": body} for name, body in bodies.items()}
    return {"prefix": prefix, "info": info, "width": 24, "height": 24, "icons": icons, **fields}


def read(tmp_path, *sets):
    members = {
        f"json__{data['prefix']}" if isinstance(data, dict) else f"json__{i}": data for i, data in enumerate(sets)
    }
    return list(iconify.read_sets(archive(tmp_path / "all.tgz", collections={}, **members)))


def glyphs(tmp_path, *sets):
    rejected = Counter()
    found = [glyph for icon_set in read(tmp_path, *sets) for glyph in glyphs_of(icon_set, rejected)]
    return found, rejected


@pytest.mark.parametrize(
    ("fields", "name", "expected"),
    [
        ({"suffixes": {"": "Regular", "thin": "Thin"}}, "rocket-launch-thin", ("rocket launch", "thin", 24)),
        ({"suffixes": {"": "Regular", "thin": "Thin"}}, "rocket-launch", ("rocket launch", "regular", 24)),
        ({"suffixes": {"ab-cd": "Ab Cd", "cd": "Cd"}}, "x-ab-cd", ("x", "ab cd", 24)),
        ({"suffixes": {"20-filled": "20 Filled"}}, "alert-on-20-filled", ("alert on", "filled", 20)),
        ({"suffixes": {"": "Outline 24x24", "16-solid": "Solid 16x16"}}, "bell-16-solid", ("bell", "solid", 16)),
        ({"suffixes": {"duotone": "BoldDuotone"}}, "bell-duotone", ("bell", "bold duotone", 24)),
        ({"prefixes": {"baseline": "Baseline"}}, "baseline-add_box", ("add box", "baseline", 24)),
        ({}, "home-outline", ("home outline", "", 24)),  # too few names end so
    ],
)  # fmt: skip
def test_a_name_has_a_subject_a_variant_and_a_size(tmp_path, fields, name, expected):
    (icon_set,) = read(tmp_path, a_set("toys", [name], **fields))
    assert NameParser(icon_set)(name) == expected


def test_frequent_last_words_are_variants_of_sets_that_declare_none(tmp_path):
    names = [f"thing{i}" for i in range(20)]
    (icon_set,) = read(tmp_path, a_set("toys", [*names, *(f"{name}-outline" for name in names), "base-line", "base"]))
    parse = NameParser(icon_set)
    assert parse("thing3-outline") == ("thing3", "outline", 24)
    assert parse("base-line") == ("base line", "", 24)


def test_the_size_closest_to_24_is_used(tmp_path):
    sizes = {f"{n}-filled": f"{n} Filled" for n in (12, 20, 32)}
    data = a_set("toys", [f"bell-{n}-filled" for n in (12, 20, 32)], suffixes=sizes)
    data["icons"] = {name: {"body": bar(i, 2)} for i, name in enumerate(data["icons"])}
    found, rejected = glyphs(tmp_path, data)
    assert [(g.icon.name, g.style) for g in found] == [("bell-20-filled", "toys filled")]
    assert rejected["another size of the same drawing"] == 2


def test_other_kinds_of_sets_and_brands_are_left_out_and_counted(tmp_path):
    found, rejected = glyphs(
        tmp_path,
        a_set("a", ["cat", "brand-x", "x-logo-2", "us", "flag-logic"], categories={"Country Flags": ["us"]}),
        a_set("b", ["cat"], category="Logos"),
        a_set("c", ["cat"], palette=True),
        a_set("d", ["cat"], hidden=True),
        a_set("e", ["cat"], category="Archive / Unmaintained"),
    )  # fmt: skip
    assert [(g.credit["set"], g.subject) for g in found] == [("a", "cat"), ("a", "flag logic")]
    assert rejected["brand or flag"] == 3 and rejected["set in fixed colors"] == 1
    assert {kind for kind in rejected if kind.startswith("set of another kind")} == {
        "set of another kind: Logos", "set of another kind: hidden", "set of another kind: Archive / Unmaintained",
    }  # fmt: skip


def test_aliases_of_the_same_variant_are_further_subjects(tmp_path):
    data = a_set("toys", ["bin-fill"], suffixes={"fill": "Fill", "": "Line"})
    data["aliases"] = {"trash-fill": {"parent": "bin-fill"}, "waste": {"parent": "bin-fill"}}
    (glyph,), _ = glyphs(tmp_path, data)
    assert glyph.other_subjects == ("trash",)
    assert "trash, toys fill" in captions(glyph)


def test_every_caption_names_the_style_or_its_look():
    glyph = Glyph(Icon("ant", "ant"), {"set": "ph"}, "ant", "phosphor thin", ("bug",), look="thin outline")
    phrases = captions(glyph)
    assert phrases[0] == "ant, phosphor thin" and phrases[1] == "an ant, phosphor thin"
    assert all("phosphor thin" in phrase or "thin outline" in phrase for phrase in phrases)
    assert len(set(phrases)) == len(phrases)


def test_damaged_sets_are_skipped_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match=r"skipped package/json/\d.json: .* is not"):
        sets = read(tmp_path, a_set("toys", ["cat"]), b"{", [1])
    assert [icon_set.prefix for icon_set in sets] == ["toys"]


def test_a_package_without_sets_is_an_error(tmp_path):
    with pytest.raises(UserError, match="not an icon set"):
        list(iconify.read_sets(archive(tmp_path / "x.tgz", other={})))


def ring(width: float, side: int = 48, gray: int | None = None) -> np.ndarray:
    """A circle of this stroke width, in units of 1 / 24 of the side, drawn with 8 x 8 samples a pixel."""
    axis = (np.arange(side * 8) + 0.5) / 8 * 24 / side - 12
    radius = np.hypot(*np.meshgrid(axis, axis))
    mask = abs(radius - 8) <= width / 2
    picture = 255 * (1 - mask.reshape(side, 8, side, 8).mean((1, 3)))
    if gray is not None:
        inside = (radius < 8 - width / 2).reshape(side, 8, side, 8).mean((1, 3))
        picture -= inside * (255 - gray)
    return picture.round().astype(np.uint8)


@pytest.mark.parametrize(
    ("picture", "look"),
    [(ring(1), "thin outline"), (ring(1.6), "regular outline"), (ring(2), "regular outline"),
     (ring(2.4), "bold outline"), (ring(16), "filled"), (ring(1.5, gray=190), "duotone"),
     (ring(2, side=64), "regular outline")],
)  # fmt: skip
def test_a_style_is_described_by_what_its_drawings_look_like(picture, look):
    assert describe_style([picture]) == look


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Shards of 240 subjects in ten sets of two variants, with a set that is held out, and their summary."""
    subjects = [f"thing{i}" for i in range(240)]
    names = [name for subject in subjects for name in (subject, f"{subject}-fill")]
    folder = tmp_path_factory.mktemp("glyphs")
    prefixes = [*(f"set{i}" for i in range(9)), HELD_OUT_SETS[0], "hostile"]
    sets = [
        a_set(prefix, names, thickness=1 + i, suffixes={"": "Line", "fill": "Fill"})
        for i, prefix in enumerate(prefixes)
    ]
    sets[-1]["icons"] = {"thing1": {"body": '<image href="file:///etc/passwd"/>'}, "thing2": {"body": "<path"}}
    with warnings.catch_warnings(action="error"):
        summary = write_glyphs(folder / "data", read(folder, *sets), GlyphDataSettings(size=24))
    source = open_source(folder / "data")
    return [(source[i], source.meta(i)) for i in range(len(source))], summary


def test_hostile_drawings_are_counted(written):
    _, summary = written
    assert summary["rejected"]["SVG that is not XML"] == 1
    assert sum(n for reason, n in summary["rejected"].items() if "element that icons do not need" in reason) == 1


def test_pictures_are_black_on_white(written):
    samples, _ = written
    for sample, _ in samples[::400]:
        picture = np.asarray(Image.open(io.BytesIO(sample.image)))
        assert picture.shape == (24, 24) and picture.max() == 255 and picture.min() < 128


def test_held_out_sets_subjects_and_combinations_are_not_in_training(written):
    samples, summary = written
    kinds = defaultdict(set)
    for _, meta in samples:
        kinds[meta.get("held_out", "train")].add((meta["subject"], meta["style"], meta["set"]))
        assert (meta["split"] == "train") == ("held_out" not in meta)
    train = kinds["train"]
    assert all(name != HELD_OUT_SETS[0] for *_, name in train)
    assert not {subject for subject, *_ in kinds["subject"]} & {subject for subject, *_ in train}
    seen, styles = {subject for subject, *_ in train}, {style for _, style, _ in train}
    for subject, style, _ in kinds["combination"]:
        assert style in styles and (subject in seen or subject in {s for s, *_ in kinds["combination"]})
    assert summary["kinds"] == {kind: len(found) for kind, found in kinds.items()}
    assert kinds["combination"] and kinds["subject"] and kinds["set"]


def test_equal_pictures_are_on_one_side_of_the_split(written):
    samples, _ = written
    sides = defaultdict(set)
    for sample, meta in samples:
        sides[sample.image].add(meta.get("held_out"))
    assert all(len(side) == 1 for side in sides.values())


def test_one_in_twenty_combinations_of_frequent_subjects_is_held_out():
    found = [
        Glyph(Icon("x", "x"), {"set": "s"}, f"thing {i}", f"style {j}") for i in range(1_000) for j in range(8)
    ] + [Glyph(Icon("x", "x"), {"set": "s"}, f"rare {i}", f"style {j}") for i in range(100) for j in range(5)]
    split = assign_splits(found, [str(i).encode() for i in range(len(found))])
    kinds = Counter(g.held_out for g in split)
    assert 340 <= kinds["combination"] <= 460 and kinds["subject"] == 0  # none has ten styles
    rare = [
        g for g in assign_splits(found, [b""] * 0 + [str(i).encode() for i in range(len(found))]) if "rare" in g.subject
    ]
    assert not any(g.held_out for g in rare)


def test_subjects_in_too_few_styles_are_left_out(tmp_path):
    sets = [a_set("one", ["cat", "dog"]), a_set("two", ["cat"], thickness=4), a_set("three", ["cat"], thickness=6)]
    summary = write_glyphs(tmp_path / "out", read(tmp_path, *sets))
    assert summary["kept"] == 3 and summary["rejected"]["subject in too few styles"] == 1
    with pytest.raises(UserError, match="no subject exists in 9 styles"):
        write_glyphs(tmp_path / "none", read(tmp_path, *sets), GlyphDataSettings(styles=9))


def test_the_pictures_of_square_icons_fill_the_frame(tmp_path):
    data = a_set("toys", ["cat"])
    data["icons"]["cat"] = {"body": SQUARE.replace("#f00", "#000"), "width": 8, "height": 8}
    write_glyphs(tmp_path / "out", read(tmp_path, data, a_set("b", ["cat"]), a_set("c", ["cat"], thickness=5)))
    sample = open_source(tmp_path / "out")[0]
    assert np.asarray(Image.open(io.BytesIO(sample.image))).max() == 0


def test_a_folder_of_svg_files_is_a_set(tmp_path, capsys):
    folder = tmp_path / "My_icons"
    (folder / "arrows").mkdir(parents=True)
    header = '<?xml version="1.0"?><!-- an editor --><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24">'
    files = {
        "cat": bar(1, 2), "BigDog": bar(2, 3), "arrows/arrow-left": bar(3, 4), "arrows/cat": bar(4, 5),
        "hostile": '<image href="file:///etc/passwd"/>', "brand-cat": bar(5, 5), "empty": "",
    }  # fmt: skip
    for name, body in files.items():
        (folder / f"{name}.svg").write_text(f"{header}{body}</svg>")
    (folder / "damaged.SVG").write_bytes(b"\xff\xfe<svg")
    (folder / "notes.txt").write_text("no icon")
    data_command(["glyphs", str(tmp_path / "data"), str(folder), "--styles", "1", "--size", "24"])
    printed = capsys.readouterr().out
    assert "3 subjects, 1 styles: my\n" in printed  # "icons" says nothing
    for reason in ("another file of the same name", "brand or flag", "SVG that is not XML", "empty drawing", "image"):
        assert reason in printed
    samples = list(open_source(tmp_path / "data"))
    assert {sample.captions[0] for sample in samples} == {"arrow left, my", "big dog, my", "cat, my"}
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="lacks SVG files"):
        data_command(["glyphs", str(tmp_path / "other"), str(tmp_path / "none"), "--styles", "1"])


def test_the_command_takes_permissive_sets_and_says_what_it_left_out(tmp_path, capsys):
    sets = [
        a_set("one", ["cat", "dog"]),
        a_set("two", ["cat"], thickness=4),
        a_set("three", ["cat"], spdx="CC-BY-SA-4.0"),
    ]
    path = archive(tmp_path / "all.tgz", **{f"json__{data['prefix']}": data for data in sets})
    options = ["--styles", "1", "--size", "24"]
    data_command(["glyphs", str(tmp_path / "a"), str(path), *options])
    assert "skipped Three, whose license is CC-BY-SA-4.0" in (printed := capsys.readouterr().out)
    assert "2 subjects, 2 styles" in printed and "train 3" in printed
    data_command(["glyphs", str(tmp_path / "b"), str(path), "--all-licenses", *options])
    assert "2 subjects, 3 styles" in capsys.readouterr().out
    data_command(["glyphs", str(tmp_path / "c"), str(path), "--sets", "two", *options])
    assert "1 subjects, 1 styles" in capsys.readouterr().out
    with pytest.raises(UserError, match="no set 'tow' in these files: did you mean 'two'"):
        data_command(["glyphs", str(tmp_path / "d"), str(path), "--sets", "tow", *options])
    with pytest.raises(UserError, match="needs files of icon sets"):
        data_command(["glyphs", str(tmp_path / "e")])
