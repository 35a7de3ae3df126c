"""The training data of a run: samples of the two splits, the tokenizer, each stage's dataset, and the attribution.

RUN/tokenizer.json   RUN/tokens/   RUN/attribution.json, if the data names the owners of its pictures
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from limner import bundles, pretrained
from limner.data.attribution import attribution, merge_attributions
from limner.data.datasets import CaptionEncoding, EncodedDataset, ImageCaptionDataset, TokenDataset
from limner.data.hard_negative_captions import Distractors
from limner.data.open_source import open_source
from limner.data.related import Related, RelatedTokenDataset
from limner.data.sample import Rejected, Source, Subset, describe_unread, group_by_split
from limner.data.stream import Dataset
from limner.data.token_cache import TokenCache, encode_tokens, weights_hash
from limner.errors import UserError
from limner.json_files import read_json, write_json
from limner.models.image_tokenizer import ImageTokenizer
from limner.numerics.seeding import splitmix64
from limner.progress import progress
from limner.recipes.recipe import DVAEStage, PatchStage, Recipe, ResolvedRecipe, resolve
from limner.retrieval import Examples
from limner.tasks.verify import falsity_test
from limner.text.bpe import Tokenizer
from limner.training.checkpoint import completed
from limner.training.parallel import Parallel, SingleProcess

_IMAGE_CACHE_BYTES = 1 << 30  # of decoded pictures
_MAX_CLUSTERING_PICTURES = 8_000
MAX_EVALUATION_SAMPLES, MAX_COUNTED_SAMPLES = 512, 100_000  # for evaluation; whose words make distractors


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of a recipe's run in `out`. Training samples have the stage's augmentation and dropout; held-out samples
    have neither, and an evaluation uses at most 512 of them."""

    recipe: Recipe
    train: Source
    held_out: Source
    out: Path
    parallel: Parallel = field(default_factory=SingleProcess)
    _read: dict[str, tuple[TokenCache, list[Mapping[str, Any]]]] = field(default_factory=dict, init=False)  # by dVAE

    @classmethod
    def open(cls, recipe: Recipe, data: str | Path, out: str | Path, parallel: Parallel | None = None) -> RunData:
        """Open the data. Raises `UserError` if no sample is in the split 'train'."""
        source = open_source(str(data))
        splits = group_by_split(source)
        train, held_out = (splits.get(name) or Subset(source, []) for name in ("train", "held-out"))
        if warning := describe_unread({name: len(selection) for name, selection in splits.items()}):
            warnings.warn(f"{data}: {warning}", stacklevel=2)
        if len(train) == 0:
            raise UserError(f"the split 'train' of {data} is empty: check the key 'split' of its metadata")
        return cls(recipe=recipe, train=train, held_out=held_out, out=Path(out), parallel=parallel or SingleProcess())

    def save_attribution(self) -> list[dict[str, Any]]:
        """Return and save the attribution (`data/attribution.py`) of the data of this call, of earlier calls, and of
        the bundles that the recipe starts from."""
        path, starts = self.out / "attribution.json", [self.recipe.start, getattr(self.recipe.dvae, "bundle", None)]
        inherited = [bundles.read_info(name).get("attribution") for name in starts if name]
        saved = read_json(path) if path.exists() else []
        rows = merge_attributions(saved, *inherited, attribution(self.train))
        if rows and rows != saved:
            write_json(path, rows, indent=1, ensure_ascii=False)
        return rows

    def existing_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the run, else of the recipe's start, else None."""
        path, start = self.out / "tokenizer.json", self.recipe.start
        if not path.exists():
            if start is None:
                return None
            path = pretrained.find_bundle(pretrained.resolve_name(start)) / "tokenizer.json"
        return Tokenizer.load(path)

    def resolve(self, stages: Sequence[str]) -> ResolvedRecipe:
        """Resolve the recipe for a run that trains `stages`. Before the tokenizer exists, the vocabulary has the
        recipe's maximal size."""
        tokenizer = self.existing_tokenizer()
        dvae_from_start = "dvae" not in stages and not completed(self.out / "dvae")
        return resolve(self.recipe, tokenizer.vocab_size if tokenizer else None, dvae_from_start)

    def tokenizer(self) -> Tokenizer:
        """Return the run's tokenizer. The first call copies that of the recipe's start, or trains one on the
        captions."""
        path = self.out / "tokenizer.json"
        with self.parallel.main_first():
            if not path.exists():
                (self.existing_tokenizer() or Tokenizer.train(_captions(self.train), self.recipe.text.vocab)).save(path)
        return Tokenizer.load(path)

    def evaluation_pictures(self, source: Source, size: int) -> Tensor:
        """Return at most 512 evenly spaced pictures of the source, not augmented: uint8 [B, 3, size, size]."""
        subset = _subset(source)
        return ImageCaptionDataset(subset, size).load(np.arange(len(subset)))[1]

    def dvae_dataset(self, stage: DVAEStage | PatchStage) -> Dataset:
        """Return the dVAE's training data: pictures."""
        augment = "dvae" if stage.augment else "none"
        return ImageCaptionDataset(self.train, stage.model.size, augment, cache_bytes=_IMAGE_CACHE_BYTES)

    def clustering_pictures(self, stage: DVAEStage | PatchStage) -> Tensor:
        """Return at most 8,000 evenly spaced pictures to cluster patches of: uint8 [B, 3, size, size]."""
        images = self.dvae_dataset(stage)
        rows = _evenly_spaced(len(images), _MAX_CLUSTERING_PICTURES)
        return images.batch(rows, splitmix64(stage.training.seed, rows))["pixels"]

    def prior_dataset(self, source: Source, tokenizer: Tokenizer, dvae: ImageTokenizer) -> Dataset:
        """Return the prior's dataset: caption and image tokens, and those of related pictures if the recipe names keys
        of metadata. Augmented pictures are encoded per batch, others once and cached."""
        stage, training = self.recipe.prior, source is self.train
        encoding = self._encoding(tokenizer, training, caption_dropout=stage.caption_dropout if training else 0.0)
        if training and stage.augment:
            pictures = ImageCaptionDataset(source, dvae.config.size, "prior", encoding)
            return EncodedDataset(pictures, partial(_tokens, dvae))
        subset = source if training else _subset(source)
        if not stage.related_by:
            cache = self._encode(subset, dvae)
            return TokenDataset(cache.tokens, cache.captions, encoding)
        if (key := weights_hash(dvae)) not in self._read:
            known = self._encode(self.train, dvae)
            self._read[key] = known, [self.train.meta(int(i)) for i in known.indices]
        known, known_metadata = self._read[key]
        cache = known if training else self._encode(subset, dvae)
        metadata = known_metadata if training else [subset.meta(int(i)) for i in cache.indices]
        related = Related(known.tokens, known_metadata, stage.related_by, stage.related_share if training else 1.0)
        return RelatedTokenDataset(cache.tokens, cache.captions, encoding, metadata, related, training)

    def examples(self, dvae: ImageTokenizer) -> Examples | None:
        """Return at most the recipe's number of training pictures, by the subject and style in their first captions."""
        if not (limit := self.recipe.prior.examples):
            return None
        cache = self._encode(self.train, dvae)
        rows = _evenly_spaced(len(cache), limit)
        return Examples.from_captions(np.asarray(cache.tokens)[rows], [cache.captions[row][0] for row in rows])

    def _encode(self, source: Source, dvae: ImageTokenizer) -> TokenCache:
        """Return the tokens of a source, from the cache or by the dVAE."""
        key, size, shown = weights_hash(dvae), dvae.config.size, self.parallel.is_main
        with self.parallel.main_first(), progress("encoding pictures", len(source), unit="image", shown=shown) as bar:
            return encode_tokens(
                source, partial(_tokens, dvae), key=key, size=size, cache_dir=self.out / "tokens", progress=bar.advance
            )

    def contrastive_dataset(self, source: Source, tokenizer: Tokenizer, size: int) -> ImageCaptionDataset:
        """Return the contrastive model's dataset: pictures, captions and distractors."""
        stage, training, distractors = self.recipe.contrastive, source is self.train, None
        if count := stage.distractors:
            counted = _captions(_subset(self.train, MAX_COUNTED_SAMPLES))
            distractors = Distractors(counted, _captions(self.held_out), falsity_test, count)
        encoding = self._encoding(tokenizer, training, distractors=distractors)
        subset = source if training else _subset(source)
        augment = "prior" if stage.augment and training else "none"
        return ImageCaptionDataset(subset, size, augment, encoding, cache_bytes=_IMAGE_CACHE_BYTES)

    def _encoding(self, tokenizer: Tokenizer, training: bool, **settings: Any) -> CaptionEncoding:
        """Return the encoding of captions, with BPE dropout in training; `settings` are those of a stage."""
        text = self.recipe.text
        dropout = text.dropout if training else 0.0
        return CaptionEncoding(tokenizer=tokenizer, length=text.length, bpe_dropout=dropout, **settings)


def _tokens(dvae: ImageTokenizer, pixels: Tensor) -> Tensor:
    return dvae.tokenize(pixels.to(next(dvae.parameters()).device)).cpu()


def _captions(source: Source) -> Iterable[str]:
    for i in range(len(source)):
        try:
            yield from source.captions(i)
        except Rejected:
            continue


def _subset(source: Source, limit: int = MAX_EVALUATION_SAMPLES) -> Source:
    """Return at most `limit` evenly spaced samples."""
    return Subset(source, _evenly_spaced(len(source), limit))


def _evenly_spaced(count: int, limit: int) -> np.ndarray:
    """Return at most `limit` evenly spaced indices below `count`."""
    return np.linspace(0, count - 1, min(limit, count)).astype(int)
