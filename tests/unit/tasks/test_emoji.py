"""Emoji: names and splits without a font; pictures where one is installed."""

import shutil
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("emoji")

from limner.data.image_decode import decode_image
from limner.data.open_source import open_source
from limner.data.sample import Rejected
from limner.errors import UserError
from limner.tasks import emoji as module
from limner.tasks.emoji import EmojiRenderer, all_emoji, assign_splits, find_font, write_emoji

try:
    find_font()
except UserError:
    FONT = False
else:
    FONT = True
needs_font = pytest.mark.skipif(not FONT, reason="no color-emoji font is installed")

ALL = all_emoji()
BY_NAME = {one.name: one for one in ALL}


def test_names_and_captions():
    assert len(ALL) == len(BY_NAME) > 3600
    one = BY_NAME["woman firefighter medium-dark skin tone"]
    assert (one.base, one.tones) == ("woman firefighter", ("medium-dark",))
    assert one.captions == (
        "woman firefighter medium-dark skin tone",
        "woman firefighter with medium-dark skin tone",
        "woman firefighter, medium-dark skin",
    )
    assert BY_NAME["France"].captions == ("flag of France", "France flag")
    assert "man's shoe" in BY_NAME
    assert all(len(set(one.captions)) == len(one.captions) for one in ALL)
    plain = Counter(one.captions[0] for one in ALL)
    assert max(plain.values()) == 1  # a plain caption names one emoji


def test_families_join_variants_and_nothing_else():
    def family(name):
        return BY_NAME[name].family

    assert family("woman firefighter dark skin tone") == family("man firefighter")
    assert family("man red hair") == family("person light skin tone") == family("woman")
    assert family("thumbs up dark skin tone") == family("thumbs up")
    assert family("woman running facing right") == family("person running")
    assert len({family(n) for n in ("thumbs down", "thumbs up", "grinning face", "France")}) == 4


def test_split_holds_out_combinations_only():
    split = dict(zip(ALL, assign_splits(ALL), strict=True))
    toned = [one for one in ALL if one.tones]
    held_out = [one for one in toned if split[one] == "held-out"]
    assert 0.07 < len(held_out) / len(toned) < 0.13
    assert all(split[one] == "train" for one in ALL if not one.tones)
    trained = [one for one in toned if split[one] == "train"]
    assert {one.base for one in held_out} <= {one.base for one in trained}
    assert {tone for one in trained for tone in one.tones} == {"light", "medium-light", "medium", "medium-dark", "dark"}
    # The choice for one emoji does not depend on which others a version of Unicode has.
    half = [one for one in ALL if one.base[0] < "m"]
    assert assign_splits(half) == [split[one] for one in half]


def test_a_missing_font_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(module, "FONT_PATHS", ())
    for action in (find_font, lambda: write_emoji(tmp_path / "out"), lambda: EmojiRenderer(tmp_path / "no.ttf")):
        with pytest.raises(UserError, match="apt-get install fonts-noto-color-emoji") as caught:
            action()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    (tmp_path / "no.ttf").write_bytes(b"not a font")
    with pytest.raises(UserError, match="not a readable font"):
        EmojiRenderer(tmp_path / "no.ttf")


@needs_font
def test_rendering():
    renderer = EmojiRenderer()
    face = renderer.render("\U0001f600", 64)
    assert face.shape == (64, 64, 3) and face.dtype == np.uint8
    assert (face[0, 0] == 255).all() and face[32, 32, 2] < 128 < face[32, 32, 0]  # yellow on white
    firefighter = renderer.render(BY_NAME["woman firefighter dark skin tone"].text, 64)
    assert not np.array_equal(firefighter, renderer.render(BY_NAME["woman firefighter"].text, 64))
    assert not np.array_equal(*(renderer.render(BY_NAME[n].text, 64) for n in ("France", "Italy")))
    with pytest.raises(Rejected, match="not one glyph"):
        renderer.render("\U0001f600\U0001f600", 64)
    with pytest.raises(Rejected, match="not in the font"):
        renderer.render("\U0010fffd", 64)


@needs_font
def test_write_emoji(monkeypatch, tmp_path):
    some = [one for one in ALL if "firefighter" in one.name or "flag" in one.name or len(one.name) < 4]
    monkeypatch.setattr(module, "all_emoji", lambda: some)
    summary = write_emoji(tmp_path / "out", size=32)
    assert summary["count"] == len(some) and summary["kept"] > 0.7 * len(some)
    source = open_source(tmp_path / "out")
    assert len(source) == summary["kept"]
    pictures = {decode_image(sample.image).tobytes() for sample in source}
    assert len(pictures) == summary["kept"]  # all different
    meta = source.meta(0)
    assert set(meta) == {"key", "emoji", "name", "base", "tones", "family", "split"}
    write_emoji(tmp_path / "again", size=32)
    tars = [(tmp_path / name / "00000.tar").read_bytes() for name in ("out", "again")]
    assert tars[0] == tars[1]
