"""A pipeline of a few thousand random weights, for tests of everything around the models."""

import torch

from limner.models.contrastive import ContrastiveConfig
from limner.models.dvae import DVAEConfig
from limner.models.transformer import TransformerConfig
from limner.pipeline import TextToImage
from limner.text.bpe import Tokenizer

WORDS = ["a small red circle above a large blue square on a gray background", "two green crosses, teal background"]


def tiny_pipe(seed: int = 0, sharp: float = 20.0) -> TextToImage:
    """24 x 24 pixels, 6 x 6 tokens. `sharp` scales the image logits, so that captions make a difference."""
    tokenizer = Tokenizer.train(WORDS * 3, 300)
    vocab = tokenizer.vocab_size
    torch.manual_seed(seed)
    dvae = DVAEConfig(size=24, width=8, groups=3, blocks=1, vocab=32, code_width=8, code_gain=3.0).build()
    prior = TransformerConfig(
        text_vocab=vocab, image_vocab=32, text_len=30, grid=(6, 6), width=32, depth=5, heads=2, kernel=3
    ).build()
    with torch.no_grad():
        prior.head.image.weight *= sharp
    contrastive = ContrastiveConfig(
        text_vocab=vocab, text_len=30, size=24, patch=8, width=16, depth=1, heads=2, embedding=8
    ).build()
    return TextToImage(dvae, prior, contrastive, tokenizer, {"name": "tiny"})
