"""The stages of a run: the dVAE (§2.1), the prior (§2.2) and the contrastive model (§2.6), each trained or loaded.

Each stage is one call of the training loop. Each has its own folder and resumes from its newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from limner import bundles, pretrained
from limner.config import differences, load_json, to_dict
from limner.data.stream import Dataset, Stream
from limner.data.token_cache import weights_hash
from limner.errors import UserError
from limner.evaluation.reconstruction import codebook_metrics, relaxation_gap
from limner.evaluation.validation import held_out_metrics
from limner.models.contrastive import CLIP
from limner.models.dvae import DVAE
from limner.models.patch_dvae import KMEANS_ITERS, AnyDVAE, AnyDVAEConfig, PatchDVAE
from limner.models.transformer import Transformer
from limner.numerics.seeding import fold_in
from limner.objectives.codebook_elbo import BalancedELB
from limner.optim.dtensor import full_tensor, is_dtensor, shard_like
from limner.pipeline import load
from limner.progress import progress
from limner.recipes.recipe import (
    STAGE_TITLES,
    AnyStage,
    PatchStage,
    PretrainedDVAE,
    Recipe,
    resolve_contrastive_config,
    resolve_dvae_config,
    resolve_prior_config,
)
from limner.runs.codebook_monitor import CollapseWarning
from limner.runs.run_data import RunData
from limner.text.bpe import Tokenizer
from limner.training.checkpoint import completed, load_weights
from limner.training.hooks import Hook
from limner.training.kernel_report import KernelReport
from limner.training.loop import train
from limner.training.rms_monitor import RMSMonitor
from limner.training.state_tensors import fill_model, model_tensors
from limner.training.train_state import Evaluate, TrainState

M = TypeVar("M", bound=PatchDVAE | DVAE | Transformer | CLIP)
Stage = Literal["dvae", "prior", "contrastive"]
STAGES: tuple[Stage, ...] = ("dvae", "prior", "contrastive")


class StageTrainer:
    """The stages of a run, one method each. With `train=False` a method only loads the weights of the run, or those
    that the recipe starts from."""

    def __init__(self, run_data: RunData) -> None:
        self.run_data, self.recipe, self.out = run_data, run_data.recipe, run_data.out
        self.device = _device()

    def has_dvae(self) -> bool:
        """Return True if a dVAE exists: pretrained, from the recipe's start, or trained here."""
        pretrained_or_start = isinstance(self.recipe.dvae, PretrainedDVAE) or self.recipe.start is not None
        return pretrained_or_start or bool(completed(self.out / "dvae"))

    def dvae(self, train: bool = True) -> AnyDVAE:
        """Train or load the dVAE (stage one, §2.1), or load the recipe's pretrained one.

        Weights are rounded to the bundle's format, so that the prior trains on the bundle's tokens. Raises `UserError`
        if there is nothing to load.
        """
        stage, run_data = self.recipe.dvae, self.run_data
        if isinstance(stage, PretrainedDVAE):
            return bundles.load_model(stage.bundle, "dvae").to(self.device)
        if not train and self.recipe.start and not completed(self.out / "dvae"):  # not compared with the recipe
            return bundles.load_model(self.recipe.start, "dvae").to(self.device)
        if not train:
            model = stage.model.build()
            if not self._load_checkpoint_or_start("dvae", model):
                raise UserError(f"no dVAE in {self.out / 'dvae'}: train the stage 'dvae' first")
            return bundles.rounded(model).to(self.device).eval()
        model = self._build(stage.model, stage.training.seed)
        size = stage.model.size
        pixels = run_data.evaluation_pictures(run_data.held_out if len(run_data.held_out) else run_data.train, size)
        pixels = pixels.to(self.device)

        def evaluate(model: Any, step: int) -> Mapping[str, float]:
            metrics = codebook_metrics(model, pixels)
            if isinstance(stage, PatchStage):
                return metrics
            return metrics | relaxation_gap(model, pixels, stage.objective.tau(step), metrics["psnr"])

        record = {"model": stage.model, "objective": stage.objective}
        hooks = []
        if isinstance(model, PatchDVAE):
            if not self.recipe.start and not completed(self.out / "dvae"):
                with progress("clustering patches", KMEANS_ITERS, unit="round", shown=run_data.parallel.is_main) as bar:
                    generator = torch.Generator().manual_seed(fold_in(stage.training.seed))
                    model.fit_codebook(run_data.clustering_pictures(stage), generator, progress=bar.advance)
        elif not (isinstance(stage.objective, BalancedELB) and stage.objective.usage_penalty_from is not None):
            hooks = [CollapseWarning(stage.model.vocab)]
        trained = self._train("dvae", model, stage, run_data.dvae_dataset(stage), evaluate, record, hooks)
        return bundles.rounded(self._unsharded(model, trained)).eval()

    def prior(
        self, tokenizer: Tokenizer, dvae: AnyDVAE, train: bool = True, hooks: Sequence[Hook] = ()
    ) -> Transformer | None:
        """Train or load the prior (stage two, §2.2). Returns None on all processes but the first."""
        stage, run_data = self.recipe.prior, self.run_data
        config = resolve_prior_config(stage, self.recipe.text, tokenizer.vocab_size, dvae.config)
        if not train:
            return self._load_stage("prior", config)
        model = self._build(config, stage.training.seed)
        if isinstance(dvae, PatchDVAE):
            init_from_codebook(model, dvae.codes)
        dvae = dvae.to(self.device).eval()
        evaluate = None
        if len(run_data.held_out):
            held_out = run_data.prior_dataset(run_data.held_out, tokenizer, dvae)
            evaluate = held_out_metrics(stage.objective, held_out, 64, self.device)
        record = {"model": config, "objective": stage.objective, "dvae": weights_hash(dvae)}
        data = run_data.prior_dataset(run_data.train, tokenizer, dvae)
        trained = self._train("prior", model, stage, data, evaluate, record, hooks)
        return self._unsharded(model, trained).eval() if run_data.parallel.is_main else None

    def contrastive(self, tokenizer: Tokenizer, dvae: AnyDVAEConfig, train: bool = True) -> CLIP | None:
        """Train or load the reranker (§2.6) of the dVAE's size. Returns None on all processes but the first."""
        stage, run_data = self.recipe.contrastive, self.run_data
        config = resolve_contrastive_config(stage, self.recipe.text, tokenizer.vocab_size, dvae)
        if not train:
            return self._load_stage("contrastive", config)
        model = self._build(config, stage.training.seed)
        evaluate = None
        if len(run_data.held_out):
            held_out = run_data.contrastive_dataset(run_data.held_out, tokenizer, config.size)
            evaluate = held_out_metrics(stage.objective, held_out, 128, self.device)
        record = {"model": config, "objective": stage.objective}
        data = run_data.contrastive_dataset(run_data.train, tokenizer, config.size)
        trained = self._train("contrastive", model, stage, data, evaluate, record)
        return self._unsharded(model, trained).eval() if run_data.parallel.is_main else None

    def restore(self, name: Stage) -> tuple[TrainState, Dataset]:
        """Return a stage's newest checkpoint, in training mode, and its data. Raises `UserError` without one."""
        stage, run_data = getattr(self.recipe, name), self.run_data
        if isinstance(stage, PretrainedDVAE) or not completed(self.out / name):
            raise UserError(f"no checkpoint in {self.out / name}: train the stage {name!r} first")
        if name == "dvae":
            model, data = stage.model.build(), run_data.dvae_dataset(stage)
        else:
            tokenizer = run_data.tokenizer()
            if name == "prior":
                dvae = self.dvae(train=False)
                config = resolve_prior_config(stage, self.recipe.text, tokenizer.vocab_size, dvae.config)
                data = run_data.prior_dataset(run_data.train, tokenizer, dvae)
            else:
                dvae = self.dvae(train=False).config if self.has_dvae() else resolve_dvae_config(self.recipe)
                config = resolve_contrastive_config(stage, self.recipe.text, tokenizer.vocab_size, dvae)
                data = run_data.contrastive_dataset(run_data.train, tokenizer, config.size)
            model = config.build()
        load_weights(model, self.out / name)
        return TrainState(model.train(), stage.objective, stage.training, self.device), data

    def _build(self, config: Any, seed: int) -> Any:
        """Build a model with initial weights from `seed`."""
        torch.manual_seed(fold_in(seed))
        with self.run_data.parallel.init_context():
            return config.build()

    @torch.no_grad()
    def _load_start(self, name: Stage, model: AnyDVAE | Transformer | CLIP) -> bool:
        """Load the weights that the recipe starts from. Returns False if the recipe starts from random weights."""
        start = self.recipe.start
        if start is None:
            return False
        with self.run_data.parallel.init_context() if any(map(is_dtensor, model.parameters())) else nullcontext():
            start_model = bundles.load_model(start, name)
        if changed := differences(to_dict(start_model.config), to_dict(model.config)):
            problem = f"the {name} of {start} has other settings than the recipe ({', '.join(changed)})"
            raise UserError(f"{problem}: copy the settings of its config.json to the recipe")
        fill_model(model, model_tensors(start_model), start)
        return True

    def _load_checkpoint_or_start(self, name: Stage, model: AnyDVAE | Transformer | CLIP) -> bool:
        """Load the run's newest checkpoint, or the recipe's start. Returns False if there is neither."""
        if not completed(self.out / name):
            return self._load_start(name, model)
        load_weights(model, self.out / name)
        return True

    def _load_stage(self, name: Stage, config: Any) -> Any:
        """Return the model loaded by `_load_checkpoint_or_start`, or None; None on all processes but the first."""
        if not self.run_data.parallel.is_main:
            return None
        model = config.build()
        return model.to(self.device).eval() if self._load_checkpoint_or_start(name, model) else None

    def _train(
        self,
        name: Stage,
        model: AnyDVAE | Transformer | CLIP,
        stage: AnyStage,
        data: Dataset,
        evaluate: Evaluate | None,
        record: Mapping[str, Any],
        hooks: Sequence[Hook] = (),
    ) -> Path:
        """Train a model and return its last checkpoint."""
        config = stage.training
        if config.precision.converts:
            hooks = [*hooks, KernelReport(self.out / name)]
        if self._load_start(name, model):
            record = {**record, "start": self.recipe.start}
        stream = Stream(data, config.batch_size, config.seed, prefetch=2)
        with progress(f"training the {STAGE_TITLES[name]}", config.steps, shown=self.run_data.parallel.is_main) as bar:
            run = TrainState(model, stage.objective, config, self.device, self.run_data.parallel)
            hooks = [*hooks, RMSMonitor(self.out / name)]
            trained = train(run, stream, self.out / name, evaluate=evaluate, record=record, hooks=hooks, bar=bar)
        stream.close()
        return trained.checkpoint

    def _unsharded(self, model: M, checkpoint: Path) -> M:
        """Return the model, or an unsharded copy if its weights are sharded over processes."""
        if any(map(is_dtensor, model.parameters())):
            model = model.config.build()  # type: ignore[assignment]
            load_weights(model, checkpoint)  # written by all processes
            model.to(self.device)
        return model


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


def load_reranker(name_or_folder: str | Path) -> tuple[CLIP, Tokenizer, str]:
    """Return the contrastive model of a bundle or of a run without one, its tokenizer, and its name."""
    run = Path(name_or_folder)
    if pretrained.is_bundle(run) or pretrained.is_bundle(run / "bundle") or not completed(run / "contrastive"):
        pipe = load(name_or_folder)
        return pipe.contrastive, pipe.tokenizer, pipe.name
    recipe, tokenizer = load_json(Recipe, run / "recipe.json"), Tokenizer.load(run / "tokenizer.json")
    model = resolve_contrastive_config(
        recipe.contrastive, recipe.text, tokenizer.vocab_size, resolve_dvae_config(recipe)
    ).build()
    load_weights(model, run / "contrastive")
    return model.to(_device()).eval(), tokenizer, run.name


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
