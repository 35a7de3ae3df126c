"""What a recipe is: everything that decides a trained bundle, as one frozen configuration.

A recipe names three stages (dVAE, prior, contrastive model) and how captions become tokens. Numbers
that follow from the data or from an earlier stage (vocabulary sizes, the token grid) are filled in when
the stage runs, so that a recipe cannot contradict itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

from limner.bundles import load_model
from limner.models.contrastive import ContrastiveConfig
from limner.models.dvae import DVAEConfig
from limner.models.patch_dvae import AnyDVAEConfig, PatchDVAEConfig
from limner.models.transformer import TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.objectives.codebook_elbo import BalancedELB
from limner.objectives.elbo import RelaxedELB
from limner.objectives.hard_negatives import HardContrastiveLoss
from limner.objectives.reconstruction_loss import PixelError
from limner.training.config import TrainConfig
from limner.validation import Checked, OutOfRange, Range


@dataclass(frozen=True, kw_only=True)
class TextConfig(Checked):
    """How captions become tokens.

    Args:
        vocab: BPE tokens at most.
        length: tokens of a caption, which is cut there.
        dropout: share of the merges that are left out at random in training (BPE dropout).
    """

    vocab: Annotated[int, Range(256, 2**24)] = 16_384
    length: Annotated[int, Range(1, 2**14)] = 256
    dropout: Annotated[float, Range(0, 1)] = 0.1


def _check_activations(training: TrainConfig) -> None:
    if training.checkpoint_activations:
        raise OutOfRange("training.checkpoint_activations", "must be false: only the prior can do it")


def _check_dvae(training: TrainConfig) -> None:
    if training.optimizer.for_blocks:
        kind = type(training.optimizer).__name__
        raise OutOfRange("training.optimizer", f"must be AdamW: {kind} is for the matrices of transformers")
    if training.precision.converts:
        raise OutOfRange(
            "training.precision", "must be auto, bf16, fp16 or fp32: others change the blocks of transformers"
        )
    _check_activations(training)


@dataclass(frozen=True, kw_only=True)
class DVAEStage:
    """A dVAE.

    Args:
        augment: crop and flip pictures at random (Listing 1); otherwise the central square is taken.
    """

    model: DVAEConfig = field(default_factory=DVAEConfig)
    objective: RelaxedELB | BalancedELB = field(default_factory=RelaxedELB)
    training: TrainConfig
    augment: bool = True

    def __post_init__(self) -> None:
        _check_dvae(self.training)


@dataclass(frozen=True, kw_only=True)
class PatchStage:
    """A dVAE of patches: k-means of the training pictures' patches, then training of the decoder.

    Args:
        augment: crop and flip pictures at random (Listing 1); otherwise the central square is taken.
    """

    model: PatchDVAEConfig = field(default_factory=PatchDVAEConfig)
    objective: PixelError = field(default_factory=PixelError)
    training: TrainConfig
    augment: bool = False

    def __post_init__(self) -> None:
        _check_dvae(self.training)


@dataclass(frozen=True, kw_only=True)
class Bundled:
    """No dVAE is trained; the run takes another one."""

    bundle: str = "scenes"
    """The bundle (a name or a folder) whose dVAE it is, or what `limner convert` wrote."""


@dataclass(frozen=True, kw_only=True)
class PriorStage(Checked):
    """The transformer over text and image tokens.

    Args:
        augment: crop pictures at random (Listing 2) and encode them on the fly; otherwise once, and cached.
        caption_dropout: share of captions left empty in training, which guidance needs (0.1, say).
        temperature, guidance: of drawings by the trained model, unless they are asked for otherwise; a guidance of 1 is
            none.
    """

    model: TransformerConfig = field(default_factory=TransformerConfig)
    objective: Autoregressive = field(default_factory=Autoregressive)
    training: TrainConfig
    augment: bool = True
    caption_dropout: Annotated[float, Range(0, 1)] = 0.0
    temperature: Annotated[float, Range(0, 100)] = 1.0
    guidance: Annotated[float, Range(0, 100)] = 1.0


@dataclass(frozen=True, kw_only=True)
class ContrastiveStage(Checked):
    """The reranker.

    Args:
        augment: crop pictures at random (Listing 2).
        distractors: wrong captions that come with each picture.
        likelihood: weight of a drawing's log-probability under the prior, in nats per token, in its score; 0, as in the
            paper, ranks by the contrastive model alone.
    """

    model: ContrastiveConfig = field(default_factory=ContrastiveConfig)
    objective: HardContrastiveLoss = field(default_factory=HardContrastiveLoss)
    training: TrainConfig
    augment: bool = True
    distractors: Annotated[int, Range(0, 1_000)] = 0
    likelihood: Annotated[float, Range(0, 100)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_activations(self.training)


AnyStage = DVAEStage | PatchStage | PriorStage | ContrastiveStage


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole plan. `limner train DATA --recipe NAME` runs it, with any field overridden.

    Args:
        start: a bundle (a name or a folder) to continue from. It gives the tokenizer, the initial weights of each
            stage, whose settings must be the same, and the models that are not trained. None begins with random
            weights.
    """

    start: str | None = None
    text: TextConfig = field(default_factory=TextConfig)
    dvae: DVAEStage | PatchStage | Bundled
    prior: PriorStage
    contrastive: ContrastiveStage


#: The stages, in order, as people call them.
TITLES = {"dvae": "dVAE", "prior": "prior", "contrastive": "contrastive model"}


def dvae_config(recipe: Recipe) -> AnyDVAEConfig:
    """Of the dVAE that the recipe trains, or of the one that it borrows. Raises `UserError` if that is not there."""
    dvae = recipe.dvae
    return load_model(dvae.bundle, "dvae").config if isinstance(dvae, Bundled) else dvae.model


def fitted_prior(stage: PriorStage, text: TextConfig, text_vocab: int, dvae: AnyDVAEConfig) -> TransformerConfig:
    """The prior's sizes that follow from the tokenizer and the dVAE."""
    return replace(stage.model, text_vocab=text_vocab, text_len=text.length, image_vocab=dvae.vocab, grid=dvae.grid)


def fitted_contrastive(
    stage: ContrastiveStage, text: TextConfig, text_vocab: int, dvae: AnyDVAEConfig
) -> ContrastiveConfig:
    """The contrastive model's sizes that follow from the tokenizer and the dVAE."""
    return replace(stage.model, text_vocab=text_vocab, text_len=text.length, size=dvae.size)
