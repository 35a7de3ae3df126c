"""A cache of activations at the boundary of a model's frozen part, in one file for all processes of a machine.

The frozen part gives a sample the same activations in every epoch. A record holds the activations of one sample, and
is identified by the *sample*, a hash of all its tokens, and by the *source*, a hash of the frozen weights, their number
and the number format. Records have a fixed size and are in fp32, the format of activations between blocks, so that a
record equals the activations exactly. The file is a hash table. The places of a sample depend on the sample only, so
the record of a deeper boundary replaces its old record.

Reading is by a memory map, writing by one call for each record. A checksum over identity and values decides whether a
record is valid: a record that is half written, because a process was killed or two wrote together, counts as missing.
Locks are thus unnecessary. When all places of a sample are taken, it is computed each time: samples come in epochs, and
replacing other records would lose those before they are read again.
"""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from limner.data.datasets import TokenDataset
from limner.data.related import RelatedTokenDataset
from limner.data.stream import Dataset
from limner.errors import UserError

__all__ = ["ActivationCache", "check_repeats", "identity"]

PROBES = 16  # places of a sample
_HASH_BYTES = 16


def identity(*parts: bytes | str) -> bytes:
    """Return a hash of byte strings and texts, [16]."""
    state = hashlib.blake2b(digest_size=_HASH_BYTES)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.digest()


def check_repeats(dataset: Dataset) -> None:
    """Raise `UserError` if the tokens of a sample differ between epochs, so that a cache would never be read."""
    if not isinstance(dataset, TokenDataset):
        raise UserError(
            "activations are cached for stored tokens only, since pictures encoded in each step may be augmented: "
            "train without the cache"
        )
    if isinstance(dataset, RelatedTokenDataset):
        raise UserError("a sample follows another picture in each epoch: set cache_mb to 0")
    if dataset.text.bpe_dropout:
        raise UserError("BPE dropout gives a caption other tokens in each epoch: train without the cache")


class ActivationCache:
    """Records of activations [n, D] in a file in `folder`, of at most `max_bytes`.

    `full` becomes True when the disk is full; then nothing is written.

    Raises `UserError` if `max_bytes` is less than a record, or the file cannot be created.
    """

    def __init__(self, folder: Path, shape: tuple[int, int], max_bytes: int) -> None:
        key = f"V{_HASH_BYTES}"
        self.record = np.dtype([("check", "<u4"), ("sample", key), ("source", key), ("values", "<f4", shape)])
        self.places = max_bytes // self.record.itemsize
        if not self.places:
            raise UserError(
                f"a cache of {max_bytes:,} bytes is too small for a record of {self.record.itemsize:,}: enlarge it"
            )
        self.path = folder / f"{shape[0]}x{shape[1]}-{self.places}.activations"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            self._file = self.path.open("r+b", buffering=0)
            size = self.places * self.record.itemsize
            if self._file.seek(0, 2) < size:
                self._file.truncate(size)  # takes no space before records are written
            self._records = np.memmap(self.path, self.record, "r", shape=(self.places,))
        except OSError as error:
            raise UserError(f"cannot create the cache {self.path}: {error.strerror}") from None
        self._samples, self.full = self._records["sample"], False

    def read(self, sample: bytes, source: bytes) -> Tensor | None:
        """Return the activations fp32 [n, D], or None if there is no valid record."""
        place = self._place(sample, sample)
        if place is None:
            return None
        record = np.array(self._records[place : place + 1])  # a copy, which other processes cannot change
        identified = record["sample"].tobytes() + record["source"].tobytes() == sample + source
        if not identified or record["check"] != _checksum(record):
            return None
        return torch.from_numpy(record["values"][0])

    def write(self, sample: bytes, source: bytes, values: Tensor) -> None:
        """Write a record, in place of an older one of this sample."""
        place = self._place(sample, sample)
        place = self._place(sample, bytes(_HASH_BYTES)) if place is None else place
        if place is None or self.full:
            return
        record = np.zeros(1, self.record)
        record["sample"], record["source"], record["values"] = np.void(sample), np.void(source), values.numpy()
        record["check"] = _checksum(record)
        try:
            self._file.seek(place * self.record.itemsize)
            self.full = self._file.write(record.tobytes()) < self.record.itemsize
        except OSError:
            self.full = True

    def close(self) -> None:
        """Close the file, which stays."""
        self._file.close()
        del self._records, self._samples

    def _place(self, sample: bytes, stored: bytes) -> int | None:
        """Return the first place of a sample whose record is of the sample `stored`."""
        first = int.from_bytes(sample[:8], "little")
        places = ((first + i) % self.places for i in range(min(PROBES, self.places)))
        return next((place for place in places if self._samples[place].tobytes() == stored), None)


def _checksum(record: np.ndarray) -> int:
    """Return the CRC-32 of a record [1] without its field "check"."""
    return zlib.crc32(record.view(np.uint8)[4:].data)
