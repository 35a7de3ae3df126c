"""Run a recipe: tokenizer, dVAE, prior, contrastive model, bundle.

    RUN/recipe.json   RUN/tokenizer.json   RUN/dvae/   RUN/tokens/   RUN/prior/   RUN/contrastive/   RUN/bundle/
    RUN/attribution.json, where the data says whose pictures they are

Each stage is one call of the training loop in its own folder, which goes on from its newest checkpoint;
a finished stage is loaded, not repeated. So the same command, given again after Ctrl-C or a crash,
continues where it stopped.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from limner import bundles, catalogue
from limner.config import differences, read_json, save_json, to_dict
from limner.data.attribution import attribution, united
from limner.data.datasets import ImageCaptionDataset, TokenDataset
from limner.data.distractors import Distractors
from limner.data.encoded import EncodedDataset
from limner.data.samples import Rejected, Selection, Source, by_split, unread
from limner.data.sources import open_source
from limner.data.stream import Dataset, Stream
from limner.data.tokens import encode_tokens, weights_hash
from limner.errors import UserError
from limner.evaluation.held_out import held_out
from limner.evaluation.reconstruction import health, relaxation
from limner.files import atomic_write_text, locked
from limner.layers.precisions import SwitchBack
from limner.models.contrastive import Contrastive
from limner.models.dvae import DVAE
from limner.models.patches import ROUNDS, AnyDVAE, PatchDVAE, relate
from limner.models.transformer import Transformer
from limner.objectives.balanced import BalancedELB
from limner.optim.shards import sharded
from limner.pipeline import TextToImage
from limner.progress import Progress, progress
from limner.recipes.recipe import (
    TITLES,
    AnyStage,
    Bundled,
    DVAEStage,
    PatchStage,
    Recipe,
    dvae_config,
    fitted_contrastive,
    fitted_prior,
)
from limner.runs.beside import contrastive_beside, trained_together
from limner.runs.collapse import CollapseWarning
from limner.text.bpe import Tokenizer
from limner.training.checkpoint import completed, load_weights, step_of
from limner.training.config import refuse_changes
from limner.training.hooks import Hook
from limner.training.kernels import KernelCounts
from limner.training.loop import train
from limner.training.parallel import Parallel, Single
from limner.training.run import Evaluate, Run, prepare
from limner.training.stability import Stability
from limner.worlds.truth import falsehood

M = TypeVar("M", bound=PatchDVAE | DVAE | Transformer | Contrastive)
Stage = Literal["dvae", "prior", "contrastive"]
STAGES: tuple[Stage, ...] = ("dvae", "prior", "contrastive")
_KEPT_BYTES = 1 << 30  # of decoded pictures that stay in memory, where they are read again and again
_EVALUATED = 512  # held-out samples that an evaluation during training looks at
_CLUSTERED = 8_000  # pictures whose patches are clustered


def train_all(
    recipe: Recipe,
    data: str | Path,
    out: str | Path,
    stages: Sequence[Stage] | None = None,
    before: Callable[[Sequence[Stage]], object] | None = None,
    parallel: Parallel | None = None,
) -> TextToImage | None:
    """Train the stages (all by default) and write `out/bundle`, which is returned once all three exist.

    `before` is called with the stages when it is known that they can be trained.
    On a CPU with several threads the prior and the contrastive model train at the same time. Of several processes
    (`parallel`) each trains every stage with the others, and the first one writes files.
    """
    run, wanted = Stages.of(recipe, data, out, parallel or Single()), stages or STAGES
    with locked(run.out) if run.parallel.is_main else nullcontext(-1) as lock:
        run.check(wanted)
        with run.parallel.first():
            if run.parallel.is_main:
                save_json(recipe, run.out / "recipe.json")
            credited = run.credited()
            if before and run.parallel.is_main:
                before(wanted)
        dvae = run.dvae(train="dvae" in wanted)
        if not {"prior", "contrastive"} & set(wanted):
            return None
        tokenizer = run.tokenizer()
        alone = run.parallel.world == 1 and not torch.are_deterministic_algorithms_enabled()
        both = alone and trained_together(wanted, run.device)
        with contrastive_beside(recipe, data, run.out, lock) if both else nullcontext() as watch:
            prior = run.prior(tokenizer, dvae, "prior" in wanted, [watch] if watch else [])
        contrastive = run.contrastive(tokenizer, dvae, train="contrastive" in wanted and not both)
        if prior is None or contrastive is None:
            return None
        info = {
            "data": Path(data).name,
            "samples": len(run.seen),
            "recipe": to_dict(recipe),
            "temperature": recipe.prior.temperature,
            "guidance": recipe.prior.guidance,
        } | ({"attribution": credited} if credited else {})
        bundle = TextToImage(dvae, prior, contrastive, tokenizer, info)
        if run.parallel.is_main:
            bundle.save_pretrained(run.out / "bundle")
        return bundle


@dataclass(frozen=True, kw_only=True)
class Stages:
    """A recipe with its data and its folder; a method for each stage.

    With `train=False` a stage only loads what an earlier call has trained, or what the recipe starts from.
    """

    recipe: Recipe
    seen: Source
    unseen: Source
    out: Path
    device: torch.device
    parallel: Parallel = field(default_factory=Single)

    @classmethod
    def of(cls, recipe: Recipe, data: str | Path, out: str | Path, parallel: Parallel | None = None) -> Stages:
        """Open the data. Raises `UserError` if none of it is for training."""
        source = open_source(str(data))
        splits = by_split(source)
        seen, unseen = (splits.get(name) or Selection(source, []) for name in ("train", "held-out"))
        if lost := unread({name: len(chosen) for name, chosen in splits.items()}):
            warnings.warn(f"{data}: {lost}", stacklevel=2)
        if len(seen) == 0:
            raise UserError(f"{data} has no sample in the split 'train': check its metadata")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return cls(recipe=recipe, seen=seen, unseen=unseen, out=Path(out), device=device, parallel=parallel or Single())

    def check(self, stages: Sequence[Stage]) -> None:
        """Build all three models, without memory, and their optimisers, so that what cannot be trained is found before
        training begins. Raises `UserError` for that, and for stages that began with other settings."""
        recipe = self.recipe
        found: dict[Stage, tuple[AnyStage, Any]] = {}
        try:
            pictures = dvae_config(recipe)
            if not isinstance(recipe.dvae, Bundled):
                found["dvae"] = recipe.dvae, pictures
            vocab = self.known_tokenizer()
            vocab = vocab.vocab_size if vocab else recipe.text.vocab
            found["prior"] = recipe.prior, fitted_prior(recipe.prior, recipe.text, vocab, pictures)
            found["contrastive"] = (
                recipe.contrastive,
                fitted_contrastive(recipe.contrastive, recipe.text, vocab, pictures),
            )
            with torch.device("meta"):
                for stage, config in found.values():
                    prepare(config.build(), stage.objective, stage.training, torch.device("meta"), Single())
        except (ValueError, ZeroDivisionError, RuntimeError, OverflowError) as error:
            raise UserError(f"the recipe describes no models that fit together: {error}".splitlines()[0]) from None
        for name, (stage, config) in found.items():
            saved = self.out / name / "config.json"
            if name in stages and saved.exists() and completed(self.out / name):
                ours = {"training": stage.training, "model": config, "objective": stage.objective}
                known = read_json(saved)
                refuse_changes(self.out / name, known, {**known, **{k: to_dict(v) for k, v in ours.items()}})
        if "dvae" in stages and not isinstance(recipe.dvae, Bundled) and completed(self.out / "prior"):
            done = completed(self.out / "dvae")
            if not done or step_of(done[-1]) < recipe.dvae.training.steps:
                raise UserError(
                    f"the prior in {self.out} has learned from its dVAE as it is: train another dVAE in a new folder"
                )

    def credited(self) -> list[dict[str, Any]]:
        """Whose pictures the run's models learn from (`data/attribution.py`): those of this data, of what earlier
        calls trained on, and of the bundles that the recipe begins with."""
        path, begun = self.out / "attribution.json", [self.recipe.start]
        if isinstance(self.recipe.dvae, Bundled):
            begun.append(self.recipe.dvae.bundle)
        earlier = [bundles.read_info(name).get("attribution") for name in begun if name]
        known = read_json(path) if path.exists() else []
        rows = united(known, *earlier, attribution(self.seen))
        if rows and rows != known:
            atomic_write_text(path, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        return rows

    def known_tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer, or that of the recipe's start; None if it is still to be trained."""
        path, start = self.out / "tokenizer.json", self.recipe.start
        if path.exists():
            return Tokenizer.load(path)
        return Tokenizer.load(catalogue.find(catalogue.named(start)) / "tokenizer.json") if start else None

    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer, trained on the captions the first time if it is not that of the recipe's start."""
        path = self.out / "tokenizer.json"
        with self.parallel.first():
            if not path.exists():
                (self.known_tokenizer() or Tokenizer.train(_captions(self.seen), self.recipe.text.vocab)).save(path)
        return Tokenizer.load(path)

    def dvae(self, train: bool = True) -> AnyDVAE:
        """Stage one (§2.1), or the dVAE that the recipe borrows.

        Its weights are rounded as the bundle will store them, so that the prior learns the tokens of the bundle.
        """
        stage = self.recipe.dvae
        if isinstance(stage, Bundled):
            return bundles.load_model(stage.bundle, "dvae").to(self.device)
        if not train and self.recipe.start and not completed(self.out / "dvae"):  # whatever its settings
            return bundles.load_model(self.recipe.start, "dvae").to(self.device)
        torch.manual_seed(stage.training.seed)
        model = stage.model.build()
        if not train:
            if not self._load("dvae", model):
                raise UserError(f"there is no dVAE in {self.out / 'dvae'}: train the stage 'dvae' first")
            return bundles.rounded(model).to(self.device).eval()
        size = stage.model.size
        some = _some(self.unseen if len(self.unseen) else self.seen)
        checked = ImageCaptionDataset(some, size).load(np.arange(len(some)))[1].to(self.device)

        def evaluate(model: Any, step: int) -> Mapping[str, float]:
            found = health(model, checked)
            if isinstance(stage, PatchStage):
                return found
            return found | relaxation(model, checked, stage.objective.tau(step), found["psnr"])

        record = {"model": to_dict(stage.model), "objective": to_dict(stage.objective)}
        watching = []
        if isinstance(model, PatchDVAE):
            if not self.recipe.start and not completed(self.out / "dvae"):
                with self._bar("finding codes", ROUNDS, "round") as bar:
                    some = ImageCaptionDataset(_some(self.seen, _CLUSTERED), size)
                    pixels = some.load(np.arange(len(some)))[1]
                    model.fit(pixels, torch.Generator().manual_seed(stage.training.seed), progress=bar.advance)
        elif not (isinstance(stage.objective, BalancedELB) and stage.objective.balance < 0):
            watching = [CollapseWarning(stage.model.vocab)]
        model = self._run("dvae", model, stage, self._images(stage), evaluate, record, watching)
        return bundles.rounded(model).eval()

    def _images(self, stage: DVAEStage | PatchStage) -> Dataset:
        augment = "dvae" if stage.augment else "none"
        return ImageCaptionDataset(self.seen, stage.model.size, augment, keep_bytes=_KEPT_BYTES)

    def prior(
        self, tokenizer: Tokenizer, dvae: AnyDVAE, train: bool = True, hooks: Sequence[Hook] = ()
    ) -> Transformer | None:
        """Stage two (§2.2): the transformer over text and image tokens."""
        stage, text = self.recipe.prior, self.recipe.text
        config = fitted_prior(stage, text, tokenizer.vocab_size, dvae.config)
        torch.manual_seed(stage.training.seed)
        model = config.build()
        if not train:
            return model.to(self.device).eval() if self._load("prior", model) else None
        if isinstance(dvae, PatchDVAE):
            relate(model, dvae.codes)
        dvae = dvae.to(self.device).eval()
        evaluate = None
        if len(self.unseen):
            unseen = self._tokens(_some(self.unseen), tokenizer, dvae)
            evaluate = held_out(stage.objective, unseen, 64, self.device)
        record = {"model": to_dict(config), "objective": to_dict(stage.objective), "dvae": weights_hash(dvae)}
        return self._run("prior", model, stage, self._streams(tokenizer, dvae), evaluate, record, hooks).eval()

    def _streams(self, tokenizer: Tokenizer, dvae: AnyDVAE) -> Dataset:
        """The prior's: tokens of captions and pictures, these encoded once, or anew each time if they are augmented."""
        stage, text = self.recipe.prior, self.recipe.text
        if not stage.augment:
            return self._tokens(self.seen, tokenizer, dvae, text.dropout, stage.caption_dropout)
        images = ImageCaptionDataset(
            self.seen, dvae.config.size, "prior", tokenizer, text.length, text.dropout, stage.caption_dropout
        )
        return EncodedDataset(images, self._encoder(dvae))

    def _tokens(
        self, source: Source, tokenizer: Tokenizer, dvae: AnyDVAE, dropout: float = 0.0, caption_dropout: float = 0.0
    ) -> TokenDataset:
        with self.parallel.first(), self._bar("encoding pictures", len(source), "image") as bar:
            cache = encode_tokens(
                source,
                self._encoder(dvae),
                key=weights_hash(dvae),
                size=dvae.config.size,
                cache_dir=self.out / "tokens",
                progress=bar.advance,
            )
        return TokenDataset(cache.tokens, cache.captions, tokenizer, self.recipe.text.length, dropout, caption_dropout)

    def _encoder(self, dvae: AnyDVAE) -> Callable[[Tensor], Tensor]:
        return lambda pixels: dvae.tokens(pixels.to(self.device)).cpu()

    def contrastive(self, tokenizer: Tokenizer, dvae: AnyDVAE, train: bool = True) -> Contrastive | None:
        """The reranker (§2.6)."""
        stage, text = self.recipe.contrastive, self.recipe.text
        config = fitted_contrastive(stage, text, tokenizer.vocab_size, dvae.config)
        torch.manual_seed(stage.training.seed)
        model = config.build()
        if not train:
            return model.to(self.device).eval() if self._load("contrastive", model) else None
        evaluate = None
        if len(self.unseen):
            evaluate = held_out(stage.objective, self._captioned(self.unseen, tokenizer, config.size), 128, self.device)
        record = {"model": to_dict(config), "objective": to_dict(stage.objective)}
        data = self._captioned(self.seen, tokenizer, config.size)
        return self._run("contrastive", model, stage, data, evaluate, record).eval()

    def _captioned(self, source: Source, tokenizer: Tokenizer, size: int) -> ImageCaptionDataset:
        """The contrastive model's: pictures, captions and distractors; without augmentation or dropout, and not all of
        them, if they are held out."""
        stage, text, seen = self.recipe.contrastive, self.recipe.text, source is self.seen
        distractors = None
        if stage.distractors:
            distractors = Distractors(_captions(self.seen), _captions(self.unseen), falsehood), stage.distractors
        return ImageCaptionDataset(
            source if seen else _some(source),
            size,
            "prior" if stage.augment and seen else "none",
            tokenizer,
            text.length,
            text.dropout if seen else 0.0,
            distractors=distractors,
            keep_bytes=_KEPT_BYTES,
        )

    def trained(self, name: Stage) -> tuple[Run, Dataset]:
        """A stage as its newest checkpoint has it, in training mode, and its data. Raises `UserError` without one."""
        stage = getattr(self.recipe, name)
        if isinstance(stage, Bundled) or not completed(self.out / name):
            raise UserError(f"there is no checkpoint in {self.out / name}: train the stage {name!r} first")
        if name == "dvae":
            model, data = stage.model.build(), self._images(stage)
        else:
            tokenizer, dvae = self.tokenizer(), self.dvae(train=False)
            if name == "prior":
                config = fitted_prior(stage, self.recipe.text, tokenizer.vocab_size, dvae.config)
                data = self._streams(tokenizer, dvae)
            else:
                config = fitted_contrastive(stage, self.recipe.text, tokenizer.vocab_size, dvae.config)
                data = self._captioned(self.seen, tokenizer, config.size)
            model = config.build()
        load_weights(model, self.out / name)
        return Run(model.train(), stage.objective, stage.training, self.device), data

    def _bar(self, title: str, total: int, unit: str = "step") -> Progress:
        """Shown by the process that writes files."""
        return (progress if self.parallel.is_main else Progress)(title, total, unit=unit)

    def _begin(self, name: Stage, model: AnyDVAE | Transformer | Contrastive) -> bool:
        """Fill the model with the weights that the recipe starts from; False if it starts from random ones."""
        start = self.recipe.start
        if start is None:
            return False
        begun = bundles.load_model(start, name)
        if wrong := differences(to_dict(begun.config), to_dict(model.config)):
            what = f"the {name} of {start} has other settings than the recipe ({', '.join(wrong)})"
            raise UserError(f"{what}: give the recipe those of its config.json")
        model.load_state_dict(begun.state_dict())
        return True

    def _load(self, name: Stage, model: AnyDVAE | Transformer | Contrastive) -> bool:
        """Fill the model with what an earlier call has trained, or the recipe starts from; False if there is none."""
        if not completed(self.out / name):
            return self._begin(name, model)
        load_weights(model, self.out / name)
        return True

    def _run(
        self,
        name: Stage,
        model: M,
        stage: AnyStage,
        data: Dataset,
        evaluate: Evaluate | None,
        record: Mapping[str, Any],
        hooks: Sequence[Hook] = (),
    ) -> M:
        """Train a model; returns it, or where its weights are spread over processes one like it with all of them."""
        config = stage.training
        if isinstance(config.precision, SwitchBack):
            hooks = [*hooks, KernelCounts(self.out / name)]
        if self._begin(name, model):
            record = {**record, "start": self.recipe.start}
        stream = Stream(data, config.batch_size, config.seed, prefetch=2)
        with self._bar(f"training the {TITLES[name]}", config.steps) as bar:
            trained = train(
                model,
                stage.objective,
                stream,
                config,
                self.out / name,
                evaluate=evaluate,
                record=record,
                hooks=[*hooks, Stability(self.out / name)],
                device=self.device,
                parallel=self.parallel,
                progress=bar,
            )
        stream.close()
        if any(map(sharded, model.parameters())):
            model = model.config.build()  # type: ignore[assignment]
            load_weights(model, trained.checkpoint)  # which all processes have written
            model.to(self.device)
        return model


def _captions(source: Source) -> Iterable[str]:
    for i in range(len(source)):
        try:
            yield from source[i].captions
        except Rejected:
            continue


def _some(source: Source, most: int = _EVALUATED) -> Source:
    """At most `most` samples, evenly spread."""
    return Selection(source, np.linspace(0, len(source) - 1, min(most, len(source))).astype(int))
