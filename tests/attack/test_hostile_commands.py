"""Every command with every option, given what nobody should give."""

import json
import os
import re
import shutil

import pytest
from hostile import MEMORY, NUMBERS, SECONDS, TEXTS, check_outcome
from miniature import DEMO, SMALL, TRAIN
from PIL import Image

from toy_icons import write_toy_icons

pytestmark = pytest.mark.attack

CAPTION = "two green crosses, teal background"
#: A right call of each command, small, and how much of the attack it gets.
COMMANDS = {
    "draw": (("draw", CAPTION, "--model", "tiny", "--candidates", 1, "--scale", 1, "-o", "out.png"), 3),
    "edit": (("edit", "picture.png", CAPTION, "--keep-rows", "3", "--model", "tiny", "--candidates", 1, "-o",
    "out.png"), 2),
    "data scenes": (("data", "scenes", "out", "--count", 8, "--size", 24), 2),
    "data emoji": (("data", "emoji", "out", "--size", 16), 1),
    "data icons": (("data", "icons", "out", "icons.json", "--size", 16), 2),
    "data glyphs": (("data", "glyphs", "out", "icons.json", "--size", 16, "--styles", 1), 1),
    "data prepare": (("data", "prepare", "pictures", "out"), 2),
    "data show": (("data", "show", "pictures", "-o", "out.png"), 1),
    "train": (TRAIN, 8),
    "demo": (DEMO, 1),
    "plan": (("plan", "--recipe", "tiny"), 2),
    "bundle": (("bundle", "tiny", "out", "--name", "copy"), 1),
    "import openai-dvae": (
        ("convert", "openai-dvae", "encoder.pt", "decoder.safetensors", "out", "--size", 32), 1,
    ),
    "import clip": (("convert", "clip", "clip.safetensors", "merges.txt", "out", "--activation", "gelu"), 1),
    "evaluate composition": (
        ("evaluate", "composition", "tiny", "--captions", 2, "--candidates", 1, "-o", "out.json"), 1,
    ),
    "evaluate pairs": (("evaluate", "pairs", "tiny", "--pairs", 1, "--candidates", 1, "-o", "out.json"), 1),
    "evaluate reconstruction": (("evaluate", "reconstruction", "tiny", "--count", 4, "-o", "out.json"), 1),
    "evaluate zero-shot": (("evaluate", "zero-shot", "tiny", "--count", 4, "-o", "out.json"), 1),
    "evaluate emoji": (("evaluate", "emoji", "tiny", "data", "--captions", 1, "--candidates", 1, "-o", "out.json"), 1),
    "evaluate icons": (
        ("evaluate", "icons", "tiny", "icons", "--captions", 1, "--candidates", 1, "--classifier-steps", 1, "-o",
        "o.json"),
        1,
    ),
    "evaluate glyphs": (
        ("evaluate", "glyphs", "tiny", "icons", "--captions", 1, "--candidates", 1, "--classifier-steps", 1, "-o",
        "o.json"),
        1,
    ),
    "evaluate grid": (("evaluate", "grid", "tiny", "icons", "--candidates", 1, "-o", "out.png"), 1),
    "inspect spikes": (("inspect", "spikes", "stage", "-o", "out.png"), 1),
    "bench": (("bench", "--grids", 4, "--candidates", 1), 1),
}  # fmt: skip
_SAID = {"data": 2, "evaluate": 2, "convert": 2, "inspect": 2}  # words that name a command


MIT = {"info": {"name": "Toys", "author": {"name": "A"}, "license": {"spdx": "MIT"}}}


@pytest.fixture(scope="module")
def ground(ground):
    """The folder with invalid places to write to."""
    Image.new("RGB", (24, 24), (0, 128, 128)).save(ground / "picture.png")
    write_toy_icons(ground / "icons")
    drawing = {"body": '<path fill="#f00" d="M2 2h4v4H2z"/>', "width": 8, "height": 8}
    (ground / "icons.json").write_text(json.dumps({"prefix": "toys", "icons": {"tiger": drawing}, **MIT}))
    rows = [{"step": i + 1, "loss": 1 / (i + 1), "rms": {"head.weight": 1.0}} for i in range(40)]
    (ground / "stage").mkdir()
    (ground / "stage" / "stability.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.mkfifo(ground / "fifo")
    (ground / "full").symlink_to("/dev/full")
    (ground / "file").write_text("{}")
    return ground


def options_of(server, argv, place):
    """The options that a command's help names."""
    words = argv[: _SAID.get(argv[0], 1)]
    recipe = ("--recipe", "recipe.json") if argv[0] == "train" else ()
    ended = server.run((*words, *recipe, "--help"), place, timeout=SECONDS)
    assert ended.code == 0, ended.command
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][\w.-]*", ended.out)) - {"--help"})


def hostile_argv(rng, argv, options):
    """The call with something changed: an option's value, an argument, an option twice, words left out."""
    words = [str(word) for word in argv]
    values = [t for t in (*NUMBERS, *NUMBERS, *TEXTS) if "\0" not in t]
    values += [
        "fifo",
        "file",
        "full",
        "full/x",
        "picture.png/x",
        "data",
        "tiny",
        "out",
        "名" * 84,
        "x" * 5000,
        "[1,2]",
        "1 2",
    ]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        way = rng.randrange(12)
        value = rng.choice(values)
        if way < 7 and options:
            option = rng.choice(options)
            words += [f"{option}={value}"] if rng.random() < 0.5 else [option, value]
        elif way < 9:
            words[rng.randrange(1, len(words))] = value
        elif way == 9:
            del words[rng.randrange(1, len(words))]
        elif way == 10:
            words.insert(rng.randrange(1, len(words) + 1), value)
        else:
            words += [rng.choice(words), "-" + rng.choice(words)]
    return words


@pytest.mark.parametrize("name", list(COMMANDS))
def test_command_lines(server, tally, ground, name):
    argv, weight = COMMANDS[name]
    with tally(f"command lines: {name}") as count:
        rng = count.random
        options = options_of(server, argv, ground)
        for number in count.share(range(60 * weight)):
            words = hostile_argv(rng, argv, options)
            if name == "train" and number < len(options):  # each at least once
                words = [*map(str, argv), f"{options[number]}={rng.choice(NUMBERS)}"]
            shown = " ".join(word if len(word) < 60 else word[:60] + "..." for word in words)
            with count.case(shown) as place:
                work = place / "work"
                shutil.copytree(ground, work, symlinks=True, copy_function=os.link, ignore=lambda *_: {"fifo"})
                os.mkfifo(work / "fifo")
                before = listing(work)
                try_command(server, work, words)
                touched = [path for path, what in before.items() if listing(work).get(path) != what]
                named = [
                    path for path in touched if any(path == w or path in w or w.rstrip("/") in path for w in words if w)
                ]
                assert set(touched) <= set(named), f"changed other files than it was asked to: {touched}"


def listing(folder):
    """Size and time of each file."""
    return {
        str(p.relative_to(folder)): (p.lstat().st_size, p.lstat().st_mtime_ns)
        for p in folder.rglob("*")
        if not p.is_dir()
    }


def try_command(server, work, words, seconds=10):
    """The rule; a command that was asked for days of work is interrupted after some seconds."""
    process = server.start(words, work, root=work, log=True, memory=MEMORY, environment=SMALL)
    ended = process.ended_or_interrupted(seconds, SECONDS)
    check_outcome(ended, [work.parent], codes=(0, 2, 130))  # an output may be named ".."
    if ended.code == 0 and "train" in words[:1] and (work / "run" / "bundle").exists():
        drawn = server.run(("draw", CAPTION, "--model", "run", "--candidates", 1, "-o", "o.png"), work, timeout=SECONDS)
        assert drawn.code == 0, f"what was trained does not draw: {ended.command}\n{drawn.command}"
