"""Check, filter and copy any image-caption data into shards.

`prepare` decodes every picture and reads every caption once. It omits unusable samples and counts them
by reason, so that training reads only good samples, and reads them fast.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import floor
from typing import TypeVar

from limner.data.area_resize import area_resize
from limner.data.filters import Filters
from limner.data.image_decode import decoded
from limner.data.image_encode import image_bytes
from limner.data.open_source import open_source
from limner.data.sample import Rejected, Sample, Source, format_reasons
from limner.data.shard_writer import ShardWriter
from limner.errors import UserError
from limner.progress import Advance

_T = TypeVar("_T")


@dataclass(frozen=True)
class Counts:
    """Numbers of samples: kept, rejected by reason, and kept by split."""

    kept: int
    rejected: dict[str, int] = field(default_factory=dict)
    splits: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.kept + sum(self.rejected.values())

    def __str__(self) -> str:
        """Format a table: kept first, then the reasons, most frequent first."""
        reasons = sorted(self.rejected.items(), key=lambda item: (-item[1], item[0]))
        rows = [("kept", self.kept)] + [(f"rejected: {reason}", n) for reason, n in reasons]
        width = max(len(name) for name, _ in rows)
        digits = len(f"{self.total:,}")
        return "\n".join(f"{name:<{width}}  {n:>{digits},}  {n / max(1, self.total):6.1%}" for name, n in rows)


def prepare(
    source: Source | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    filters: Filters | None = None,
    size: int | None = None,
    held_out: float = 0.02,
    progress: Advance | None = None,
    threads: int | None = None,
) -> Counts:
    """Write the good samples of `source`, or of the path `source`, to shards in `out`.

    `filters` defaults to `Filters()`. With `size`, a picture whose shorter side exceeds `size` is resized
    by area to this shorter side (JPEGs are encoded at quality 95, others as PNG). Other JPEG, PNG and
    WebP files are copied byte for byte. `held_out` is the share of samples without a split that become
    held-out samples, evenly spaced. `progress` is called with 1 after each sample.
    Raises `UserError` if `out` is in use, or if no sample is good: `out` is then marked as incomplete.
    """
    if isinstance(source, str | os.PathLike):
        source = open_source(source)
    data, sample_filters = source, filters or Filters()

    def process(index: int) -> tuple[Sample, str] | str:
        try:
            return _prepare_one(data[index], sample_filters, size)
        except Rejected as rejection:
            return rejection.reason

    without_split = 0
    with ShardWriter(out) as writer:
        for result in _map_ahead(process, len(data), threads):
            if isinstance(result, str):
                writer.reject(result)
            else:
                sample, suffix = result
                meta = {k: v for k, v in sample.meta.items() if k != "key"}
                if held_out and "split" not in meta:
                    meta["split"] = "held-out" if _is_held_out(without_split, held_out) else "train"
                    without_split += 1
                writer.write(sample.image, sample.captions, meta, suffix)
            if progress:
                progress(1)
        counts = Counts(writer.kept, dict(writer.rejected.most_common()), dict(writer.splits))
        if not writer.kept:
            reasons = format_reasons(writer.rejected)
            raise UserError(f"none of the {counts.total} samples can be used ({reasons}): check data and filters")
    return counts


def _prepare_one(sample: Sample, filters: Filters, size: int | None) -> tuple[Sample, str]:
    """Return the sample to write and the suffix of its picture. Raises `Rejected` if it is bad."""
    captions, suffix = filters.captions(sample.captions), _suffix(sample.image)
    with decoded(sample.image) as image:
        height, width = image.shape[:2]
        filters.image(height, width)
        shrinks = bool(size) and min(height, width) > size
        if suffix and not shrinks:
            return Sample(sample.image, captions, sample.meta), suffix
        if shrinks:
            scale = size / min(height, width)
            image = area_resize(image, max(size, round(height * scale)), max(size, round(width * scale)))
        suffix = suffix if suffix == "jpg" else "png"  # `prepare` encodes no other kind
        return Sample(image_bytes(image, "JPEG" if suffix == "jpg" else "PNG"), captions, sample.meta), suffix


def _is_held_out(n: int, share: float) -> bool:
    """Return True if sample `n` is held out: a `share` of all, evenly spaced from the second sample on, so that small
    data sets have one, too."""
    return n > 0 and floor((n - 1) * share) > floor((n - 2) * share)


def _suffix(data: bytes) -> str | None:
    if data.startswith(b"\xff\xd8"):
        return "jpg"
    if data.startswith(b"\x89PNG"):
        return "png"
    return "webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def _map_ahead(function: Callable[[int], _T], count: int, threads: int | None) -> Iterator[_T]:
    """Yield `function` of 0, 1, ... `count` - 1, computed in threads with a bounded number of pending results."""
    threads = threads or os.cpu_count() or 1
    pending: deque[Future[_T]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for index in range(count):
            pending.append(pool.submit(function, index))
            if len(pending) > 4 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
