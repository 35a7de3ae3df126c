"""Shards: reading returns the written samples, the same samples give the same bytes, and unfinished folders fail."""

import json
import math
import tarfile

import pytest
from hypothesis import given, settings, strategies as st

from limner.data.shard_reader import ShardReader
from limner.data.shard_writer import ShardWriter
from limner.errors import UserError
from tar_files import write

SAMPLES = st.lists(
    st.tuples(
        st.binary(min_size=1, max_size=1500),
        st.lists(st.text("ab éß日", min_size=1).filter(str.strip), min_size=1, max_size=3),
        st.sampled_from(["train", "held-out"]),
    ),
    max_size=12,
)


@given(samples=SAMPLES)
@settings(max_examples=25, deadline=None)
def test_round_trip_and_stable_bytes(samples, tmp_path_factory):
    paths = write(tmp_path_factory.mktemp("a") / "x", samples)
    again = write(tmp_path_factory.mktemp("b") / "x", samples)
    assert [p.read_bytes() for p in paths] == [p.read_bytes() for p in again]
    assert len(paths) == -(-len(samples) // 5)
    reader = ShardReader(paths)
    assert len(reader) == len(samples)
    for index, (image, captions, split) in enumerate(samples):
        sample = reader[index]
        assert sample.image == image
        assert sample.captions == tuple(" ".join(c.split()) for c in captions)
        assert sample.meta["split"] == reader.meta(index)["split"] == split


def test_summary_counts(tmp_path):
    with ShardWriter(tmp_path / "out") as writer:
        writer.write(b"x", ["a b"], {"split": "train"})
        writer.write(b"y", ["c d"], {"split": "held-out"})
        for reason in ("broken image", "missing caption", "broken image"):
            writer.counts.rejected[reason] += 1
    assert json.loads((tmp_path / "out/dataset.json").read_text()) == {
        "count": 5,
        "kept": 2,
        "rejected": {"broken image": 2, "missing caption": 1},
        "splits": {"train": 1, "held-out": 1},
        "shards": 1,
    }


def test_an_interrupted_writer_leaves_nothing_that_reads(tmp_path):
    out = tmp_path / "out"

    def interrupted():
        with ShardWriter(out, per_shard=2) as writer:
            for n in range(5):
                writer.write(b"x%d" % n, [f"caption {n}"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not (out / "dataset.json").exists()
    with pytest.raises(UserError, match="incomplete"):
        ShardReader(sorted(out.glob("*.tar")))
    # The same command again starts afresh and completes.
    paths = write(out, [(b"z", ["a caption"], "train")])
    assert [path.name for path in paths] == ["00000.tar"]
    assert len(ShardReader(paths)) == 1
    assert sorted(path.name for path in out.iterdir()) == ["00000.tar", "dataset.json"]


def test_two_writers_do_not_share_a_folder(tmp_path):
    with ShardWriter(tmp_path / "out") as writer:
        writer.write(b"picture", ["one"])
        with pytest.raises(UserError, match="another process .*is writing to"):
            ShardWriter(tmp_path / "out").__enter__()
        writer.write(b"picture", ["two"])
    assert len(ShardReader([tmp_path / "out" / "00000.tar"])) == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["00000.tar", "dataset.json"]


def test_a_folder_in_use_raises_an_error(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="not empty"):
        ShardWriter(tmp_path).__enter__()
    assert (tmp_path / "thesis.txt").read_text() == "precious"
    with pytest.raises(UserError, match="is a file"):
        ShardWriter(tmp_path / "thesis.txt").__enter__()


def test_metadata_with_numbers_that_are_not_finite_is_json(tmp_path):
    with ShardWriter(tmp_path) as writer:
        writer.write(b"picture", ["a caption"], {"a": {"b": [math.nan, 1.5]}})
    with tarfile.open(tmp_path / "00000.tar") as shard:
        text = shard.extractfile("000000000.json").read()
    assert json.loads(text, parse_constant=pytest.fail)["a"] == {"b": [None, 1.5]}
