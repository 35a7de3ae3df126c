"""Whole runs: checks before training, resumed and loaded stages, datasets, and the reranker."""

import json
import math
import shutil
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from limner import recipes
from limner.atomic_io import exclusive_lock
from limner.attention.patterns import PATTERNS
from limner.bundles import load_model
from limner.config import load_json, save_json
from limner.errors import UserError
from limner.evaluation.zero_shot import evaluate, scene_task
from limner.models.contrastive import CLIPConfig
from limner.models.dvae import DVAEConfig, map_pixels
from limner.models.patch_dvae import PatchDVAEConfig
from limner.models.transformer import TransformerConfig
from limner.objectives.elbo import gumbel_softmax
from limner.objectives.hard_negatives import HardNegativeLoss
from limner.optim.optimizers import AdamWConfig, StableAdamWConfig
from limner.optim.schedules import Cosine
from limner.pipeline import TextToImage, load
from limner.pretrained import ASSETS
from limner.recipes.recipe import PatchStage, PretrainedDVAE, Recipe, resolve
from limner.runs.run_data import RunData
from limner.runs.stages import StageTrainer, init_from_codebook, load_reranker
from limner.runs.train import train_all
from limner.tasks.build_scenes import SceneDataSettings, write_scenes
from limner.training.freezing_rules import ScheduledFreezing
from limner.training.metrics_log import read_metrics
from limner.training.parallel import SingleProcess
from limner.validation import InvalidSetting
from more_patterns import dilated
from tiny import tiny_recipe


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "scenes"
    write_scenes(folder, SceneDataSettings(count=24, size=24, held_out=0.3))
    return folder


def with_steps(recipe, steps, **more):
    """All three stages with as many steps, and the same other settings of training."""
    changed = {
        name: replace(stage, training=replace(stage.training, steps=steps, **more))
        for name in ("dvae", "prior", "contrastive")
        for stage in [getattr(recipe, name)]
    }
    return replace(recipe, **changed)


RECIPE = with_steps(tiny_recipe(), 2)


def test_an_invalid_command_changes_no_file(data, tmp_path):
    run, prior, dvae = tmp_path / "run", RECIPE.prior, RECIPE.dvae
    train_all(RECIPE, data, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    wider = replace(prior, model=replace(prior.model, width=64))
    for change, message in (
        ({"prior": wider}, "run/prior contains a run with another model.width"),
        ({"dvae": replace(dvae, training=replace(dvae.training, seed=9))}, "dvae contains .* another training.seed"),
        (
            {"contrastive": replace(RECIPE.contrastive, objective=HardNegativeLoss())},
            "another objective.cut_paste_negatives",
        ),
        ({"dvae": with_steps(RECIPE, 3).dvae}, "the prior in .* was trained on tokens of its dVAE"),
    ):
        with pytest.raises(UserError, match=message):
            train_all(replace(RECIPE, **change), data, run)
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    longer = replace(RECIPE, prior=with_steps(RECIPE, 3).prior)  # steps may change
    assert train_all(longer, data, run) is not None
    assert json.loads((run / "recipe.json").read_text())["prior"]["training"]["steps"] == 3


def test_a_contrastive_model_needs_no_dvae(data, tmp_path):
    """The model trains alone, classifies pictures, and is part of the bundle that a later call completes."""
    run = tmp_path / "run"
    assert train_all(RECIPE, data, run, ["contrastive"]) is None
    assert not (run / "dvae").exists() and not (run / "bundle").exists()
    model, _, name, _ = reranker = load_reranker(run)
    result = evaluate(reranker, scene_task(4, model.config.size))
    assert name == "run" and result.rows["top 1"]["accuracy"].total == 4
    seven = replace(RECIPE, contrastive=replace(RECIPE.contrastive, candidates=7))  # may change in a run
    pipe = train_all(seven, data, run, ["dvae", "prior"])
    assert pipe.defaults.candidates == TextToImage.from_pretrained(run).defaults.candidates == 7
    assert pipe is not None
    for bundled, trained in zip(pipe.contrastive.parameters(), model.parameters(), strict=True):
        assert torch.equal(bundled, trained)
    assert load_reranker(run)[2] == pipe.name


def test_the_second_papers_models_are_recipes(data, tmp_path):
    """In small: ViT-B/32 with the optimizer, the warm-up and the patch dropout of that paper."""
    recipe = recipes.get("clip-b")
    model = replace(recipe.contrastive.model, patch=8, width=16, depth=1, heads=2, text_tower=(16, 1, 2), embedding=8)
    training = replace(recipe.contrastive.training, steps=3, batch_size=4, warmup_steps=2)
    recipe = replace(
        recipe,
        text=replace(recipe.text, vocab=300),
        dvae=replace(recipe.dvae, model=DVAEConfig(size=24, groups=3, vocab=32, width=8, code_width=8)),
        contrastive=replace(recipe.contrastive, model=model, training=training),
    )
    assert train_all(recipe, data, tmp_path / "run", ["contrastive"]) is None
    assert load_reranker(tmp_path / "run")[0].config.ln_pre


@pytest.mark.parametrize("name", ["clip-b", "clip-l", "clip-h"])
def test_the_second_papers_recipes_have_its_settings(name):
    """§2.2.2, §3.2 and App. F.2; no BPE dropout and no crops, which are of Ramesh et al. 2021."""
    recipe = recipes.get(name)
    stage = recipe.contrastive
    assert recipe.text.dropout == 0 and not stage.augment
    model, training = stage.model, stage.training
    assert (model.patch_dropout, model.ln_pre, model.sinusoids) == (0.5, True, False)
    assert training.optimizer == StableAdamWConfig(lr=2e-3, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.2)
    assert (training.steps, training.warmup_steps, training.batch_size) == (20_000, 5_000, 16_384)
    assert training.clip_norm is None and training.schedule == Cosine()


@pytest.mark.parametrize("name", ["scenes", "demo", "emoji", "icons", "laptop"])
def test_recipes_for_small_pictures_have_the_reranker_of_the_bundled_models(name):
    model = recipes.get(name).contrastive.model
    assert model.sinusoids and not model.ln_pre
    assert not recipes.get("photos").contrastive.model.sinusoids  # smaller versions of the paper's models


def test_an_invalid_stage_raises_before_the_first_stage(data, tmp_path):
    wrong = replace(RECIPE, contrastive=replace(RECIPE.contrastive, model=CLIPConfig(patch=7, width=32)))
    with pytest.raises(UserError, match="patch must divide"):
        train_all(wrong, data, tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_an_indivisible_batch_of_a_later_stage_raises_before_the_first(data, tmp_path):
    class First(SingleProcess):
        world_size = 3

    dvae = replace(RECIPE.dvae, training=replace(RECIPE.dvae.training, batch_size=3))
    with pytest.raises(UserError, match="among 3 ranks: choose a multiple of 3 for prior.training.batch_size"):
        train_all(replace(RECIPE, dvae=dvae), data, tmp_path / "run", parallel=First())
    assert list((tmp_path / "run").iterdir()) == []


def test_only_the_prior_has_the_recipes_compression(data, tmp_path):
    ranks = {}

    class Noting(SingleProcess):
        def prepare(self, trainable, device, dtype):
            ranks[type(trainable.model).__name__] = self.grad_compression_rank
            return super().prepare(trainable, device, dtype)

    recipe = with_steps(tiny_recipe(), 1)
    recipe = replace(recipe, prior=replace(recipe.prior, grad_compression_rank=8))
    trainer = StageTrainer(RunData.open(recipe, data, tmp_path / "run", Noting()), ("dvae", "prior", "contrastive"))
    for name in ("dvae", "prior", "contrastive"):
        trainer.model(name)
    assert len(ranks) == 3 and {name for name, rank in ranks.items() if rank == 8} == {"Transformer"}


def test_a_recipe_freezes_blocks_of_the_prior(data, tmp_path):
    def train(**changed):
        recipe = with_steps(tiny_recipe(), 4, warmup_steps=0)
        recipe = replace(recipe, prior=replace(recipe.prior, freezing=ScheduledFreezing(end=0), **changed))
        trainer = StageTrainer(RunData.open(recipe, data, tmp_path), ("dvae", "prior"))
        for name in ("dvae", "prior"):
            trainer.model(name)

    train(freeze_every=2)
    assert [row["frozen"] for row in read_metrics(tmp_path / "prior/metrics.jsonl")] == [0, 1, 1, 1]
    with pytest.raises(UserError, match="a run with another freezing.every"):
        train(freeze_every=3)


def test_the_output_of_frozen_blocks_is_cached_until_the_stage_ends(data, tmp_path):
    recipe = with_steps(tiny_recipe(), 12, warmup_steps=0)
    prior = replace(recipe.prior, freezing=ScheduledFreezing(end=0), freeze_every=1, augment=False)
    losses = {}
    for cache_mb in (0, 64):
        changed = replace(recipe, prior=replace(prior, cache_mb=cache_mb), text=replace(recipe.text, dropout=0.0))
        train_all(changed, data, tmp_path / str(cache_mb), stages=("dvae", "prior"))
        rows = read_metrics(tmp_path / str(cache_mb) / "prior/metrics.jsonl")
        losses[cache_mb] = [row["loss"] for row in rows]
        assert ("cache/compute_ms" in rows[-1]) == bool(cache_mb)
        assert not (tmp_path / str(cache_mb) / "prior/activations").exists()
    assert losses[64] == pytest.approx(losses[0], abs=1e-5)
    with pytest.raises(UserError, match="prior.cache_mb needs text.dropout 0"):
        train_all(replace(changed, text=replace(recipe.text, dropout=0.1)), data, tmp_path / "dropout")
    assert list((tmp_path / "dropout").iterdir()) == []
    for settings in ({"freezing": None}, {"augment": True}):
        with pytest.raises(InvalidSetting, match="cache_mb must be 0 with"):
            replace(prior, cache_mb=64, **settings)


def test_processes_that_cannot_freeze_raise_before_the_first_stage(data, tmp_path):
    class Others(SingleProcess):
        can_freeze = False

    recipe = replace(RECIPE, prior=replace(RECIPE.prior, freezing=ScheduledFreezing()))
    with pytest.raises(UserError, match="cannot freeze blocks: choose --parallel pipeline"):
        train_all(recipe, data, tmp_path / "run", parallel=Others())
    assert list((tmp_path / "run").iterdir()) == []


def test_an_objective_may_have_a_constant_temperature(data, tmp_path):
    """Relaxed pictures are evaluated for temperatures that change with the step, which the gap shows too high."""

    @dataclass(frozen=True, kw_only=True)
    class AbsoluteError:
        tau: float = 0.5

        def __call__(self, model, batch, step, generator):
            mu, _ = model.decode(gumbel_softmax(model.encode(batch["pixels"]), self.tau, generator))
            return (mu.sigmoid() - map_pixels(batch["pixels"])).abs().mean(), {}

    recipe = with_steps(tiny_recipe(), 2)
    recipe = replace(recipe, dvae=replace(recipe.dvae, objective=AbsoluteError()))
    StageTrainer(RunData.open(recipe, data, tmp_path / "run"), ("dvae",)).model("dvae")
    last = read_metrics(tmp_path / "run/dvae/metrics.jsonl")[-1]
    assert "eval/psnr" in last and "eval/gap" not in last


def test_only_trained_stages_need_the_settings_of_the_start(data, tmp_path):
    """The models of the other stages are those of the bundle, also if the recipe has other settings."""
    assert train_all(RECIPE, data, tmp_path / "first") is not None
    recipe, start = replace(RECIPE, start=str(tmp_path / "first")), "the {} of .* has other settings than the recipe"
    larger = replace(recipe.contrastive, model=replace(recipe.contrastive.model, width=64))
    wider = replace(recipe.prior, model=replace(recipe.prior.model, width=64))
    patches = PatchStage(model=PatchDVAEConfig(size=24, vocab=16, width=8, blocks=1), training=recipe.dvae.training)
    for _ in range(2):  # the second call resumes
        pipe = train_all(replace(recipe, contrastive=larger, dvae=patches), data, tmp_path / "prior", ("prior",))
        assert pipe is not None
        assert pipe.contrastive.config.width == recipe.contrastive.model.width and pipe.dvae.config.vocab == 32
    assert train_all(replace(recipe, prior=wider), data, tmp_path / "reranker", ("contrastive",)) is not None
    for name, stage in (("prior", wider), ("contrastive", larger), ("dvae", patches)):
        with pytest.raises(UserError, match=start.format(name)):
            train_all(replace(recipe, **{name: stage}), data, tmp_path / "new", (name,))


def test_a_prior_needs_a_dvae_before_the_first_file_is_written(data, tmp_path):
    with pytest.raises(UserError, match="no dVAE in .*run/dvae: train the stage 'dvae' first"):
        train_all(RECIPE, data, tmp_path / "run", ("prior", "contrastive"))
    assert list((tmp_path / "run").iterdir()) == []


def test_settings_are_resolved_without_the_weights_of_a_bundle(data, tmp_path):
    shutil.copytree(ASSETS / "icons", tmp_path / "icons", ignore=shutil.ignore_patterns("*.safetensors"))
    recipe = replace(RECIPE, dvae=PretrainedDVAE(bundle=str(tmp_path / "icons")))
    dvae = load_model("icons", "dvae").config
    resolved = resolve(recipe, text_vocab=290)
    assert resolved.models["dvae"] == dvae and list(resolved.stages) == ["prior", "contrastive"]
    prior, contrastive = resolved.models["prior"], resolved.models["contrastive"]
    assert (prior.image_vocab, prior.grid, prior.text_vocab, contrastive.size) == (
        dvae.vocab,
        dvae.grid,
        290,
        dvae.size,
    )
    (tmp_path / "icons" / "config.json").write_text('{"format": "limner-bundle-1", "dvae": {"type": "VAE"}}')
    with pytest.raises(UserError, match=r"config\.json: dvae\.type cannot be 'VAE': choose 'DVAE', 'PatchDVAE'"):
        resolve(recipe)


def test_a_registered_pattern_trains_by_its_name_in_a_recipe(data, tmp_path, monkeypatch):
    monkeypatch.setitem(PATTERNS, "dilated", dilated)
    longer = with_steps(RECIPE, 8)
    prior = replace(longer.prior, model=replace(longer.prior.model, pattern="dilated"))
    save_json(replace(longer, prior=prior), tmp_path / "recipe.json")
    pipe = train_all(load_json(Recipe, tmp_path / "recipe.json"), data, tmp_path / "run")
    assert pipe is not None and {pattern.name for pattern in pipe.prior.config.patterns} == {"dilated"}
    first, *_, last = (row["loss"] for row in read_metrics(tmp_path / "run/prior/metrics.jsonl"))
    assert last < first
    assert TextToImage.from_pretrained(tmp_path / "run/bundle")("a red circle", candidates=2).images


def test_a_run_has_one_writer(data, tmp_path):
    with exclusive_lock(tmp_path / "run"), pytest.raises(UserError, match="another process .*is writing to"):
        train_all(RECIPE, data, tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_evaluations_of_a_resumed_run_equal_those_of_an_uninterrupted_one(data, tmp_path):
    """Spoiled pictures are drawn at random: the same ones in each evaluation, whenever the process began."""
    often = {"eval_every": 1, "log_every": 1, "checkpoint_every": 1}
    for name, steps in (("whole", 2), ("parts", 1), ("parts", 2)):
        run_data = RunData.open(with_steps(tiny_recipe(), steps, **often), data, tmp_path / name)
        StageTrainer(run_data, ("contrastive",)).model("contrastive")
    whole, stopped = (
        [row["eval/text_to_image_acc"] for row in read_metrics(tmp_path / name / "contrastive" / "metrics.jsonl")]
        for name in ("whole", "parts")
    )
    assert whole == stopped and len(whole) == 2


def test_codes_are_clustered_once_and_stay(data, tmp_path):
    training = replace(RECIPE.dvae.training, steps=4, checkpoint_every=1)
    patches = PatchStage(model=PatchDVAEConfig(size=24, vocab=32, width=8, blocks=1), training=training)
    recipe = replace(RECIPE, dvae=patches)
    interrupted = replace(recipe, dvae=replace(patches, training=replace(training, steps=2)))
    first = StageTrainer(RunData.open(interrupted, data, tmp_path / "parts"), ("dvae",)).model("dvae")
    again = StageTrainer(RunData.open(recipe, data, tmp_path / "parts"), ("dvae",)).model("dvae")
    assert torch.equal(first.state_dict()["codes"], again.state_dict()["codes"])
    assert len(again.state_dict()["codes"].unique(dim=0)) > 8
    assert not torch.equal(first.state_dict()["output.w"], again.state_dict()["output.w"])
    assert read_metrics(tmp_path / "parts" / "dvae" / "metrics.jsonl")[-1]["eval/psnr"] > 15
    assert train_all(recipe, data, tmp_path / "all") is not None
    bundle = tmp_path / "all" / "bundle"
    assert json.loads((bundle / "config.json").read_text())["dvae"]["type"] == "PatchDVAE"
    assert TextToImage.from_pretrained(bundle)("a red circle")[0].image.size == (24, 24)


def test_clustered_pictures_are_augmented_as_in_training(data, tmp_path):
    plain = PatchStage(model=PatchDVAEConfig(size=16, vocab=32, width=8, blocks=1), training=RECIPE.dvae.training)
    cropped = replace(plain, augment=True)
    run_data = RunData.open(replace(RECIPE, dvae=plain), data, tmp_path / "run")
    whole, crops = run_data.clustering_pictures(plain), run_data.clustering_pictures(cropped)
    assert torch.equal(whole, run_data.evaluation_pictures(run_data.train, 16))
    assert crops.shape == whole.shape and (crops != whole).flatten(1).any(1).all()
    assert torch.equal(crops, run_data.clustering_pictures(cropped))


def test_similar_patches_start_with_similar_rows():
    torch.manual_seed(0)
    config = TransformerConfig(text_vocab=20, image_vocab=64, text_len=4, grid=(2, 2), width=256, depth=1, heads=2)
    prior, codes = config.build(), torch.rand(64, 48)
    codes[1::2] = codes[::2] + 0.01 * torch.randn(32, 48)  # each second patch looks like the one before it
    before = [w.clone() for w in (prior.embed.image.weight, prior.head.image.weight)]
    init_from_codebook(prior, codes)
    for weight, old in zip((prior.embed.image.weight, prior.head.image.weight), before, strict=True):
        assert weight.std().item() == pytest.approx(old.std().item(), rel=0.1)
        alike = F.cosine_similarity(weight[::2], weight[1::2])
        others = F.cosine_similarity(weight[::2], weight[1::2].roll(1, 0))
        assert alike.min() > 0.3 and others.abs().mean() < 0.2
        assert F.cosine_similarity(weight, old).min() > 0.4  # half of the variance is what it was


@pytest.mark.parametrize("name", ["prior", "contrastive"])
def test_a_run_that_skipped_most_updates_is_saved_and_raises(data, tmp_path, capsys, monkeypatch, name):
    """Also where the command is given again, and all is trained."""
    stage = getattr(with_steps(RECIPE, 15), name)
    compute = type(stage.objective).__call__

    def without_finite_gradient(*args):
        loss, metrics = compute(*args)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * math.nan)
        return loss, metrics

    monkeypatch.setattr(type(stage.objective), "__call__", without_finite_gradient)
    title = {"prior": "prior", "contrastive": "contrastive model"}[name]
    error = f"15 of 15 updates of the {title} were skipped, since .* finite: the run in .* is saved but barely trained"
    for _ in range(2):
        with pytest.raises(UserError, match=error):
            train_all(replace(RECIPE, **{name: stage}), data, tmp_path / "run")
        assert load(tmp_path / "run").name == "run"
    assert "15 of 15 updates were skipped" in capsys.readouterr().err


def test_a_run_whose_last_loss_is_not_finite_leaves_no_bundle(data, tmp_path):
    far = with_steps(RECIPE, 4, warmup_steps=0, optimizer=AdamWConfig(lr=1e30))
    with pytest.raises(
        UserError, match=r"diverged .* 3 updates in a row had a loss or gradient that is not finite; lower"
    ):
        train_all(replace(RECIPE, prior=far.prior), data, tmp_path / "run")
    assert not (tmp_path / "run/bundle").exists()
