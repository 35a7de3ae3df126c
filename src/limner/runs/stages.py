"""The stages of a run: the dVAE (§2.1), the prior (§2.2) and the contrastive model (§2.6), each trained or loaded.

Each stage is one call of the training loop. Each has its own folder and resumes from its newest checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from limner import bundles, pretrained
from limner.config import differences, load_json, to_dict
from limner.data.sample import Source
from limner.data.stream import Dataset, Stream
from limner.data.token_cache import weights_hash
from limner.errors import UserError
from limner.evaluation.reconstruction import codebook_metrics, relaxation_gap
from limner.evaluation.validation import held_out_metrics
from limner.models.patch_dvae import KMEANS_ITERS
from limner.models.transformer import Transformer
from limner.numerics.seeding import fold_in
from limner.optim.dtensor import full_tensor, is_dtensor, shard_like
from limner.optim.schedules import Anneal
from limner.pipeline import load
from limner.progress import progress
from limner.recipes.recipe import STAGE_TITLES, Recipe, Stage, resolve
from limner.reranker import Reranker, is_clip, load_clip
from limner.runs.monitors import CollapseWarning, RMSMonitor
from limner.runs.run_data import RunData
from limner.text.bpe import Tokenizer
from limner.training.auto_cache import CACHE, AutoCache
from limner.training.checkpoint import completed, fill_model, load_weights, model_tensors
from limner.training.freezing import Freezing
from limner.training.hooks import Hook
from limner.training.kernel_report import KernelReport
from limner.training.loop import train
from limner.training.train_state import Evaluate, TrainState

StageHooks = Callable[[Path], Sequence[Hook]]

_EVALUATION_BATCH = {"prior": 64, "contrastive": 128}


class StageTrainer:
    """Trains or loads the models of a run in the order of `STAGE_TITLES`.

    Args:
        stages: the stages to train. `model` loads the others from the run, or from the bundle that the recipe starts
            from.
        stage_hooks: returns more hooks for a stage, from its folder.
    """

    def __init__(self, run_data: RunData, stages: Sequence[Stage], stage_hooks: StageHooks | None = None) -> None:
        self.run_data, self.stages, self.out = run_data, stages, run_data.out
        self.stage_hooks = stage_hooks
        self.tokenizer = run_data.tokenizer() if {"prior", "contrastive"} & set(stages) else None
        self.resolved = run_data.resolve(stages)
        self.models: dict[str, Any] = {}
        self.device = _device()

    def model(self, name: Stage, hooks: Sequence[Hook] = ()) -> Any:
        """Train or load the model of a stage. Returns None if it can be neither trained nor loaded, and on all
        processes but the first, except for the dVAE, which encodes pictures for the prior on all processes."""
        trains = name in self.stages and name in self.resolved.stages
        self.models[name] = self.train(name, hooks) if trains else self.load(name)
        return self.models[name]

    def load(self, name: Stage) -> Any:
        """Load the newest checkpoint of the run, or the model of a bundle: the pretrained dVAE or the recipe's start.

        Weights of the run's dVAE are rounded to the bundle's format, so that the prior trains on the bundle's tokens.
        """
        if name != "dvae" and not self.run_data.parallel.is_main:
            return None
        dvae_bundle = self.resolved.dvae_bundle if name == "dvae" else None
        if completed(self.out / name) and dvae_bundle is None:
            model = self.resolved.models[name].build()
            load_weights(model, self.out / name)
            model = bundles.rounded(model) if name == "dvae" else model
        elif bundle := dvae_bundle or self.resolved.recipe.start:
            model = bundles.load_model(bundle, name)
        else:
            return None
        return model.to(self.device).eval()

    def train(self, name: Stage, hooks: Sequence[Hook] = ()) -> Any:
        """Train a model from the newest checkpoint, from the recipe's start, or from random weights."""
        stage, config, run_data = self.resolved.stages[name], self.resolved.models[name], self.run_data
        training, parallel = stage.training, run_data.parallel
        torch.manual_seed(fold_in(training.seed))
        with parallel.init_context():
            model = config.build()
        record = {"model": config, "objective": stage.objective}
        hooks = [*hooks]
        if name == "dvae":
            hooks += self._prepare_codebook(model, stage)
        elif name == "prior":
            record["dvae"] = weights_hash(self.models["dvae"])
            if (codes := self.models["dvae"].fixed_codes()) is not None:
                init_from_codebook(model, codes)
        evaluate, data = self._evaluation(name), self.dataset(name, run_data.train)
        if training.precision.converts:
            hooks.append(KernelReport(self.out / name))
        if start := self.resolved.recipe.start:
            self._load_start(name, model, start)
            record["start"] = start
        parallel.grad_compression_rank = getattr(stage, "grad_compression_rank", None)
        stream = Stream(data, training.batch_size, training.seed, prefetch=2)
        with progress(f"training the {STAGE_TITLES[name]}", training.steps, shown=parallel.is_main) as bar:
            run = TrainState(model, stage.objective, training, self.device, parallel)
            hooks.append(RMSMonitor(self.out / name))
            if rule := getattr(stage, "freezing", None):
                hooks.append(freezing := Freezing(run, rule, stage.freeze_every, lambda metrics: metrics["image"]))
                record["freezing"] = rule.record(stage.freeze_every)
                if stage.cache_mb:
                    hooks.append(AutoCache(run, freezing, self.out / name / CACHE, stage.cache_mb << 20, [data]))
            hooks += self.stage_hooks(self.out / name) if self.stage_hooks else []
            trained = train(run, stream, self.out / name, evaluate=evaluate, record=record, hooks=hooks, bar=bar)
        stream.close()
        shutil.rmtree(self.out / name / CACHE, ignore_errors=True)
        if name != "dvae" and not parallel.is_main:
            return None
        if any(is_dtensor(p) or p.is_meta for p in model.parameters()):  # divided among processes
            model = config.build()
            load_weights(model, trained.checkpoint)  # written by all processes
            model.to(self.device)
        return (bundles.rounded(model) if name == "dvae" else model).eval()

    def dataset(self, name: Stage, source: Source) -> Dataset:
        """Return the dataset of a stage. Samples of the training source are augmented."""
        if name == "dvae":
            return self.run_data.dvae_dataset(self.resolved.stages[name])
        assert self.tokenizer is not None
        if name == "prior":
            return self.run_data.prior_dataset(source, self.tokenizer, self.models["dvae"])
        return self.run_data.contrastive_dataset(source, self.tokenizer, self.resolved.models["dvae"].size)

    def _evaluation(self, name: Stage) -> Evaluate | None:
        """Return the evaluation on held-out data; on training data for a dVAE without any, else None."""
        objective, held_out = self.resolved.stages[name].objective, self.run_data.held_out
        if name != "dvae":
            if not len(held_out):
                return None
            return held_out_metrics(objective, self.dataset(name, held_out), _EVALUATION_BATCH[name], self.device)
        source = held_out if len(held_out) else self.run_data.train
        pixels = self.run_data.evaluation_pictures(source, self.resolved.models[name].size).to(self.device)
        tau = getattr(objective, "tau", None)

        def evaluate(model: Any, step: int) -> Mapping[str, float]:
            metrics = codebook_metrics(model, pixels)
            if isinstance(tau, Anneal):  # codes are relaxed, at the temperature of the step
                metrics |= relaxation_gap(model, pixels, tau(step), metrics["psnr"])
            return metrics

        return evaluate

    def _prepare_codebook(self, model: Any, stage: Any) -> list[Hook]:
        """Cluster the codes of a new model whose codes do not train; else return the warning of a collapse."""
        if model.fixed_codes() is None:
            penalized = getattr(stage.objective, "usage_penalty_from", None) is not None
            return [] if penalized else [CollapseWarning(model.config.vocab)]
        if not self.resolved.recipe.start and not completed(self.out / "dvae"):
            generator = torch.Generator().manual_seed(fold_in(stage.training.seed))
            shown = self.run_data.parallel.is_main
            with progress("clustering patches", KMEANS_ITERS, unit="round", shown=shown) as bar:
                model.fit_codebook(self.run_data.clustering_pictures(stage), generator, progress=bar.advance)
        return []

    @torch.no_grad()
    def _load_start(self, name: Stage, model: Any, start: str) -> None:
        """Load the weights of the bundle `start`. Raises `UserError` if its model has other settings."""
        with self.run_data.parallel.init_context() if any(map(is_dtensor, model.parameters())) else nullcontext():
            start_model = bundles.load_model(start, name)
        if changed := differences(to_dict(start_model.config), to_dict(model.config)):
            problem = f"the {name} of {start} has other settings than the recipe ({', '.join(changed)})"
            raise UserError(f"{problem}: copy the settings of its config.json to the recipe")
        fill_model(model, model_tensors(start_model), start)


@torch.no_grad()
def init_from_codebook(prior: Transformer, codes: Float[Tensor, "V D"]) -> None:
    """Initialize embeddings and head rows of image tokens: similar patches get similar vectors.

    Half of the variance stays random; the other half is a random projection of the codes. The prior then need not
    learn for each of V codes what similar codes share.
    """
    centered = codes.cpu() - codes.cpu().mean(0)
    for weight in (prior.embed.image.weight, prior.head.image.weight):
        initial, projected = full_tensor(weight).cpu(), centered @ torch.randn(centered.shape[1], weight.shape[1])
        mixed = (initial + projected * (initial.std() / projected.std())) * 0.5**0.5
        weight.copy_(shard_like(mixed, weight))


def restore(run_data: RunData, name: Stage) -> tuple[TrainState, Dataset]:
    """Return a stage's newest checkpoint, in training mode, and its data. Raises `UserError` without one."""
    folder = run_data.out / name
    if not completed(folder):
        raise UserError(f"no checkpoint in {folder}: train the stage {name!r} first")
    trainer = StageTrainer(run_data, (name,))
    if name == "prior":
        trainer.model("dvae")
    model, stage = trainer.resolved.models[name].build(), trainer.resolved.stages[name]
    load_weights(model, folder)
    data = trainer.dataset(name, run_data.train)
    return TrainState(model.train(), stage.objective, stage.training, trainer.device), data


def load_reranker(name_or_folder: str | Path) -> Reranker:
    """Return the contrastive model of a bundle, of a run without one, or of a folder of `limner convert clip`."""
    run = Path(name_or_folder)
    if is_clip(run):
        reranker = load_clip(run)
        reranker.model.to(_device())
        return reranker
    if pretrained.is_bundle(run) or pretrained.is_bundle(run / "bundle") or not completed(run / "contrastive"):
        pipe = load(name_or_folder)
        return Reranker(pipe.contrastive, pipe.tokenizer, pipe.name)
    recipe, tokenizer = load_json(Recipe, run / "recipe.json"), Tokenizer.load(run / "tokenizer.json")
    resolved = resolve(recipe, tokenizer.vocab_size, dvae_from_start=not completed(run / "dvae"))
    model = resolved.models["contrastive"].build()
    load_weights(model, run / "contrastive")
    return Reranker(model.to(_device()).eval(), tokenizer, run.name)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
