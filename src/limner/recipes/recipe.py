"""Recipe: one frozen configuration of everything that determines a trained bundle.

A recipe describes three stages (dVAE, prior, contrastive model) and the tokenization of captions. Settings that follow
from the tokenizer or the dVAE (vocabulary sizes, the token grid) are filled in once, by `resolve`, so a recipe cannot
contradict itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from limner.bundles import find_model
from limner.config import from_dict
from limner.errors import UserError
from limner.json_files import read_mapping
from limner.models.contrastive import CLIPConfig
from limner.models.dvae import DVAEConfig
from limner.models.patch_dvae import AnyDVAEConfig, PatchDVAEConfig
from limner.models.transformer import TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.objectives.codebook_elbo import BalancedELB
from limner.objectives.elbo import RelaxedELB
from limner.objectives.hard_negatives import HardNegativeLoss
from limner.objectives.reconstruction_loss import ReconstructionLoss
from limner.sampling.generation_config import CANDIDATES
from limner.training.config import TrainConfig
from limner.training.freezing_rules import AnyFreezingRule
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


class _DVAEChecks:
    training: TrainConfig

    def __post_init__(self) -> None:
        if self.training.optimizer.needs_blocks:
            kind = type(self.training.optimizer).__name__.removesuffix("Config")
            raise InvalidSetting("training.optimizer", f"must be AdamW: {kind} is for the matrices of transformers")
        if self.training.precision.converts:
            problem = "must be auto, bf16, fp16 or fp32: all others convert transformer blocks"
            raise InvalidSetting("training.precision", problem)
        _check_activations(self.training)


@dataclass(frozen=True, kw_only=True)
class DVAEStage(_DVAEChecks):
    """Training of a convolutional dVAE.

    Args:
        augment: crop and flip pictures at random (Listing 1) instead of taking the central square.
    """

    model: DVAEConfig = field(default_factory=DVAEConfig)
    objective: RelaxedELB | BalancedELB = field(default_factory=RelaxedELB)
    training: TrainConfig
    augment: bool = True


@dataclass(frozen=True, kw_only=True)
class PatchStage(_DVAEChecks):
    """Training of a patch dVAE: k-means of patches of the training pictures, then training of the decoder.

    Args:
        augment: crop and flip pictures at random (Listing 1) instead of taking the central square.
    """

    model: PatchDVAEConfig = field(default_factory=PatchDVAEConfig)
    objective: ReconstructionLoss = field(default_factory=ReconstructionLoss)
    training: TrainConfig
    augment: bool = False


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
        grad_compression_rank: rank of PowerSGD over all shards of a matrix, for gradients sent between replicas; None
            sends fp32. `limner train --grad-compression` overrides it.
        freezing: rule by which leading blocks stop training; None trains all blocks.
        freeze_every: updates between two decisions of the rule.
        cache_mb: largest size in MiB of the cache of the frozen blocks' output, which later epochs read; 0 computes it.
        caption_dropout: share of empty captions in training, required by guidance (typically 0.1).
        related_by: keys of metadata, most general first. Pictures that agree in them are related, and the model learns
            to follow one (`data/related.py`), which needs `model.condition_blocks`.
        related_share: share of training samples with a related picture.
        examples: maximum number of training pictures that the bundle contains, of which the prior follows one if a
            caption names its subject: the first caption up to a comma, after which it says the style (`retrieval.py`).
        temperature, guidance: defaults for sampling from the trained model. Guidance 1 is off.
    """

    model: TransformerConfig = field(default_factory=TransformerConfig)
    objective: Autoregressive = field(default_factory=Autoregressive)
    training: TrainConfig
    augment: bool = True
    grad_compression_rank: Annotated[int | None, Range(1, 2**16)] = None
    freezing: AnyFreezingRule | None = None
    freeze_every: Annotated[int, Range(1, 10**6)] = 100
    cache_mb: Annotated[int, Range(0, 10**7)] = 0
    caption_dropout: Annotated[float, Range(0, 1)] = 0.0
    related_by: tuple[str, ...] = ()
    related_share: Annotated[float, Range(0, 1)] = 0.75
    examples: Annotated[int, Range(0, 2**24)] = 0
    temperature: Annotated[float, Range(0, 100)] = 1.0
    guidance: Annotated[float, Range(0, 100)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.related_by) != bool(self.model.condition_blocks):
            raise InvalidSetting("related_by", "must name keys if model.condition_blocks is not 0, and only then")
        if self.examples and not self.related_by:
            raise InvalidSetting("examples", "must be 0 without related_by: the prior follows no picture")
        if self.related_by and self.augment:
            raise InvalidSetting("related_by", "must be empty with augment: related pictures are encoded once")
        if self.cache_mb and not self.freezing:
            raise InvalidSetting("cache_mb", "must be 0 without freezing: only frozen blocks are cached")
        if self.cache_mb and (self.augment or self.related_by):
            raise InvalidSetting("cache_mb", "must be 0 with augment or related_by: their samples differ in each epoch")


@dataclass(frozen=True, kw_only=True)
class ContrastiveStage(Validated):
    """Training of the contrastive model, which reranks candidates.

    Args:
        augment: crop pictures at random (Listing 2).
        distractors: wrong captions for each picture, as hard negatives.
        prior_score_weight: weight of the log-probability under the prior (nats per token) in the score of a candidate;
            0, as in the paper, ranks by the contrastive model alone.
        candidates: default number of candidates when drawing with the trained model; None leaves it to the caller.
    """

    model: CLIPConfig = field(default_factory=CLIPConfig)
    objective: HardNegativeLoss = field(default_factory=HardNegativeLoss)
    training: TrainConfig
    augment: bool = True
    distractors: Annotated[int, Range(0, 1_000)] = 0
    prior_score_weight: Annotated[float, Range(0, 100)] = 0.0
    candidates: Annotated[int | None, CANDIDATES] = None

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


Stage = Literal["dvae", "prior", "contrastive"]

#: Stages in order, with their titles in progress lines.
STAGE_TITLES = {"dvae": "dVAE", "prior": "prior", "contrastive": "contrastive model"}


@dataclass(frozen=True, kw_only=True)
class ResolvedRecipe:
    """A recipe with all settings of its models.

    Attributes:
        models: config of each model by stage, with sizes from the tokenizer and the dVAE.
        stages: training of each model by stage, without the dVAE if a bundle provides it.
        dvae_bundle: bundle (name or folder) that provides the dVAE; None if the run trains it.
    """

    recipe: Recipe
    models: dict[str, Any]
    stages: dict[str, Any]
    dvae_bundle: str | None


def resolve(recipe: Recipe, text_vocab: int | None = None, dvae_from_start: bool = False) -> ResolvedRecipe:
    """Fill in the settings that follow from the tokenizer and the dVAE. Reads at most the config of a bundle.

    `text_vocab` is the size of the tokenizer, by default the recipe's maximum. With `dvae_from_start` the dVAE is that
    of the bundle `recipe.start`, if any. Raises `UserError` if a bundle is missing, `ValueError` if sizes do not fit.
    """
    bundle = recipe.start if dvae_from_start else None
    if isinstance(recipe.dvae, PretrainedDVAE):
        bundle = recipe.dvae.bundle
    stages: dict[str, Any] = {"dvae": recipe.dvae, "prior": recipe.prior, "contrastive": recipe.contrastive}
    if bundle is None:
        dvae: AnyDVAEConfig = stages["dvae"].model
    else:
        dvae = _read_dvae_config(bundle)
        del stages["dvae"]
    text = {"text_vocab": text_vocab or recipe.text.vocab, "text_len": recipe.text.length}
    return ResolvedRecipe(
        recipe=recipe,
        models={
            "dvae": dvae,
            "prior": replace(recipe.prior.model, image_vocab=dvae.vocab, grid=dvae.grid, **text),
            "contrastive": replace(recipe.contrastive.model, size=dvae.size, **text),
        },
        stages=stages,
        dvae_bundle=bundle,
    )


def _read_dvae_config(name_or_folder: str) -> AnyDVAEConfig:
    """Read the config of the dVAE in a bundle, or in a folder with a dVAE alone."""
    path = find_model(name_or_folder, "dvae") / "config.json"
    kind: Any = AnyDVAEConfig
    try:
        return from_dict(kind, read_mapping(path).get("dvae"), "dvae")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
