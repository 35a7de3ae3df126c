"""Finetuning learns new pictures, keeps the best step, stops by itself, and resumes bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from limner import pretrained
from limner.bundles import read_info
from limner.cli import main
from limner.errors import UserError
from limner.evaluation.validation import held_out_metrics
from limner.json_files import read_json
from limner.pipeline import load
from limner.progress import Progress
from limner.retrieval import Examples
from limner.runs import finetune as module
from limner.runs.finetune import PATIENCE, BestStep, MixedStream, finetune
from limner.runs.finetune_methods import ElasticFinetuning, FullFinetuning, LoRA
from limner.runs.ordinary_samples import ORDINARY_SAMPLES, ordinary_captions, rehearsal
from limner.tasks.captions import parse
from limner.text import PAD
from limner.training.config import TrainConfig
from limner.training.freezing_rules import ScheduledFreezing
from limner.training.metrics_log import read_metrics
from limner.training.train_state import TrainState
from tiny import WORDS, tiny_pipe

CONFIG = LoRA(rank=4, steps=6, batch_size=4, score_every=2, lr=5e-2)
ELASTIC = ElasticFinetuning(
    steps=18,
    batch_size=4,
    score_every=2,
    lr=1e-3,
    freezing=ScheduledFreezing(share=0.6, start=0, end=0),
    freeze_every=2,
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return tiny_pipe(sharp=3.0).save_pretrained(tmp_path_factory.mktemp("bundles") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 256, (24, 24, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text("a zog above a large blue square")
    return folder


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("captions") / "captions.txt"
    path.write_text("\n".join(WORDS) + "\n\n")
    return str(path)


@pytest.fixture(autouse=True)
def few_ordinary_samples(monkeypatch):
    monkeypatch.setattr("limner.runs.ordinary_samples.ORDINARY_SAMPLES", 12)
    monkeypatch.setattr(module, "SCORED_SAMPLES", 4)


def test_a_run_learns_the_new_pictures_and_writes_an_adapter_and_a_bundle(bundle, data, words, tmp_path):
    best = finetune(bundle, data, tmp_path / "run", CONFIG, words)
    steps, new, ordinary = zip(*best.scores, strict=True)
    assert steps == (0, 2, 4, 6)
    assert best.best_row[1] < new[0] - 0.05
    assert best.best_row[1] + best.best_row[2] == min(map(sum, zip(new, ordinary, strict=True)))
    adapted, merged = load(bundle, adapter=tmp_path / "run/adapter").prior, load(tmp_path / "run").prior
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value, adapted.state_dict()[name], rtol=1e-3, atol=1e-3)  # half precision
    info = read_info(tmp_path / "run")
    assert (info["name"], info["start"], info["samples"]) == ("run", str(bundle), 3)


def test_the_adapter_of_the_best_step_has_its_score(bundle, data, words, tmp_path):
    best = finetune(bundle, data, tmp_path / "run", CONFIG, words)
    pipe = load(bundle, adapter=tmp_path / "run/adapter")
    new = module._encode(pipe, module.open_source(str(data)), tmp_path / "run")
    measured = held_out_metrics(module.Autoregressive(), new, 64, pipe.device)(pipe.prior, 0)["image"]
    assert measured == pytest.approx(best.best_row[1], abs=2e-2)  # the run measures in its own precision


@pytest.mark.parametrize(("config", "at"), [(CONFIG, 4), (ELASTIC, 14)])
def test_an_interrupted_run_resumes_bit_for_bit(bundle, data, words, tmp_path, monkeypatch, config, at):
    finetune(bundle, data, tmp_path / "whole", config, words)
    with monkeypatch.context() as patch:

        def interrupted(self, run, metrics):
            if run.step == at:
                raise KeyboardInterrupt
            after_eval(self, run, metrics)

        after_eval = BestStep.after_eval
        patch.setattr(BestStep, "after_eval", interrupted)
        with pytest.raises(KeyboardInterrupt):
            finetune(bundle, data, tmp_path / "resumed", config, words)
    resumed = finetune(bundle, data, tmp_path / "resumed", config, words)
    assert [row[0] for row in resumed.scores] == list(range(0, config.steps + 1, 2))
    whole, resumed = (load_file(tmp_path / name / "bundle/prior.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_full_finetuning_writes_a_bundle_with_the_weights_of_the_best_step(bundle, data, words, tmp_path):
    config = FullFinetuning(steps=6, batch_size=4, score_every=2, lr=5e-3)
    best = finetune(bundle, data, tmp_path / "run", config, words)
    assert best.best_row[1] < best.scores[0][1] - 0.05
    assert not (tmp_path / "run/adapter").exists()
    pipe, start = load(tmp_path / "run"), load(bundle)
    new = module._encode(pipe, module.open_source(str(data)), tmp_path / "run")
    measured = held_out_metrics(module.Autoregressive(), new, 64, pipe.device)(pipe.prior, 0)["image"]
    assert measured == pytest.approx(best.best_row[1], abs=2e-2)
    assert (pipe.info["finetuning"], pipe.info["start"]) == ("full", str(bundle))
    changed = [
        name for name, value in start.prior.state_dict().items() if not value.equal(pipe.prior.state_dict()[name])
    ]
    assert {"embed.image.weight", "blocks.0.mlp.branch.up.weight", "head.image.weight"} <= set(changed)


def test_elastic_finetuning_freezes_and_caches_and_has_the_losses_of_the_uncached_run(bundle, data, words, tmp_path):
    rows = {}
    for name, cache_mb in (("cached", 64), ("computed", 0)):
        finetune(bundle, data, tmp_path / name, replace(ELASTIC, cache_mb=cache_mb), words)
        rows[name] = read_metrics(tmp_path / name / "prior/metrics.jsonl")
        assert not (tmp_path / name / "activations").exists()
    losses = {name: [row["loss"] for row in part] for name, part in rows.items()}
    assert losses["cached"] == pytest.approx(losses["computed"], abs=1e-5)
    assert [row["frozen"] for row in rows["cached"]][-2:] == [3, 3]
    assert rows["cached"][-1]["cache/hits"] > 0
    start, pipe = load(bundle).prior.state_dict(), load(tmp_path / "cached").prior.state_dict()
    assert not start["blocks.0.mlp.branch.up.weight"].equal(pipe["blocks.0.mlp.branch.up.weight"])  # the warm-up


def test_another_method_in_the_same_folder_is_refused(bundle, data, words, tmp_path):
    finetune(bundle, data, tmp_path / "run", FullFinetuning(steps=1, batch_size=2), words)
    with pytest.raises(UserError, match="another finetuning.method"):
        finetune(bundle, data, tmp_path / "run", ElasticFinetuning(steps=1, batch_size=2), words)


def test_a_run_with_another_rank_is_refused(bundle, data, words, tmp_path):
    finetune(bundle, data, tmp_path / "run", LoRA(steps=1, batch_size=2), words)
    with pytest.raises(UserError, match="another adapter.rank"):
        finetune(bundle, data, tmp_path / "run", LoRA(rank=2, steps=1, batch_size=2), words)


@pytest.fixture(scope="module")
def follower(tmp_path_factory):
    """A bundle whose prior follows one of its training pictures."""
    pipe = tiny_pipe(sharp=3.0, condition_blocks=1)
    tokens = np.random.default_rng(0).integers(0, 32, (40, 36), np.uint16)
    pipe.examples = Examples(tokens, ["cross", "circle"] * 20, [f"style {i // 2}" for i in range(40)])
    return pipe.save_pretrained(tmp_path_factory.mktemp("bundles") / "follower")


@pytest.mark.parametrize("config", [CONFIG, FullFinetuning(steps=6, batch_size=4, score_every=2, lr=5e-3)])
def test_new_pictures_follow_examples_and_become_some(follower, tmp_path, config):
    data = tmp_path / "mine"
    data.mkdir()
    for i, subject in enumerate(["cross", "circle", "two stars"]):
        pixels = np.random.default_rng(i).integers(0, 256, (24, 24, 3), np.uint8)
        Image.fromarray(pixels).save(data / f"{i}.png")
        (data / f"{i}.txt").write_text(f"{subject}, my set")
    best = finetune(follower, data, tmp_path / "run", config)
    assert best.best_row[1] < best.scores[0][1] - 0.05
    assert not (tmp_path / "run/ordinary.safetensors").exists()  # training pictures instead of drawings
    tuned = [load(tmp_path / "run")]
    if config is CONFIG:
        tuned.append(load(follower, adapter=tmp_path / "run/adapter"))
    for pipe in tuned:
        start = load(follower).examples
        assert pipe.examples.subjects == [*start.subjects, "cross", "circle", "two stars"]
        assert pipe.examples.styles[-3:] == ["my set"] * 3
        pictures = np.stack([np.asarray(Image.open(data / f"{i}.png")).transpose(2, 0, 1) for i in range(3)])
        assert np.array_equal(pipe.examples.tokens[-3:], pipe.dvae.tokenize(torch.from_numpy(pictures)))
        assert pipe("two stars, my set", candidates=1)[0].settings["follows"] == "two stars, my set"
    with pytest.raises(UserError, match="leave out --ordinary"):
        finetune(follower, data, tmp_path / "other", config, str(data))
    with pytest.raises(UserError, match="set cache_mb to 0"):
        finetune(follower, data, tmp_path / "elastic", ELASTIC)


@pytest.mark.parametrize(("count", "scored"), [(3, 0), (19, 0), (20, 2), (45, 4)])
def test_of_many_new_pictures_one_in_ten_is_scored_and_does_not_train(follower, count, scored, words, tmp_path):
    pipe = load(follower)
    tokens = np.random.default_rng(1).integers(0, 32, (count, 36))
    new = module._dataset(pipe, tokens, [(f"{i} crosses",) for i in range(count)])
    for captions in (None, [*WORDS * 6]):
        samples = module._samples(pipe, new, captions, tmp_path, 0)
        trained, measured = ({tuple(x) for x in part.tokens.tolist()} for part in (samples.new, samples.measured_new))
        assert trained | measured == {tuple(x) for x in tokens.tolist()}
        assert len(measured) == (scored or count)
        assert bool(trained & measured) == (scored == 0)
        assert [samples.new.captions[i][0] for i in range(len(samples.new))] == [
            f"{tokens.tolist().index(row)} crosses" for row in samples.new.tokens.tolist()
        ]


def test_most_samples_follow_another_example_of_their_subject(follower):
    pipe = load(follower)
    trained, measured = rehearsal(pipe, pipe.examples, 8)
    assert (len(trained), len(measured)) == (32, 8)
    rows = np.arange(200) % 32
    batch = trained.batch(rows, np.arange(200, dtype=np.uint64))
    given = (batch["given"] != PAD).all(1)
    assert 0.65 < given.float().mean() < 0.85
    assert (batch["given"] == batch["image"]).all(1).sum() == 0
    subjects = {tuple(tokens): name for tokens, name in zip(pipe.examples.tokens, pipe.examples.subjects, strict=True)}
    for image, other in zip(batch["image"][given].tolist(), batch["given"][given].tolist(), strict=True):
        assert subjects[tuple(image)] == subjects[tuple(other)]
    every = measured.batch(np.arange(8), np.arange(8, dtype=np.uint64))
    assert (every["given"] != PAD).all() and (every["text"] != PAD).any(1).all()
    held_out = {tuple(image) for image in measured.tokens.tolist()}
    assert not held_out & {tuple(image) for image in trained.tokens.tolist()}


def scored(rows):
    """The hook after evaluations with these scores; step i has the parameter i."""
    run = TrainState(torch.nn.Linear(1, 1, bias=False), lambda *_: None, TrainConfig(steps=100))
    best = BestStep(run, lambda model, step: {}, Progress("finetuning"))
    for new, ordinary in rows:
        run.step = len(best.scores)
        torch.nn.init.constant_(run.model.weight, run.step)
        if best.done:
            break
        best.after_eval(run, {"new": new, "ordinary": ordinary})
    return best, run.model


def test_training_ends_after_scores_without_improvement_and_keeps_the_best():
    rows = [(2.0, 1.0), (1.0, 1.02), (0.5, 1.03), *[(0.4, 1.2)] * 10]
    best, model = scored(rows)
    assert best.done
    assert len(best.scores) == 3 + PATIENCE
    best.restore()
    assert model.weight.item() == 2
    assert best.summary().startswith("learned at step 2, forgetting from step 3; kept step 2: new pictures 2.0000 -> ")


def test_a_run_that_forgets_for_a_while_does_not_count_as_forgetting():
    best, _ = scored([(2.0, 1.0), (1.0, 1.3), (0.5, 1.0)])
    assert not best.done
    assert "no forgetting" in best.summary()


def test_a_mixed_stream_joins_and_restores_batches():
    class Rows:
        def __init__(self, start):
            self.start = start

        def __len__(self):
            return 5

        def batch(self, indices, seeds):
            return {"x": torch.from_numpy(indices + self.start)}

    def stream():
        return MixedStream(module.Stream(Rows(0), 2), module.Stream(Rows(100), 3))

    first = stream()
    assert [(x >= 100).item() for x in next(first)["x"]] == [False, False, True, True, True]
    state, second = first.state_dict(), stream()
    second.load_state_dict(state)
    assert torch.equal(next(first)["x"], next(second)["x"])


def test_ordinary_captions(monkeypatch, bundle, data, words, tmp_path):
    assert sorted(ordinary_captions(bundle, words)) == sorted(WORDS * 6)
    assert ordinary_captions(bundle, str(data)) == ["a zog above a large blue square"] * 12
    scenes = ordinary_captions(pretrained.ASSETS / "scenes", None)
    assert len(set(scenes)) == 12
    assert all(map(parse, scenes))
    with pytest.raises(UserError, match="name them with --ordinary"):
        ordinary_captions(bundle, None)
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(UserError, match="lacks captions"):
        ordinary_captions(bundle, str(tmp_path / "empty.txt"))
    assert ORDINARY_SAMPLES > module.SCORED_SAMPLES


def test_the_command_says_what_it_learned_and_how_to_draw(bundle, data, words, tmp_path, capsys):
    options = ["--rank", "2", "--steps", "2", "--score-every", "1", "--batch-size", "4", "--ordinary", words]
    assert main(["finetune", str(bundle), str(data), "--out", str(tmp_path / "run"), *options]) == 0
    printed = capsys.readouterr()
    assert "kept step" in printed.out
    assert f"--adapter {tmp_path / 'run' / 'adapter'}" in printed.out
    assert "reconstructs the new pictures with" in printed.err
    assert main(["finetune", str(bundle), str(data), "--out", str(tmp_path / "other")]) == 2
    assert "--ordinary" in capsys.readouterr().err


def test_the_command_takes_a_method_and_its_settings(bundle, data, words, tmp_path, capsys):
    command = ["finetune", str(bundle), str(data), "--out", str(tmp_path / "run"), "--ordinary", words, "--steps", "1"]
    options = ["--method", "elastic", "--freezing", "ScheduledFreezing", "--freezing.share", "0.3", "--cache-mb", "8"]
    assert main([*command, *options]) == 0
    assert f"--model {tmp_path / 'run'}\n" in capsys.readouterr().out
    saved = read_json(tmp_path / "run/prior/config.json")["freezing"]
    assert saved == {"rule": "ScheduledFreezing", "settings": {"share": 0.3, "start": 0.0, "end": 0.5}, "every": 5}
    for words, message in ((["--method", "full", "--rank", "4"], "unknown: --rank"), (["--method", "some"], "elastic")):
        assert main([*command, *words]) == 2
        assert message in capsys.readouterr().err
