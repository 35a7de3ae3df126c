"""Pictures, tables, tars and folders from strangers: read in time and memory, and every sample kept or counted."""

import csv
import datetime
import decimal
import io
import json
import os
import re
import shutil
import socket
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hostile import MEMORY, SECONDS, TEXTS, VALUES, check_outcome, dump, mutate
from PIL import Image

pytestmark = pytest.mark.attack


# ---------------------------------------------------------------------------- the rule for data


def totals(ended):
    """Samples kept and rejected, by what the command says; None if it says neither."""
    kept = re.search(r"^kept +([\d,]+)", ended.out, re.MULTILINE)
    if kept:
        rejected = re.findall(r"^rejected: .* ([\d,]+) +[\d.]+%$", ended.out, re.MULTILINE)
        return int(kept[1].replace(",", "")), sum(int(n.replace(",", "")) for n in rejected)
    none = re.search(r"none of the ([\d,]+) samples", ended.err)
    return (0, int(none[1].replace(",", ""))) if none else None


def try_data(server, place, source, count=None, least=None, good=0, show=True, options=()):
    """Prepare a source and look at it, in the folder `place`.

    Args:
        count: samples in it.
        least: samples that it had before it was damaged: if fewer are counted, something must be reported.
        good: samples that must be kept.
    """
    (place / "outside").mkdir()
    Image.new("RGB", (20, 20)).save(place / "outside" / "secret.png")
    commands = [("data", "prepare", source, "out", "--min-words", "None", "--english", "None", *options)]
    if show:
        commands.append(("data", "show", source, "-o", "out/sheet.png"))
    for argv in commands:
        ended = server.run(argv, place, root=place / "out", log=True, timeout=SECONDS, memory=MEMORY)
        check_outcome(ended, [place / "out"], [place / "outside"])
        found = totals(ended)
        if found is None:
            assert ended.code == 2, f"counts nothing: {ended.command}"
            assert not good, f"{good} samples are good: {ended.command}"
            continue
        kept, rejected = found
        assert kept >= good, f"{kept} are kept and {good} are good: {ended.out}{ended.command}"
        if count is not None:
            assert kept + rejected == count, f"{kept} + {rejected} of {count} are counted: {ended.out}{ended.command}"
        reported = rejected or "limner: warning: " in ended.err
        assert least is None or kept + rejected >= least or reported, f"lost in silence: {ended.out}{ended.command}"


def encoded(rng, kind="PNG", side=None, **options):
    side = side or rng.randrange(8, 40)
    pixels = np.frombuffer(rng.randbytes(side * side * 3), np.uint8).reshape(side, side, 3) // 64 * 64
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(options.pop("mode", "RGB")).save(buffer, kind, **options)
    return buffer.getvalue()


# ---------------------------------------------------------------------------- pictures


def kinds(rng):
    """A picture of each kind that is read."""
    frames = [Image.new("RGB", (16, 16), (i * 20, 0, 0)) for i in range(3)]
    return [
        encoded(rng), encoded(rng, mode="P"), encoded(rng, mode="RGBA"), encoded(rng, mode="1"), encoded(rng,
        mode="I;16"),
        encoded(rng, "JPEG"), encoded(rng, "JPEG", progressive=True), encoded(rng, "JPEG", mode="CMYK"),
        encoded(rng, "JPEG", mode="L"), encoded(rng, "WEBP"), encoded(rng, "WEBP", lossless=True), encoded(rng, "GIF"),
        encoded(rng, "GIF", save_all=True, append_images=frames), encoded(rng, "BMP"), encoded(rng, "TIFF"),
        encoded(rng, "TIFF", compression="tiff_lzw"), encoded(rng, "TIFF", compression="tiff_deflate"), encoded(rng,
        "PPM"),
        encoded(rng, "PNG", save_all=True, append_images=frames),
    ]  # fmt: skip


def png(width, height, data, extra=b"", depth=8, color=2):
    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width & 0xFFFFFFFF, height & 0xFFFFFFFF, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def bombs(rng):
    """Small files that ask for much."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    zeros = zlib.compress(bytes(1 << 28), 9)
    progressive = encoded(rng, "JPEG", side=512, progressive=True)
    last = progressive.rindex(b"\xff\xda")
    baseline = encoded(rng, "JPEG")
    size = baseline.index(b"\xff\xc0") + 5
    huge = baseline[:size] + b"\xff\xff\xff\xff" + baseline[size + 4 :]
    flat = io.BytesIO()
    Image.new("L", (8192, 8192)).save(flat, "PNG")
    flat_jpeg = io.BytesIO()
    Image.new("L", (8191, 8191)).save(flat_jpeg, "JPEG", progressive=True)
    frames = io.BytesIO()
    Image.new("P", (8, 8)).save(
        frames, "GIF", save_all=True, append_images=[Image.new("P", (8, 8), i % 255) for i in range(3000)]
    )
    wide = io.BytesIO()
    Image.new("RGB", (60_000, 1)).save(wide, "PNG")
    exif = Image.Exif()
    exif[0x0112] = 99
    exif[0x010E] = "x" * 60_000
    turned = io.BytesIO()
    Image.new("RGB", (9, 7)).save(turned, "JPEG", exif=exif)
    loop = b"II*\0\x08\0\0\0" + struct.pack("<H", 1) + struct.pack("<HHII", 256, 4, 1, 8) + struct.pack("<I", 8)
    tags = ((256, 1, 40_000), (257, 1, 40_000), (258, 1, 8), (259, 1, 1), (273, 1 << 28, 8), (279, 1 << 28, 8))
    strips = b"II*\0\x08\0\0\0" + struct.pack("<H", 6)
    strips += b"".join(struct.pack("<HHII", tag, 4, number, value) for tag, number, value in tags)
    return {
        "a PNG of 2^31 - 1 squared": png(2**31 - 1, 2**31 - 1, zeros),
        "a PNG of no size": png(0, 0, zeros),
        "a PNG of 8192 squared": flat.getvalue(),
        "a JPEG of 8191 squared": flat_jpeg.getvalue(),
        "a PNG with more data than pixels": png(8, 8, zeros),
        "a PNG with fewer data than pixels": png(4000, 4000, zlib.compress(b"\0")),
        "a PNG with a text of 256 MiB": png(8, 8, zlib.compress(bytes(200)), chunk(b"zTXt", b"k\0\0" + zeros)),
        "a PNG with a profile of 256 MiB": png(8, 8, zlib.compress(bytes(200)), chunk(b"iCCP", b"k\0\0" + zeros)),
        "a PNG with 100,000 texts": png(8, 8, zlib.compress(bytes(200)), chunk(b"tEXt", b"k\0v") * 100_000),
        "a PNG with a chunk of 4 GiB": png(8, 8, b"")[:33] + b"\xff\xff\xff\xffIDAT",
        "a PNG of 16 bits and odd colors": png(8, 8, zlib.compress(bytes(2000)), depth=16, color=6),
        "a PNG of unknown colors": png(8, 8, zlib.compress(bytes(2000)), depth=3, color=77),
        "a PNG that is 60,000 wide and 1 high": wide.getvalue(),
        "a JPEG of 65535 squared": huge,
        "a progressive JPEG with 1,000 last scans": progressive[:last] + progressive[last:-2] * 1000 + b"\xff\xd9",
        "a JPEG with 60,000 markers": baseline[:2] + b"\xff\xfe\0\x02" * 60_000 + baseline[2:],
        "a JPEG turned by 99": turned.getvalue(),
        "a JPEG without an end": baseline[:-2] + bytes(1 << 22),
        "a GIF of 3,000 frames": frames.getvalue(),
        "a GIF of 65535 squared": b"GIF89a\xff\xff\xff\xff\x80\0\0" + bytes(6) + b",\0\0\0\0\xff\xff\xff\xff\0\x02\0;",
        "a TIFF that follows itself": loop,
        "a TIFF of 2^28 strips": strips + struct.pack("<I", 0) + bytes(100),
        "a BMP of -2^31 rows": b"BM" + struct.pack("<IIIIiiHH", 100, 0, 54, 40, 20, -(2**31), 1, 24) + bytes(60),
        "a BMP of 60,000 squared in runs": b"BM"
        + struct.pack("<IIIIiiHHI", 100, 0, 54, 40, 60_000, 60_000, 1, 8, 1)
        + bytes(60),
        "a PPM with 400 digits": b"P6 " + b"9" * 400 + b" 1 255\n" + bytes(9),
        "a PPM in letters": b"P3 8000 8000 255\n" + b"1 " * 1000,
        "a PPM of comments": b"P6 #" + b"\n#" * 1_000_000,
        "a WebP of 16383 squared": b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0/\xff\xff\xff\x0f" + bytes(8),
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(/etc/passwd) (r) file\n",
        "an SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="/etc/passwd"/></svg>',
        "a page": b"<!doctype html><title>404</title>",
        "nothing": b"",
        "one byte": b"\xff",
        "the start of a JPEG": b"\xff\xd8",
        "the start of a PNG": b"\x89PNG\r\n\x1a\n",
        "noise": rng.randbytes(5000),
    }


def with_good_ones(rng, folder, good=1):
    folder.mkdir(parents=True)
    for i in range(good):
        (folder / f"good{i}.png").write_bytes(encoded(rng))
        (folder / f"good{i}.txt").write_text(f"a good picture, number {i}")


def test_pictures_that_ask_for_much(server, tally):
    with tally("hostile pictures, made by hand") as count:
        for name, data in count.share(list(bombs(count.random).items()), least=12):
            with count.case(name) as place:
                with_good_ones(count.random, place / "in")
                suffix = count.random.choice(("png", "jpg", "webp", "tiff"))
                (place / "in" / f"bad.{suffix}").write_bytes(data)
                (place / "in" / "bad.txt").write_text("a picture that asks for much")
                try_data(server, place, "in", 2, good=1, options=count.random.choice(((), ("--size", 8))))


def test_damaged_pictures(server, tally):
    with tally("hostile pictures, damaged at random") as count:
        rng = count.random
        good = kinds(rng)
        for _ in count.share(range(160)):
            with count.case("ten damaged pictures") as place:
                count.tried += 9
                with_good_ones(rng, place / "in")
                for i in range(10):
                    (place / "in" / f"{i}.{rng.choice(('png', 'jpg'))}").write_bytes(
                        mutate(rng, rng.choice(good), good)
                    )
                    (place / "in" / f"{i}.txt").write_text(f"a damaged picture, number {i}")
                try_data(server, place, "in", 11, good=1, show=rng.random() < 0.2)


# ---------------------------------------------------------------------------- tables


def paths(place):
    """File names that a table must not read, and values that are not file names."""
    return [
        "../outside/secret.png", str(place / "outside" / "secret.png"), "link.png", "folder.png", "fifo.png",
        "/dev/zero",
        "/dev/stdin", "/proc/self/mem", "a\0b.png", "x" * 5000 + ".png", "~/x.png", "file:///etc/passwd",
        "good.png/../..",
        "missing.png", ".", "", "good.png/", "\udcff.png", "http://localhost/x.png", "\x1b[31m.png", "loop.png",
        "./good.png", "GOOD.PNG", "zero.png", "link/../../outside/secret.png", "out/secret.png",
    ]  # fmt: skip


def beside_a_table(rng, place):
    """The folder of a table, with a good picture and what a path may lead to."""
    folder = place / "in"
    folder.mkdir()
    (folder / "good.png").write_bytes(encoded(rng))
    (folder / "folder.png").mkdir()
    os.mkfifo(folder / "fifo.png")
    (folder / "link.png").symlink_to("../outside/secret.png")
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "link").symlink_to("..")
    return folder


def rows_of(rng, place, n=6):
    """Good rows, in which some cells are replaced by hostile values."""
    rows = [{"caption": f"a fine picture, number {i}", "image": "good.png", "split": "train"} for i in range(n)]
    for row in rng.sample(rows, rng.randrange(n)):
        row[rng.choice(("caption", "image", "image", "split", "extra"))] = rng.choice((*VALUES, *TEXTS, *paths(place)))
    return rows


def test_jsonl(server, tally):
    with tally("hostile tables: JSONL") as count:
        rng = count.random
        odd = [
            b"[" * 3000 + b"]" * 3000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b"null", b"1e999",
            b'{"caption": "\\ud800"}',
            b'{"caption": "x", "caption": "y", "image": "good.png"}', b"\xff\xfe{}", b"{", b'"' + b"x" * 10_000_000,
            b"9" * 100_000,
            b'{"image": {"bytes": "' + b"A" * 100 + b'", "path": "../outside/secret.png"}, "caption": "c"}',
        ]  # fmt: skip
        for _ in count.share(range(400)):
            with count.case("rows of JSON") as place:
                folder = beside_a_table(rng, place)
                rows = rows_of(rng, place)
                lines = [json.dumps(row).encode() for row in rows]
                if rng.random() < 0.3:
                    lines.insert(rng.randrange(len(lines)), rng.choice(odd))
                data = b"\n".join(lines) + b"\n"
                if rng.random() < 0.4:
                    data = mutate(rng, data, [data])
                (folder / "t.jsonl").write_bytes(data)
                filled = sum(1 for line in data.split(b"\n") if line.strip(b"\r"))
                try_data(server, place, rng.choice(("in", "in/t.jsonl")), filled, show=rng.random() < 0.3)


def test_csv(server, tally):
    with tally("hostile tables: CSV") as count:
        rng = count.random
        for _ in count.share(range(400)):
            with count.case("rows of CSV") as place:
                folder = beside_a_table(rng, place)
                rows = rows_of(rng, place)
                kind = rng.choice(("csv", "tsv"))
                text = io.StringIO(newline="")
                writer = csv.DictWriter(
                    text, ["caption", "image", "split", "extra"], delimiter="\t" if kind == "tsv" else ","
                )
                writer.writeheader()
                writer.writerows(rows)
                data = text.getvalue().encode(errors="surrogateescape" if rng.random() < 0.5 else "backslashreplace")
                number = {"count": len(rows)}
                if rng.random() < 0.5:
                    data, number = mutate(rng, data, [data, b'"', b'""",']), {}
                (folder / f"t.{kind}").write_bytes(data)
                try_data(server, place, rng.choice(("in", f"in/t.{kind}")), show=rng.random() < 0.3, **number)


def columns(rng, place):
    """Arrow arrays of four rows and every kind that strangers may have."""
    import pyarrow as pa

    when = datetime.datetime(2020, 1, 1)
    good, n = encoded(rng), 4
    arrays = {
        "text": pa.array([f"a fine picture, number {i}" for i in range(n)]),
        "path": pa.array(["good.png"] * n),
        "bytes": pa.array([good] * n),
        "struct": pa.array([{"bytes": good, "path": "good.png"}] * n),
        "struct without bytes": pa.array([{"bytes": None, "path": "../outside/secret.png"}] * n),
        "null": pa.nulls(n),
        "dates": pa.array([when.date()] * n),
        "times": pa.array([when] * n, pa.timestamp("ns", "Asia/Tokyo")),
        "far times": pa.array([2**62, -(2**62), 0, None], pa.timestamp("s")),
        "durations": pa.array([2**60] * n, pa.duration("s")),
        "decimals": pa.array([decimal.Decimal("1.5")] * n),
        "integers": pa.array([2**63 - 1, -1, 0, None]),
        "floats": pa.array([float("nan"), float("inf"), 0.0, None]),
        "booleans": pa.array([True, False, None, True]),
        "lists": pa.array([["a caption of a list", "another one"], [], None, [""]]),
        "lists of bytes": pa.array([[good]] * n),
        "deep lists": pa.array([[[[["deep"]]]]] * n),
        "no text": pa.array([b"\xff\xfe", b"", b"\xf0\x28\x8c\x28", None]).view(pa.binary()),
        "text that is none": pa.array([b"\xff\xfe", b"x", b"\xf0\x28\x8c\x28", b"y"])
        .cast(pa.binary())
        .view(pa.string()),
        "dictionary": pa.array(["one caption", "two captions"] * 2).dictionary_encode(),
        "map": pa.array([[("key", 1)]] * n, pa.map_(pa.string(), pa.int64())),
        "paths": pa.array(rng.sample([p for p in paths(place) if p.isprintable()], n)),
        "texts": pa.array(rng.sample([t for t in TEXTS if "\udcff" not in t], n)),
        "large": pa.array(["x" * 1_000_000] * n, pa.large_string()),
    }
    return arrays


def test_parquet(server, tally):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    with tally("hostile tables: Parquet") as count:
        rng = count.random
        for _ in count.share(range(350)):
            with count.case("a table of Parquet") as place:
                folder = beside_a_table(rng, place)
                arrays = columns(rng, place)
                kinds = list(arrays)
                table = {
                    "caption": arrays[rng.choice(("text", "text", rng.choice(kinds)))],
                    "image": arrays[rng.choice(("struct", "bytes", "path", rng.choice(kinds)))],
                    rng.choice(("split", "extra", "key", "\x1b[31m", "caption ")): arrays[rng.choice(kinds)],
                }
                file = folder / "t.parquet"
                try:
                    parquet.write_table(
                        pa.table(table), file, row_group_size=rng.choice((1, 3, 4)),
                        compression=rng.choice(("none", "snappy", "zstd")),
                    )  # fmt: skip
                except pa.ArrowException:
                    continue  # a type that Parquet has not
                damaged = rng.random() < 0.4
                if damaged:
                    file.write_bytes(mutate(rng, file.read_bytes()))
                number = {"least": 4} if damaged else {"count": 4}
                try_data(server, place, rng.choice(("in", "in/t.parquet")), show=rng.random() < 0.3, **number)


# ---------------------------------------------------------------------------- tars


def member(rng, name, data, **facts):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in facts.items():
        setattr(info, key, value)
    return info, data


def packed(members, kind=tarfile.USTAR_FORMAT):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind, errors="surrogateescape") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def pair(rng, key, caption="a fine picture of noise", suffix="png"):
    return [member(rng, f"{key}.{suffix}", encoded(rng)), member(rng, f"{key}.txt", caption.encode(errors="replace"))]


def odd_members(rng):
    """Broken and unusual members of a shard: (members, samples they count for; None where both answers are right)."""
    kinds = [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, b"Z"]
    word = rng.choice([t for t in TEXTS if "\0" not in t and len(t) < 3000] or ["x"])
    return rng.choice(
        [
            ([member(rng, "link.png", b"", type=rng.choice(kinds), linkname="../outside/secret.png")], None),
            ([member(rng, "../../outside/escape.png", encoded(rng))], 1),
            ([member(rng, f"{word}.png", encoded(rng))], None),
            (pair(rng, "k.e.y"), None),
            (pair(rng, "0"), None),
            (pair(rng, "x" * 300), None),
            (pair(rng, "deep/" * 30 + "x"), 1),
            ([*pair(rng, "m"), member(rng, "m.json", dump({"split": rng.choice(VALUES)}).encode())], 1),
            ([*pair(rng, "n"), member(rng, "n.json", rng.choice((b"[" * 3000, b"{", b"\xff", b"null", b"1")))], 1),
            ([member(rng, "alone.txt", b"a caption without a picture")], 1),
            ([member(rng, "alone.png", encoded(rng))], 1),
            ([member(rng, "both.png", encoded(rng)), *pair(rng, "both", suffix="jpg")], None),
            ([member(rng, "long.txt", b"x " * 500_000), member(rng, "long.png", encoded(rng))], 1),
            ([member(rng, "empty.txt", b""), member(rng, "empty.png", b"")], 1),
            ([member(rng, "other.bin", b"x")], None),
        ]
    )


def test_tars(server, tally):
    with tally("hostile tars") as count:
        rng = count.random
        for _ in count.share(range(600)):
            with count.case("a tar") as place:
                members = [one for i in range(6) for one in pair(rng, str(i))]
                for _ in range(rng.randrange(3)):
                    some, _ = odd_members(rng)
                    at = rng.choice((0, len(members), rng.randrange(0, len(members), 2)))
                    members[at:at] = some
                kind = rng.choice((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
                try:
                    data = packed(members, kind)
                except ValueError:
                    continue  # a name that this kind cannot say
                way = rng.randrange(8)
                least = 6
                if way == 0:
                    data = data[: rng.randrange(len(data))]
                elif way == 1:
                    data = mutate(rng, data, [data])
                elif way == 2:  # a header with another size and a right sum
                    data = forged(rng, data)
                elif way == 3:
                    data, least = data + packed(pair(rng, "another") + pair(rng, "one more")), 8
                elif way == 4:
                    data = data.rstrip(b"\0")
                elif way == 5:
                    at = rng.randrange(0, len(data), 512)
                    data = data[:at] + bytes(512 * rng.choice((1, 2, 3))) + data[at:]
                (place / "in").mkdir()
                (place / "in" / "00000.tar").write_bytes(data)
                try_data(server, place, rng.choice(("in", "in/00000.tar")), least=least, show=rng.random() < 0.3)


def forged(rng, data):
    out = bytearray(data)
    at = rng.choice([i for i in range(0, len(out), 512) if out[i + 257 : i + 262] == b"ustar"])
    size = rng.choice((
        b"77777777777\0", b"\x80" + bytes(3) + b"\xff" * 8, b"\xff" * 12, b"-0000000001\0", bytes(12), b"99999999999\0",
        b"\x80" + bytes(7) + b"\0\0\x02\0", b"00000000001\0",
    ))  # fmt: skip
    out[at + 124 : at + 136] = size
    if rng.random() < 0.3:
        out[at + 156] = rng.choice(b"0123456789xgLKSVMND\0\xff")
    out[at + 148 : at + 156] = b" " * 8
    out[at + 148 : at + 156] = b"%06o\0 " % sum(out[at : at + 512])
    return bytes(out)


# ---------------------------------------------------------------------------- folders


def odd_entries():
    """Ways to put something odd into a folder; each returns how many samples it is."""

    def with_picture(folder, name):
        shutil.copy(folder / "good0.png", folder / f"{name}.png")
        return 1

    def sparse(folder, name):
        with open(folder / name, "wb") as file:
            file.truncate(5 << 30)

    def loop(folder):
        (folder / "again").symlink_to(".")
        (folder / "up").symlink_to("..")

    def deep(folder):
        here = os.getcwd()
        os.chdir(folder)
        try:
            for _ in range(20):  # longer than a path may be
                os.mkdir("deeper" * 40)
                os.chdir("deeper" * 40)
            Path("x.png").write_bytes(b"x")
        finally:
            os.chdir(here)

    def listens(folder):
        with socket.socket(socket.AF_UNIX) as one:
            here = os.getcwd()
            os.chdir(folder)
            try:
                one.bind("socket.png")
            finally:
                os.chdir(here)

    def with_text(text):
        def write(folder):
            name = f"text{zlib.crc32(repr(text).encode())}"
            shutil.copy(folder / "good0.png", folder / f"{name}.png")
            (folder / f"{name}.txt").write_bytes(
                text if isinstance(text, bytes) else text.encode(errors="surrogateescape")
            )
            return 1

        return write

    def named(name):
        def write(folder):
            raw = os.fsencode(folder) + b"/" + name
            shutil.copy(folder / "good0.png", raw + b".png")
            with open(raw + b".txt", "wb") as file:
                file.write(b"a picture with an odd name")
            return 1

        return write

    def one(act):
        def write(folder):
            act(folder)
            return 1

        return write

    return {
        "a loop of folders": lambda folder: loop(folder),
        "a path that is too long": lambda folder: deep(folder),
        "a FIFO for a picture": one(lambda folder: os.mkfifo(folder / "fifo.png")),
        "a FIFO for a caption": lambda folder: os.mkfifo(folder / "f.txt") or with_picture(folder, "f"),
        "a socket for a picture": one(listens),
        "a folder for a picture": lambda folder: (folder / "folder.png").mkdir(),
        "a dangling link": one(lambda folder: (folder / "dangling.png").symlink_to("nowhere")),
        "a link to itself": one(lambda folder: (folder / "self.png").symlink_to("self.png")),
        "/dev/zero for a picture": one(lambda folder: (folder / "zero.png").symlink_to("/dev/zero")),
        "/dev/zero for a caption": lambda folder: (
            (folder / "z.txt").symlink_to("/dev/zero") or with_picture(folder, "z")
        ),
        "a picture of 5 GiB": one(lambda folder: sparse(folder, "sparse.png")),
        "a caption of 5 GiB": lambda folder: sparse(folder, "s.txt") or with_picture(folder, "s"),
        "two pictures of a name": lambda folder: shutil.copy(folder / "good0.png", folder / "good0.jpg") and 1,
        "a picture without a caption": lambda folder: with_picture(folder, "alone"),
        "a caption without a picture": lambda folder: (folder / "silent.txt").write_text("nothing to see") and 1,
        "a name that is not UTF-8": named(b"\xff\xfe"),
        "a name that paints": named(b"\x1b[31mred\x07"),
        "a name of two lines": named(b"one\ntwo"),
        "a name of 240 bytes": named("名".encode() * 80),
        "a name in capitals": named(b"CAPITAL"),
        "a name like an option": named(b"--help"),
        **{f"a caption {i}": with_text(text) for i, text in enumerate(TEXTS)},
        "a caption in UTF-16": with_text(b"\xff\xfea\0 \0b\0"),
        "a caption of zero bytes": with_text(b"\0\0"),
        "a caption of half a character": with_text(b"\xed\xa0\x80"),
        "a caption of 1-1-1": with_text("1-" * 200_000),
        "a caption of one word": with_text("x" * 10_000_000),
        "a caption of marks": with_text("a" + "\u0301" * 1_000_000),
        "a caption of digits": with_text("IMG_" + "0123456789" * 10_000),
        "a caption of a million lines": with_text("a line of it\n" * 1_000_000),
    }  # fmt: skip


def test_folders(server, tally):
    with tally("hostile folders") as count:
        rng = count.random
        entries = odd_entries()
        chosen = [[name] for name in entries] + [rng.sample(list(entries), 4) for _ in range(200)]
        for names in count.share(chosen, least=20):
            with count.case(", ".join(names)) as place:
                with_good_ones(rng, place / "in", 2)
                number = 2 + sum(int(entries[name](place / "in") or 0) for name in names)
                try_data(server, place, "in", number, good=2, show=rng.random() < 0.5)
