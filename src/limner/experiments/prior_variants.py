"""Variants of the prior that Ramesh et al. 2021 compare (§2.2, B.1): padding, softmax, masks, targets, weights.

The priors model scenes with one or two objects, 6 x 6 tokens of patches. The conv window is 5 x 5, as large a share of
the grid as the paper's 11 x 11 of 32 x 32 allows. Losses are in nats per image token, on held-out scenes.

Shapes: B batch, T text positions, S image positions, V codes, P = T + 1, N = P + S, H heads, C head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from limner.attention.attention import AttentionFn, attend, attention_mask
from limner.attention.patterns import PATTERNS, Pattern
from limner.experiments import tiny_models
from limner.experiments.report import Finding, experiment
from limner.experiments.sweep import Result, Runs, Sweep, all_above, over_seeds, span
from limner.experiments.tiny_models import NUM_SCENES, PRIOR, TEXT_LEN, train_in_memory
from limner.models.dvae import map_pixels
from limner.models.transformer import Transformer, TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.text import PAD

MODEL, OBJECTIVE = replace(PRIOR, width=48, depth=3, kernel=5), Autoregressive()
SEEDS, SETTINGS = range(8), {"steps": 300, "batch": 32, "lr": 4e-3}
QUICK = {**SETTINGS, "steps": 4, "batch": 8}
HELD_OUT, FEW_SCENES = 512, 256
TEMPERATURE = 0.02  # of squared distances between patches and codes, in q


class MaskedPadding(Transformer):
    """A prior whose attention logits are -inf at text positions without a token, of the captions of `inputs`."""

    def inputs(self, text: Int64[Tensor, "B T"], image: Int64[Tensor, "B S"]) -> Float[Tensor, "B n D"]:
        self.has_token = F.pad(text != PAD, (0, 1 + image.shape[1]), value=True)[:, None, None]
        return super().inputs(text, image)

    def run(
        self, x: Float[Tensor, "B n D"], start: int = 0, stop: int | None = None,
        attention_fns: Iterable[AttentionFn] | None = None,
    ) -> Float[Tensor, "B n D"]:  # fmt: skip
        masks = {name: fn.get_buffer("mask") & self.has_token for name, fn in self.attention_fns.items()}
        fns = attention_fns or [self._attention_fn(masks[pattern.name]) for pattern in self.config.patterns]
        return super().run(x, start, stop, fns)

    @staticmethod
    def _attention_fn(mask: Tensor) -> AttentionFn:
        bias = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        return lambda q, k, v: (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v


class SeparateSoftmax(nn.Module):
    """Attention to the prefix and to the image, each with its own softmax; image positions add the two."""

    mask: Tensor

    def __init__(self, pattern: Pattern, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix
        self.register_buffer("mask", attention_mask(pattern, prefix), persistent=False)

    def forward(
        self, q: Float[Tensor, "B H N C"], k: Float[Tensor, "B H N C"], v: Float[Tensor, "B H N C"]
    ) -> Float[Tensor, "B H N C"]:
        p = self.prefix
        image = attend(q[:, :, p:], k[:, :, p:], v[:, :, p:], self.mask[p:, p:])
        return attend(q, k[:, :, :p], v[:, :, :p], self.mask[:, :p]) + F.pad(image, (0, 0, p, 0))


class SeparateSoftmaxes(Transformer):
    """A prior with `SeparateSoftmax` in all layers."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        for pattern in config.patterns:
            self.attention_fns[pattern.name] = SeparateSoftmax(pattern, config.text_len + 1)


@dataclass(frozen=True, kw_only=True)
class LastLayerConfig(TransformerConfig):
    """The paper's order of patterns, with the pattern `last` in the last layer."""

    last: str

    @cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        return (*super().patterns[:-1], PATTERNS[self.last](self.grid, self.kernel))


def sample(q: Float[Tensor, "B S V"], generator: torch.Generator | None) -> Int64[Tensor, "B S"]:
    """Return a token from each distribution."""
    return torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(q.shape[:2])


class SampledTokens(Autoregressive):
    """The prior's objective on image tokens that each batch samples from q (footnote 6)."""

    def __call__(self, model: Any, batch: Any, step: int, generator: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return super().__call__(model, {**batch, "image": sample(batch["q"], generator)}, step, generator)


class SoftTargets(Autoregressive):
    """The cross-entropy of q, given image tokens sampled from q (footnote 6)."""

    def __call__(self, model: Any, batch: Any, step: int, generator: Any) -> tuple[Tensor, dict[str, Tensor]]:
        text, q = batch["text"], batch["q"]
        by_text, by_image = model(text, sample(q, generator))
        text_loss = F.cross_entropy(by_text.flatten(0, 1), text[:, 1:].flatten(), ignore_index=PAD)
        image_loss = F.cross_entropy(by_image.flatten(0, 1), q.flatten(0, 1))
        loss = self.text_weight * text_loss + (1 - self.text_weight) * image_loss
        return loss, {"text": text_loss.detach(), "image": image_loss.detach()}


@cache
def samples(count: int, seed: int) -> dict[str, Tensor]:
    """Return the tokens of scenes and their captions, and q: the posterior of a mixture of normal distributions around
    the codes of patches."""
    pictures, text = tiny_models.scenes(count, seed)
    dvae = tiny_models.patch_dvae()
    patches = F.pixel_unshuffle(map_pixels(pictures), dvae.config.patch).flatten(2).mT
    q = (-torch.cdist(patches, dvae.codes).square() / TEMPERATURE).softmax(-1)
    return {"text": text, "image": q.argmax(-1), "q": q}


@cache
def unusual_captions() -> dict[str, Int64[Tensor, "B T"]]:
    """Return the tokens of captions unlike those of training, of the held-out scenes: without articles, sizes, fills
    and background, and with words in random order."""
    pairs = tiny_models.captioned_scenes(HELD_OUT, 1)
    terse = [" and ".join(f"{item.color} {item.shape}" for item in scene.objects) for scene, _ in pairs]
    rng = np.random.default_rng(0)
    shuffled = [" ".join(rng.permutation(caption.split())) for _, caption in pairs]
    captions = {"terse": terse, "shuffled": shuffled}
    return {name: tiny_models.tokenizer().encode(texts, TEXT_LEN) for name, texts in captions.items()}


def trial(
    *, seed: int, model: type[Transformer] = Transformer, config: TransformerConfig = MODEL,
    objective: Autoregressive = OBJECTIVE, count: int = NUM_SCENES, **settings: Any,
) -> Result:  # fmt: skip
    """Return the losses of training on the first `count` scenes, and `evaluate`."""
    torch.manual_seed(seed)
    run, losses = train_in_memory(model(config), objective, samples(count, 0), seed=seed, **settings)
    return {"loss": losses, **evaluate(run.model.eval())}


@torch.no_grad()
def evaluate(model: Any) -> Result:
    """Return the losses of text and image tokens of held-out scenes, that of image tokens sampled from q, and that of
    image tokens after `unusual_captions`."""
    batch = samples(HELD_OUT, 1)
    losses = OBJECTIVE(model, batch, 0, None)[1]
    sampled = SampledTokens()(model, batch, 0, torch.Generator().manual_seed(0))[1]["image"]
    unusual = {
        name: OBJECTIVE(model, {**batch, "text": text}, 0, None)[1]["image"]
        for name, text in unusual_captions().items()
    }
    return {name: loss.item() for name, loss in {**losses, "sampled": sampled, **unusual}.items()}


def sweep(folder: Path, quick: bool, grid: dict[Any, dict[str, Any]], **settings: Any) -> Sweep:
    """Run the trials of a grid."""
    return Sweep(folder, trial, grid, SEEDS[:1] if quick else SEEDS, **(QUICK if quick else SETTINGS), **settings)


COLUMNS: dict[str, Callable[[Runs], object]] = {
    "training loss": lambda runs: f"{runs.losses().mean():.4f}",
    "held-out image loss": lambda runs: f"{runs.mean('image'):.4f}",
    "of seeds": lambda runs: span(runs.values("image"), ".4f"),
}


@experiment(
    "Padding tokens give a higher validation loss than logits of -inf at padding, but a lower loss on unusual captions",
    "Ramesh et al. 2021, §2.2",
)
def padding(folder: Path, quick: bool) -> Finding:
    """Compare image losses after captions as in training, after terse ones, and after ones with shuffled words."""
    results = sweep(folder, quick, {"learned tokens": {}, "logits of -inf": {"model": MaskedPadding}})
    kinds = {"image": "captions as in training", "terse": "terse captions", "shuffled": "shuffled words"}
    tokens, infinite = results.runs.values()
    gaps = {key: infinite.values(key) - tokens.values(key) for key in kinds}
    return results.finding(
        all_above(map(over_seeds, (-gaps["image"], gaps["terse"], gaps["shuffled"]))),
        "The image loss with -inf, less that with learned tokens: "
        + ", ".join(f"{over_seeds(gap)} after {kinds[key]}" for key, gap in gaps.items())
        + ".",
        ("padding",),
        COLUMNS | {kinds[key]: lambda runs, key=key: f"{runs.mean(key):.4f}" for key in ("terse", "shuffled")},
        {"loss, first seed": results.curves},
    )


@experiment(
    "One softmax over text and image performs better than separately normalized attentions",
    "Ramesh et al. 2021, §2.2, footnote 7",
)
def separate_softmax(folder: Path, quick: bool) -> Finding:
    """Compare the held-out image loss of both, from the same initial weights."""
    results = sweep(folder, quick, {"one": {}, "separate": {"model": SeparateSoftmaxes}})
    return results.best("one", "image", "held-out image loss", ("softmax",), COLUMNS)


@experiment(
    "The convolutional mask in the last layer performs better than row and dense masks there",
    "Ramesh et al. 2021, App. B.1",
)
def last_layer(folder: Path, quick: bool) -> Finding:
    """Compare the held-out image loss with three masks in the last layer; the other layers are as in the paper."""
    grid = {name: {"config": LastLayerConfig(**asdict(MODEL), last=name)} for name in ("conv", "row", "dense")}
    return sweep(folder, quick, grid).best("conv", "image", "held-out image loss", ("last layer",), COLUMNS)


@experiment(
    "Tokens sampled from q instead of the argmax regularize an overparameterized prior, also with soft targets",
    "Ramesh et al. 2021, §2.2, footnote 6",
)
def soft_targets(folder: Path, quick: bool) -> Finding:
    """Compare held-out losses on argmax tokens after training on few scenes, which the prior overfits."""
    objectives = {"argmax": OBJECTIVE, "sampled": SampledTokens(), "soft targets": SoftTargets()}
    grid = {name: {"objective": objective} for name, objective in objectives.items()}
    results = sweep(folder, quick, grid, count=FEW_SCENES)
    argmax, sampled, soft = (runs.values("image") for runs in results.runs.values())
    return results.finding(
        all_above([over_seeds(argmax - sampled), over_seeds(argmax - soft)]),
        "The held-out image loss on argmax tokens, less that after training on them: "
        f"{over_seeds(sampled - argmax)} with sampled tokens, {over_seeds(soft - argmax)} with soft targets.",
        ("image tokens",),
        COLUMNS | {"on sampled tokens": lambda runs: f"{runs.mean('sampled'):.4f}"},
        {"loss, first seed": results.curves},
        entropy=f"{torch.special.entr(samples(HELD_OUT, 1)['q']).sum(-1).mean():.2f} nats per token in q",
    )


@experiment(
    "With weights of 1/8 for text and 7/8 for images, a prior models images better than with larger weights of text",
    "Ramesh et al. 2021, §2.2",
)
def loss_weights(folder: Path, quick: bool) -> Finding:
    """Compare the held-out image loss over the weight of the text loss."""
    weights = {"1/8": 1 / 8, "1/2": 1 / 2, "7/8": 7 / 8}
    results = sweep(folder, quick, {name: {"objective": Autoregressive(text_weight=w)} for name, w in weights.items()})
    columns = COLUMNS | {"held-out text loss": lambda runs: f"{runs.mean('text'):.4f}"}
    return results.best("1/8", "image", "held-out image loss", ("weight of text",), columns)
