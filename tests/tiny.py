"""A pipeline of a few thousand random weights, and a recipe that trains one, for tests of everything around them."""

from dataclasses import replace

import numpy as np
import torch

from limner.models.contrastive import CLIPConfig
from limner.models.dvae import DVAEConfig
from limner.models.patch_dvae import PatchDVAEConfig
from limner.models.transformer import TransformerConfig
from limner.objectives.codebook_elbo import BalancedELB
from limner.pipeline import TextToImage
from limner.recipes import get
from limner.recipes.recipe import DVAEStage, Recipe
from limner.retrieval import Examples
from limner.text.bpe import Tokenizer

WORDS = ["a small red circle above a large blue square on a gray background", "two green crosses, teal background"]


def tiny_pipe(seed: int = 0, sharp: float = 20.0, patches: bool = False, condition_blocks: int = 0) -> TextToImage:
    """24 x 24 pixels, 6 x 6 tokens. `sharp` scales the image logits, so that captions make a difference; the dVAE is
    the paper's in small, or one of `patches`. With `condition_blocks` the prior takes a picture to follow."""
    tokenizer = Tokenizer.train(WORDS * 3, 300)
    vocab = tokenizer.vocab_size
    torch.manual_seed(seed)
    if patches:
        dvae = PatchDVAEConfig(size=24, width=8, blocks=1, vocab=32).build()
        dvae.codes.uniform_(0.1, 0.9)
    else:
        dvae = DVAEConfig(size=24, width=8, groups=3, blocks=1, vocab=32, code_width=8, code_gain=3.0).build()
    prior = TransformerConfig(
        text_vocab=vocab,
        image_vocab=32,
        text_len=30,
        grid=(6, 6),
        width=32,
        depth=5,
        heads=2,
        kernel=3,
        condition_blocks=condition_blocks,
    ).build()
    with torch.no_grad():
        prior.head.image.weight *= sharp
        if condition_blocks:
            prior.embed.condition.out.weight.normal_()
    contrastive = CLIPConfig(
        text_vocab=vocab, text_len=30, size=24, patch=8, width=16, depth=1, heads=2, embedding=8
    ).build()
    return TextToImage(dvae, prior, contrastive, tokenizer, {"name": "tiny"})


def examples(pipe: TextToImage) -> Examples:
    """Pictures of "red circle" and "green crosses", with random tokens."""
    tokens = np.random.default_rng(0).integers(0, pipe.prior.config.image_vocab, (6, 36), np.uint16)
    return Examples(tokens, ["red circle", "green crosses"] * 3, [""] * 6)


STEPS = 40


def tiny_recipe() -> Recipe:
    """Seconds on one core, of which the prior takes the longer part."""
    r = get("scenes")
    often = {"batch_size": 4, "eval_every": 1_000, "log_every": 1, "checkpoint_every": 5}
    dvae = DVAEConfig(size=24, width=8, groups=3, blocks=1, vocab=32, code_width=8, context_groups=0)
    return replace(
        r,
        text=replace(r.text, vocab=300),
        dvae=DVAEStage(
            model=dvae,
            objective=BalancedELB(),
            training=replace(r.dvae.training, steps=3, **often),
            augment=False,
        ),
        prior=replace(
            r.prior,
            model=TransformerConfig(width=32, depth=2, heads=2),
            training=replace(r.prior.training, steps=STEPS, **often),
        ),
        contrastive=replace(
            r.contrastive,
            model=CLIPConfig(patch=8, width=32, depth=1, heads=2, embedding=16),
            training=replace(r.contrastive.training, steps=STEPS, **{**often, "batch_size": 8}),
        ),
    )
