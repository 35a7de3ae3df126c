"""Check, filter and copy any image-caption data into shards.

`prepare` decodes every picture and reads every caption once. It omits unusable samples and counts them
by reason, so that training reads only good samples, and reads them fast.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import floor
from typing import Any

from limner.data.area_resize import area_resize
from limner.data.filters import Filters
from limner.data.image_decode import decoded
from limner.data.image_encode import image_bytes
from limner.data.open_source import open_source
from limner.data.sample import Rejected, Sample, Source, format_reasons
from limner.data.shard_writer import Counts, ShardWriter
from limner.errors import UserError
from limner.progress import Advance


def prepare(
    source: Source | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    filters: Filters | None = None,
    size: int | None = None,
    held_out: float = 0.02,
    progress: Advance = lambda done: None,
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
    prepare_one, without_split = partial(_prepare_one, source, filters or Filters(), size), 0
    with ShardWriter(out) as writer:
        counts = writer.counts
        for result in _map_ahead(prepare_one, len(source), threads or os.cpu_count() or 1):
            if isinstance(result, str):
                counts.rejected[result] += 1
            else:
                sample, suffix = result
                meta = {k: v for k, v in sample.meta.items() if k != "key"}
                if held_out and "split" not in meta:
                    meta["split"] = "held-out" if _is_held_out(without_split, held_out) else "train"
                    without_split += 1
                writer.write(sample.image, sample.captions, meta, suffix)
            progress(1)
        if not counts.kept:
            reasons = format_reasons(counts.rejected)
            raise UserError(f"none of the {counts.total} samples can be used ({reasons}): check data and filters")
    return counts


def _prepare_one(source: Source, filters: Filters, size: int | None, index: int) -> tuple[Sample, str] | str:
    """Return the sample to write and the suffix of its picture, or the reason to reject it."""
    try:
        sample = source[index]
        captions, data, suffix = filters.captions(sample.captions), sample.image, _suffix(sample.image)
        with decoded(data) as image:
            height, width = image.shape[:2]
            filters.image(height, width)
            if shrinks := size and min(height, width) > size:
                scale = size / min(height, width)
                image = area_resize(image, max(size, round(height * scale)), max(size, round(width * scale)))
            if shrinks or not suffix:
                suffix = "jpg" if suffix == "jpg" else "png"
                data = image_bytes(image, "JPEG", quality=95) if suffix == "jpg" else image_bytes(image)
        return Sample(data, captions, sample.meta), suffix
    except Rejected as rejection:
        return rejection.reason


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


def _map_ahead(function: Callable[[int], Any], count: int, threads: int) -> Iterator[Any]:
    """Yield `function` of 0, 1, ... `count` - 1, computed in threads with a bounded number of pending results."""
    pending, pool = deque(), ThreadPoolExecutor(threads)
    try:
        for index in range(count):
            pending.append(pool.submit(function, index))
            if len(pending) > 4 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
