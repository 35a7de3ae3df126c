"""Recipes. Each docstring gives commands, cost and expected result."""

from __future__ import annotations

from dataclasses import replace

from limner.models.contrastive import SIZES as CLIP_SIZES, CLIPConfig
from limner.models.dvae import DVAEConfig
from limner.models.patch_dvae import PatchDVAEConfig
from limner.models.transformer import SIZES, TransformerConfig
from limner.numerics.precision import Auto, Fp16
from limner.objectives.autoregressive import Autoregressive
from limner.objectives.codebook_elbo import BalancedELB
from limner.objectives.hard_negatives import HardNegativeLoss
from limner.optim.optimizers import AdamW16Config, AdamWConfig, MuonConfig, OptimizerConfig, StableAdamWConfig
from limner.optim.schedules import Anneal, Cosine, Plateau
from limner.quantization.precisions import Fp16Weights
from limner.recipes.recipe import (
    ContrastiveStage,
    DVAEStage,
    PatchStage,
    PretrainedDVAE,
    PriorStage,
    Recipe,
    TextConfig,
)
from limner.training.config import TrainConfig


def scenes() -> Recipe:
    """Synthetic scenes, as for the bundled model `scenes`. Two to three hours on two cores.

    limner data scenes data/scenes --count 120000 --objects 2 7 0.5 0.5 --in-order 0.7
    limner train data/scenes --recipe scenes --out runs/scenes
    """
    return Recipe(
        text=TextConfig(vocab=1_024, length=32, dropout=0.0),
        dvae=_small_dvae(48, groups=3, vocab=512, steps=8_000, context=0, contrast=0.7, penalty_from=5_000),
        prior=_small_prior(width=256, steps=12_000, batch=16, ema=0.999),
        contrastive=replace(_small_contrastive(steps=3_000), prior_score_weight=2.0),
    )


def demo() -> Recipe:
    """Recipe of `limner demo`, which reduces the number of steps if training would take more than nine minutes."""
    return Recipe(
        text=TextConfig(vocab=1_024, length=20, dropout=0.0),
        dvae=PretrainedDVAE(),
        prior=_small_prior(width=96, steps=3_000, batch=16, ema=0.99),
        contrastive=_small_contrastive(steps=1_000, width=96, distractors=1),
    )


def emoji() -> Recipe:
    """Emoji pictures with their names as captions. Half an hour to an hour on two cores.

        limner data emoji data/emoji
        limner train data/emoji --recipe emoji --out runs/emoji
        limner evaluate emoji runs/emoji data/emoji

    The best of 16 candidates is nearest to the right emoji or a variant of it for nine in ten training captions, and
    for eight in ten held-out captions.
    """
    return Recipe(
        text=TextConfig(vocab=2_048, length=24, dropout=0.1),
        dvae=_small_dvae(64, groups=4, vocab=1_024, steps=3_000, context=1),
        prior=_small_prior(width=128, steps=4_000, batch=32, ema=0.998),
        contrastive=_small_contrastive(steps=400),
    )


def icons() -> Recipe:
    """Icons of the same objects by several artists, as for the bundled model `icons`. Two hours on two cores.

        limner data icons data/icons iconify-json-[a-z]*.tgz --size 72 --margin 6 --styles 7 --tones 0 --pairs 0.1 \\
            --categories "Animals & Nature" "Food & Drink" Activities "Smileys & Emotion"
        limner train data/icons --recipe icons --out runs/icons

    The dVAE trains on random crops, which the margin allows, and reconstructs unseen pictures better for it. The prior
    trains without crops and memorizes its training pictures: it draws training captions correctly, but not objects in
    styles it has not seen them in (docs/log/2026-11-27.md, "Icons of 16 x 16 tokens after 6,500 steps").
    """
    return Recipe(
        text=TextConfig(vocab=2_048, length=26, dropout=0.0),
        dvae=_patch_dvae(vocab=2_048, steps=2_000),
        prior=_small_prior(width=160, steps=6_500, batch=16, ema=0.998, temperature=0.5),
        contrastive=_small_contrastive(steps=400),
    )


def glyphs() -> Recipe:
    """Monochrome icons by subject and style, as for the bundled model `glyphs`. Two hours on two cores with AMX.

        npm pack @iconify/json
        limner data glyphs data/glyphs iconify-json-[0-9]*.tgz --styles 10
        limner train data/glyphs --recipe glyphs --out runs/glyphs
        limner evaluate glyphs runs/glyphs data/glyphs

    Unlike `icons`, the data set shows most subjects in many styles, and held-out combinations of them. The prior learns
    to follow another icon of the subject: one of the training icons that the bundle contains, or a given one, as in
    `limner edit --like ICON.svg "the same, filled" --model runs/glyphs`.
    """
    dvae = _patch_dvae(vocab=1_024, steps=3_000)
    prior = _small_prior(width=192, steps=10_000, batch=32, ema=0.999)
    prior = replace(
        prior, model=replace(prior.model, heads=3, condition_blocks=2), related_by=("subject", "set"), examples=100_000
    )
    return Recipe(
        text=TextConfig(vocab=4_096, length=24, dropout=0.0),
        dvae=replace(dvae, model=replace(dvae.model, size=48), augment=False),
        prior=replace(prior, caption_dropout=0.1, temperature=0.6, guidance=2.0),
        contrastive=replace(_small_contrastive(steps=3_000, distractors=0), prior_score_weight=1.0),
    )


def laptop() -> Recipe:
    """Pictures of your own on two cores. Not yet trained to the end. `limner train` estimates the hours it takes.

        limner data prepare photos/ data/photos --size 144
        limner train data/photos --recipe laptop --out runs/photos

    All three stages augment: each of a few thousand pictures is seen tens of times, and crops vary its pixels and
    tokens. Only the dVAE flips pictures, so that captions can mention left and right and pictures can contain writing.
    Pictures prepared to 144 pixels load fast and are large enough for `photos`.
    """
    return Recipe(
        text=TextConfig(vocab=4_096, length=64, dropout=0.1),
        dvae=_patch_dvae(vocab=8_192, steps=3_000),
        prior=_small_prior(width=256, steps=10_000, batch=16, ema=0.998, augment=True),
        contrastive=replace(_small_contrastive(steps=1_500), augment=True),
    )


def photos() -> Recipe:
    """Pictures of your own on one GPU. Not yet trained to the end, so the cost is unknown.

    The prior and the contrastive model are smaller versions of the paper's. The dVAE differs from the paper's in its
    objective, `BalancedELB`, and in the larger initial weights which that objective needs.
    """
    return Recipe(
        dvae=DVAEStage(
            model=DVAEConfig(size=128, width=128, vocab=4_096, gain=0.5, init_gain=2**0.5, code_gain=3.0),
            objective=BalancedELB(tau=Anneal(start=1.0, end=1 / 16, steps=20_000)),
            training=TrainConfig(
                steps=50_000, batch_size=64, optimizer=AdamWConfig(lr=5e-4, betas=(0.9, 0.999), weight_decay=1e-4),
                warmup_steps=500, schedule=Cosine(end=1 / 80), ema_decay=0.999, eval_every=1_000,
            ),
        ),
        prior=PriorStage(
            model=TransformerConfig(width=768, depth=16, heads=12),
            objective=Autoregressive(logit_operands="autocast"),
            training=TrainConfig(
                steps=100_000, batch_size=64, optimizer=AdamWConfig(lr=4.5e-4, betas=(0.9, 0.96), weight_decay=4.5e-2),
                warmup_steps=2_000, schedule=Cosine(end=1 / 32), ema_decay=0.999, eval_every=1_000,
            ),
        ),
        contrastive=ContrastiveStage(
            model=CLIPConfig(patch=16, width=384, depth=8, heads=6),
            training=TrainConfig(
                steps=30_000, batch_size=256, optimizer=AdamWConfig(lr=5e-4, betas=(0.9, 0.98), weight_decay=0.1),
                warmup_steps=1_000, schedule=Cosine(), eval_every=1_000,
            ),
        ),
    )  # fmt: skip


def paper(size: str = "dalle-12b") -> Recipe:
    """Ramesh et al. 2021, App. A.2 and B.2, with a prior of the given size. The largest sizes are plans for a cluster.

    All parameters decay, and averages have a constant coefficient from the first update on, as in the paper. Moments of
    the prior's matrices are in 16 bits (B.2). From three billion parameters on, so are these matrices and their
    gradients, with a gradient scale for each resblock; PowerSGD has the ranks of Table 1, and the dVAE trains in fp16
    with one loss scale. Settings of the contrastive model are those of Radford et al. 2021, since the paper omits them.

    The learning rate of smaller models decreases with the width, as in Brown et al. 2020 (Table 2.1). They have fp32
    weights and no fp16, which CPUs multiply slowly.
    """
    model, rank = SIZES[size], {"dalle-3b": 512, "dalle-6b": 640, "dalle-12b": 896}.get(size)
    large = rank is not None
    lr = 4.5e-4 if large else min(1e-3, 0.3 / model.width)
    return Recipe(
        dvae=DVAEStage(
            training=TrainConfig(
                steps=3_000_000, batch_size=512, clip_norm=None, schedule=Cosine(end=1 / 80, steps=1_200_000),
                optimizer=AdamWConfig(lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-4, decay_scope="all"),
                ema_decay=0.999, ema_warmup=False, eval_every=10_000,
                precision=Fp16() if large else Auto(), scaling="loss" if large else "none",
            ),
        ),
        prior=PriorStage(
            model=model,
            training=TrainConfig(
                steps=430_000, batch_size=1_024, clip_norm=4.0, warmup_steps=5_000, schedule=Plateau(halvings=5),
                optimizer=AdamW16Config(
                    lr=lr, betas=(0.9, 0.96), weight_decay=4.5e-2, decay_scope="all", max_exp_avg_sq=5.0
                ),
                ema_decay=0.99, ema_every=25, ema_on_cpu=True, ema_warmup=False,
                precision=Fp16Weights() if large else Auto(), scaling="resblocks" if large else "none",
                checkpoint_activations=True, eval_every=5_000,
                max_bad_steps=1_500,  # the updates in which a scale falls to 2^7
            ),
            grad_compression_rank=rank,
        ),
        contrastive=ContrastiveStage(
            training=TrainConfig(
                steps=400_000, batch_size=4_096, warmup_steps=2_000, schedule=Cosine(), eval_every=5_000,
                optimizer=AdamWConfig(lr=5e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2),
            ),
            candidates=512,
        ),
    )  # fmt: skip


def clip(size: str) -> Recipe:
    """Contrastive model of Wortsman et al. 2023 (§2.2 and §3.2): B, L or H, for `--stages contrastive`.

    The paper describes neither BPE dropout nor crops: the stage resizes the central square of each picture.
    dVAE and prior, which Wortsman et al. do not have, are those of `tiny` at the picture size of the contrastive model.
    """
    tiny = paper("tiny")
    return replace(
        tiny,
        text=TextConfig(length=77, dropout=0.0),
        dvae=replace(tiny.dvae, model=DVAEConfig(size=224)),
        contrastive=ContrastiveStage(
            model=CLIP_SIZES[size],
            training=TrainConfig(
                steps=20_000, batch_size=16_384, optimizer=StableAdamWConfig(lr=2e-3, weight_decay=0.2),
                clip_norm=None, warmup_steps=5_000, schedule=Cosine(), eval_every=1_000,
            ),
            augment=False,
        ),
    )  # fmt: skip


def _small_training(
    steps: int, batch: int, optimizer: OptimizerConfig, warmup: int, ema: float | None = None
) -> TrainConfig:
    """Training of small models: a short warm-up, then a cosine to a fiftieth."""
    return TrainConfig(
        steps=steps, batch_size=batch, optimizer=optimizer, clip_norm=1.0, warmup_steps=warmup,
        schedule=Cosine(end=0.02), ema_decay=ema, eval_every=500, checkpoint_every=250,
    )  # fmt: skip


def _small_prior(
    width: int, steps: int, batch: int, ema: float, augment: bool = False, temperature: float = 1.0
) -> PriorStage:
    """Prior with the settings that train small priors fastest: small batches and Muon (docs/log/2026-11-21.md, "Small
    batches and Muon for the prior"), and logits with operands in the format of other products."""
    optimizer = MuonConfig(fallback_adamw=AdamWConfig(lr=5e-3))
    return PriorStage(
        model=TransformerConfig(width=width, depth=6, heads=4),
        objective=Autoregressive(logit_operands="autocast"),
        training=_small_training(steps, batch, optimizer, min(200, steps // 10), ema),
        augment=augment,
        temperature=temperature,
    )


def _small_dvae(
    size: int, groups: int, vocab: int, steps: int, context: int, contrast: float = 0.0, penalty_from: int | None = None
) -> DVAEStage:
    """dVAE for small, flat pictures.
    docs/log/2026-11-21.md, "dVAE objectives for small flat pictures" compares settings, but not the three gains."""
    return DVAEStage(
        model=DVAEConfig(
            size=size, width=48, groups=groups, blocks=1, vocab=vocab, code_width=64, gain=0.5, init_gain=2**0.5,
            code_gain=3.0, context_groups=context,
        ),
        objective=BalancedELB(
            tau=Anneal(start=1.0, end=0.1, steps=steps // 2), freeze_encoder_from=steps * 3 // 4,
            contrast_weight=contrast, usage_penalty_from=penalty_from,
        ),
        training=_small_training(steps, 16, AdamWConfig(lr=3e-3, betas=(0.9, 0.99), weight_decay=1e-4), 100, 0.998),
        augment=False,
    )  # fmt: skip


def _patch_dvae(vocab: int, steps: int) -> PatchStage:
    """dVAE with patches of 4 x 4 pixels for random 64 x 64 crops."""
    optimizer = AdamWConfig(lr=2e-3, betas=(0.9, 0.99), weight_decay=1e-4)
    model = PatchDVAEConfig(size=64, vocab=vocab)
    return PatchStage(model=model, training=_small_training(steps, 16, optimizer, 50, 0.998), augment=True)


def _small_contrastive(steps: int, width: int = 128, distractors: int = 3) -> ContrastiveStage:
    """Contrastive model for small pictures. Muon is more accurate than AdamW after equal time
    (docs/log/2026-11-21.md, "Muon for the reranker")."""
    optimizer = MuonConfig(fallback_adamw=AdamWConfig(lr=1e-3, betas=(0.9, 0.98), weight_decay=0.05))
    return ContrastiveStage(
        model=CLIPConfig(patch=8, width=width, depth=4, heads=4, embedding=128, ln_pre=False, sinusoids=True),
        objective=HardNegativeLoss(cut_paste_negatives=1),
        training=_small_training(steps, 128, optimizer, min(50, steps // 10)),
        augment=False,
        distractors=distractors,
    )
