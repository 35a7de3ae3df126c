"""A small prior, and stored tokens with numbers as captions."""

import torch

from limner.data.datasets import CaptionEncoding, TokenDataset
from limner.models.transformer import TransformerConfig

PRIOR = TransformerConfig(text_vocab=20, image_vocab=16, text_len=4, grid=(3, 3), width=16, depth=4, heads=2, kernel=3)


class Numbers:
    """A tokenizer of numbers."""

    def encode(self, captions, length, dropout=0.0, rng=None):
        return torch.tensor([[int(caption) % 20] * length for caption in captions])


def numbered_tokens(count, **text):
    """Random tokens of `count` pictures; `text` are settings of `CaptionEncoding`."""
    tokens = torch.randint(0, 16, (count, 9), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    captions = [(str(i),) for i in range(count)]
    return TokenDataset(tokens, captions, CaptionEncoding(tokenizer=Numbers(), length=4, **text))
