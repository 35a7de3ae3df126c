"""Icon sets from strangers: archives, JSON and drawings, and every drawing kept or counted."""

import gzip
import io
import json
import re
import tarfile

import pytest
from hostile import MEMORY, SECONDS, TEXTS, VALUES, check_outcome, dump, mutate, mutate_json

from icon_sets import archive, information

pytestmark = pytest.mark.attack

SQUARE = '<path fill="#f00" d="M2 2h4v4H2z"/>'

#: Attributes of drawings in which something else than a number or a color may stand.
ODD = (
    "url(#a)", "url(file:///etc/passwd)", "url(http://localhost/a.svg#b)", "1e308", "-1e400", "nan", "9" * 400,
    "var(--a)",
    "none", "data:image/png;base64,iVBORw0KGgo=", "rgb(1e9,0,0)", "matrix(0 0 0 0 0 0)", "scale(1e30)", "rotate(nan)",
)  # fmt: skip


def drawings(rng):
    """SVG bodies that ask for much memory, or for files and hosts."""
    path = "M0 0" + "l1 1-1 1" * 150_000
    filters = "".join(f'<feGaussianBlur stdDeviation="{10**i}"/>' for i in range(12))
    gradients = "".join(f'<linearGradient id="l{i}" href="#l{i + 1}"/>' for i in range(3_000))
    return {
        "a path of 300,000 lines": f'<path d="{path}"/>',
        "a path of one number of 400,000 digits": f'<path d="M{"9" * 400_000} 0z"/>',
        "blurs of 10^12": f'<filter id="f">{filters}</filter><path filter="url(#f)" d="M0 0h8v8z"/>',
        "a filter of 10^9 pixels": '<filter id="f" width="1e9" height="1e9"><feGaussianBlur stdDeviation="3"/></filter>'
        '<path filter="url(#f)" d="M0 0h8v8z"/>',
        "gradients of gradients": f'{gradients}<path fill="url(#l0)" d="M0 0h8v8z"/>',
        "gradients in a circle": '<linearGradient id="a" href="#b"/><linearGradient id="b" href="#a"/>'
        '<path fill="url(#a)" d="M0 0h8v8z"/>',
        "clips of clips": "".join(f'<clipPath id="c{i}" clip-path="url(#c{i + 1})"><path d="M0 0h8v8z"/></clipPath>'
                                  for i in range(500)) + '<path clip-path="url(#c0)" d="M0 0h8v8z"/>',
        "many dashes": '<path stroke="#000" stroke-dasharray=".0001" d="M0 0h8v8z"/>' * 3_000,
        "huge arcs": '<path stroke="#000" stroke-dasharray="1" d="M0 0A999999 999999 0 1 1 1 1"/>' * 3_000,
        "90,000 attributes": "<path " + " ".join(f'a{i}="1"' for i in range(90_000)) + "/>",
        "10^9 elements": '<defs><path id="u0" d="M0 0h1v1z"/>' + "".join(
            f'<g id="u{i + 1}">' + f'<use href="#u{i}"/>' * 10 + "</g>" for i in range(9)) + '</defs><use href="#u9"/>',
        "10^11 masks": "".join(f'<mask id="m{i + 1}">' + f'<path mask="url(#m{i})" d="M0 0h8v8z"/>' * 10 + "</mask>"
                               for i in range(11)) + '<path mask="url(#m11)" d="M0 0h8v8z"/>',
        "90,000 levels": "<g>" * 90_000 + "</g>" * 90_000,
        "dashes of nothing": '<path stroke="#000" stroke-dasharray="1e-9 1e-9" d="M0 0h8v8z"/>',
        "a stroke of 10^30": '<path stroke="#000" stroke-width="1e30" d="M0 0h8v8z"/>',
        "a pattern of small tiles": '<pattern id="p" width="1e-6" height="1e-6" patternUnits="userSpaceOnUse">'
        '<path d="M0 0h1v1z"/></pattern><path fill="url(#p)" d="M0 0h8v8z"/>',
        "styles": "<style>@import url(http://localhost/a.css);* {fill: url(file:///etc/passwd)}</style>" + SQUARE,
        "a picture of a file": '<image href="../outside/secret.png" width="8" height="8"/>',
        "a script": "<script>alert(1)</script>" + SQUARE,
        "entities": '<!DOCTYPE a [<!ENTITY b "' + "c" * 1_000 + '">]><path d="&b;"/>',
        "references to no character": "<path d='&#0;&#xFFFFFFFF;'/>",
        "the document's end": "</svg><svg xmlns='http://www.w3.org/2000/svg'>" + SQUARE,
        "half a surrogate": "\ud800" + SQUARE,
        "attributes twice": '<path d="M0 0h8v8z" d="M0 0h4v4z"/>',
        "30,000 attributes": "<path " + " ".join(f'a{i}="1"' for i in range(30_000)) + "/>",
        "an animation": f"<g>{SQUARE}<animate attributeName='x' dur='1s' repeatCount='indefinite'/></g>",
    }  # fmt: skip


def icon_set(rng):
    """A set with five subjects, aliases that turn and mirror, and icons with their own sizes."""
    icons = {name: {"body": SQUARE} for name in ("tiger", "guitar", "red-apple", "cat-face")}
    icons["rocket"] = {"body": f"<g>{SQUARE}</g>", "width": 36, "height": 20, "left": -2, "top": 1, "rotate": 1}
    aliases = {"upside-down": {"parent": "rocket", "rotate": 2}, "mirrored": {"parent": "upside-down", "hFlip": True}}
    return {"prefix": "toys", "width": 8, "height": 8, "icons": icons, "aliases": aliases, "info": information("MIT")}


def try_icons(server, place, files, number=None, good=0):
    """Draw the sets in `files`; of `number` drawings each must be kept or counted, and at least `good` kept."""
    (place / "outside").mkdir(exist_ok=True)
    argv = ("data", "icons", "out", *files, "--size", 16, "--pairs", 0)
    ended = server.run(argv, place, root=place / "out", log=True, timeout=SECONDS, memory=MEMORY)
    check_outcome(ended, [place / "out"], [place / "outside"])
    kept = re.search(r"^kept +([\d,]+)", ended.out, re.MULTILINE)
    if kept is None:
        assert ended.code == 2, f"counts nothing: {ended.command}"
        assert not good, f"{good} drawings are good: {ended.command}"
        return
    rejected = re.findall(r"^rejected: .* ([\d,]+) +[\d.]+%$", ended.out, re.MULTILINE)
    counted = int(kept[1].replace(",", "")) + sum(int(n.replace(",", "")) for n in rejected)
    assert int(kept[1].replace(",", "")) >= good, f"{kept[1]} are kept and {good} are good: {ended.out}{ended.command}"
    assert number is None or counted == number, f"{counted} of {number} are counted: {ended.out}{ended.command}"


def test_drawings_that_ask_for_much(server, tally):
    with tally("hostile drawings, made by hand") as count:
        for name, body in count.share(list(drawings(count.random).items()), least=8):
            with count.case(name) as place:
                data = {"prefix": "toys", "width": 8, "height": 8, "info": information("MIT")}
                data["icons"] = {"tiger": {"body": SQUARE}, "guitar": {"body": body}}
                (place / "icons.json").write_text(json.dumps(data))
                try_icons(server, place, ["icons.json"], 2, good=1)


def test_drawings_with_odd_values(server, tally):
    attributes = (
        "d",
        "fill",
        "stroke",
        "transform",
        "stroke-width",
        "opacity",
        "clip-path",
        "style",
        "id",
        "mask",
        "x",
    )
    with tally("hostile drawings, odd values") as count:
        rng = count.random
        for _ in count.share(range(60)):
            with count.case("ten drawings") as place:
                count.tried += 9
                data = icon_set(rng)
                for i in range(10):
                    chosen = {rng.choice(attributes): rng.choice(ODD) for _ in range(3)}
                    odd = "".join(f" {key}='{value}'" for key, value in {"d": "M0 0h8v8z", **chosen}.items())
                    data["icons"][f"odd-{i}"] = {"body": f"<path id='a' {odd if 'id' not in chosen else ''}/>"}
                (place / "icons.json").write_text(json.dumps(data))
                try_icons(server, place, ["icons.json"], 17, good=1)


def test_sets(server, tally):
    with tally("hostile icon sets") as count:
        rng = count.random
        for _ in count.share(range(300)):
            with count.case("a set") as place:
                data = icon_set(rng)
                for _ in range(rng.choice((1, 1, 2, 4))):
                    if rng.random() < 0.5:
                        data = mutate_json(rng, data) if data else data
                    elif isinstance(data.get("icons"), dict):
                        some = data["icons"].get(rng.choice(list(data["icons"]) or [""]))
                        if isinstance(some, dict):
                            key = rng.choice(("left", "top", "width", "height", "rotate", "hFlip", "hidden", "parent"))
                            some[key] = rng.choice((*VALUES, *TEXTS))
                raw = dump(data).encode()
                (place / "icons.json").write_bytes(mutate(rng, raw, [raw]) if rng.random() < 0.3 else raw)
                chars = {
                    rng.choice(("1f405", "zz", "1f405-200d", "", "9" * 50)): rng.choice((*VALUES, *TEXTS, "tiger"))
                }
                (place / "chars.json").write_text(dump(chars))
                try_icons(server, place, ["icons.json"])


def test_archives(server, tally):
    zeros = io.BytesIO()
    with gzip.GzipFile(fileobj=zeros, mode="wb") as file:
        head = tarfile.TarInfo("package/first.bin")
        head.size = 64 << 30
        file.write(head.tobuf())
        for _ in range(3 << 4):  # 3 GiB of the 64
            file.write(bytes(1 << 26))
    many = b"[" + b"[]," * 50_000_000 + b"[]]"
    odd = {
        "an archive of 64 GiB of zeros, the rest of which is missing": zeros.getvalue(),
        "a set of 150 MB of nothing": gzip.compress(_tar({"package/icons.json": many}), 1),
        "no archive": gzip.compress(b"x" * 1000),
        "an archive of nothing": gzip.compress(bytes(1024)),
        "half a header": b"\x1f\x8b\x08",
        "links": gzip.compress(_tar({}, {"package/icons.json": "../outside/secret.json"})),
        "deep JSON": b"[" * 100_000,
        "no object": b"[1, 2]",
        "nothing": b"",
    }
    with tally("hostile archives of icons") as count:
        rng = count.random
        for name in count.share([*odd, *["damaged"] * 150, *["pax headers"] * 50], least=12):
            with count.case(name) as place:
                file = place / "set.tgz"
                if name == "damaged":
                    data = icon_set(rng)
                    members = {"icons": data, "info": data.pop("info"), "chars": {"1f405": "tiger"}}
                    cldr = {"annotations": {"annotations": {"\U0001f405": {"default": ["tiger"]}}}}
                    good = archive(file, **members, annotations__en__annotations=cldr).read_bytes()
                    raw = mutate(rng, gzip.decompress(good), [good]) if rng.random() < 0.5 else None
                    file.write_bytes(gzip.compress(raw) if raw is not None else mutate(rng, good, [good]))
                elif name == "pax headers":
                    output = b"".join(pax(rng) for _ in range(rng.choice((1, 1, 2, 5))))
                    members = {"x": output, "package/icons.json": json.dumps(icon_set(rng)).encode()}
                    file.write_bytes(gzip.compress(_tar(members, kinds={"x": rng.choice((b"x", b"g", b"X"))})))
                else:
                    file.write_bytes(odd[name])
                try_icons(server, place, ["set.tgz"])


def pax(rng):
    """A record of an extended header, whose length may be wrong, and whose value mostly is."""
    names = ("size", "path", "hdrcharset", "mtime", "uid", "GNU.sparse.map", "GNU.sparse.size", "GNU.sparse.realsize")
    values = ("", "abc", "1,x", "-1", "nan", "1e400", "9" * 400, "\xff", "package/icons.json", "BINARY")
    record = f" {rng.choice(names)}={rng.choice(values)}\n".encode("latin-1")
    length = len(record) + len(str(len(record) + 2))
    return str(rng.choice((length, length, length, 0, 3, 10**6, "x"))).encode() + record


def _tar(members, links=None, kinds=None):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.type = len(data), (kinds or {}).get(name, tarfile.REGTYPE)
            tar.addfile(info, io.BytesIO(data))
        for name, to in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, to
            tar.addfile(info)
    return out.getvalue()
