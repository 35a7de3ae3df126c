"""What a recipe is: everything that decides a trained bundle, as one frozen configuration.

A recipe names three stages (dVAE, prior, contrastive model) and how captions become tokens. Numbers
that follow from the data or from an earlier stage (vocabulary sizes, the token grid) are filled in when
the stage runs, so that a recipe cannot contradict itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from limner.models.contrastive import ContrastiveConfig
from limner.models.dvae import DVAEConfig
from limner.models.transformer import TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.objectives.contrastive import ContrastiveLoss
from limner.objectives.elbo import BalancedELB, RelaxedELB
from limner.training.loop import TrainConfig


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """`vocab` BPE tokens at most; captions are cut at `length`; merges are dropped with `dropout`."""

    vocab: int = 16_384
    length: int = 256
    dropout: float = 0.1


@dataclass(frozen=True, kw_only=True)
class DVAEStage:
    """`augment` is Listing 1 of the paper; without it, pictures are squares resized."""

    model: DVAEConfig = field(default_factory=DVAEConfig)
    objective: RelaxedELB | BalancedELB = field(default_factory=RelaxedELB)
    training: TrainConfig
    augment: bool = True


@dataclass(frozen=True, kw_only=True)
class Bundled:
    """No dVAE is trained: that of a bundle serves (a name or a folder), or one that `limner import` wrote."""

    bundle: str = "scenes"


@dataclass(frozen=True, kw_only=True)
class PriorStage:
    """With `augment` (Listing 2) pictures are encoded on the fly, else once and cached.

    `caption_dropout` is the share of captions left empty in training, which guidance needs (0.1, say);
    `guidance` is what the trained model is drawn with where nothing else is asked, 1 is none.
    """

    model: TransformerConfig = field(default_factory=TransformerConfig)
    objective: Autoregressive = field(default_factory=Autoregressive)
    training: TrainConfig
    augment: bool = True
    caption_dropout: float = 0.0
    guidance: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ContrastiveStage:
    """The reranker. `augment` as for the prior; `distractors` wrong captions come with each picture."""

    model: ContrastiveConfig = field(default_factory=ContrastiveConfig)
    objective: ContrastiveLoss = field(default_factory=ContrastiveLoss)
    training: TrainConfig
    augment: bool = True
    distractors: int = 0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole plan. `limner train DATA --recipe NAME` runs it, with any field overridden.

    `start` is a bundle (a name or a folder) to go on from: its tokenizer, the weights that each training begins
    with, which must have the same settings, and whatever is not trained. None begins with random weights.
    """

    start: str | None = None
    text: TextConfig = field(default_factory=TextConfig)
    dvae: DVAEStage | Bundled
    prior: PriorStage
    contrastive: ContrastiveStage


def fitted_prior(stage: PriorStage, text: TextConfig, text_vocab: int, dvae: DVAEConfig) -> TransformerConfig:
    """The prior's sizes that follow from the tokenizer and the dVAE."""
    return replace(stage.model, text_vocab=text_vocab, text_len=text.length, image_vocab=dvae.vocab, grid=dvae.grid)


def fitted_contrastive(
    stage: ContrastiveStage, text: TextConfig, text_vocab: int, dvae: DVAEConfig
) -> ContrastiveConfig:
    """The contrastive model's sizes that follow from the tokenizer and the dVAE."""
    return replace(stage.model, text_vocab=text_vocab, text_len=text.length, size=dvae.size)
