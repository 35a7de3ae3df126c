"""A disk that becomes full gives one sentence; with free space again, the same command completes."""

import shutil

import pytest
from again import alone, go_on
from hostile import check_outcome
from miniature import DEMO, SMALL, TRAIN, ground_for_imports, world
from trees import assert_same, tree

from tiny import tiny_pipe

pytestmark = pytest.mark.attack


@pytest.mark.parametrize(
    ("name", "argv", "cases"),
    [
        ("train", TRAIN, 40),
        ("demo", DEMO, 30),
        ("bundle", ("bundle", "tiny", "out"), 20),
        ("data scenes", ("data", "scenes", "out", "--count", 24, "--size", 24), 20),
        ("data prepare", ("data", "prepare", "pictures", "out", "--held-out", 0.2), 20),
        ("convert", ("convert", "openai-dvae", "encoder.pt", "decoder.safetensors", "out", "--size", 32), 20),
        ("draw", ("draw", "two green crosses", "--model", "tiny", "--candidates", 1, "-o", "out.png"), 10),
        ("data show", ("data", "show", "pictures", "-o", "out.png"), 10),
    ],
)
def test_full_disk(server, tally, tmp_path, name, argv, cases):
    ground = tmp_path / "ground"
    world(ground)
    tiny_pipe().save_pretrained(ground / "tiny")
    ground_for_imports(ground)
    with tally(f"full disk: {name}") as count:
        whole = count.folder / "whole"
        shutil.copytree(ground, whole)
        ended = server.run(argv, whole, root=whole, log=True, environment=SMALL)
        assert ended.code == 0, ended.command
        expected = tree(whole)
        changes = [line for line in ended.log if line.startswith("W ") and line.split(" ", 2)[2].startswith(str(whole))]
        numbers = sorted(count.random.sample(range(1, len(changes) + 1), min(cases, len(changes))))
        for number in count.share(numbers, least=3):
            with count.case(f"full from change {number} on: {changes[number - 1]}") as place:
                work = place / "work"
                shutil.copytree(ground, work)
                ended = server.run(argv, work, root=work, at=number, full=True, log=True, environment=SMALL)
                check_outcome(ended, [work])
                if ended.code == 0:  # nothing was left to write
                    continue
                go_on(server, argv, work, environment=SMALL)
                alone(work)
                assert_same(tree(work), expected)
        shutil.rmtree(whole)
