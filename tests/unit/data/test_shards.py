"""Shards: what is written comes back, in the same bytes each time; half a data set is refused."""

import io
import json
import os
import pickle
import random
import tarfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings, strategies as st

from limner.data.samples import Rejected
from limner.data.shard_reader import ShardReader
from limner.data.shard_writer import ShardWriter
from limner.data.tars import tar_members
from limner.errors import UserError

SAMPLES = st.lists(
    st.tuples(
        st.binary(min_size=1, max_size=1500),
        st.lists(st.text("ab éß日", min_size=1).filter(str.strip), min_size=1, max_size=3),
        st.sampled_from(["train", "held-out"]),
    ),
    max_size=12,
)


def write(folder, samples, per_shard=5):
    with ShardWriter(folder, per_shard) as writer:
        for image, captions, split in samples:
            writer.write(image, captions, {"split": split})
    return sorted(folder.glob("*.tar"))


@given(samples=SAMPLES)
@settings(max_examples=25, deadline=None)
def test_round_trip_and_stable_bytes(samples, tmp_path_factory):
    paths = write(tmp_path_factory.mktemp("a") / "x", samples)
    again = write(tmp_path_factory.mktemp("b") / "x", samples)
    assert [p.read_bytes() for p in paths] == [p.read_bytes() for p in again]
    assert len(paths) == -(-len(samples) // 5)
    reader = ShardReader(paths)
    assert len(reader) == len(samples)
    for index, (image, captions, split) in enumerate(samples):
        sample = reader[index]
        assert sample.image == image
        assert sample.captions == tuple(" ".join(c.split()) for c in captions)
        assert sample.meta["split"] == reader.meta(index)["split"] == split


def test_summary_counts(tmp_path):
    with ShardWriter(tmp_path / "out") as writer:
        writer.write(b"x", ["a b"], {"split": "train"})
        writer.write(b"y", ["c d"], {"split": "held-out"})
        for reason in ("broken image", "missing caption", "broken image"):
            writer.reject(reason)
    assert json.loads((tmp_path / "out/dataset.json").read_text()) == {
        "count": 5,
        "kept": 2,
        "rejected": {"broken image": 2, "missing caption": 1},
        "splits": {"train": 1, "held-out": 1},
        "shards": 1,
    }


def test_an_interrupted_writer_leaves_nothing_that_reads(tmp_path):
    out = tmp_path / "out"

    def interrupted():
        with ShardWriter(out, per_shard=2) as writer:
            for n in range(5):
                writer.write(b"x%d" % n, [f"caption {n}"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not (out / "dataset.json").exists()
    with pytest.raises(UserError, match="incomplete"):
        ShardReader(sorted(out.glob("*.tar")))
    # The same command again starts afresh and completes.
    paths = write(out, [(b"z", ["a caption"], "train")])
    assert [path.name for path in paths] == ["00000.tar"]
    assert len(ShardReader(paths)) == 1
    assert sorted(path.name for path in out.iterdir()) == ["00000.tar", "dataset.json"]


def test_two_writers_do_not_share_a_folder(tmp_path):
    with ShardWriter(tmp_path / "out") as writer:
        writer.write(b"picture", ["one"])
        with pytest.raises(UserError, match="being written to by another process"):
            ShardWriter(tmp_path / "out").__enter__()
        writer.write(b"picture", ["two"])
    assert len(ShardReader([tmp_path / "out" / "00000.tar"])) == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["00000.tar", "dataset.json"]


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="not empty"):
        ShardWriter(tmp_path).__enter__()
    assert (tmp_path / "thesis.txt").read_text() == "precious"
    with pytest.raises(UserError, match="is a file"):
        ShardWriter(tmp_path / "thesis.txt").__enter__()


def tar(path, members, **options):
    with tarfile.open(path, "w", **options) as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_agree_with_tarfile(tmp_path, format):
    """Names short and long, in every dialect: offsets as the library has them."""
    members = {"a/1.jpg": b"1" * 700, "a/1.txt": b"one", "empty.txt": b""}
    members["deep/" * 18 + "2.jpg"] = b"2" * 513
    if format != tarfile.USTAR_FORMAT:
        members["n" * 180 + ".jpg"] = members["é.jpg"] = b"3"
    path = tar(tmp_path / "x.tar", members, format=format)
    with tarfile.open(path) as file:
        expected = [(m.name, m.offset_data, m.size) for m in file if m.isfile()]
    assert [member[1:] for member in tar_members(path)] == expected


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


# ---------------------------------------------------------------------------- in = kept + rejected


def archive(members, format=tarfile.USTAR_FORMAT):
    """The bytes of a tar; `members` is a list of names and bytes (None for a link), which may come twice."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data or b"")
            if data is None:
                info.type, info.linkname = tarfile.SYMTYPE, "elsewhere"
            file.addfile(info, io.BytesIO(data or b""))
    return buffer.getvalue()


def outcomes(path, data):
    path.write_bytes(data)
    reader = ShardReader([path])
    found = []
    for index in range(len(reader)):
        try:
            sample = reader[index]
            found.append((sample.image.decode(), sample.captions[0]))
        except Rejected as rejected:
            found.append(rejected.reason)
    return found


def pairs(*numbers, key="{}"):
    return [
        (f"{key.format(n)}.{suffix}", data)
        for n in numbers
        for suffix, data in (("png", b"P%d" % n), ("txt", b"C%d" % n), ("json", b"{}"))
    ]


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_a_tar_cut_anywhere_says_so(tmp_path):
    whole = archive(pairs(*range(12)))
    full = [(f"P{n}", f"C{n}") for n in range(12)]
    assert outcomes(tmp_path / "0.tar", whole) == full
    for cut in range(0, 12 * 3 * 1024, 700):
        found = outcomes(tmp_path / "0.tar", whole[:cut])
        assert found[-1] == "damaged shard"
        good = [pair for pair in found if pair in full]
        assert good == full[: len(good)] and len(good) >= cut // (3 * 1024) and len(found) <= len(good) + 2
    erased = whole[: 6 * 3 * 1024] + bytes(3 * 1024 + 100)  # an end like any other, but that it is no whole block
    assert outcomes(tmp_path / "0.tar", erased) == [*full[:6], "damaged shard"]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_joined_tars_are_read_to_the_end(tmp_path, format):
    parts = [
        archive(pairs(*numbers, key="n" * 90 + "/é" * 20 + "/{}"), format) for numbers in ((0, 1), (2,), (), (3, 4))
    ]
    expected = [(f"P{n}", f"C{n}") for n in range(5)]
    assert outcomes(tmp_path / "0.tar", b"".join(parts)) == expected
    # The same keys in another archive are other samples, even where one of them lacks a caption.
    first, second = pairs(0, 1), [(name, data.replace(b"0", b"7")) for name, data in pairs(0, 1)]
    first = [member for member in first if member[0] != "0.txt"]
    found = outcomes(tmp_path / "0.tar", archive(first) + archive(second))
    assert found == ["missing caption", ("P1", "C1"), ("P7", "C7"), ("P1", "C1")]
    with pytest.warns(UserWarning, match="damaged"):
        assert outcomes(tmp_path / "0.tar", archive(first) + b"junk" * 200)[-1] == "damaged shard"


def test_keys_that_come_twice(tmp_path):
    def found(*members):
        return outcomes(tmp_path / "0.tar", archive([(name, data and data.encode()) for name, data in members]))

    a, b, x, y = ("k.png", "A"), ("k.png", "B"), ("k.txt", "x"), ("k.txt", "y")
    assert found(a, x, b, y) == found(a, b, x, y) == [("A", "x"), ("B", "y")]
    assert found(a, ("k.jpg", "B"), x) == [("A", "x"), "second picture of a name"]
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


def test_what_is_no_regular_file_is_never_opened(tmp_path):
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


def test_a_size_beyond_all_numbers_is_damage(tmp_path):
    path = tar(tmp_path / "x.tar", {"a.jpg": b"A", "b.jpg": b"B"})
    data = bytearray(path.read_bytes())
    data[1024 + 124 : 1024 + 136] = b"\x80" + b"\x7f" * 11  # in base 256
    data[1024 + 148 : 1024 + 156] = b" " * 8
    data[1024 + 148 : 1024 + 156] = b"%06o\0 " % sum(data[1024:1536])
    path.write_bytes(data)
    with pytest.warns(UserWarning, match="is damaged at byte 1024"):
        assert len(ShardReader([path])) == 2  # a picture, and whatever lies behind the damage


def test_sparse_members_do_not_derail_the_walk(tmp_path):
    """GNU tar's sparse files have a map after their header."""
    sparse = bytearray(archive([("hole.png", b"0" * 600)])[: 512 + 1024])
    sparse[156:157], sparse[482:483] = b"S", b"\1"
    sparse[148:156] = b" " * 8
    sparse[148:156] = b"%06o\0 " % sum(sparse[:512])
    data = bytes(sparse[:512]) + b"\0" * 512 + bytes(sparse[512:]) + archive(pairs(1))
    assert outcomes(tmp_path / "0.tar", data) == ["missing image", ("P1", "C1")]
