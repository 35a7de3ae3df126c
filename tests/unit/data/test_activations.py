"""The cache of activations: exact records, bounded, and never a wrong one."""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import torch

from limner.data.activations import ActivationCache, check_repeats, identity
from limner.data.datasets import EncodedDataset, ImageCaptionDataset
from limner.errors import UserError
from numbered_tokens import numbered_tokens

SHAPE = (5, 8)
SOURCE, DEEPER = identity("weights", "2"), identity("weights", "4")


def record(name):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(hash(name) % 1000))


@pytest.fixture
def cache(tmp_path):
    cache = ActivationCache(tmp_path, SHAPE, 100_000)
    yield cache
    cache.close()


def test_a_record_is_read_as_it_was_written(cache):
    a, b = identity("a"), identity("b")
    assert cache.read(a, SOURCE) is None
    cache.write(a, SOURCE, record("a"))
    assert torch.equal(cache.read(a, SOURCE), record("a"))
    assert cache.read(b, SOURCE) is None
    assert cache.read(a, DEEPER) is None
    cache.write(a, DEEPER, record("b"))
    assert torch.equal(cache.read(a, DEEPER), record("b"))
    assert cache.read(a, SOURCE) is None  # the same place


def test_identities_of_parts_differ():
    assert len({identity("ab", "c"), identity("a", "bc"), identity("abc"), identity("", "abc")}) == 4


def test_another_process_reads_what_this_one_wrote(cache, tmp_path):
    other = ActivationCache(tmp_path, SHAPE, 100_000)
    cache.write(identity("a"), SOURCE, record("a"))
    assert torch.equal(other.read(identity("a"), SOURCE), record("a"))
    other.close()


@pytest.mark.parametrize("kept", [0, 4, 20, 36, 100, 190])
def test_a_record_that_is_half_written_is_missing(cache, kept):
    a = identity("a")
    cache.write(a, SOURCE, record("a"))
    size = cache.record.itemsize
    data = bytearray(cache.path.read_bytes())
    start = data.index(a) - 4
    data[start + kept : start + size] = bytes(size - kept)
    cache.path.write_bytes(data)
    again = ActivationCache(cache.path.parent, SHAPE, 100_000)
    assert again.read(a, SOURCE) is None
    again.write(a, SOURCE, record("a"))
    assert torch.equal(again.read(a, SOURCE), record("a"))
    again.close()


def test_a_full_cache_keeps_its_records_and_its_size(tmp_path):
    cache = ActivationCache(tmp_path, SHAPE, 3 * (36 + 160) + 100)
    assert cache.places == 3
    names = list("abcdef")
    for name in names:
        cache.write(identity(name), SOURCE, record(name))
    values = [cache.read(identity(name), SOURCE) for name in names]
    assert [value is not None for value in values] == [True] * 3 + [False] * 3
    assert torch.equal(values[0], record("a"))
    assert cache.path.stat().st_size == 3 * (36 + 160)
    cache.close()
    with pytest.raises(UserError, match="a cache of 100 bytes is too small for a record of 196"):
        ActivationCache(tmp_path, SHAPE, 100)


def test_a_full_disk_ends_writing(cache):
    class Full:
        def seek(self, place):
            pass

        def write(self, data):
            raise OSError(28, "No space left on device")

        close = seek

    cache.write(identity("a"), SOURCE, record("a"))
    file, cache._file = cache._file, Full()
    cache.write(identity("b"), SOURCE, record("b"))
    assert cache.full
    assert torch.equal(cache.read(identity("a"), SOURCE), record("a"))
    cache._file = file


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot create the cache"):
        ActivationCache(tmp_path / "file", SHAPE, 1000)


def value(i):
    return torch.full((64, 512), float(i))


def write_forever(folder, seed):
    cache, rng = ActivationCache(folder, (64, 512), 12 * 131_108), np.random.default_rng(seed)
    while True:
        i = int(rng.integers(8))
        source = SOURCE if rng.random() < 0.5 else DEEPER
        cache.write(identity(str(i)), source, value(i if source == SOURCE else -i))


@pytest.mark.skipif(os.name == "nt", reason="forks")
def test_killed_and_concurrent_writers_leave_no_wrong_record(tmp_path):
    context = multiprocessing.get_context("fork")
    for attempt in range(5):
        writers = [context.Process(target=write_forever, args=(tmp_path, 10 * attempt + i)) for i in range(2)]
        for writer in writers:
            writer.start()
        cache, seen, end = ActivationCache(tmp_path, (64, 512), 12 * 131_108), 0, time.monotonic() + 0.3
        while time.monotonic() < end or not seen:
            seen += check(cache)
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
        check(cache)
        cache.close()


def check(cache):
    """Compare all records with their values; return their number."""
    seen = 0
    for i in range(8):
        for source, sign in ((SOURCE, 1), (DEEPER, -1)):
            if (found := cache.read(identity(str(i)), source)) is not None:
                assert torch.equal(found, value(sign * i))
                seen += 1
    return seen


def test_data_whose_tokens_change_is_refused():
    check_repeats(numbered_tokens(3))
    check_repeats(numbered_tokens(3, caption_dropout=0.5))
    with pytest.raises(UserError, match="BPE dropout"):
        check_repeats(numbered_tokens(3, bpe_dropout=0.1))
    encoded = EncodedDataset(ImageCaptionDataset.__new__(ImageCaptionDataset), lambda pixels: pixels)
    with pytest.raises(UserError, match="augmented"):
        check_repeats(encoded)
