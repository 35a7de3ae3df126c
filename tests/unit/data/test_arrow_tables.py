"""Untrusted Parquet and Arrow files: columns of any type, and damage that affects only its rows."""

import datetime
import decimal
import json

import pytest

from limner.data import arrow_tables
from limner.data.open_source import open_source
from limner.data.prepare import prepare
from limner.data.sample import Rejected
from limner.errors import UserError
from no_filters import NO_FILTERS
from table_rows import outcomes, png

pyarrow = pytest.importorskip("pyarrow")


parquet = pytest.importorskip("pyarrow.parquet")


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


def test_values_that_rows_share_are_in_memory_once(tmp_path):
    """0.02 MB of Parquet that would take 300 MB."""
    many = ["x" * 1_000_000] * 100
    pictures, lists = [{"bytes": b"1", "path": "1.png"}] * 100, [many[:2]] * 100
    table = {"text": ["a"] * 100, "image": pictures, "large": many, "lists": lists}
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table(table), path, compression="zstd", dictionary_pagesize_limit=1 << 28)
    assert path.stat().st_size < 20_000
    source, before = open_source(path), pyarrow.total_allocated_bytes()
    assert source.tables[0].row(99)["lists"] == many[:2]
    assert pyarrow.total_allocated_bytes() - before < 10_000_000


@pytest.mark.parametrize(
    ("cell", "options"),
    [
        ([None] * 10_000, {}),
        ("x" * 100_000, {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}),  # shared prefixes
    ],
)
def test_a_row_group_that_takes_more_memory_than_its_size_says_is_damaged(tmp_path, monkeypatch, cell, options):
    monkeypatch.setattr(arrow_tables, "MAX_GROUP_BYTES", 1 << 22)
    for n in (10, 50):
        table = pyarrow.table({"text": [cell] * n, "image": ["b"] * n})
        parquet.write_table(table, tmp_path / f"{n}.parquet", compression="zstd", **options)
    few, many = (arrow_tables.Parquet(tmp_path / f"{n}.parquet") for n in (10, 50))
    assert few.row(9) == {"text": cell, "image": "b"}
    with pytest.raises(Rejected, match="damaged table"):
        many.row(0)


@pytest.mark.parametrize("format", ["stream", "file"])
@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_an_arrow_file_that_decompresses_to_more_than_a_row_group_may_take_is_refused(
    tmp_path, monkeypatch, format, compression
):
    names = pyarrow.array(["x" * 100_000] * 40).dictionary_encode()
    large = pyarrow.table({"text": names, "image": [b"0" * 100_000] * 40})
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with getattr(pyarrow.ipc, f"new_{format}")(tmp_path / "t.arrow", large.schema, options=options) as writer:
        writer.write_table(large, max_chunksize=4)
    assert (tmp_path / "t.arrow").stat().st_size < 60_000
    assert arrow_tables.Arrow(tmp_path / "t.arrow").row(39) == {"text": "x" * 100_000, "image": b"0" * 100_000}
    monkeypatch.setattr(arrow_tables, "MAX_GROUP_BYTES", 4_000_000)
    before = pyarrow.total_allocated_bytes()
    with pytest.raises(UserError, match=r"t.arrow decompresses to 4,\d{3},\d{3} bytes, and the maximum is 4,000,000:"):
        arrow_tables.Arrow(tmp_path / "t.arrow")
    assert pyarrow.total_allocated_bytes() == before
    write_arrow(tmp_path / "t.arrow", large, format)  # without compression it stays in the file
    assert arrow_tables.Arrow(tmp_path / "t.arrow").row(0)["text"] == "x" * 100_000
