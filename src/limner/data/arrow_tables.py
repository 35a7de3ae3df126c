"""Rows of Parquet and Arrow files. A row group with an impossible number of rows counts as one row."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from limner.data.sample import Rejected
from limner.data.sanitize import is_environment_error
from limner.errors import UserError

MAX_GROUP_BYTES = 1 << 31  # bytes of a row group, which is read as a whole
_MAX_CACHED_BYTES = 1 << 28  # of row groups in memory
_CELL_BYTES = 16  # bytes of a value in memory, without the characters of a text


class _RowGroups:
    """Arrow tables, loaded on demand; the last few stay in memory. Random reads are slow from a file whose row groups
    hold many pictures: `limner data prepare` converts it to shards."""

    def __init__(self, columns: Sequence[str], counts: Sequence[int]) -> None:
        self.columns = list(columns)
        self._counts, self._ends = list(counts), np.cumsum(counts, dtype=np.int64)
        self._groups: OrderedDict[int, Any] = OrderedDict()  # None for a damaged table
        self._lock = Lock()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _load(self, group: int) -> Any:
        """Load an Arrow table. Raises pyarrow's exceptions if it is damaged."""
        raise NotImplementedError

    def row(self, index: int) -> dict[str, Any]:
        group = int(np.searchsorted(self._ends, index, side="right"))
        with self._lock:
            if group not in self._groups:
                try:
                    table = self._load(group)
                except Exception as error:  # OSError, ArrowException, UnicodeDecodeError, MemoryError ...
                    if is_environment_error(error):
                        raise
                    table = None
                self._groups[group] = table if table is not None and table.num_rows == self._counts[group] else None
                sizes = [getattr(table, "nbytes", 0) for table in self._groups.values()]
                while len(sizes) > 1 and sum(sizes) > _MAX_CACHED_BYTES:
                    self._groups.popitem(last=False)
                    sizes.pop(0)
            self._groups.move_to_end(group)
            table = self._groups[group]
        if table is None:
            raise Rejected("damaged table")
        return _arrow_row(table, index - int(self._ends[group] - self._counts[group]))


class Parquet(_RowGroups):
    """A Parquet file."""

    def __init__(self, path: Path) -> None:
        pyarrow = _pyarrow(path)
        import pyarrow.parquet as parquet

        size = path.stat().st_size
        try:
            self._file = parquet.ParquetFile(path)
            meta = self._file.metadata
            names, columns = self._file.schema_arrow.names, range(meta.num_columns)
            groups = [meta.row_group(group) for group in range(meta.num_row_groups)]
            # DELTA_BYTE_ARRAY shares prefixes, which pyarrow expands: each value may be as long as the column.
            self._prefixed = {i for g in groups for i in columns if "DELTA_BYTE_ARRAY" in g.column(i).encodings}
            # A dictionary holds a repeated value once: without it, 50 kB may expand to 20,000 texts of 1 MB.
            schemas = {i: meta.schema.column(i) for i in columns if i not in self._prefixed}
            repeated = [column.path for column in schemas.values() if column.physical_type == "BYTE_ARRAY"]
            self._file = parquet.ParquetFile(path, metadata=meta, read_dictionary=repeated)
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
    """An Arrow IPC file: a stream, as `datasets` writes, or a file with a footer. Memory-mapping leaves its batches in
    the file."""

    def __init__(self, path: Path) -> None:
        pyarrow = _pyarrow(path)
        import pyarrow.ipc as ipc

        self._batches: list[Any] = []
        intact, names = True, []
        try:
            with open(path, "rb") as start:
                has_footer = start.read(6) == b"ARROW1"
            mapped = pyarrow.memory_map(str(path))
            file = ipc.open_file(mapped) if has_footer else ipc.open_stream(mapped)
            batches = (file.get_batch(n) for n in range(file.num_record_batches)) if has_footer else file
            names = file.schema.names
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UserError(f"{path} is not an Arrow file: {_first_line(error)}") from None
        try:
            self._batches += batches
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            warnings.warn(f"{path} is damaged ({_first_line(error)}): the rest of the file is skipped", stacklevel=2)
            intact = False
        size = path.stat().st_size
        counts = [len(batch) if len(batch) <= size else 1 for batch in self._batches]
        super().__init__(names, counts + [1] * (not intact))

    def _load(self, group: int) -> Any:
        import pyarrow

        columns = []
        for column in self._batches[group].columns:
            text = pyarrow.types.is_string(column.type)
            # Without validation pyarrow follows offsets beyond the data. `_arrow_row` checks UTF-8 per cell.
            (column.view(pyarrow.binary()) if text else column).validate(full=True)
            columns.append(column)
        return pyarrow.Table.from_arrays(columns, names=self.columns)


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f'reading {path} needs pyarrow: pip install "limner[data]"') from None
    return pyarrow


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _arrow_row(table: Any, offset: int) -> dict[str, Any]:
    row = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            row[name] = column[offset].as_py()
        except UnicodeDecodeError:
            row[name] = "\udc80"  # in a caption: rejected as "caption is not UTF-8"
        except (ValueError, OverflowError):  # times that Python cannot represent
            row[name] = column[offset].cast("string").as_py()
    return row
