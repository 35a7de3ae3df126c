"""Attribution: read from shards, saved with the run, written to the model card, and bounded for any metadata."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from limner.cli import main
from limner.data import attribution as module
from limner.data.attribution import attribution, merge_attributions
from limner.data.open_source import open_source
from limner.data.shard_writer import ShardWriter
from limner.pipeline import load
from limner.recipes.recipe import PretrainedDVAE
from limner.runs.train import train_all
from tiny import tiny_recipe

TWEMOJI = {
    "set": "twemoji", "author": "Twitter", "license": "CC-BY-4.0", "source": "https://github.com/twitter/twemoji",
}  # fmt: skip
NOTO = {"set": "noto", "author": "Google Inc", "license": "Apache-2.0", "source": "https://example.org/noto"}


def shards(folder, metas):
    random = np.random.default_rng(0)
    with ShardWriter(folder) as writer:
        for i, meta in enumerate(metas):
            file = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (24, 24, 3), np.uint8)).save(file, "PNG")
            writer.write(file.getvalue(), [f"picture number {i} of these"], {"split": "train", **meta})
    return folder


def two_steps():
    recipe = tiny_recipe()
    for name in ("dvae", "prior", "contrastive"):
        stage = getattr(recipe, name)
        recipe = replace(recipe, **{name: replace(stage, training=replace(stage.training, steps=2))})
    return recipe


def test_a_run_keeps_whose_pictures_it_learned_from_and_its_card_says_it(tmp_path):
    held_out = {**NOTO, "author": "nobody trained on", "split": "held-out"}
    data = shards(tmp_path / "data", [TWEMOJI] * 5 + [NOTO] * 2 + [{"set": "unsaid"}, held_out])
    earlier = shards(tmp_path / "earlier", [{"author": "Ann\nB"}] * 8 + [TWEMOJI] * 2)
    train_all(two_steps(), earlier, tmp_path / "run", ("dvae",))
    pipe = train_all(two_steps(), data, tmp_path / "run")
    assert pipe is not None
    rows = [{"author": "Ann B", "pictures": 8}, {**TWEMOJI, "pictures": 5}, {**NOTO, "pictures": 2}]
    assert pipe.info["attribution"] == rows
    assert main(["bundle", str(tmp_path / "run"), str(tmp_path / "packed")]) == 0
    assert load(tmp_path / "packed").info["attribution"] == rows
    lines = (tmp_path / "packed" / "README.md").read_text().splitlines()
    at = lines.index("## Attribution")
    assert lines[at + 4 : at + 7] == [
        "- Ann B: 8 pictures",
        "- twemoji, Twitter, CC-BY-4.0, https://github.com/twitter/twemoji: 5 pictures",
        "- noto, Google Inc, Apache-2.0, https://example.org/noto: 2 pictures",
    ]

    # A run that starts from the bundle or uses its dVAE has the same attribution, also with data without metadata.
    unsaid = shards(tmp_path / "unsaid", [{}] * 8)
    again = train_all(replace(two_steps(), start=str(tmp_path / "packed")), unsaid, tmp_path / "started")
    assert again is not None and again.info["attribution"] == rows
    borrowed = replace(two_steps(), dvae=PretrainedDVAE(bundle=str(tmp_path / "packed")))
    assert (train_all(borrowed, unsaid, tmp_path / "borrowed") or pipe).info["attribution"] == rows


def test_data_that_names_nobody_leaves_no_trace(tmp_path):
    pipe = train_all(two_steps(), shards(tmp_path / "data", [{"set": "a"}] * 8), tmp_path / "run")
    assert pipe is not None and "attribution" not in pipe.info
    assert not (tmp_path / "run" / "attribution.json").exists()
    assert "Attribution" not in (tmp_path / "run" / "bundle" / "README.md").read_text()


def test_a_picture_made_of_two_is_in_the_rows_of_both(tmp_path):
    metas = [{**TWEMOJI, "pair": {"kind": "style", **NOTO}}, {**TWEMOJI, "pair": {**TWEMOJI}}, {"pair": {"kind": "x"}}]
    rows = attribution(open_source(shards(tmp_path / "data", metas)))
    assert rows == [{**TWEMOJI, "pictures": 2}, {**NOTO, "pictures": 1}]


def test_rows_are_bounded_and_all_pictures_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_ROWS", 3)
    metas = [{"license": f"L{i % 5}", "author": "x" * 999} for i in range(20)] + [{"license": "L4"}] * 2
    rows = attribution(open_source(shards(tmp_path / "data", metas)))
    assert [row.get("license") for row in rows] == ["L0", "L1", "L2", None]
    assert rows[-1] == {"pictures": 10} and sum(row["pictures"] for row in rows) == 22
    assert len(rows[0]["author"]) == 200
    assert merge_attributions(rows, rows, [{"license": "L0", "author": "x" * 200, "pictures": 3}]) == rows


@pytest.mark.parametrize("table", [None, 3, "text", {"a": 1}, [1, None], [{"pictures": True}], [{"pictures": -1}]])
def test_values_other_than_tables_have_no_rows(table):
    assert merge_attributions(table) == []


def test_an_untrusted_row_is_one_line(tmp_path):
    rows = merge_attributions([{"author": ["a", {"b": "\n## x\x1b"}], "license": 7, "pictures": 2}])
    assert rows == [{"author": "['a', {'b': '\\n## x\\x1b'}]", "license": "7", "pictures": 2}]
    assert merge_attributions(json.loads(json.dumps(rows))) == rows
