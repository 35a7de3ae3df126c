"""The recipes. Each docstring gives the commands, the cost and the expected result."""

from __future__ import annotations

from dataclasses import replace

from limner.layers.precisions import Fp16Weights
from limner.models.contrastive import SIZES as VITS, ContrastiveConfig
from limner.models.dvae import DVAEConfig
from limner.models.patch_dvae import PatchDVAEConfig
from limner.models.transformer import SIZES, TransformerConfig
from limner.numerics.precision import Auto
from limner.objectives.codebook_elbo import BalancedELB
from limner.objectives.hard_negatives import HardContrastiveLoss
from limner.optim.optimizers import AdamW, AdamW16, Muon, StableAdamW
from limner.optim.schedules import Anneal, Cosine, Plateau
from limner.recipes.recipe import Bundled, ContrastiveStage, DVAEStage, PatchStage, PriorStage, Recipe, TextConfig
from limner.training.config import TrainConfig


def scenes() -> Recipe:
    """The world of the bundled model of that name; two to three hours on two cores.

    limner data scenes data/scenes --count 120000 --things 2 7 0.5 0.5 --in-order 0.7
    limner train data/scenes --recipe scenes --out runs/scenes
    """
    return Recipe(
        text=TextConfig(vocab=1_024, length=32, dropout=0.0),
        dvae=_small_dvae(48, groups=3, vocab=512, steps=8_000, context=0, detail=0.7, priced_from=5_000),
        prior=PriorStage(
            model=TransformerConfig(width=256, depth=6, heads=4),
            training=_training(steps=12_000, batch=16, ema=0.999),
            augment=False,
        ),
        contrastive=replace(_small_contrastive(steps=3_000), likelihood=2.0),
    )


def demo() -> Recipe:
    """What `limner demo` trains, with fewer steps where these take more than nine minutes."""
    return Recipe(
        text=TextConfig(vocab=1_024, length=20, dropout=0.0),
        dvae=Bundled(),
        prior=PriorStage(
            model=TransformerConfig(width=96, depth=6, heads=4),
            training=_training(steps=3_000, batch=16, ema=0.99),
            augment=False,
        ),
        contrastive=_small_contrastive(steps=1_000, width=96, distractors=1),
    )


def emoji() -> Recipe:
    """Real pictures that nobody here drew; half an hour to an hour on two cores.

        limner data emoji data/emoji
        limner train data/emoji --recipe emoji --out runs/emoji
        limner evaluate emoji runs/emoji data/emoji

    Of 16 drawings of a training caption the best is nearest to the right emoji, or a variant of it, for nine
    captions in ten, of a held-out one for eight.
    """
    return Recipe(
        text=TextConfig(vocab=2_048, length=24, dropout=0.1),
        dvae=_small_dvae(64, groups=4, vocab=1_024, steps=3_000, context=1),
        prior=PriorStage(
            model=TransformerConfig(width=128, depth=6, heads=4),
            training=_training(steps=4_000, batch=32, ema=0.998),
            augment=False,
        ),
        contrastive=_small_contrastive(steps=400),
    )


def icons() -> Recipe:
    """Drawings of one thing by several artists; the bundled model of that name, about two hours on two cores.

        limner data icons data/icons iconify-json-*.tgz --size 72 --margin 6 --styles 7 --tones 0 --pairs 0.1 \\
            --categories "Animals & Nature" "Food & Drink" Activities "Smileys & Emotion"
        limner train data/icons --recipe icons --out runs/icons

    The dVAE sees crops, for which the margin leaves room: so it reconstructs unseen pictures better. The prior does
    not, and learns the training pictures by heart: captions of training are drawn right, things in styles in which they
    were never seen are not (docs/RESULTS.md).
    """
    return Recipe(
        text=TextConfig(vocab=2_048, length=26, dropout=0.0),
        dvae=_patches(vocab=2_048, steps=2_000),
        prior=PriorStage(
            model=TransformerConfig(width=160, depth=6, heads=4),
            training=_training(steps=6_500, batch=16, ema=0.998),
            augment=False,
            temperature=0.5,
        ),
        contrastive=_small_contrastive(steps=400),
    )


def laptop() -> Recipe:
    """Pictures of your own on two cores; not trained to its end yet. `limner train` says how many hours it takes.

        limner data prepare photos/ data/photos --size 144
        limner train data/photos --recipe laptop --out runs/photos

    All three stages augment: a few thousand pictures are seen tens of times each, and a crop makes other pixels and
    other tokens each time. Only the dVAE sees flipped pictures, so that captions may say left and right, and show
    writing. Pictures that were prepared to 144 pixels are read fast, and are large enough for `photos` as well.
    """
    contrastive = _small_contrastive(steps=1_500)
    return Recipe(
        text=TextConfig(vocab=4_096, length=64, dropout=0.1),
        dvae=_patches(vocab=8_192, steps=3_000),
        prior=PriorStage(
            model=TransformerConfig(width=256, depth=6, heads=4),
            training=_training(steps=10_000, batch=16, ema=0.998),
        ),
        contrastive=replace(contrastive, augment=True),
    )


def photos() -> Recipe:
    """Pictures of your own, at a size for one GPU; not trained to its end yet, so its cost is not known.

    The prior and the contrastive model are the paper's, smaller. The dVAE is not: its objective is `BalancedELB`,
    and its initial weights are the larger ones that go with it.
    """
    return Recipe(
        dvae=DVAEStage(
            model=DVAEConfig(size=128, width=128, vocab=4_096, gain=0.5, init_gain=2**0.5, code_gain=3.0),
            objective=BalancedELB(tau=Anneal(start=1.0, end=1 / 16, steps=20_000)),
            training=TrainConfig(
                steps=50_000,
                batch_size=64,
                optimizer=AdamW(lr=5e-4, betas=(0.9, 0.999), weight_decay=1e-4),
                warmup_steps=500,
                schedule=Cosine(end=1 / 80),
                ema_decay=0.999,
                eval_every=1_000,
            ),
        ),
        prior=PriorStage(
            model=TransformerConfig(width=768, depth=16, heads=12),
            training=TrainConfig(
                steps=100_000,
                batch_size=64,
                optimizer=AdamW(lr=4.5e-4, betas=(0.9, 0.96), weight_decay=4.5e-2),
                warmup_steps=2_000,
                schedule=Cosine(end=1 / 32),
                ema_decay=0.999,
                eval_every=1_000,
            ),
        ),
        contrastive=ContrastiveStage(
            model=ContrastiveConfig(patch=16, width=384, depth=8, heads=6),
            training=TrainConfig(
                steps=30_000,
                batch_size=256,
                optimizer=AdamW(lr=5e-4, betas=(0.9, 0.98), weight_decay=0.1),
                warmup_steps=1_000,
                schedule=Cosine(),
                eval_every=1_000,
            ),
        ),
    )


def paper(size: str = "dalle-12b") -> Recipe:
    """Ramesh et al. 2021, App. A.2 and B.2, with the prior of that size. The largest are plans for a cluster.

    Decay and averaging are as written there: all parameters decay, and averages forget evenly from the first update
    on. The moments of the prior's matrices are in 16 bits, as in App. D; from three billion parameters on also these
    matrices and their gradients, with a gradient scale for each resblock. The contrastive model, of which the paper
    gives no settings, has those of Radford et al. 2021.

    The learning rate falls with the width, as Brown et al. 2020 (Table 2.1) have it for smaller models; these keep
    weights in fp32, since CPUs multiply fp16 slowly.
    """
    model, large = SIZES[size], size.startswith("dalle")
    lr = 4.5e-4 if large else min(1e-3, 0.3 / model.width)
    return Recipe(
        dvae=DVAEStage(
            training=TrainConfig(
                steps=3_000_000,
                batch_size=512,
                optimizer=AdamW(lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-4, decayed="all"),
                clip_norm=None,
                schedule=Cosine(end=1 / 80, steps=1_200_000),
                ema_decay=0.999,
                ema_warmup=False,
                eval_every=10_000,
            ),
        ),
        prior=PriorStage(
            model=model,
            training=TrainConfig(
                steps=430_000,
                batch_size=1_024,
                optimizer=AdamW16(lr=lr, betas=(0.9, 0.96), weight_decay=4.5e-2, decayed="all", most=5.0),
                clip_norm=4.0,
                warmup_steps=5_000,
                schedule=Plateau(halvings=5),
                ema_decay=0.99,
                ema_every=25,
                ema_on_cpu=True,
                ema_warmup=False,
                precision=Fp16Weights() if large else Auto(),
                scaling="resblocks" if large else "none",
                checkpoint_activations=True,
                eval_every=5_000,
            ),
        ),
        contrastive=ContrastiveStage(
            training=TrainConfig(
                steps=400_000,
                batch_size=4_096,
                optimizer=AdamW(lr=5e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2),
                warmup_steps=2_000,
                schedule=Cosine(),
                eval_every=5_000,
            ),
        ),
    )


def clip(size: str) -> Recipe:
    """The contrastive model of Wortsman et al. 2023 (§2.2 and §3.2): B, L or H, for `--stages contrastive`.

    Of its pictures' size are a dVAE and a prior as the paper's smallest, which that paper does not have.
    """
    tiny = paper("tiny")
    return replace(
        tiny,
        text=TextConfig(length=77),
        dvae=replace(tiny.dvae, model=DVAEConfig(size=224)),
        contrastive=ContrastiveStage(
            model=VITS[size],
            training=TrainConfig(
                steps=20_000,
                batch_size=16_384,
                optimizer=StableAdamW(lr=2e-3, weight_decay=0.2),
                clip_norm=None,
                warmup_steps=5_000,
                schedule=Cosine(),
                eval_every=1_000,
            ),
        ),
    )


def _training(steps: int, batch: int, ema: float) -> TrainConfig:
    """What small priors learn fastest from
    (docs/log/2026-11-21.md, "Small batches and Muon for the prior"): small batches, Muon, a cosine to a fiftieth."""
    return TrainConfig(
        steps=steps, batch_size=batch, optimizer=Muon(others=AdamW(lr=5e-3)), clip_norm=1.0,
        warmup_steps=min(200, steps // 10), schedule=Cosine(end=0.02), ema_decay=ema, eval_every=500,
        checkpoint_every=250,
    )  # fmt: skip


def _small_dvae(
    size: int, groups: int, vocab: int, steps: int, context: int, detail: float = 0.0, priced_from: int | None = None
) -> DVAEStage:
    """A dVAE for small, flat pictures;
    docs/log/2026-11-21.md, "dVAE objectives for small flat pictures"
    says what was compared, and that the three gains were not."""
    return DVAEStage(
        model=DVAEConfig(
            size=size, width=48, groups=groups, blocks=1, vocab=vocab, code_width=64, gain=0.5, init_gain=2**0.5,
            code_gain=3.0, context_groups=context,
        ),
        objective=BalancedELB(
            tau=Anneal(start=1.0, end=0.1, steps=steps // 2), hard_from=steps * 3 // 4, detail=detail,
            priced_from=priced_from,
        ),
        training=TrainConfig(
            steps=steps, batch_size=16, optimizer=AdamW(lr=3e-3, betas=(0.9, 0.99), weight_decay=1e-4), clip_norm=1.0,
            warmup_steps=100, schedule=Cosine(end=0.02), ema_decay=0.998, eval_every=500, checkpoint_every=250,
        ),
        augment=False,
    )  # fmt: skip


def _patches(vocab: int, steps: int) -> PatchStage:
    """A dVAE of patches of 4 x 4 pixels, for pictures of 64 x 64, which it sees cropped."""
    return PatchStage(
        model=PatchDVAEConfig(size=64, vocab=vocab),
        training=TrainConfig(
            steps=steps, batch_size=16, optimizer=AdamW(lr=2e-3, betas=(0.9, 0.99), weight_decay=1e-4), clip_norm=1.0,
            warmup_steps=50, schedule=Cosine(end=0.02), ema_decay=0.998, eval_every=500, checkpoint_every=250,
        ),
        augment=True,
    )  # fmt: skip


def _small_contrastive(steps: int, width: int = 128, distractors: int = 3) -> ContrastiveStage:
    """Muon tells captions apart after a third of the steps that AdamW needs
    (docs/log/2026-11-21.md, "Muon for the reranker")."""
    return ContrastiveStage(
        model=ContrastiveConfig(patch=8, width=width, depth=4, heads=4, embedding=128),
        objective=HardContrastiveLoss(spoiled=1),
        training=TrainConfig(
            steps=steps, batch_size=128, optimizer=Muon(others=AdamW(lr=1e-3, betas=(0.9, 0.98), weight_decay=0.05)),
            clip_norm=1.0, warmup_steps=min(50, steps // 10), schedule=Cosine(end=0.02), eval_every=500,
            checkpoint_every=250,
        ),
        augment=False,
        distractors=distractors,
    )  # fmt: skip
