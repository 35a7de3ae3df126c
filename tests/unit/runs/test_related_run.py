"""A run whose prior learns to follow related pictures, from data with subjects to its bundle."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from limner.data.image_encode import image_bytes
from limner.data.shard_writer import ShardWriter
from limner.models.transformer import TransformerConfig
from limner.pipeline import load
from limner.recipes.recipe import resolve
from limner.runs import run_data as run_data_module
from limner.runs.run_data import RunData
from limner.runs.train import train_all
from limner.text import PAD
from limner.training.metrics_log import read_metrics
from limner.validation import InvalidSetting
from tiny import tiny_recipe


def recipe(**changes):
    """Two updates of each stage; the prior follows pictures of the same subject."""
    r = tiny_recipe()
    prior = replace(
        r.prior, model=replace(r.prior.model, condition_blocks=1), related_by=("subject", "set"), augment=False
    )
    r = replace(r, prior=replace(prior, **changes))
    short = {
        name: replace(stage, training=replace(stage.training, steps=2, eval_every=2))
        for name in ("dvae", "prior", "contrastive")
        for stage in [getattr(r, name)]
    }
    return replace(r, **short)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "icons"
    with ShardWriter(folder) as writer:
        for i in range(24):
            shade = np.full((24, 24), 10 * i, np.uint8)
            meta = {"subject": f"subject {i // 4}", "set": f"set {i % 2}", "same": [f"the same, set {i % 2}"]}
            split = "held-out" if i % 4 == 3 else "train"
            writer.write(image_bytes(shade), [f"subject {i // 4}, set {i % 2}"], {**meta, "split": split})
    return folder


def test_the_prior_trains_and_draws_with_pictures_to_follow(data, tmp_path):
    train_all(recipe(), data, tmp_path / "run")
    assert "image" in str(read_metrics(tmp_path / "run/prior/metrics.jsonl")[-1])
    pipe = load(tmp_path / "run")
    assert pipe.prior.config.condition_blocks == 1
    picture = Image.new("L", (24, 24), 90)
    drawn = pipe("the same, set 1", candidates=2, prompt_tokens=pipe.like(picture))
    assert drawn[0].image.size == (24, 24)


def test_the_bundle_contains_training_pictures_by_subject(data, tmp_path):
    pipe = train_all(recipe(examples=9), data, tmp_path / "run")
    saved = load(tmp_path / "run").examples
    assert saved.subjects == pipe.examples.subjects
    assert sorted(set(saved.subjects)) == [f"subject {i}" for i in range(6)]
    assert len(saved) == 9  # evenly spaced, of 18
    every_second = [f"subject {i // 3}" for i in np.linspace(0, 17, 9).astype(int)]
    assert saved.subjects == every_second
    assert (set(saved.styles), saved.styles) == ({"set 0", "set 1"}, pipe.examples.styles)


def test_distractors_take_words_of_the_whole_data(data, tmp_path, monkeypatch):
    """Samples are often sorted, so the words of the first ones are not those of all."""
    monkeypatch.setattr(run_data_module, "MAX_COUNTED_SAMPLES", 18)
    r = recipe()
    run_data = RunData.open(replace(r, contrastive=replace(r.contrastive, distractors=2)), data, tmp_path)
    counted = run_data.contrastive_dataset(run_data.train, run_data.tokenizer(), 24).text.distractors
    assert sorted({word for words in counted.choices.values() for word in words if word.isdigit()}) == list("012345")
    monkeypatch.setattr(run_data_module, "MAX_COUNTED_SAMPLES", 6)
    few = run_data.contrastive_dataset(run_data.train, run_data.tokenizer(), 24).text.distractors
    assert few.choices and not few.choices.keys() - counted.choices.keys()


def test_samples_are_joined_with_training_pictures_of_their_subject(data, tmp_path):
    run_data = RunData.open(recipe(related_share=1.0), data, tmp_path)
    tokenizer = run_data.tokenizer()
    dvae = resolve(run_data.recipe).models["dvae"].build()
    sources = run_data.train, run_data.held_out
    datasets = [run_data.prior_dataset(source, tokenizer, dvae) for source in sources]
    assert [len(dataset) for dataset in datasets] == [18, 6]
    train = datasets[0].tokens
    for dataset, per_subject in zip(datasets, (3, 1), strict=True):
        n = len(dataset)
        given = dataset.batch(np.arange(n), np.arange(n))["given"]
        assert not (given == PAD).any()
        for i, tokens in enumerate(given):
            subject = i // per_subject
            rows = [r for r in range(3 * subject, 3 * subject + 3) if dataset is not datasets[0] or r != i]
            assert any(torch.equal(tokens, torch.from_numpy(train[r].astype(np.int64))) for r in rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"related_by": ()}, "must name keys"),
        ({"augment": True}, "must be empty with augment"),
        ({"related_by": (), "model": TransformerConfig(), "examples": 1}, "must be 0 without related_by"),
    ],
)
def test_settings_that_contradict_each_other_raise(changes, message):
    with pytest.raises(InvalidSetting, match=message):
        recipe(**changes)
