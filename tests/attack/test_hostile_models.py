"""Bundles, checkpoints, recipes and weights from strangers, or from a disk that has lost some of them."""

import json
import os
import pickle
import shutil
import struct
import zipfile

import pytest
import torch
from hostile import MEMORY, SECONDS, TEXTS, check_outcome, dump, mutate, mutate_json
from miniature import SMALL, TRAIN
from PIL import Image
from trees import assert_same, tree

pytestmark = pytest.mark.attack


def damage(rng, path, splices=()):
    """One file, damaged as disks and strangers do it."""
    data = path.read_bytes()
    way = rng.randrange(12)
    if way < 6:
        changed = mutate(rng, data, splices)
        path.write_bytes(changed if changed != data else data[:-1])
        return
    path.unlink()
    if way == 6:
        path.mkdir()
    elif way == 7:
        os.mkfifo(path)
    elif way == 8:
        path.symlink_to("/dev/zero")
    elif way == 9:
        path.symlink_to(path.name)
    elif way == 10:
        path.write_bytes(b"")


def header(rng, path):
    """A safetensors file with another header."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    head, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    way = rng.randrange(6)
    if way == 0:
        head = mutate_json(rng, head)
    elif way == 1:
        some = head[rng.choice([k for k in head if k != "__metadata__"])]
        some["shape"] = rng.choice(
            ([2**62, 4], [-1], [0], [1] * 70, [2**31] * 3, some["shape"][::-1], [*some["shape"], 1])
        )
    elif way == 2:
        some = head[rng.choice([k for k in head if k != "__metadata__"])]
        some["dtype"] = rng.choice(("F64", "I8", "BOOL", "F8_E4M3", "BF16", "C64", "U64", "X"))
    elif way == 3:
        head = {f"{k}{i}": v for k, v in head.items() for i in range(rng.choice((2, 2000)))}
    elif way == 4:
        head = {(rng.choice(TEXTS) if rng.random() < 0.3 else k): v for k, v in head.items()}
    text = dump(head).encode() if way != 5 else b'{"a":' * 5000
    size = rng.choice((len(text),) * 4 + (2**63, 2**40, 0, 7))
    path.write_bytes(struct.pack("<Q", size) + text + rest)


def values(rng, path):
    """A safetensors file with other numbers: NaN, infinities, the largest."""
    data = bytearray(path.read_bytes())
    start = 8 + struct.unpack("<Q", data[:8])[0]
    for _ in range(rng.choice((1, 10, 1000))):
        at = rng.randrange(start, len(data) - 2) & ~1
        data[at : at + 2] = struct.pack("<e", rng.choice((float("nan"), float("inf"), -float("inf"), 65504.0, 1e-7)))
    path.write_bytes(bytes(data))


def test_bundles(server, tally, ground):
    with tally("hostile bundles") as count:
        rng = count.random
        weights = ["dvae.safetensors", "prior.safetensors", "contrastive.safetensors"]
        models = ["tiny", "eight"]  # the paper's dVAE in 16 bits; one of patches and matrices in 8
        splices = [(ground / model / name).read_bytes() for model in models for name in weights]
        written = {path.read_bytes() for model in models for path in (ground / model).iterdir()}
        for _ in count.share(range(800)):
            with count.case("a bundle") as place:
                model = rng.choice(models)
                shutil.copytree(ground / model, place / "m")
                for _ in range(rng.choice((1, 1, 1, 2))):
                    way = rng.randrange(6)
                    file = place / "m" / rng.choice((*weights, "config.json", "config.json", "tokenizer.json"))
                    if not file.is_file():
                        continue
                    if file.suffix == ".json" and way < 5 and file.read_bytes() in written:
                        file.write_text(dump(mutate_json(rng, json.loads(file.read_text()))))
                    elif way < 2 and file.suffix == ".safetensors" and file.read_bytes() in written:
                        header(rng, file)
                    elif way == 2 and file.suffix == ".safetensors" and file.read_bytes() in written:
                        values(rng, file)
                    else:
                        damage(rng, file, splices)
                if rng.random() < 0.8:
                    argv = (
                        "draw",
                        "two green crosses",
                        "--model",
                        "m",
                        "--candidates",
                        2,
                        "--scale",
                        1,
                        "-o",
                        "out.png",
                    )
                else:
                    argv = ("bundle", "m", "out.png")
                ended = server.run(argv, place, root=place, log=True, timeout=SECONDS, memory=MEMORY)
                check_outcome(ended, [place / "out.png"])
                if ended.code == 0 and argv[0] == "draw":
                    with Image.open(place / "out.png") as picture:
                        assert (
                            picture.size == (24, 24)
                            or (place / "m" / "config.json").read_bytes()
                            != (ground / model / "config.json").read_bytes()
                        ), f"a picture of {picture.size}: {ended.command}"


def test_checkpoints(server, tally, ground):
    """With the newest checkpoint damaged, a run resumes from the one before and ends with the same bits, and reports it
    once. With both damaged it says so in a sentence."""
    argv = (*TRAIN, "--stages", "dvae", "--dvae.training.steps", 6)
    with tally("damaged checkpoints") as count:
        rng = count.random
        whole = count.folder / "whole"
        shutil.copytree(ground, whole)
        ended = server.run(argv, whole, root=whole, log=True)
        assert ended.code == 0, ended.command
        changes = [line for line in ended.log if line.startswith("W ") and line.split(" ", 2)[2].startswith(str(whole))]
        number = next(i for i, line in enumerate(changes, 1) if "step-00000006" in line)  # 2 and 4 are whole
        expected = tree(whole / "run")
        killed = count.folder / "killed"
        shutil.copytree(ground, killed)
        assert server.run(argv, killed, root=killed, at=number).code == -9
        saved = sorted(p.name for p in (killed / "run" / "dvae" / "checkpoints").glob("step-*"))
        assert saved == ["step-00000002", "step-00000004"]
        for _ in count.share(range(120)):
            both = rng.random() < 0.25
            with count.case("both damaged" if both else "the newest damaged") as place:
                shutil.copytree(killed, place / "work")
                for name in saved if both else saved[1:]:
                    folder = place / "work" / "run" / "dvae" / "checkpoints" / name
                    file = rng.choice(sorted(folder.iterdir()))
                    if rng.random() < 0.1:
                        shutil.rmtree(folder)
                        folder.write_bytes(b"") if rng.random() < 0.5 else folder.mkdir()
                    elif file.suffix == ".safetensors" and rng.random() < 0.3:
                        header(rng, file)
                    else:
                        damage(rng, file)
                work = place / "work"
                ended = server.run(argv, work, root=work, log=True, timeout=SECONDS, memory=MEMORY)
                check_outcome(ended, [work / "run"])
                if both:
                    assert ended.code in (0, 2), ended.command
                    if ended.code == 2:
                        continue
                else:
                    assert ended.code == 0, f"an older checkpoint is whole: {ended.command}"
                    output = [
                        line
                        for line in ended.err.splitlines()
                        if line.startswith("limner: warning: ") and "step-" in line
                    ]
                    assert len(output) <= 1, f"reported {len(output)} times: {ended.command}"
                assert_same(tree(work / "run"), expected)
        for used in (whole, killed):
            shutil.rmtree(used)


def test_recipes(server, tally, ground):
    with tally("hostile recipes") as count:
        rng = count.random
        recipe = json.loads((ground / "recipe.json").read_text())
        for _ in count.share(range(300)):
            with count.case("a recipe") as place:
                shutil.copytree(ground, place / "work")
                changed = recipe
                for _ in range(rng.choice((1, 1, 1, 2))):
                    changed = mutate_json(rng, changed)
                (place / "work" / "recipe.json").write_text(dump(changed))
                try_training(server, place / "work", TRAIN)


def try_training(server, work, argv, seconds=15, **options):
    """The rule, for commands that may have been asked for days of work: those are interrupted after a while."""
    process = server.start(argv, work, root=work, log=True, memory=MEMORY, environment=SMALL, **options)
    ended = process.ended_or_interrupted(seconds, SECONDS)
    check_outcome(ended, [work / "run", work / "out", work / "out.png"], codes=(0, 2, 130))
    if ended.code == 0 and argv[0] == "train" and (work / "run" / "bundle").exists():
        drawn = server.run(
            ("draw", "two green crosses", "--model", "run", "--candidates", 1, "-o", "out.png"), work, timeout=SECONDS
        )
        assert drawn.code == 0, f"what was trained does not draw: {ended.command}\n{drawn.command}"
    return ended


class Evil:
    """Runs a command where it is unpickled."""

    def __reduce__(self):
        return (os.system, ("touch PWNED",))


def weight_files(rng, good):
    """Files of invalid or harmful weights."""
    state = dict(good)
    first = next(iter(state))
    several = {k.replace("group_1", "group_100000000000"): v for k, v in state.items()}
    return {
        "a pickle that runs code": lambda p: p.write_bytes(pickle.dumps(Evil())),
        "a torch file that runs code": lambda p: torch.save({**state, "evil": Evil()}, p),
        "a state dict in a state dict": lambda p: torch.save({"state_dict": state}, p),
        "groups without end": lambda p: torch.save(several, p),
        "blocks without end": lambda p: torch.save(
            {k.replace("block_1", f"block_{10**4000}"): v for k, v in state.items()}, p
        ),
        "a tensor of no size": lambda p: torch.save({**state, first: torch.zeros(0)}, p),
        "a tensor of many sizes": lambda p: torch.save({**state, first: torch.zeros([1] * 60)}, p),
        "tensors of 2^40 numbers": lambda p: torch.save({k: torch.zeros(1).expand(2**40) for k in state}, p),
        "numbers for tensors": lambda p: torch.save(dict.fromkeys(state, 1), p),
        "numbers for keys": lambda p: torch.save(dict(enumerate(state.values())), p),
        "keys that paint": lambda p: torch.save({f"\x1b[31m{k}": v for k, v in state.items()}, p),
        "complex numbers": lambda p: torch.save({k: v.to(torch.complex64) for k, v in state.items()}, p),
        "NaN": lambda p: torch.save({k: v * float("nan") for k, v in state.items()}, p),
        "sparse tensors": lambda p: torch.save({k: v.to_sparse() for k, v in state.items()}, p),
        "a list": lambda p: torch.save(list(state.values()), p),
        "a deep pickle": lambda p: p.write_bytes(b"\x80\x02" + b"(" * 1_000_000 + b"."),
        "a long pickle": lambda p: p.write_bytes(b"\x80\x02" + b"N0" * 1_000_000 + b"N."),
        "a pickle of 2^31 bytes that are not there": lambda p: p.write_bytes(b"\x80\x02B\xff\xff\xff\x7f"),
        "a zip that grows": lambda p: _zip(p, bytes(1 << 28)),
        "an empty zip": lambda p: p.write_bytes(b"PK\x05\x06" + bytes(18)),
        "nothing": lambda p: p.write_bytes(b""),
        "noise": lambda p: p.write_bytes(rng.randbytes(3000)),
        "a folder": lambda p: p.mkdir(),
        "a FIFO": lambda p: os.mkfifo(p),
        "/dev/zero": lambda p: p.symlink_to("/dev/zero"),
        "a link to itself": lambda p: p.symlink_to(p.name),
        "no file": lambda p: None,
        "a module": lambda p: torch.save(torch.nn.Linear(2, 2), p),
        "five GiB of holes": lambda p: p.write_bytes(b"") or os.truncate(p, 5 << 30),
    }


def _zip(path, data):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3")


@pytest.mark.parametrize(
    ("command", "names", "options"),
    [
        ("openai-dvae", ("encoder.pt", "decoder.safetensors"), ("--size", 32)),
        ("clip", ("clip.safetensors", "merges.txt"), ("--activation", "gelu")),
    ],
)
def test_imports(server, tally, ground, command, names, options):
    good = torch.load(ground / "encoder.pt", weights_only=True)
    with tally(f"hostile weights to import: {command}") as count:
        rng = count.random
        made = weight_files(rng, good)
        for name in count.share([*made, *["damaged"] * 150], least=10):
            with count.case(name) as place:
                suffix = rng.choice(("pt", "pkl", "pth"))
                half, files = rng.choice(names), dict(zip(names, names, strict=True))
                for file in names:
                    shutil.copy(ground / file, place / file)
                bad = place / f"bad.{suffix}"
                if name == "damaged":
                    original = ground / half
                    bad = bad.with_suffix(original.suffix)
                    shutil.copy(original, bad)
                    if bad.suffix == ".safetensors" and rng.random() < 0.5:
                        header(rng, bad)
                    else:
                        bad.write_bytes(mutate(rng, bad.read_bytes()))
                else:
                    made[name](bad)
                files[half] = bad.name
                argv = ("convert", command, *files.values(), "out", *options)
                ended = server.run(argv, place, root=place, log=True, timeout=SECONDS, memory=MEMORY)
                assert not (place / "PWNED").exists(), f"it runs code: {ended.command}"
                check_outcome(ended, [place / "out"])
