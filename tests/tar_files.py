"""Tars and shards that tests write, and what a reader makes of them."""

import io
import tarfile

from limner.data.sample import Rejected
from limner.data.shard_reader import ShardReader
from limner.data.shard_writer import ShardWriter


def write(folder, samples, per_shard=5):
    with ShardWriter(folder, per_shard) as writer:
        for image, captions, split in samples:
            writer.write(image, captions, {"split": split})
    return sorted(folder.glob("*.tar"))


def tar(path, members, **options):
    with tarfile.open(path, "w", **options) as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


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
