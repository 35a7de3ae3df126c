"""Ordinary samples, to finetune a bundle with: pictures that it draws for captions similar to its training captions.

A bundle with examples (`retrieval.py`) has its training pictures, so these are its ordinary samples. As in training,
most samples follow another picture of the same subject, new ones as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from limner import pretrained, recipes
from limner.atomic_io import atomic_write_bytes
from limner.data.datasets import CaptionEncoding
from limner.data.open_source import open_source
from limner.data.related import Related, RelatedTokenDataset
from limner.data.sample import Rejected, Source
from limner.data.token_cache import weights_hash
from limner.errors import UserError
from limner.json_files import to_json
from limner.numerics.seeding import fold_in
from limner.pipeline import TextToImage
from limner.progress import progress
from limner.retrieval import Examples
from limner.sampling.generation_config import Sampler
from limner.tasks.captions import describe
from limner.tasks.scenes import sample_scene

ORDINARY_SAMPLES = 320  # 15 CPU seconds of `scenes`
_MAX_FILE_BYTES = 4 << 20


def ordinary_captions(folder: Path, ordinary: str | None) -> list[str]:
    """Return `ORDINARY_SAMPLES` captions from a text file or training data, repeated if they are fewer.

    Raises `UserError` if the file or the data lacks captions, or if `ordinary` is None and the bundle is not `scenes`.
    """
    if ordinary is None:
        if folder != pretrained.ASSETS / "scenes":
            raise UserError(
                f"the captions that {folder} can draw are unknown: name them with --ordinary, a text file with one per "
                "line or the training data of the bundle"
            )
        generators = (np.random.default_rng([0, i]) for i in range(ORDINARY_SAMPLES))
        return [describe(sample_scene(rng), rng) for rng in generators]
    path = Path(ordinary)
    if path.suffix == ".txt" and path.is_file():
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UserError(f"{path} is larger than {_MAX_FILE_BYTES >> 20} MiB: name a file of fewer captions")
        lines = path.read_text("utf-8", errors="replace").splitlines()
    else:
        lines = list(_first_captions(open_source(ordinary)))
    if not (lines := [line.strip() for line in lines if line.strip()]):
        raise UserError(f"{ordinary} lacks captions: name a text file with one per line, or training data")
    rows = np.linspace(0, len(lines), ORDINARY_SAMPLES, endpoint=False).astype(int)  # repeats if there are fewer
    return [lines[row] for row in np.random.default_rng(0).permutation(rows)]


def _first_captions(source: Source) -> Iterator[str]:
    """Yield the first caption of evenly spaced samples."""
    for row in np.linspace(0, len(source), min(len(source), ORDINARY_SAMPLES), endpoint=False).astype(int):
        with suppress(Rejected):
            yield source.captions(int(row))[0]


def following(
    pipe: TextToImage, tokens: np.ndarray, captions: Sequence[Sequence[str]], examples: Examples, training: bool,
    is_example: bool = False,
) -> RelatedTokenDataset:  # fmt: skip
    """Return a dataset of pictures that follow examples of the subject in their first caption.

    With `training` some samples lack the example or the caption, as in the recipe `glyphs`. `is_example` is True if the
    pictures are the `examples` themselves.
    """
    stage, length = recipes.get("glyphs").prior, pipe.prior.config.text_len
    dropout, share = (stage.caption_dropout, stage.related_share) if training else (0.0, 1.0)
    encoding = CaptionEncoding(tokenizer=pipe.tokenizer, length=length, caption_dropout=dropout)
    known, pictures = (
        [{"subject": subject} for subject in part.subjects]
        for part in (examples, Examples.from_captions(tokens, [first for first, *_ in captions]))
    )
    related = Related(examples.tokens, known, ("subject",), share)
    return RelatedTokenDataset(tokens, captions, encoding, pictures, related, is_example)


def rehearsal(pipe: TextToImage, examples: Examples, scored: int) -> tuple[RelatedTokenDataset, RelatedTokenDataset]:
    """Return a bundle's examples as ordinary samples that train, and `scored` others that measure forgetting."""
    rows = np.random.default_rng(0).permutation(len(examples))
    trained, held_out = examples.select(rows[scored:]), examples.select(rows[:scored])

    def follow(part: Examples, training: bool) -> RelatedTokenDataset:
        captions = [(part.name(row),) for row in range(len(part))]
        return following(pipe, part.tokens, captions, trained, training, is_example=training)

    return follow(trained, True), follow(held_out, False)


def draw_ordinary(pipe: TextToImage, captions: list[str], path: Path, seed: int) -> Tensor:
    """Return the image tokens [N, S] of one drawing for each caption, saved in `path`."""
    key = to_json([weights_hash(pipe.prior), weights_hash(pipe.dvae), seed, captions])
    with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
        if (file.metadata() or {}).get("key") == key:
            return file.get_tensor("tokens")
    seeds = [fold_in(seed, i) for i in range(len(captions))]
    sampler = Sampler(temperature=1.0, top_k=None, top_p=None, guidance=1.0)
    with progress("drawing ordinary samples", len(captions), unit="picture") as bar:
        tokens = pipe.candidates(captions, 1, seed=seeds, sampler=sampler, progress=bar.advance).tokens[:, 0]
    atomic_write_bytes(path, save({"tokens": tokens.contiguous()}, {"key": key}))
    return tokens
