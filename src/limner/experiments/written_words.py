"""Words in pictures (Ramesh et al. 2021, Figure 2b): does a prior write words that its training lacks?

Pictures are signs (`tasks/signs.py`) as 6 x 6 tokens. The codes are all distinct patches, two of which are a letter, so
the reader checks the prior alone. Captions in training have BPE dropout or not: with it, the prior also sees a word
split into its letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor

from limner.experiments.report import Finding, experiment
from limner.experiments.sweep import Result, Sweep, all_above, over_seeds
from limner.experiments.tiny_models import train_in_memory
from limner.models.dvae import map_pixels
from limner.models.patch_dvae import PatchDVAE, PatchDVAEConfig
from limner.models.transformer import Transformer, TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.optim.optimizers import AdamWConfig, MuonConfig
from limner.sampling.decoder import TokenDecoder
from limner.sampling.generation_config import Sampler
from limner.sampling.parallel import generate
from limner.tasks.signs import CELL, SIZE, Sign, read_sign, render_sign, sample_sign, sample_word
from limner.text.bpe import Tokenizer

SEEDS, COPIES = range(8), 4  # copies of each sign, each with its own split into tokens
SETTINGS = {"words": 1_000, "pictures": 8_192, "shown": 256, "steps": 2_000, "batch": 32}
QUICK = {"words": 20, "pictures": 64, "shown": 4, "steps": 4, "batch": 8}
OPTIMIZER = MuonConfig(fallback_adamw=AdamWConfig(lr=5e-3))
VOCAB, TEXT_LEN, CODES, PATCH = 1_024, 18, 128, CELL[1]


@cache
def word_lists(count: int) -> tuple[list[str], list[str]]:
    """Return `count` words of training and as many that training lacks."""
    rng = np.random.default_rng(7)
    words = list(dict.fromkeys(sample_word(rng) for _ in range(4 * count)))
    return words[:count], words[count : 2 * count]


@cache
def training_signs(words: int, pictures: int) -> tuple[list[Sign], UInt8[Tensor, "N 3 H W"]]:
    """Return signs with training words, and their pictures."""
    rngs = [np.random.default_rng([8, i]) for i in range(pictures)]
    signs = [sample_sign(rng, word_lists(words)[0]) for rng in rngs]
    drawn = np.stack([render_sign(sign, rng) for sign, rng in zip(signs, rngs, strict=True)])
    return signs, torch.from_numpy(drawn).movedim(-1, 1)


def patch_codes(pictures: UInt8[Tensor, "N 3 H W"]) -> PatchDVAE:
    """Return a dVAE whose codes are all distinct patches of the pictures."""
    dvae = PatchDVAEConfig(size=SIZE, patch=PATCH, vocab=CODES).build()
    codes = F.pixel_unshuffle(map_pixels(pictures), PATCH).flatten(2).mT.flatten(0, 1).unique(dim=0)
    dvae.codes[: len(codes)] = codes
    return dvae


def trial(*, seed: int, dropout: float, words: int, pictures: int, shown: int, steps: int, batch: int) -> Result:
    """Return the losses, and the outcomes for words of training ("known right", ...) and for words that it lacks ("new
    right", ...)."""
    signs, pixels = training_signs(words, pictures)
    captions = [sign.caption for sign in signs]
    tokenizer, dvae = Tokenizer.train(captions, VOCAB), patch_codes(pixels)
    rng = np.random.default_rng(seed)
    text = torch.cat([tokenizer.encode(captions, TEXT_LEN, dropout, rng) for _ in range(COPIES)])
    torch.manual_seed(seed)
    model = TransformerConfig(
        text_vocab=tokenizer.vocab_size, image_vocab=CODES, text_len=TEXT_LEN, grid=dvae.config.grid, width=64, depth=4,
        heads=2, pattern="dense",
    ).build()  # fmt: skip
    samples = {"text": text, "image": dvae.tokenize(pixels).repeat(COPIES, 1)}
    _, losses = train_in_memory(
        model, Autoregressive(), samples, steps=steps, batch=batch, seed=seed, optimizer=OPTIMIZER
    )
    model.eval()
    known, new = word_lists(words)
    result: Result = {"loss": losses}
    for kind, asked in (("known", known), ("new", new)):
        shares = outcomes(model, dvae, tokenizer, known, asked[:shown], seed)
        result |= {f"{kind} {outcome}": share for outcome, share in shares.items()}
    return result


@torch.inference_mode()
def outcomes(
    model: Transformer, dvae: PatchDVAE, tokenizer: Tokenizer, known: Sequence[str], words: Sequence[str], seed: int
) -> dict[str, float]:
    """Draw a sign of each word. Return the shares with the right word and color, with another word of training, and
    without a readable word."""
    rng = np.random.default_rng([9, seed])
    asked = [sample_sign(rng, [word]) for word in words]
    text = tokenizer.encode([sign.caption for sign in asked], TEXT_LEN)
    tokens = generate(TokenDecoder(model), text, range(1), Sampler(temperature=1.0), seed=seed).tokens[:, 0]
    read = [read_sign(picture.movedim(0, -1).numpy()) for picture in dvae.decode_tokens(tokens)]
    pairs = list(zip(read, asked, strict=True))
    trained = set(known)
    return {
        "right": sum(r == a for r, a in pairs) / len(pairs),
        "copied": sum(r is not None and r.word != a.word and r.word in trained for r, a in pairs) / len(pairs),
        "unreadable": read.count(None) / len(pairs),
    }


@experiment("A prior writes words that its training lacks, from their captions", "Ramesh et al. 2021, §3.3, Figure 2b")
def written_words(folder: Path, quick: bool) -> Finding:
    """Draw words, with and without BPE dropout in training. The claim holds if more than half of the new words are
    right with dropout."""
    grid = {label: {"dropout": dropout} for label, dropout in (("0.1", 0.1), ("none", 0.0))}
    results = Sweep(folder, trial, grid, SEEDS[:1] if quick else SEEDS, **(QUICK if quick else SETTINGS))

    new = {label: runs.values("new right") for label, runs in results.runs.items()}
    columns = {
        key.replace(" ", " words "): lambda runs, key=key: f"{runs.mean(key):.1%}"
        for key in ("known right", "new right", "new copied", "new unreadable")
    }
    return results.finding(
        all_above([over_seeds(new["0.1"] - 0.5)]),
        f"Of new words, {over_seeds(new['0.1'], '.1%')} are right, "
        f"and {over_seeds(new['none'], '.1%')} after training without dropout.",
        ("BPE dropout",),
        columns,
        {"loss, first seed": results.curves},
    )
