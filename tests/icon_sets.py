"""Small icon sets in Iconify's format, as npm packs them."""

import io
import json
import tarfile
from pathlib import Path

SQUARE = '<path fill="#f00" d="M0 0h8v8H0z"/>'


def archive(path: Path, **members: object) -> Path:
    """A .tgz with `package/NAME.json` for each member (a__b is a/b), JSON values or bytes."""
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            raw = data if isinstance(data, bytes) else json.dumps(data).encode()
            member = tarfile.TarInfo(f"package/{name.replace('__', '/')}.json")
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))
    return path


def information(spdx: str) -> dict[str, object]:
    """info.json of a set with this license."""
    author = {"name": "A. Painter", "url": "https://example.org"}
    return {"name": "Toys", "author": author, "license": {"title": spdx, "spdx": spdx}}
