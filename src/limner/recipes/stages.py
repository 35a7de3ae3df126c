"""Run a recipe: tokenizer, dVAE, prior, contrastive model, bundle.

    RUN/tokenizer.json   RUN/dvae/   RUN/tokens/   RUN/prior/   RUN/contrastive/   RUN/bundle/

Each stage is one call of the training loop in its own folder, which goes on from its newest checkpoint;
a finished stage is loaded, not repeated. So the same command, given again after Ctrl-C or a crash,
continues where it stopped.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from limner.config import to_dict
from limner.data.datasets import ImageCaptionDataset, TokenDataset
from limner.data.samples import Rejected, Source, select_split
from limner.data.sources import open_source
from limner.data.stream import Stream
from limner.data.tokens import encode_tokens
from limner.errors import UserError
from limner.metrics.pictures import psnr
from limner.models.contrastive import Contrastive
from limner.models.dvae import DVAE
from limner.models.transformer import Transformer
from limner.objectives.elbo import gumbel_softmax
from limner.pipeline import TextToImage, load
from limner.recipes.recipe import Bundled, Recipe, fitted_contrastive, fitted_prior
from limner.text.bpe import Tokenizer
from limner.training.loop import Callback, TrainConfig, train
from limner.training.progress import progress

Stage = Literal["dvae", "prior", "contrastive"]
STAGES: tuple[Stage, ...] = ("dvae", "prior", "contrastive")
_EVALUATED = 512  # held-out samples that an evaluation during training looks at


def train_all(
    recipe: Recipe, data: str | Path, out: str | Path, stages: Sequence[Stage] | None = None
) -> TextToImage | None:
    """Train the stages (all by default) and write `out/bundle`, which is returned once all three exist."""
    out = Path(out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = open_source(str(data))
    seen, unseen = select_split(source, "train"), select_split(source, "held-out")
    if len(seen) == 0:
        raise UserError(f"{data} has no sample in the split 'train': check its metadata")
    wanted = stages or STAGES
    dvae = train_dvae(recipe, seen, unseen, out, device, run="dvae" in wanted)
    if not set(wanted) & {"prior", "contrastive"}:
        return None
    tokenizer = fit_tokenizer(recipe, seen, out)
    prior = contrastive = None
    if "prior" in wanted:
        prior = train_prior(recipe, seen, unseen, out, device, tokenizer, dvae)
    if "contrastive" in wanted:
        contrastive = train_contrastive(recipe, seen, unseen, out, device, tokenizer, dvae)
    if prior is None or contrastive is None:
        return None
    info = {"data": str(Path(data).name), "samples": len(seen), "recipe": to_dict(recipe)}
    bundle = TextToImage(dvae, prior, contrastive, tokenizer, info)
    bundle.save_pretrained(out / "bundle")
    return bundle


def fit_tokenizer(recipe: Recipe, source: Source, out: Path) -> Tokenizer:
    """The run's tokenizer, trained on the captions of `source` the first time."""
    path = out / "tokenizer.json"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        Tokenizer.train(_captions(source), recipe.text.vocab).save(path)
    return Tokenizer.load(path)


def train_dvae(
    recipe: Recipe, seen: Source, unseen: Source, out: Path, device: torch.device, run: bool = True
) -> DVAE:
    """Stage one (§2.1), or the dVAE that the recipe borrows."""
    stage = recipe.dvae
    if isinstance(stage, Bundled):
        return load(stage.bundle).dvae.to(device)
    model = stage.model.build()
    if not run and not (out / "dvae" / "checkpoints").exists():
        raise UserError(f"there is no dVAE in {out / 'dvae'}: train the stage 'dvae' first")
    images = ImageCaptionDataset(seen, stage.model.size, "dvae" if stage.augment else "none")
    checked = _some_pixels(unseen if len(unseen) else seen, stage.model.size)

    def evaluate(model: Any, step: int) -> Mapping[str, float]:
        found = []
        for part in checked.to(device).split(64):
            logits = model.encode(part)
            hard = model.pictures(logits.argmax(1).flatten(1))
            generator = torch.Generator(device).manual_seed(0)
            relaxed = model.decode(gumbel_softmax(logits, stage.objective.tau(step), generator))[0]
            found.append((psnr(part, hard), psnr(part, _as_pixels(relaxed)), logits.argmax(1).cpu()))
        codes = torch.cat([tokens.flatten() for *_, tokens in found]).bincount(minlength=stage.model.vocab)
        p = codes[codes > 0] / codes.sum()
        hard_db, relaxed_db = (float(torch.cat([row[i] for row in found]).mean()) for i in (0, 1))
        return {
            "psnr": hard_db,
            "relaxed_psnr": relaxed_db,
            "gap": relaxed_db - hard_db,
            "codes": float((codes > 0).sum()),
            "perplexity": float((-(p * p.log()).sum()).exp()),
        }

    _run(
        "dVAE", model, stage.objective, images, stage.training, out / "dvae", device, evaluate,
        {"model": to_dict(stage.model), "objective": to_dict(stage.objective)},
        callbacks=[CollapseWarning(stage.model.vocab)],
    )  # fmt: skip
    return model.eval()


class CollapseWarning(Callback):
    """Says aloud, once a run, that the codebook has collapsed, and what to try."""

    def __init__(self, vocab: int, share: float = 0.1, after: int = 500) -> None:
        self.vocab, self.share, self.after, self.said = vocab, share, after, False

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        codes = metrics.get("codes", self.vocab)
        if step >= self.after and codes < self.share * self.vocab and not self.said:
            self.said = True
            warnings.warn(
                f"the codebook has collapsed: {codes:.0f} of {self.vocab} codes are in use after {step} steps; "
                "for small or flat pictures train with objective BalancedELB (or raise its balance), raise "
                "log_b_floor, or lower the step size",
                stacklevel=2,
            )


def train_prior(
    recipe: Recipe, seen: Source, unseen: Source, out: Path, device: torch.device,
    tokenizer: Tokenizer, dvae: DVAE,
) -> Transformer:  # fmt: skip
    """Stage two (§2.2): the transformer over text and image tokens."""
    stage, text = recipe.prior, recipe.text
    config = fitted_prior(stage, text, tokenizer.vocab_size, dvae.config)
    torch.manual_seed(stage.training.seed)
    model = config.build()
    dvae = dvae.to(device).eval()
    key, size = weights_hash(dvae), dvae.config.size

    def encode(pixels: Tensor) -> Tensor:
        return dvae.tokens(pixels.to(device)).cpu()

    def cached(source: Source, title: str) -> TokenDataset:
        with progress(title, len(source), unit="image") as bar:
            cache = encode_tokens(
                source, encode, key=key, size=size, cache_dir=out / "tokens",
                progress=lambda done, total: bar.advance(done - bar.done),
            )  # fmt: skip
        dropout = text.dropout if source is seen else 0.0
        return TokenDataset(cache.tokens, cache.captions, tokenizer, text.length, dropout)

    if stage.augment:
        data = EncodedDataset(
            ImageCaptionDataset(seen, size, "prior", tokenizer, text.length, text.dropout), encode
        )
    else:
        data = cached(seen, "encoding pictures")
    evaluate = None
    if len(unseen):
        checked = cached(_some(unseen), "encoding held-out pictures")
        rows = np.arange(len(checked))
        batch = checked.batch(rows, rows.astype(np.uint64))

        def evaluate(model: Any, step: int) -> Mapping[str, float]:
            parts = [
                stage.objective(model, {k: v.to(device) for k, v in part.items()}, step, None)[1]
                for part in _parts(batch, 64)
            ]
            return {name: float(torch.stack([p[name] for p in parts]).mean()) for name in ("text", "image")}

    record = {"model": to_dict(config), "objective": to_dict(stage.objective), "dvae": key}
    _run("prior", model, stage.objective, data, stage.training, out / "prior", device, evaluate, record)
    return model.eval()


class EncodedDataset:
    """An image data set whose pictures become dVAE tokens as they are read."""

    def __init__(self, images: ImageCaptionDataset, encode: Any) -> None:
        self.images, self.encode = images, encode

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        """{"text": Long [B, T], "image": Long [B, S]}"""
        batch = self.images.batch(indices, seeds)
        return {"text": batch["text"], "image": self.encode(batch["pixels"])}


def train_contrastive(
    recipe: Recipe, seen: Source, unseen: Source, out: Path, device: torch.device,
    tokenizer: Tokenizer, dvae: DVAE,
) -> Contrastive:  # fmt: skip
    """The reranker (§2.6)."""
    stage, text = recipe.contrastive, recipe.text
    config = fitted_contrastive(stage, text, tokenizer.vocab_size, dvae.config)
    torch.manual_seed(stage.training.seed)
    model = config.build()
    augment = "prior" if stage.augment else "none"
    data = ImageCaptionDataset(seen, config.size, augment, tokenizer, text.length, text.dropout)
    evaluate = None
    if len(unseen):
        checked = ImageCaptionDataset(_some(unseen), config.size, "none", tokenizer, text.length)
        rows = np.arange(len(checked))
        batch = checked.batch(rows, rows.astype(np.uint64))

        def evaluate(model: Any, step: int) -> Mapping[str, float]:
            parts = [
                stage.objective(model, {k: v.to(device) for k, v in part.items()}, step, None)[1]
                for part in _parts(batch, 128)
            ]
            return {"accuracy": float(torch.stack([p["accuracy"] for p in parts]).mean())}

    record = {"model": to_dict(config), "objective": to_dict(stage.objective)}
    _run(
        "contrastive model", model, stage.objective, data, stage.training, out / "contrastive", device,
        evaluate, record,
    )  # fmt: skip
    return model.eval()


def _run(
    title: str, model: Any, objective: Any, data: Any, config: TrainConfig, out: Path,
    device: torch.device, evaluate: Any, record: Mapping[str, Any], callbacks: Sequence[Callback] = (),
) -> None:  # fmt: skip
    stream = Stream(data, config.batch_size, config.seed, prefetch=2)
    with progress(f"training the {title}", config.steps) as bar:
        train(
            model, objective, stream, config, out,
            evaluate=evaluate, record=record, callbacks=callbacks, device=device, progress=bar,
        )  # fmt: skip
    stream.close()


def weights_hash(model: torch.nn.Module) -> str:
    """SHA-256 over the names, shapes and values of a model's parameters."""
    state = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(f"{name} {tuple(tensor.shape)}".encode())
        state.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return state.hexdigest()


def _captions(source: Source) -> Iterable[str]:
    for i in range(len(source)):
        try:
            yield from source[i].captions
        except Rejected:
            continue


def _some(source: Source) -> Source:
    from limner.data.samples import Selection

    return Selection(source, np.linspace(0, len(source) - 1, min(_EVALUATED, len(source))).astype(int))


def _some_pixels(source: Source, size: int) -> Tensor:
    some = _some(source)
    return ImageCaptionDataset(some, size).load(np.arange(len(some)))[1]


def _as_pixels(mu: Tensor) -> Tensor:
    from limner.models.dvae import unmap_pixels

    return unmap_pixels(torch.sigmoid(mu))


def _parts(batch: Mapping[str, Tensor], size: int) -> Iterable[dict[str, Tensor]]:
    for start in range(0, len(next(iter(batch.values()))), size):
        yield {name: tensor[start : start + size] for name, tensor in batch.items()}
