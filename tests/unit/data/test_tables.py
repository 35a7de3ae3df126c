"""Tables of strangers: what goes in is kept or counted, whatever the rows hold and however a file is damaged."""

import csv
import datetime
import decimal
import io
import json
import random

import pytest
from PIL import Image

from limner.data import text_tables
from limner.data.filters import NO_FILTERS
from limner.data.prepare import prepare
from limner.data.samples import Rejected
from limner.data.sources import open_source
from limner.errors import UserError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def png(n=0):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (n % 256, 3, 4)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "1.png").write_bytes(png())
    return tmp_path


def outcomes(source):
    """For each element its first caption, or in brackets why it is rejected."""
    found = []
    for index in range(len(source)):
        try:
            found.append(source[index].captions[0])
        except Rejected as rejected:
            found.append(f"[{rejected.reason}]")
    return found


def write_csv(folder, lines):
    (folder / "t.csv").write_text("\n".join(["caption,image", *lines]) + "\n")
    return outcomes(open_source(folder / "t.csv"))


# -------------------------------------------------------------------------------------------- CSV


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


# ------------------------------------------------------------------------------------------ JSONL


def test_json_of_any_shape(folder, tmp_path):

    def good(*more):
        return "{" + ", ".join(['"caption": "good one", "image": "1.png"', *more]) + "}"

    lines = {
        good(): "good one",
        good('"deep": ' + "[" * 3000 + "]" * 3000): "[broken row]",
        "[" * 100_000: "[broken row]",
        good('"deep": ' + "[" * 100 + "]" * 100): "[broken metadata]",
        good('"split": ["train"]'): "[broken metadata]",
        good('"split": 3'): "[broken metadata]",
        good('"split": "\\u001b[2J"'): "[broken metadata]",
        good('"split": null'): "good one",
        good('"split": ""'): "good one",
        good(f'"odd \\udfff": "\\ud800", "nan": NaN, "inf": 1e999, "big": {10**4000}'): "good one",
        good('"big": ' + "9" * 5000): "[broken row]",
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


def test_links_without_end_are_missing_pictures(folder):
    (folder / "loop.png").symlink_to("loop.png")
    rows = [{"caption": "a", "image": name} for name in ("loop.png", "loop.png/x", "x" * 300, "1.png/x")]
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert outcomes(open_source(folder / "t.jsonl")) == ["[missing image]"] * 4


# ------------------------------------------------------------------------------- Parquet and Arrow


def columns():
    return pyarrow.table(
        {
            "image": [{"bytes": png(n), "path": f"{n}.png"} for n in range(6)],
            "text": [f"number {n}" for n in range(6)],
            "day": [datetime.date(2020, 1, 2)] * 6,
            "time": [datetime.datetime(2020, 1, 2, 3, 4)] * 6,
            "moment": pyarrow.array([1, 2, 3, 4, 5, 6], pyarrow.timestamp("ns")),
            "far": pyarrow.array([1 << 50] * 6, pyarrow.timestamp("s")),
            "price": [decimal.Decimal("1.50")] * 6,
            "raw": [b"\xff"] * 6,
            "nested": [{"list": [{"raw": b"123", "nan": float("nan")}]}] * 6,
        }
    )


def write_arrow(path, table, format="stream"):
    with getattr(pyarrow.ipc, f"new_{format}")(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_columns_of_any_type(tmp_path, kind):
    path = tmp_path / ("t.parquet" if kind == "parquet" else "t.arrow")
    if kind == "parquet":
        parquet.write_table(columns(), path)
    else:
        write_arrow(path, columns(), kind)
    meta = open_source(path).meta(0)
    assert json.loads(json.dumps(meta)) == meta
    assert meta["day"] == "2020-01-02" and meta["time"] == "2020-01-02T03:04:00" and meta["price"] == "1.50"
    assert meta["moment"].startswith("1970-01-01") and meta["nested"] == {"list": [{"raw": "3 bytes", "nan": None}]}
    assert "raw" not in meta and "image" not in meta
    counts = prepare(path, tmp_path / "out", filters=NO_FILTERS, held_out=0)
    assert counts.kept == counts.total == 6


def test_text_that_is_not_utf8(tmp_path):
    data = pyarrow.array([b"good", b"\xff\xfe", b"good"])
    for name in ("text", "other"):
        table = columns().slice(0, 3)
        if name in table.column_names:
            table = table.drop_columns(name)
        table = table.append_column(name, data.view(pyarrow.string()))
        parquet.write_table(table, tmp_path / f"{name}.parquet")
        write_arrow(tmp_path / f"{name}.arrow", table)
        for path in (tmp_path / f"{name}.parquet", tmp_path / f"{name}.arrow"):
            source = open_source(path)
            expected = (
                ["good", "[caption is not UTF-8]", "good"] if name == "text" else [f"number {n}" for n in range(3)]
            )
            assert outcomes(source) == expected
            json.dumps(source.meta(1), ensure_ascii=False).encode()


def test_damaged_pages_cost_their_row_group(tmp_path):
    path = tmp_path / "t.parquet"
    parquet.write_table(columns(), path, row_group_size=2, compression="zstd")
    meta = parquet.ParquetFile(path).metadata
    data = bytearray(path.read_bytes())
    column = meta.row_group(1).column(2)
    start = min(filter(None, (column.data_page_offset, column.dictionary_page_offset)))
    data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)
    expected = ["number 0", "number 1", "[damaged table]", "[damaged table]", "number 4", "number 5"]
    assert outcomes(open_source(path)) == expected


def test_an_arrow_stream_cut_in_half(tmp_path):
    path = write_arrow(tmp_path / "t.arrow", columns())
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.warns(UserWarning, match="is damaged"):
        source = open_source(path)
    assert outcomes(source) == ["number 0", "number 1", "number 2", "number 3", "[damaged table]"]


def test_one_damaged_file_among_several(tmp_path):
    parquet.write_table(columns(), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 cut")
    with pytest.warns(UserWarning, match="b.parquet is not a Parquet file"):
        source = open_source(tmp_path)
    assert outcomes(source) == [f"number {n}" for n in range(6)] + ["[damaged table]"]
    with pytest.raises(UserError, match="not a Parquet file"):
        open_source(tmp_path / "b.parquet")


def test_too_many_columns(folder):
    (folder / "t.csv").write_text(",".join(f"c{n}" for n in range(20_000)) + "\n1,2\n")
    with pytest.raises(UserError, match="20,000 columns") as caught:
        open_source(folder / "t.csv")
    assert len(str(caught.value)) < 500
