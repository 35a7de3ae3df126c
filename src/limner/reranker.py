"""A contrastive model with its tokenizer: a bundle's, or a published CLIP model that `limner convert clip` wrote.

A published model has another picture size and vocabulary than a bundle, whose drawings it can rerank.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from limner.bundles import FORMATS, load_model, read_info
from limner.errors import UserError
from limner.models.contrastive import CLIP
from limner.pretrained import is_bundle
from limner.text.bpe import Tokenizer
from limner.text.clip_bpe import CLIPTokenizer

__all__ = ["Reranker", "is_clip", "load_clip"]


class Reranker(NamedTuple):
    """A contrastive model, its tokenizer and its name. `augment` of `data/augment.py` resizes pictures for it."""

    model: CLIP
    tokenizer: Tokenizer | CLIPTokenizer
    name: str
    augment: str = "none"


def is_clip(folder: str | Path) -> bool:
    """Return True for a folder of `limner convert clip`."""
    return is_bundle(Path(folder), FORMATS["contrastive"])


def load_clip(folder: str | Path) -> Reranker:
    """Read a folder of `limner convert clip`. Raises `UserError` if it is unusable."""
    if not is_clip(folder):
        raise UserError(f"{folder} is not a published CLIP model: name a folder that `limner convert clip` wrote")
    model, tokenizer = load_model(folder, "contrastive"), CLIPTokenizer.load(Path(folder) / "tokenizer.json")
    if model.config.text_vocab != tokenizer.vocab_size:
        sizes = f"{model.config.text_vocab:,} tokens, its tokenizer {tokenizer.vocab_size:,}"
        raise UserError(f"{folder} is damaged, its model has {sizes}: convert the weights again")
    return Reranker(model, tokenizer, str(read_info(folder).get("name") or "unnamed"), "bicubic")
