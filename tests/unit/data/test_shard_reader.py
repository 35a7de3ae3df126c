"""Shards of other tools: every picture is kept or counted."""

import os
import pickle
import random
import tarfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings, strategies as st

from limner.data.sample import Rejected
from limner.data.shard_reader import ShardReader
from tar_files import archive, outcomes, pairs, tar, write


def test_a_foreign_shard(tmp_path):
    """img2dataset's layout: captions in the JSON count too, unknown members do not."""
    members = {
        "000000000.jpg": b"A",
        "000000000.txt": b"first",
        "000000000.json": b'{"caption": "first", "similarity": 0.3}',
        "000000001.JPG": b"B",
        "000000001.json": b'{"caption": "second"}',
        "000000002.jpg": b"C",
        "000000003.txt": b"no picture",
        "000000004.jpg": b"D",
        "000000004.txt": b"\xff\xfe\xfd",
        "000000005.jpg": b"E",
        "000000005.txt": b" \n",
        "000000006.jpg": b"F",
        "000000006.txt": b"fine",
        "000000006.json": b"{",
        "000000007.cls": b"7",
    }
    reader = ShardReader([tar(tmp_path / "00000.tar", members)])
    assert len(reader) == 7
    assert reader[0].captions == ("first",) and reader[0].meta["similarity"] == 0.3
    assert reader[1].captions == ("second",)
    reasons = {}
    for index in range(2, 7):
        with pytest.raises(Rejected) as caught:
            reader[index]
        reasons[index] = caught.value.reason
    assert reasons == {
        2: "missing caption",
        3: "missing image",
        4: "caption is not UTF-8",
        5: "empty caption",
        6: "broken metadata",
    }


def test_damage_costs_only_what_is_damaged(tmp_path):
    members = {f"{n}.{suffix}": b"x" * 600 for n in range(4) for suffix in ("txt", "jpg")}
    path = tar(tmp_path / "00000.tar", members)
    whole = path.read_bytes()
    path.write_bytes(whole[: 7 * 1536 + 700])  # the last picture is cut
    with pytest.warns(UserWarning, match="damaged at byte 11452"):
        reader = ShardReader([path])
    assert len(reader) == 5 and reader[2].image == b"x" * 600
    for index, reason in ((3, "broken image"), (4, "damaged shard")):
        with pytest.raises(Rejected, match=reason):
            reader[index]
        assert reader.meta(0) == {}
    path.write_bytes(whole[: 4 * 1536] + b"\x55" * 512 + whole[4 * 1536 + 512 :])
    with pytest.warns(UserWarning, match="damaged at byte 6144"):
        assert len(ShardReader([path])) == 3


def test_readers_are_shared_by_threads_and_pickled(tmp_path):
    paths = write(tmp_path / "out", [(b"%d" % n * 400, [f"no {n}"], "train") for n in range(40)])
    reader = pickle.loads(pickle.dumps(ShardReader(paths)))
    with ThreadPoolExecutor(8) as pool:
        for index, sample in enumerate(pool.map(reader.__getitem__, list(range(40)) * 5)):
            assert sample.captions == (f"no {index % 40}",)


def test_keys_that_come_twice(tmp_path):
    def found(*members):
        return outcomes(tmp_path / "0.tar", archive([(name, data and data.encode()) for name, data in members]))

    a, b, x, y = ("k.png", "A"), ("k.png", "B"), ("k.txt", "x"), ("k.txt", "y")
    assert found(a, x, b, y) == found(a, b, x, y) == [("A", "x"), ("B", "y")]
    assert found(a, ("k.jpg", "B"), x) == [("A", "x"), "duplicate picture name"]
    assert found(a, x, y) == ["duplicate key"] * 2
    assert found(a, b) == ["missing caption"] * 2
    assert found(x, y) == ["missing image"] * 2
    assert found(("k.png", None), x) == ["missing image"]
    assert found(a, ("k.txt", None)) == ["missing caption"]


def test_keys_with_dots(tmp_path):
    assert outcomes(tmp_path / "0.tar", archive(pairs(1, 2, key="photo.2020.{}"))) == [("P1", "C1"), ("P2", "C2")]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_every_picture_is_kept_or_counted(seed, tmp_path_factory):
    """Random members in random order, over several archives: each picture is an element, and so is each caption
    or metadata of a key without a picture."""
    rng = random.Random(seed)
    data, pictures, bare = b"", 0, 0
    for _ in range(rng.randrange(1, 4)):
        keys = [f"{rng.choice(['', 'd/'])}{n}{rng.choice(['', '.x'])}" for n in range(6)]
        members = [
            (f"{rng.choice(keys)}.{rng.choice(['png', 'JPG', 'txt', 'json', 'cls'])}", b"{}")
            for _ in range(rng.randrange(20))
        ]
        data += archive(members, rng.choice([tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT]))
        for key in keys:
            count = Counter(
                suffix.lower() for stem, _, suffix in (m[0].rpartition(".") for m in members) if stem == key
            )
            images = count["png"] + count["jpg"]
            pictures += images
            if max(count["txt"], count["json"]) > images and (images == 0 or max(count["txt"], count["json"]) > 1):
                bare += max(count["txt"], count["json"]) - images
    found = outcomes(tmp_path_factory.mktemp("t") / "0.tar", data)
    assert len(found) == pictures + bare


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "0.tar")
    (tmp_path / "1.tar").symlink_to("/dev/zero")
    (tmp_path / "2.tar").symlink_to("2.tar")
    with pytest.warns(UserWarning, match="cannot be read"):
        reader = ShardReader([tmp_path / f"{n}.tar" for n in range(3)])
    for index in range(3):
        with pytest.raises(Rejected, match="damaged shard"):
            reader[index]
    assert len(reader.fingerprint()) == 64


def test_large_members_are_not_read(tmp_path):
    text = b"word " * 20_000
    members = [("a.png", b"A"), ("a.txt", text), ("b.png", b"B"), ("b.txt", b"b"), ("b.json", b" " * (1 << 20) + b"{}")]
    assert outcomes(tmp_path / "0.tar", archive(members)) == ["caption too long", "metadata too large"]
