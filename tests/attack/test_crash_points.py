"""A command that is killed before any one of its changes of files, and given again, ends as if nothing had happened."""

import shutil

import pytest
from again import alone, go_on
from miniature import DEMO, SMALL, TRAIN
from trees import assert_same, tree

pytestmark = pytest.mark.attack


def attack(server, count, ground, argv, threads=1, helper=False):
    """Kill the command (or its helper process) at its changes of files, one after the
    other; each time the same command must resume."""
    whole = count.folder / "whole"
    shutil.copytree(ground, whole)
    ended = server.run(argv, whole, threads=threads, root=whole, log=True, environment=SMALL)
    assert ended.code == 0, ended.command
    expected = tree(whole)
    root = str(whole.resolve())
    log = ended.helper_log if helper else ended.log
    changes = [line for line in log if line.startswith("W ") and line.split(" ", 2)[2].startswith(root)]
    numbered = list(enumerate(changes, 1))
    if threads > 1 and not helper:  # up to the start of the other process it is as in one process
        first = next(i for i, line in enumerate(changes) if line.endswith("/contrastive.log"))
        numbered = numbered[max(0, first - 1) :]
    assert numbered
    for number, change in count.share(numbered, least=8):
        with count.case(f"killed at change {number}: {change}") as place:
            folder = place / "work"
            shutil.copytree(ground, folder)
            at = {"helper_at": number} if helper else {"at": number}
            killed = server.run(argv, folder, threads=threads, root=folder, environment=SMALL, timeout=300, **at)
            if helper:
                assert killed.code in (0, 2), killed.command
            else:  # two processes do not always make the same changes: it may have ended before
                assert killed.code == -9 or (threads > 1 and killed.code == 0), f"not killed\n{killed.command}"
            if (
                argv[0] == "data"
                and (folder / "result" / "dataset.json").exists()
                and not any(folder.rglob("INCOMPLETE"))
            ):
                # It was done but for its lock. Given again, it writes over nothing.
                assert server.run(argv, folder, environment=SMALL).code == 2
                assert_same(tree(folder), expected)
                continue
            go_on(server, argv, folder, threads=threads, environment=SMALL)
            alone(folder)
            assert_same(tree(folder), expected)
    shutil.rmtree(whole)


def test_train_in_one_process(server, tally, ground):
    with tally("crash points: train, one process") as count:
        attack(server, count, ground, TRAIN)


def test_train_in_two_processes(server, tally, ground):
    with tally("crash points: train, two processes, the first") as count:
        attack(server, count, ground, TRAIN, threads=2)
    with tally("crash points: train, two processes, the second") as count:
        attack(server, count, ground, TRAIN, threads=2, helper=True)


def test_demo(server, tally, ground):
    with tally("crash points: demo") as count:
        attack(server, count, ground, DEMO)


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("bundle", ("bundle", "tiny", "result", "--name", "copy")),
        ("data scenes", ("data", "scenes", "result", "--count", 24, "--size", 24)),
        ("data prepare", ("data", "prepare", "pictures", "result", "--size", 20, "--held-out", 0.2)),
        ("data emoji", ("data", "emoji", "result", "--size", 16)),
        ("convert", ("convert", "openai-dvae", "encoder.pt", "decoder.safetensors", "result", "--size", 32)),
    ],
)
def test_others(server, tally, ground, name, argv):
    with tally(f"crash points: {name}") as count:
        attack(server, count, ground, argv)


def test_a_bundle_is_replaced_or_kept(server, tally, ground):
    """A reader finds the old one, or the new one, whenever the writer was killed; the same command resumes."""
    with tally("crash points: bundle over another") as count:
        twice = count.folder / "twice"
        shutil.copytree(ground, twice)
        assert server.run(("bundle", "tiny", "result", "--name", "old"), twice).code == 0
        attack(server, count, twice, ("bundle", "tiny", "result", "--name", "copy"))
