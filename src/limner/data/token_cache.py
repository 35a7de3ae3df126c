"""Encode a data set once with the dVAE, and cache the tokens.

Stage two of Ramesh et al. 2021 trains on token grids of a frozen encoder, so one encoding serves all
epochs. The name of the cache folder is a hash of all inputs of the tokens: the dVAE, the pictures
(see `Source.fingerprint`) and the size. The cache is written in parts, each complete or absent, so
an interrupted encoding resumes at the first missing part:

    CACHE/<hash>/00000.safetensors   "tokens" [n, S] uint16 (int32 for vocabularies above 65,536),
                                     "indices" [n] int64: the elements of the source
    CACHE/<hash>/00000.json          {"captions": [[phrasing, ...], ...], "rejected": {reason: n}}
    CACHE/<hash>/complete.json       the number of parts

Pictures are central squares, resized by area, without augmentation. `EncodedDataset` encodes augmented
pictures during training (`ImageCaptionDataset` with `augment="prior"`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import Tensor

from limner.atomic_io import atomic_write_bytes
from limner.data.datasets import ImageCaptionDataset
from limner.data.sample import Source, digest, format_reasons
from limner.errors import UserError
from limner.json_files import parse_json, write_json
from limner.progress import Advance

__all__ = ["TokenCache", "encode_tokens", "weights_hash"]


@dataclass(frozen=True)
class TokenCache:
    """Tokens of the good samples of a source; row k belongs to element `indices[k]` of the source."""

    tokens: np.ndarray  # [N, S] uint16 or int32
    captions: list[tuple[str, ...]]
    indices: np.ndarray  # [N] int64
    rejected: Counter[str]

    def __len__(self) -> int:
        return len(self.tokens)


def encode_tokens(
    source: Source,
    encode: Callable[[Tensor], Tensor],
    *,
    key: str,
    size: int,
    cache_dir: str | Path,
    batch_size: int = 64,
    part_size: int = 4096,
    progress: Advance = lambda done: None,
) -> TokenCache:
    """Return the tokens of every good picture of `source`, from the cache or by `encode`.

    `encode` maps uint8 [B, 3, size, size] to Long [B, S]; `key` identifies it (the dVAE's hash). `progress` is called
    with the number of samples of each batch and of each cached part. Raises `UserError` if no sample is good.
    """
    folder = Path(cache_dir) / digest(key, source.fingerprint(), f"{size} {part_size} v1")[:32]
    images = ImageCaptionDataset(source, size)
    parts = []
    for start in range(0, len(source), part_size):
        stem, stop = folder / f"{len(parts):05d}", min(start + part_size, len(source))
        if (part := _load_part(stem)) is not None:
            progress(stop - start)
        else:
            batches = []
            for first in range(start, stop, batch_size):
                rows = np.arange(first, min(first + batch_size, stop))
                batches.append(_encode_batch(images, encode, rows))
                progress(len(rows))
            part = _join(batches)
            _save_part(stem, part)
        parts.append(part)
    cache = _join(parts)
    if not len(cache):
        raise UserError(f"no picture could be encoded ({format_reasons(cache.rejected)}): check the data")
    write_json(folder / "complete.json", {"parts": len(parts)})
    return cache


@torch.no_grad()
def _encode_batch(images: ImageCaptionDataset, encode: Callable[[Tensor], Tensor], indices: np.ndarray) -> TokenCache:
    good, pixels, captions, rejected = images.load(indices)
    tokens = encode(pixels).cpu().numpy() if len(good) else np.zeros((0, 0), np.int64)
    fits_uint16 = tokens.max(initial=0) < 1 << 16
    return TokenCache(tokens.astype(np.uint16 if fits_uint16 else np.int32), captions, good, rejected)


def _join(parts: Sequence[TokenCache]) -> TokenCache:
    good = [part for part in parts if len(part)] or parts[:1]  # concatenating fails for empty parts, of shape [0, 0]
    return TokenCache(
        tokens=np.concatenate([part.tokens for part in good]),
        captions=[captions for part in good for captions in part.captions],
        indices=np.concatenate([part.indices for part in good]),
        rejected=sum((part.rejected for part in parts), Counter[str]()),
    )


def _save_part(stem: Path, part: TokenCache) -> None:
    # Captions first: the file of tokens marks a part as present.
    text = {"captions": part.captions, "rejected": part.rejected}
    write_json(stem.with_suffix(".json"), text, ensure_ascii=False)
    arrays = save({"tokens": part.tokens, "indices": part.indices})
    atomic_write_bytes(stem.with_suffix(".safetensors"), arrays)


def _load_part(stem: Path) -> TokenCache | None:
    try:
        arrays = load_file(stem.with_suffix(".safetensors"))
        text = parse_json(stem.with_suffix(".json").read_bytes())
        captions = [tuple(phrasings) for phrasings in text["captions"]]
        part = TokenCache(arrays["tokens"], captions, arrays["indices"], Counter(text["rejected"]))
    except (FileNotFoundError, SafetensorError, KeyError, TypeError, ValueError):
        return None  # absent or damaged: encode the part again
    return part if len(captions) == len(part.tokens) == len(part.indices) else None


def weights_hash(model: torch.nn.Module) -> str:
    """Return the SHA-256 of the names, shapes and values of a model's parameters and buffers."""
    state = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(f"{name} {tuple(tensor.shape)}".encode())
        state.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return state.hexdigest()
