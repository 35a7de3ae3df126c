"""Tars of any dialect, joined, cut or damaged: every member is found as far as it is undamaged."""

import tarfile

import pytest

from limner.data.shard_reader import ShardReader, tar_members
from tar_files import archive, outcomes, pairs, tar


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
    erased = whole[: 6 * 3 * 1024] + bytes(3 * 1024 + 100)  # ends with zeros, but within a block
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


def test_a_size_beyond_all_numbers_is_damage(tmp_path):
    path = tar(tmp_path / "x.tar", {"a.jpg": b"A", "b.jpg": b"B"})
    data = bytearray(path.read_bytes())
    data[1024 + 124 : 1024 + 136] = b"\x80" + b"\x7f" * 11  # in base 256
    data[1024 + 148 : 1024 + 156] = b" " * 8
    data[1024 + 148 : 1024 + 156] = b"%06o\0 " % sum(data[1024:1536])
    path.write_bytes(data)
    with pytest.warns(UserWarning, match="is damaged at byte 1024"):
        assert len(ShardReader([path])) == 2  # a picture, and one element for the rest


def test_sparse_members_do_not_derail_the_walk(tmp_path):
    """GNU tar's sparse files have a map after their header."""
    sparse = bytearray(archive([("hole.png", b"0" * 600)])[: 512 + 1024])
    sparse[156:157], sparse[482:483] = b"S", b"\1"
    sparse[148:156] = b" " * 8
    sparse[148:156] = b"%06o\0 " % sum(sparse[:512])
    data = bytes(sparse[:512]) + b"\0" * 512 + bytes(sparse[512:]) + archive(pairs(1))
    assert outcomes(tmp_path / "0.tar", data) == ["missing image", ("P1", "C1")]
