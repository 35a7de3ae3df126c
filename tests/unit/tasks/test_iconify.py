"""Icon sets in Iconify's format: folders and archives, aliases, and invalid files."""

import gzip
import io
import json
import tarfile

import numpy as np
import pytest

from icon_sets import SQUARE, archive, information
from limner.data.sample import Rejected
from limner.errors import UserError
from limner.tasks import iconify
from limner.tasks.svg import draw

DATA = {
    "prefix": "toys", "width": 16, "height": 16,
    "icons": {"ball": {"body": SQUARE}, "old": {"body": SQUARE, "hidden": True}, "tall": {"body": SQUARE, "height": 32},
              "again": {"body": SQUARE}, "empty": {"body": " "}, "flat": {"body": "<g/>", "height": 0}},
    "aliases": {"sphere": {"parent": "ball"}, "ball-right": {"parent": "ball", "hFlip": True},
                "ball-turned": {"parent": "ball-right", "rotate": 1}, "lost": {"parent": "nowhere"},
                "a": {"parent": "b"}, "b": {"parent": "a"}, "twice": {"parent": "ball-right", "hFlip": True}},
}  # fmt: skip
INFO = information("MIT")


@pytest.fixture(params=["archive", "folder", "one file"])
def toys(request, tmp_path):
    if request.param == "archive":
        return archive(tmp_path / "toys.tgz", icons=DATA, info=INFO, chars={"26bd-fe0f": "ball"})
    data = {**DATA, "info": INFO} if request.param == "one file" else DATA
    (tmp_path / "icons.json").write_text(json.dumps(data))
    if request.param == "folder":
        (tmp_path / "info.json").write_text(json.dumps(INFO))
    (tmp_path / "chars.json").write_text(json.dumps({"26bd-fe0f": "ball"}))
    return tmp_path / "icons.json"


def test_a_set_is_read_with_author_license_and_code_points(toys):
    found = iconify.read(toys)
    assert (found.prefix, found.title, found.author, found.license) == ("toys", "Toys", "A. Painter", "MIT")
    assert found.permissive and found.codes == {"ball": "26bd-fe0f"}


def test_each_picture_comes_once_and_aliases_are_followed(toys):
    found = iconify.read(toys)
    assert found.icons["ball-right"].mirror == (-1, 1) and found.icons["ball-right"].root == "ball"
    assert (found.icons["ball-turned"].turns, found.icons["ball-turned"].mirror) == (1, (-1, 1))
    assert set(found.aliases["ball"]) == {"again", "sphere", "twice"}  # the same picture, one mirrored twice
    assert found.rejected == {
        "hidden icon": 1, "duplicate picture": 3, "missing icon": 1, "circular alias": 2,
    }  # fmt: skip
    seen = len(found.icons) + sum(found.rejected.values())
    assert seen == len(DATA["icons"]) + len(DATA["aliases"])  # every name is kept or counted


def test_sizes_come_from_the_icon_or_its_set(toys):
    found = iconify.read(toys)
    ball, tall = (draw(found.svg(found.icons[name]), 32) for name in ("ball", "tall"))
    assert (ball[:16, :16] == (255, 0, 0)).all() and (ball[17:] == 255).all()
    assert (tall[:8, 8:16] == (255, 0, 0)).all() and (tall[:, :7] == 255).all()
    for name, reason in (("empty", "without a drawing"), ("flat", "without a size")):
        with pytest.raises(Rejected, match=reason):
            found.svg(found.icons[name])


@pytest.mark.parametrize("box", [{"width": 1e400}, {"width": 10**400}, {"left": -(10**400)}, {"top": float("nan")},
                                 {"width": "16"}, {"left": True}, {"height": -1}, {"top": 1e9}])  # fmt: skip
def test_an_icon_of_an_impossible_size_is_no_icon(tmp_path, box):
    path = tmp_path / "icons.json"
    path.write_text(json.dumps({"prefix": "a", "icons": {"b": {"body": SQUARE, **box}}}))
    found = iconify.read(path)
    with pytest.raises(Rejected, match="without a size"):
        found.svg(found.icons["b"])


@pytest.mark.parametrize("license", ["CC-BY-SA-4.0", "GPL-3.0", "CC-BY-NC-4.0", "MIT AND GPL-3.0", "", None])
def test_only_known_licenses_are_permissive(tmp_path, license):
    path = tmp_path / "icons.json"
    path.write_text(json.dumps({"prefix": "a", "icons": {}, "info": {"license": {"spdx": license}}}))
    assert not iconify.read(path).permissive


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"", "not valid JSON"), (b"[1]", "JSON object"), (b'{"icons": {}}', 'lacks "prefix"'), (b"\x1f\x8bhalf", "read"),
     (b'{"prefix": "a", "icons": [1]}', 'lacks "prefix"'), (b"[" * 100_000, "not valid"), (b"\xff\xfe", "not valid")],
)  # fmt: skip
def test_an_invalid_file_raises_an_error_of_one_sentence(tmp_path, content, complaint):
    path = tmp_path / "icons.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=complaint) as caught:
        iconify.read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert iconify.read_keywords(path) is None


def test_an_archive_without_icons_raises_an_error(tmp_path):
    with pytest.raises(UserError, match="package/icons.json is missing"):
        iconify.read(archive(tmp_path / "a.tgz", info=INFO))
    whole = archive(tmp_path / "b.tgz", icons={**DATA, "more": np.random.default_rng(0).bytes(4_000).hex()})
    torn = tmp_path / "c.tgz"
    torn.write_bytes(whole.read_bytes()[:1_500])
    with pytest.raises(UserError, match="cannot be read"):
        iconify.read(torn)


@pytest.mark.parametrize("record", [
    b"GNU.sparse.size=abc", b"GNU.sparse.realsize=", b"GNU.sparse.map=1,x", b"hdrcharset=\xff", b"mtime=nan",
])  # fmt: skip
def test_broken_values_in_pax_headers_do_not_matter(tmp_path, record):
    path, header = tmp_path / "a.tgz", b"%d %s\n" % (len(record) + 4, record)
    with tarfile.open(path, "w:gz") as tar:
        for name, kind, data in (("x", tarfile.XHDTYPE, header), ("icons", tarfile.REGTYPE, json.dumps(DATA).encode())):
            member = tarfile.TarInfo(f"package/{name}.json")
            member.type, member.size = kind, len(data)
            tar.addfile(member, io.BytesIO(data))
    assert iconify.read(path).prefix == "toys"


def test_an_archive_is_unpacked_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(iconify, "MAX_UNPACKED", 1 << 20)
    path = archive(tmp_path / "a.tgz", icons=DATA, more=bytes(1 << 19))
    assert iconify.read(path).prefix == "toys"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + bytes(1 << 20)))
    with pytest.raises(UserError, match="unpacks to more than 1 MiB"):
        iconify.read(path)


def test_keywords_are_cldrs(tmp_path):
    annotations = {"🐯": {"default": ["face", "tiger"], "tts": ["tiger face"]},
                   "x": {"default": "no list"}, "y": 3}  # fmt: skip
    table = {"annotations": {"identity": {}, "annotations": annotations}}
    path = archive(tmp_path / "a.tgz", annotations__en__annotations=table)
    assert iconify.read_keywords(path) == {"🐯": ("face", "tiger")}
    assert iconify.read_keywords(archive(tmp_path / "b.tgz", icons=DATA)) is None
