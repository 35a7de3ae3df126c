"""Rows of Parquet and Arrow files. A row group with an impossible number of rows counts as one row."""

from __future__ import annotations

import struct
import warnings
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

from limner.data.sample import Rejected, is_environment_error
from limner.errors import UserError

MAX_GROUP_BYTES = 1 << 31  # bytes of a row group, which is read as a whole, and of a compressed Arrow file
_MAX_CACHED_BYTES = 1 << 28  # of row groups in memory
_CELL_BYTES = 16  # bytes of a value in memory, without the characters of a text


class _RowGroups:
    """Arrow tables, loaded on demand; the last few stay in memory. Random reads are slow from a file whose row groups
    hold many pictures: `limner data prepare` converts it to shards."""

    def __init__(self, columns: Sequence[str], counts: Sequence[int]) -> None:
        self.columns, self._counts = list(columns), list(counts)
        self._starts = [0, *accumulate(counts)]
        self._groups: OrderedDict[int, Any] = OrderedDict()  # None for a damaged table
        self._lock = Lock()

    def __len__(self) -> int:
        return self._starts[-1]

    def _load(self, group: int) -> Any:
        """Load an Arrow table. Raises pyarrow's exceptions if it is damaged."""
        raise NotImplementedError

    def row(self, index: int) -> dict[str, Any]:
        group = bisect_right(self._starts, index) - 1
        with self._lock:
            if group not in self._groups:
                try:
                    table = self._load(group)
                except Exception as error:  # OSError, ArrowException, UnicodeDecodeError, MemoryError ...
                    if is_environment_error(error):
                        raise
                    table = None
                self._groups[group] = table if table is not None and len(table) == self._counts[group] else None
                sizes = [getattr(table, "nbytes", 0) for table in self._groups.values()]
                while len(sizes) > 1 and sum(sizes) > _MAX_CACHED_BYTES:
                    self._groups.popitem(last=False)
                    sizes.pop(0)
            self._groups.move_to_end(group)
            table = self._groups[group]
        if table is None:
            raise Rejected("damaged table")
        offset, row = index - self._starts[group], {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            try:
                row[name] = column[offset].as_py()
            except UnicodeDecodeError:
                row[name] = "\udc80"  # in a caption: rejected as "caption is not UTF-8"
            except (ValueError, OverflowError):  # times that Python cannot represent
                row[name] = column[offset].cast("string").as_py()
        return row


class Parquet(_RowGroups):
    """A Parquet file."""

    def __init__(self, path: Path) -> None:
        pyarrow = _pyarrow(path)
        size = path.stat().st_size
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
            meta = self._file.metadata
            names, columns = self._file.schema_arrow.names, range(meta.num_columns)
            groups = [meta.row_group(group) for group in range(meta.num_row_groups)]
            # DELTA_BYTE_ARRAY shares prefixes, which pyarrow expands: each value may be as long as the column.
            self._prefixed = {i for g in groups for i in columns if "DELTA_BYTE_ARRAY" in g.column(i).encodings}
            # A dictionary holds a repeated value once: without it, 50 kB may expand to 20,000 texts of 1 MB.
            schemas = {i: meta.schema.column(i) for i in columns if i not in self._prefixed}
            repeated = [column.path for column in schemas.values() if column.physical_type == "BYTE_ARRAY"]
            self._file = pyarrow.parquet.ParquetFile(path, metadata=meta, read_dictionary=repeated)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UserError(f"{path} is not a Parquet file: {_first_line(error)}") from None
        # Each row holds a caption or a picture, so a number of rows above that of bytes is damaged.
        super().__init__(names, [group.num_rows if 0 <= group.num_rows <= size else 1 for group in groups])

    def _load(self, group: int) -> Any:
        import pyarrow

        meta, schema = self._file.metadata.row_group(group), self._file.metadata.schema
        sizes = [meta.column(i).num_values * max(_CELL_BYTES, schema.column(i).length) for i in range(meta.num_columns)]
        if max(sum(sizes), meta.total_byte_size) > MAX_GROUP_BYTES:
            raise Rejected("damaged table")
        if not self._prefixed:
            return self._file.read_row_group(group)
        batches, size = [], 0
        for batch in self._file.iter_batches(max(1, MAX_GROUP_BYTES // max(1, meta.total_byte_size)), [group]):
            batches.append(batch)
            size += batch.nbytes
            if size > MAX_GROUP_BYTES:
                raise Rejected("damaged table")
        return pyarrow.Table.from_batches(batches)


class Arrow(_RowGroups):
    """An Arrow IPC file: a stream, as `datasets` writes, or a file with a footer, which holds a stream after its magic.

    Memory-mapping leaves its batches in the file, unless they are compressed: `MAX_GROUP_BYTES` bounds these.
    """

    def __init__(self, path: Path) -> None:
        pyarrow = _pyarrow(path)
        damage = (pyarrow.ArrowException, OSError, ValueError)
        try:
            data = pyarrow.memory_map(str(path)).read_buffer()
            stream = data[8:] if bytes(data[:6]) == b"ARROW1" else data
            batches = pyarrow.ipc.open_stream(stream)
            size = sum(map(_decompressed_size, _messages(stream)))
        except damage as error:
            raise UserError(f"{path} is not an Arrow file: {_first_line(error)}") from None
        if size > MAX_GROUP_BYTES:
            limit = f"the maximum is {MAX_GROUP_BYTES:,}"
            raise UserError(f"{path} decompresses to {size:,} bytes, and {limit}: write it without compression")
        self._batches, lost = [], [1]
        try:
            self._batches += batches
            lost = []
        except damage as error:
            warnings.warn(f"{path} is damaged ({_first_line(error)}): the rest of the file is skipped", stacklevel=2)
        counts = [len(batch) if len(batch) <= len(data) else 1 for batch in self._batches]
        super().__init__(batches.schema.names, counts + lost)

    def _load(self, group: int) -> Any:
        import pyarrow

        columns = self._batches[group].columns
        for column in columns:
            is_text = pyarrow.types.is_string(column.type)
            # Without validation pyarrow follows offsets beyond the data. `row` checks UTF-8 per cell.
            (column.view(pyarrow.binary()) if is_text else column).validate(full=True)
        return pyarrow.Table.from_arrays(columns, names=self.columns)


def _messages(stream: Any) -> Iterator[Any]:
    """Yield the messages of an Arrow stream up to the first damage."""
    from pyarrow import ArrowException, ipc

    with suppress(ArrowException, OSError, ValueError):
        yield from ipc.MessageReader.open_stream(stream)


def _decompressed_size(message: Any) -> int:
    """Return the bytes of a message's compressed buffers after decompression.

    The size is at the beginning of each buffer. The buffers' positions are in FlatBuffers tables (`Message.fbs` of the
    Arrow format), which pyarrow verifies but does not show.
    """
    if message.type == "schema":
        return 0
    data, size = bytes(message.metadata), 0
    batch = _pointer(data, _field(data, _pointer(data, 0), 2))
    if message.type == "dictionary":
        batch = _pointer(data, _field(data, batch, 1))
    buffers, has_compression = _field(data, batch, 2), _field(data, batch, 3)
    if buffers and has_compression:
        start = _pointer(data, buffers) + 4
        (count,) = struct.unpack_from("<I", data, start - 4)
        for offset, length in struct.iter_unpack("<qq", data[start : start + 16 * count]):
            prefix = bytes(message.body[offset : offset + min(8, length)])
            size += max(0, int.from_bytes(prefix, "little", signed=True))  # -1: the buffer is not compressed
    return size


def _pointer(data: bytes, at: int) -> int:
    return at + struct.unpack_from("<I", data, at)[0]


def _field(data: bytes, table: int, number: int) -> int:
    """Return the position of a field of a FlatBuffers table; 0 if it is absent."""
    entries = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, entries)
    offset = struct.unpack_from("<H", data, entries + 4 + 2 * number)[0] if 4 + 2 * number < size else 0
    return table + offset if offset else 0


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise UserError(f'reading {path} needs pyarrow: pip install "limner[data]"') from None
    return pyarrow


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
