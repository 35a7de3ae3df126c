"""Joint data set of icons: sets joined by code points and names, captions, a split without leaks, and pairs."""

import io
import json
from collections import Counter, defaultdict
from functools import partial

import numpy as np
import pytest
from PIL import Image

from limner.atomic_io import file_hash
from limner.data.open_source import open_source
from limner.data.sample import group_by_split
from limner.errors import UserError
from limner.tasks import build_icons, iconify, icons
from limner.tasks.build_icons import IconDataSettings, write_icons
from limner.tasks.emoji import all_emoji
from limner.tasks.icons import Keywords, article, captions
from limner.tasks.svg import SVGRenderer
from limner.validation import InvalidSetting

STYLES = ("noto", "twemoji", "emojione", "fxemoji", "made-up")
SOME = [one for one in all_emoji() if not one.tones][200:1_000:2]
TONED = [one for one in all_emoji() if len(one.tones) == 1][:40]


def drawing(seed: int) -> str:
    """Two squares of random colors, of which the upper one lies left."""
    a, b = (f"#{n:06x}" for n in np.random.default_rng(seed).integers(0, 1 << 24, 2))
    return f'<path fill="{a}" d="M1 1h8v6H1z"/><path fill="{b}" d="M6 9h9v6H6z"/>'


def a_set(tmp_path, prefix, entries, chars, aliases=None) -> iconify.IconSet:
    """A set with these icons (body by name)."""
    data = {
        "prefix": prefix, "icons": {name: {"body": body} for name, body in entries.items()}, "aliases": aliases or {},
        "info": {"name": "Made Up", "author": {"name": "Somebody"}, "license": {"spdx": "MIT"}},
    }  # fmt: skip
    folder = tmp_path / prefix
    folder.mkdir()
    (folder / "icons.json").write_text(json.dumps(data))
    (folder / "chars.json").write_text(json.dumps(chars))
    return iconify.read(folder / "icons.json")


def hexadecimal(text: str) -> str:
    return "-".join(f"{ord(c):x}" for c in text)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Five sets of the same 440 emoji. The first lists code points, and the others spell the names differently. Every
    fifth icon of a set mirrors the one before."""
    tmp_path, made = tmp_path_factory.mktemp("sets"), []
    for i, prefix in enumerate(STYLES):
        entries, aliases, chars = {}, {}, {}
        for k, one in enumerate([*SOME, *TONED]):
            name = one.name.replace(" ", "-") if i % 2 else one.name.replace(" ", "").title()
            if k % 5 == 4 and list(entries)[-1:]:
                aliases[name] = {"parent": list(entries)[-1], "hFlip": True}
            else:
                entries[name] = drawing(1_000 * i + k)
            if i == 0:
                chars[hexadecimal(one.text)] = name
        made.append(a_set(tmp_path, prefix, entries, chars, aliases))
    return made


def test_sets_that_spell_names_differently_are_joined(sets):
    drawn, rejected = icons.join_sets(sets)
    assert not rejected
    styles = defaultdict(set)
    for one in drawn:
        styles[one.subject].add(one.style)
    assert len(styles) == len(SOME) + len(TONED)
    assert all(len(found) == len(STYLES) for found in styles.values())
    assert {one.style for one in drawn} == {"shaded", "flat", "cartoon", "simple", "made up"}


def test_code_points_join_under_any_name_and_names_without_them(tmp_path):
    tiger, made = "\U0001f405", drawing(0)
    sets = [
        a_set(tmp_path, "noto", {"big-cat": made}, {hexadecimal(tiger): "big-cat"}),
        a_set(tmp_path, "twemoji", {"Tiger": made}, {}),
        a_set(tmp_path, "emojione", {"bigcat": made}, {}),  # a name that the first set explains
        a_set(tmp_path, "fxemoji", {"no_emoji-at-all": made, "\u200b": made + "<g/>"}, {}),
    ]
    drawn, rejected = icons.join_sets(sets)
    assert [(one.subject, one.style) for one in drawn] == [
        ("tiger", "shaded"), ("tiger", "flat"), ("tiger", "cartoon"), ("no emoji at all", "simple"),
    ]  # fmt: skip
    assert [one.emoji for one in drawn] == [tiger, tiger, tiger, None]
    assert rejected == {"name without words": 1}


def test_no_combination_that_is_held_out_is_trained_in_any_form(sets):
    drawn, _ = icons.join_sets(sets)
    held = {(one.base, one.style) for one in drawn if one.held_out}
    assert held.isdisjoint((one.base, one.style) for one in drawn if not one.held_out)
    roots = {(one.set.prefix, one.icon.root) for one in drawn if one.held_out}
    assert roots.isdisjoint((one.set.prefix, one.icon.root) for one in drawn if not one.held_out)


def test_a_twentieth_of_the_subjects_lacks_one_style_and_a_hundredth_is_never_seen(sets):
    drawn, _ = icons.join_sets(sets)
    kinds = defaultdict(set)
    for one in drawn:
        if one.icon.root == one.icon.name:  # the others follow what they mirror
            kinds[one.held_out].add(one.base)
    bases = len({one.base for one in drawn if one.icon.root == one.icon.name})
    assert 0.02 < len(kinds["combination"]) / bases < 0.09
    assert 0 < len(kinds["subject"]) / bases < 0.03
    whole = {one.base for one in drawn if one.held_out == "subject" and one.icon.root == one.icon.name}
    assert all(one.held_out == "subject" for one in drawn if one.base in whole and one.icon.root == one.icon.name)


def test_the_split_does_not_depend_on_the_order_of_the_sets(sets):
    one, other = (icons.join_sets(order)[0] for order in (sets, sets[::-1]))

    def held(drawn):
        return {(some.subject, some.style, some.held_out) for some in drawn}

    assert held(one) == held(other)


def test_captions_name_subject_and_style(sets):
    drawn, _ = icons.join_sets(sets)
    for one in drawn[::50]:
        output = captions(one)
        assert output[0] == f"{article(one.subject)}, {one.style}"
        assert all(one.subject in phrase for phrase in output)
        assert sum(one.style in phrase for phrase in output) == len(output) - 1  # one leaves the style open
        assert len(set(output)) == len(output)


@pytest.mark.parametrize(
    ("subject", "with_article"),
    [("tiger", "a tiger"), ("apple", "an apple"), ("unicorn", "a unicorn"), ("skis", "skis"), ("1st place medal",) * 2,
     ("flag of France",) * 2, ("cat with wry smile", "a cat with wry smile"), ("compass", "a compass"),
     ("waving hand, dark skin tone", "a waving hand, dark skin tone"), ("glasses",) * 2],
)  # fmt: skip
def test_articles(subject, with_article):
    assert article(subject) == with_article


def test_keywords_are_those_that_tell_subjects_apart():
    tiger, all_others = "\U0001f405", {chr(0x1F400 + i): ("animal",) for i in range(20)}
    known = Keywords([{**all_others, tiger: ("animal", "big cat", "tiger")}])
    one = icons.IconDrawing(None, None, "flat", "tiger", "tiger", (), tiger)  # pyright: ignore[reportArgumentType]
    assert list(known(one)) == ["big cat"]
    assert captions(one, known(one))[-1] == "big cat, flat"


@pytest.fixture(scope="module")
def written(sets, tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "icons"
    return out, write_icons(out, sets, IconDataSettings(size=32, pairs=1.0))


def test_every_drawing_is_written_or_counted(written, sets):
    out, summary = written
    names = sum(len(one.icons) for one in sets)
    pairs = summary["kinds"]["pair"] + summary["kinds"]["held-out pair"]
    assert summary["kept"] + summary["rejected"]["additional skin tone"] == names + pairs
    assert sum(summary["joined"].values()) == summary["kept"] - pairs
    source = open_source(str(out))
    assert len(source) == summary["kept"]
    assert {name: len(some) for name, some in group_by_split(source).items()} == summary["splits"]


def test_the_same_sets_give_the_same_bytes(written, sets, tmp_path):
    out, _ = written
    write_icons(tmp_path / "again", sets, IconDataSettings(size=32, pairs=1.0))
    assert file_hash(out / "00000.tar") == file_hash(tmp_path / "again" / "00000.tar")


def test_metadata_names_set_license_and_author_and_one_tone_of_each_is_kept(written):
    source = open_source(str(written[0]))
    metadata = [source.meta(i) for i in range(len(source))]
    assert all(meta["license"] == "MIT" and meta["author"] == "Somebody" and meta["set"] in STYLES for meta in metadata)
    toned = Counter((meta["base"], meta["style"]) for meta in metadata if meta["tones"] and "pair" not in meta)
    assert toned and set(toned.values()) == {1}


def test_subjects_that_few_styles_have_are_left_out_with_all_their_tones(sets, tmp_path):
    of = defaultdict(set)
    for one in icons.join_sets(sets)[0]:
        of[one.base].add(one.style)
    rare = a_set(tmp_path, "rare", {"kitchen-golem": drawing(1), "tiger": drawing(2)}, {})
    summary = write_icons(tmp_path / "out", [*sets, rare], IconDataSettings(size=16, pairs=0, styles=5))
    source = open_source(str(tmp_path / "out"))
    bases = {source.meta(i)["base"] for i in range(len(source))}
    assert "kitchen golem" not in bases and all(len(of[base]) >= 4 for base in bases)
    assert summary["rejected"]["subject in too few styles"] >= 1
    everything = write_icons(tmp_path / "all", [*sets, rare], IconDataSettings(size=16, pairs=0))
    left_out = summary["rejected"]["subject in too few styles"]
    tones = everything["rejected"]["additional skin tone"] - summary["rejected"]["additional skin tone"]
    assert summary["kept"] + left_out == everything["kept"] + tones


def test_categories_keep_subjects_that_some_set_files_there(sets, tmp_path):
    folder = tmp_path / "openmoji"
    filed = a_set(tmp_path, "openmoji", {"tiger": drawing(1), "hamburger": drawing(2), "car": drawing(3)}, {})
    assert not filed.categories  # without metadata.json, like the other sets
    listed = {"categories": {"Animals": ["tiger", 7], "Food & Drink": ["hamburger"], "Odd": "car"}}
    (folder / "metadata.json").write_text(json.dumps(listed))
    filed = iconify.read(folder / "icons.json")
    assert filed.categories == {"tiger": "Animals", "hamburger": "Food & Drink"}
    summary = write_icons(
        tmp_path / "out", [*sets, filed], IconDataSettings(size=16, pairs=0, categories=("Animals", "Food & Drink"))
    )
    source = open_source(str(tmp_path / "out"))
    metadata = [source.meta(i) for i in range(len(source))]
    assert {one["base"] for one in metadata} == {"tiger", "hamburger"} and len(metadata) == summary["kept"] > 2
    assert {one.get("category") for one in metadata} == {"Animals", "Food & Drink", None}  # other sets' are kept, too
    assert summary["rejected"]["subject of another category"] > 400
    with pytest.raises(UserError, match="no set has a category 'Animal': did you mean 'Animals'"):
        write_icons(tmp_path / "none", [*sets, filed], IconDataSettings(size=16, categories=("Animal",)))


def test_pairs_show_only_what_is_trained(written):
    source = open_source(str(written[0]))
    metadata = [source.meta(i) for i in range(len(source))]
    held = {(meta["base"], meta["style"]) for meta in metadata if meta.get("held_out") in ("combination", "subject")}
    pairs = [meta for meta in metadata if "pair" in meta]
    assert {meta["pair"]["kind"] for meta in pairs} == {"style", "upside down", "silhouette", "grayscale", "recolored"}
    for meta in pairs:
        assert (meta["base"], meta["style"]) not in held
        if meta["pair"]["kind"] == "style":
            assert meta["pair"]["style"] != meta["style"] and (meta["base"], meta["pair"]["style"]) not in held
    shares = Counter(meta["split"] for meta in pairs)
    assert 0.02 < shares["held-out"] / len(pairs) < 0.09
    assert all(meta["held_out"] == "pair" for meta in pairs if meta["split"] == "held-out")


@pytest.mark.slow
@pytest.mark.parametrize("number", [2.5, 100])
def test_more_pairs_of_a_drawing_are_different_ones_and_begin_with_the_first(sets, written, tmp_path, number):
    def pairs(folder):
        source = open_source(str(folder))
        metadata = [source.meta(i) for i in range(len(source))]
        return Counter((one["subject"], one["style"], one["pair"]["caption"]) for one in metadata if "pair" in one)

    summary = write_icons(tmp_path / "more", sets, IconDataSettings(size=16, pairs=number))
    found = pairs(tmp_path / "more")
    assert set(found.values()) == {1} and set(pairs(written[0])) <= set(found)
    drawn = summary["kinds"]["train"]
    if number == 2.5:
        assert 2.4 * drawn < len(found) <= 2.6 * drawn
    else:
        assert Counter(caption for *_, caption in found)["upside down"] == drawn  # as all that a drawing can have


def test_lower_halves_fit_the_caption(written):
    source = open_source(str(written[0]))
    singles, seen = {}, Counter()
    for i in range(len(source)):
        meta, sample = source.meta(i), source[i]
        picture = np.asarray(Image.open(io.BytesIO(sample.image)).convert("RGB")).astype(int)
        if "pair" not in meta:
            singles[meta["subject"], meta["style"]] = picture
            continue
        above, below = picture[:16, 8:24], picture[16:, 8:24]
        assert (picture[:, :8] == 255).all() and (picture[:, 24:] == 255).all()
        smaller = singles[meta["subject"], meta["style"]].reshape(16, 2, 16, 2, 3).mean((1, 3))
        assert np.abs(above - smaller).mean() < 12  # the same drawing at half the size
        kind = meta["pair"]["kind"]
        seen[kind] += 1
        assert all(meta["pair"]["caption"] in phrase for phrase in sample.captions)
        if kind == "upside down":
            assert (below == above[::-1]).all()
        elif kind == "grayscale":
            assert (np.ptp(below, axis=-1) == 0).all() and np.abs(below.mean(-1) - above.mean(-1)).mean() < 40
        elif kind == "silhouette":
            assert (below[(above == 255).all(-1)] == 255).all() and (
                below[np.abs(above - 255).max(-1) >= 32] == 0
            ).all()
        elif kind == "recolored":
            assert (below[(above == 255).all(-1)] == 255).all() and np.ptp(
                below[below.min(-1) < 250], axis=-1
            ).min() > 0
    assert min(seen.values()) > 20 and len(seen) == 5


def test_nothing_to_draw_and_no_color_are_reported(tmp_path):
    empty = a_set(tmp_path, "noto", {"tiger": "<script/>"}, {})
    with pytest.raises(UserError, match=r"nothing to draw.*script: 1"):
        write_icons(tmp_path / "a", [empty])
    with pytest.raises(InvalidSetting, match="must be a CSS color such as white or #ffeecc, not 'whiteish'"):
        IconDataSettings(background="whiteish")


def test_drawings_that_end_their_process_are_counted_and_the_others_written(tmp_path, monkeypatch):
    monkeypatch.setattr(build_icons, "SVGRenderer", partial(SVGRenderer, 0.2))
    endless = '<path stroke="#000" stroke-width=".1" stroke-dasharray=".0001" d="M0 0h16v16z"/>' * 9_000
    bodies = {"cat": drawing(0), "dog": endless, "cow": "<g>" * 50_000 + "</g>" * 50_000, "tiger": drawing(1)}
    summary = write_icons(tmp_path / "out", [a_set(tmp_path, "noto", bodies, {})], IconDataSettings(pairs=0))
    assert summary["kept"] == 2
    assert summary["rejected"] == {"SVG that takes too long": 1, "SVG that crashes resvg or takes too much memory": 1}


def test_a_margin_is_empty_and_in_it_is_the_smaller_drawing(sets, tmp_path):
    """Halves of pairs have half of it."""

    def pictures(folder, **settings):
        write_icons(tmp_path / folder, sets[:2], IconDataSettings(background="#202020", **settings))
        for one in open_source(str(tmp_path / folder)):
            yield one.meta, np.array(Image.open(io.BytesIO(one.image)))

    small = {(meta["subject"], meta["style"]): picture for meta, picture in pictures("small", size=24, pairs=0)}
    singles = 0
    for meta, picture in pictures("large", size=32, margin=4, pairs=1):
        edges, inner = picture.copy(), (slice(4, 28), slice(4, 28))
        if "pair" not in meta:
            singles += 1
            assert (picture[inner] == small[meta["subject"], meta["style"]]).all()
            edges[inner] = 32
        else:
            edges[2:14, 10:22] = edges[18:30, 10:22] = 32
        assert (edges == 32).all()
    assert singles == len(small) > 100
