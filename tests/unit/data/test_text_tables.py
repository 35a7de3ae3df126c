"""Untrusted CSV and JSONL: every record is kept or counted, and a broken one affects no other."""

import csv
import io
import json
import random

import pytest

from limner.data import text_tables
from limner.data.open_source import open_source
from limner.data.prepare import prepare
from no_filters import NO_FILTERS
from table_rows import outcomes, png


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "1.png").write_bytes(png())
    return tmp_path


def write_csv(folder, lines):
    (folder / "t.csv").write_text("\n".join(["caption,image", *lines]) + "\n")
    return outcomes(open_source(folder / "t.csv"))


def test_an_open_quote_costs_its_line(folder):
    lines = [f"row {n},1.png" for n in range(106)]
    lines[5] = '"row 5,1.png'
    expected = [f"row {n}" for n in range(106)]
    expected[5] = "[broken row]"
    assert write_csv(folder, lines) == expected
    # Nor is it closed by a quote further on.
    lines[40], lines[50] = '"row, 40",1.png', '"row\n50",1.png'
    expected[40], expected[50] = "row, 40", "row"
    assert write_csv(folder, lines) == expected
    assert write_csv(folder, [*lines, '"the last'])[-1] == "[broken row]"


def test_quotes_within_a_field_are_kept(folder):
    assert write_csv(folder, ['a "big" dog,1.png', '"a"b c,1.png', '"a ""b"" c",1.png']) == [
        'a "big" dog',
        "ab c",
        'a "b" c',
    ]


def test_more_fields_than_columns_are_a_broken_row(folder):
    assert write_csv(folder, ["a dog, asleep,1.png", "a cat,1.png,", "a cow"]) == [
        "[broken row]",
        "a cat",
        "[missing image]",
    ]


@pytest.mark.parametrize("seed", range(12))
def test_every_record_is_kept_or_counted(folder, seed):
    """Random records as the `csv` module writes them, some of them spoiled: no other is touched."""
    rng, lines, expected = random.Random(seed), [], []
    for n in range(rng.randrange(1, 90)):
        buffer = io.StringIO()
        caption = f"row {n}" + "".join(rng.choice(',"\n xé') for _ in range(rng.randrange(6)))
        csv.writer(buffer, quoting=rng.choice([csv.QUOTE_ALL, csv.QUOTE_MINIMAL])).writerow([caption, "1.png"])
        line, kept = buffer.getvalue().rstrip("\r\n"), " ".join(caption.splitlines()[0].split())
        if rng.random() < 0.15:
            line, kept = rng.choice([(f'"row {n},1.png', "[broken row]"), (f"row {n},1.png,more", "[broken row]")])
        lines.append(line)
        expected.append(kept)
    assert write_csv(folder, lines) == expected


def test_long_rows_are_counted(folder, monkeypatch):
    monkeypatch.setattr(text_tables, "MAX_ROW", 100)
    assert write_csv(folder, ["a,1.png", "b" * 350 + ",1.png", "c,1.png"]) == ["a", "[row too long]", "c"]
    rows = [json.dumps({"caption": c, "image": "1.png"}) for c in ("a", "b" * 350, "c")]
    (folder / "t.jsonl").write_text("\n".join(rows))
    assert outcomes(open_source(folder / "t.jsonl")) == ["a", "[row too long]", "c"]


def test_json_of_any_shape(folder, tmp_path):

    def good(*more):
        return "{" + ", ".join(['"caption": "good one", "image": "1.png"', *more]) + "}"

    lines = {
        good(): "good one",
        good('"deep": ' + "[" * 100_000 + "]" * 100_000): "[broken row]",
        "[" * 100_000: "[broken row]",
        good('"deep": ' + "[" * 100 + "]" * 100): "[broken metadata]",
        good('"split": ["train"]'): "[broken metadata]",
        good('"split": 3'): "[broken metadata]",
        good('"split": "\\u001b[2J"'): "[broken metadata]",
        good('"split": null'): "good one",
        good('"split": ""'): "good one",
        good(f'"odd \\udfff": "\\ud800", "nan": NaN, "inf": 1e999, "big": {10**4000}'): "good one",
        good('"big": ' + "9" * 5000): "good one",
        '{"caption": "odd \\ud800", "image": "1.png"}': "[caption is not UTF-8]",
        '{"caption": "odd", "image": "\\ud8001.png"}': "[missing image]",
        '{"caption": "odd", "image": "a\\u0000.png"}': "[broken image]",
        '{"caption": 5, "image": "1.png"}': "[caption is not a text]",
        '{"caption": {"en": "x"}, "image": "1.png"}': "[caption is not a text]",
        '{"caption": [1, "two"], "image": "1.png"}': "two",
        '{"caption": [], "image": "1.png"}': "[empty caption]",
        good('"caption": "' + "word " * 1000 + '"'): "[caption too long]",
        good('"caption": "' + "word\\n" * 1000 + '"'): "[too many captions]",
        good('"much": ' + json.dumps(list(range(200_000)))): "[metadata too large]",
        good(", ".join(f'"{n}": 0' for n in range(10_001))): "[broken row]",
    }  # fmt: skip
    (folder / "t.jsonl").write_text("\n".join(lines), "utf-8")
    source = open_source(folder / "t.jsonl")
    assert outcomes(source) == list(lines.values())
    counts = prepare(source, tmp_path / "out", filters=NO_FILTERS)
    assert counts.total == len(lines) and counts.kept == sum(not v.startswith("[") for v in lines.values())
    again = open_source(tmp_path / "out")
    assert again.meta(3)["odd \\udfff"] == "\\ud800" and again.meta(3)["nan"] is None
