"""Synthetic scenes as a data set: the same command writes the same bytes, with ground truth for every picture."""

import io

import numpy as np
import pytest
from PIL import Image

from limner.data.shard_reader import ShardReader
from limner.tasks import rendering, verify
from limner.tasks.build_scenes import SceneDataSettings, write_scenes
from limner.tasks.scenes import Scene, ScenePair


def samples(folder):
    reader = ShardReader(sorted(folder.glob("*.tar")))
    return [reader[i] for i in range(len(reader))]


def pixels(sample):
    assert sample.image.startswith(b"\x89PNG")
    return np.asarray(Image.open(io.BytesIO(sample.image)))


def test_captions_and_truth_are_those_of_the_picture(tmp_path):
    ticks = []
    summary = write_scenes(tmp_path / "a", SceneDataSettings(count=60, seed=3, held_out=0.4, pairs=0.4), ticks.append)
    found = samples(tmp_path / "a")
    assert len(found) == summary["kept"] == sum(ticks) == 60
    kinds = set()
    for sample in found:
        picture = pixels(sample)
        if "pair" in sample.meta:
            pair = ScenePair.from_dict(sample.meta["pair"])
            truth, split = rendering.render_pair(pair), pair.top.split
        else:
            scene = Scene.from_dict(sample.meta["scene"])
            truth, split = rendering.render(scene), scene.split
        kinds.add(("pair" in sample.meta, split))
        assert (picture == truth).all() and sample.meta["split"] == split
        assert 1 <= len(set(sample.captions)) == len(sample.captions)
        assert all(verify.satisfies(picture, caption) for caption in sample.captions)
    assert len(kinds) == 4
    assert max(len(sample.captions) for sample in found) > 2
    assert summary["splits"] == {s: sum(x.meta["split"] == s for x in found) for s in summary["splits"]}


def test_the_bytes_depend_on_the_command_alone(tmp_path):
    for name, count, seed in (("a", 12, 5), ("b", 12, 5), ("other seed", 12, 6), ("more", 20, 5)):
        write_scenes(tmp_path / name, SceneDataSettings(count=count, seed=seed))
    read = {p.name: [f.read_bytes() for f in sorted(p.iterdir())] for p in tmp_path.iterdir()}
    assert read["a"] == read["b"] != read["other seed"]
    first, more = samples(tmp_path / "a"), samples(tmp_path / "more")
    assert [(s.image, s.captions) for s in first] == [(s.image, s.captions) for s in more[:12]]


@pytest.mark.parametrize(("kind", "least"), [("described", 1), ("crowded", 4)])
def test_kinds_and_sizes(tmp_path, kind, least):
    write_scenes(tmp_path / kind, SceneDataSettings(count=12, size=24, kind=kind, pairs=0.0))
    for sample in samples(tmp_path / kind):
        assert pixels(sample).shape == (24, 24, 3)
        assert len(sample.meta["scene"]["objects"]) >= least - 1
    assert len(samples(tmp_path / kind)) == 12
