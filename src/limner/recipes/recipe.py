"""Recipe: one frozen configuration of everything that determines a trained bundle.

A recipe describes three stages (dVAE, prior, contrastive model) and the tokenization of captions. Settings that follow
from the data or an earlier stage (vocabulary sizes, the token grid) are resolved when the stage runs, so a recipe
cannot contradict itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

from limner.bundles import load_model
from limner.models.contrastive import CLIPConfig
from limner.models.dvae import DVAEConfig
from limner.models.patch_dvae import AnyDVAEConfig, PatchDVAEConfig
from limner.models.transformer import TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.objectives.codebook_elbo import BalancedELB
from limner.objectives.elbo import RelaxedELB
from limner.objectives.hard_negatives import HardNegativeLoss
from limner.objectives.reconstruction_loss import ReconstructionLoss
from limner.training.config import TrainConfig
from limner.validation import InvalidSetting, Range, Validated


@dataclass(frozen=True, kw_only=True)
class TextConfig(Validated):
    """Tokenization of captions.

    Args:
        vocab: maximal number of BPE tokens.
        length: tokens per caption; longer captions are cut.
        dropout: probability of skipping a merge in training (BPE dropout).
    """

    vocab: Annotated[int, Range(256, 2**24)] = 16_384
    length: Annotated[int, Range(1, 2**14)] = 256
    dropout: Annotated[float, Range(0, 1)] = 0.1


def _check_activations(training: TrainConfig) -> None:
    if training.checkpoint_activations:
        raise InvalidSetting("training.checkpoint_activations", "must be false: only the prior supports it")


def _check_dvae(training: TrainConfig) -> None:
    if training.optimizer.needs_blocks:
        kind = type(training.optimizer).__name__.removesuffix("Config")
        raise InvalidSetting("training.optimizer", f"must be AdamW: {kind} is for the matrices of transformers")
    if training.precision.converts:
        raise InvalidSetting(
            "training.precision", "must be auto, bf16, fp16 or fp32: all others convert transformer blocks"
        )
    _check_activations(training)


@dataclass(frozen=True, kw_only=True)
class DVAEStage:
    """Training of a convolutional dVAE.

    Args:
        augment: crop and flip pictures at random (Listing 1) instead of taking the central square.
    """

    model: DVAEConfig = field(default_factory=DVAEConfig)
    objective: RelaxedELB | BalancedELB = field(default_factory=RelaxedELB)
    training: TrainConfig
    augment: bool = True

    def __post_init__(self) -> None:
        _check_dvae(self.training)


@dataclass(frozen=True, kw_only=True)
class PatchStage:
    """Training of a patch dVAE: k-means of patches of the training pictures, then training of the decoder.

    Args:
        augment: crop and flip pictures at random (Listing 1) instead of taking the central square.
    """

    model: PatchDVAEConfig = field(default_factory=PatchDVAEConfig)
    objective: ReconstructionLoss = field(default_factory=ReconstructionLoss)
    training: TrainConfig
    augment: bool = False

    def __post_init__(self) -> None:
        _check_dvae(self.training)


@dataclass(frozen=True, kw_only=True)
class PretrainedDVAE:
    """A trained dVAE to use instead of training one."""

    bundle: str = "scenes"
    """Bundle (name or folder) that contains the dVAE, or output folder of `limner convert`."""


@dataclass(frozen=True, kw_only=True)
class PriorStage(Validated):
    """Training of the prior, a transformer over text and image tokens.

    Args:
        augment: crop pictures at random (Listing 2) and encode them on the fly, instead of once into a cache.
        caption_dropout: share of empty captions in training, required by guidance (typically 0.1).
        temperature, guidance: defaults for sampling from the trained model. Guidance 1 is off.
    """

    model: TransformerConfig = field(default_factory=TransformerConfig)
    objective: Autoregressive = field(default_factory=Autoregressive)
    training: TrainConfig
    augment: bool = True
    caption_dropout: Annotated[float, Range(0, 1)] = 0.0
    temperature: Annotated[float, Range(0, 100)] = 1.0
    guidance: Annotated[float, Range(0, 100)] = 1.0


@dataclass(frozen=True, kw_only=True)
class ContrastiveStage(Validated):
    """Training of the contrastive model, which reranks candidates.

    Args:
        augment: crop pictures at random (Listing 2).
        distractors: wrong captions for each picture, as hard negatives.
        prior_score_weight: weight of the log-probability under the prior (nats per token) in the score of a candidate;
            0, as in the paper, ranks by the contrastive model alone.
    """

    model: CLIPConfig = field(default_factory=CLIPConfig)
    objective: HardNegativeLoss = field(default_factory=HardNegativeLoss)
    training: TrainConfig
    augment: bool = True
    distractors: Annotated[int, Range(0, 1_000)] = 0
    prior_score_weight: Annotated[float, Range(0, 100)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_activations(self.training)


AnyStage = DVAEStage | PatchStage | PriorStage | ContrastiveStage


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Configuration of all stages. `limner train DATA --recipe NAME` runs it; options override its settings.

    Args:
        start: bundle (name or folder) to continue from. It provides the tokenizer, initial weights for the trained
            stages, whose model settings must be equal, and the other models. None starts with random weights.
    """

    start: str | None = None
    text: TextConfig = field(default_factory=TextConfig)
    dvae: DVAEStage | PatchStage | PretrainedDVAE
    prior: PriorStage
    contrastive: ContrastiveStage


#: Stages in order, with their titles in progress lines.
STAGE_TITLES = {"dvae": "dVAE", "prior": "prior", "contrastive": "contrastive model"}


def resolve_dvae_config(recipe: Recipe) -> AnyDVAEConfig:
    """Config of the dVAE that the recipe trains or loads. Raises `UserError` if the bundle to load from is missing."""
    dvae = recipe.dvae
    return load_model(dvae.bundle, "dvae").config if isinstance(dvae, PretrainedDVAE) else dvae.model


def resolve_prior_config(
    stage: PriorStage, text: TextConfig, text_vocab: int, dvae: AnyDVAEConfig
) -> TransformerConfig:
    """Config of the prior, with sizes taken from the tokenizer and the dVAE."""
    return replace(stage.model, text_vocab=text_vocab, text_len=text.length, image_vocab=dvae.vocab, grid=dvae.grid)


def resolve_contrastive_config(
    stage: ContrastiveStage, text: TextConfig, text_vocab: int, dvae: AnyDVAEConfig
) -> CLIPConfig:
    """Config of the contrastive model, with sizes taken from the tokenizer and the dVAE."""
    return replace(stage.model, text_vocab=text_vocab, text_len=text.length, size=dvae.size)
