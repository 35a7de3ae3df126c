"""Text-to-image pipeline: prior, dVAE, contrastive model and tokenizer (§2.6).

    pipe = limner.load()                       # the bundled model, or a folder
    drawings = pipe("a small red circle", n=2, candidates=64, seed=0)
    drawings[0].save("circle.png")

The prior samples `candidates` token grids, the dVAE decodes them, the contrastive model scores the pictures against
the caption, and the pipeline returns the best `n` (`sampling/rerank.py`). Candidate i of a caption depends only on the
caption, the seed and i. More candidates or other captions in the batch do not change it, apart from float rounding,
which may flip a choice between two equally likely tokens.

Weights are stored in 16 or 8 bits (`bundles.py`). Drawing computes in bf16 on hardware with fast bf16 products, else in
single precision.

Shapes: B captions, N candidates, T text positions, S image positions, H x W pixels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from limner import bundles, pretrained
from limner.attention.cache import Int8KVStore, KVStore
from limner.data.augment import augment_none
from limner.data.image_decode import to_rgb
from limner.drawing import Drawing, Drawings
from limner.errors import UserError
from limner.models.contrastive import CLIP, CLIPConfig
from limner.models.patch_dvae import AnyDVAE, AnyDVAEConfig
from limner.models.transformer import Transformer, TransformerConfig
from limner.numerics.precision import Auto, Precision
from limner.progress import Advance
from limner.quantization.convert import convert
from limner.quantization.inference_linear import Int8Linear, pack_linears
from limner.sampling.cuda_graph import TokenDecoder, build_decoder
from limner.sampling.generate import UNSET, generate
from limner.sampling.generation_config import GenerationConfig, Sampler
from limner.sampling.rerank import best, distinct_first, scores
from limner.text.bpe import Tokenizer
from limner.validation import SEEDS, InvalidSetting, Range
from limner.version import __version__

__all__ = ["Candidates", "InferenceConfig", "OnPreview", "Preview", "TextToImage", "load"]

MAX_CPU_BATCH = 256  # candidates in one batch on a CPU; larger batches exceed its caches
MAX_CACHE_BYTES = 1 << 30  # of keys and values in one batch on a CPU; on a GPU, a quarter of the free memory
MAX_GPU_BATCH = 1_024  # candidates in one batch on a GPU
MAX_DECODER_BYTES = 1 << 30  # of codes and activations in the dVAE's decoder
_PRIOR_SCORE_WEIGHTS = Range(0, 100)

OnPreview = Callable[["Preview"], object]


@dataclass(frozen=True)
class Candidates:
    """All candidates of B captions, in the order of their numbers.

    Attributes:
        pictures: uint8 [B, N, 3, H, W].
        scores: float32 [B, N], higher is better; see `Drawing.score`.
        tokens: int64 [B, N, S].
        sampler: settings of the sampler, with the model's defaults filled in.
    """

    pictures: Tensor
    scores: Tensor
    tokens: Tensor
    sampler: Sampler


@dataclass(frozen=True)
class Preview:
    """The top rows of unfinished drawings.

    Attributes:
        captions: indices of b captions.
        candidates: indices of n candidates.
        pictures: uint8 [b, n, 3, current height, W]. The last rows may still change slightly, since the dVAE's
            decoder also depends on the rows below.
    """

    captions: Sequence[int]
    candidates: range
    pictures: Tensor


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Settings of computation.

    Args:
        precision: by default bf16 on hardware with fast bf16 products, else fp32.
        int8_cache: store keys and values in 8 bits, which halves the memory per candidate (`attention/cache.py`).
        int8_weights: store the prior's matrices in 8 bits, which halves its memory.
        compiled: faster, after half a minute or more of compilation for each number of candidates
            (`sampling/aot_inductor.py`).
    """

    precision: Precision = field(default_factory=Auto)
    int8_cache: bool = False
    int8_weights: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.precision, Precision):
            raise UserError(
                f"precision is Auto(), Bf16(), Fp16() or Fp32() of limner.numerics.precision, not {self.precision!r}"
            )

    @property
    def store(self) -> type[KVStore]:
        return Int8KVStore if self.int8_cache else KVStore


class TextToImage:
    """Text-to-image pipeline.

    Args:
        dvae, prior, contrastive, tokenizer: models that were trained together.
        info: JSON values for the model card: "name", "recipe", "data", "scores", ...; "temperature" and "guidance" are
            defaults of sampling, "prior_score_weight" is the weight of the prior's log-probability in `Drawing.score`.

    Raises:
        UserError: the models do not fit together, or `info` is invalid.
    """

    def __init__(
        self,
        dvae: AnyDVAE,
        prior: Transformer,
        contrastive: CLIP,
        tokenizer: Tokenizer,
        info: Mapping[str, Any] | None = None,
        inference_config: InferenceConfig = InferenceConfig(),
    ) -> None:
        self.dvae, self.prior, self.contrastive = dvae.eval(), prior.eval(), contrastive.eval()
        self.tokenizer, self.info, self.inference_config = tokenizer, dict(info or {}), inference_config
        try:
            self.sampler = Sampler(
                temperature=self._bundle_default("temperature"), guidance=self._bundle_default("guidance")
            )
            self.prior_score_weight = self._bundle_default("prior_score_weight", 0.0)
            _PRIOR_SCORE_WEIGHTS.check("prior_score_weight", self.prior_score_weight)
        except InvalidSetting as error:
            raise UserError(f"the model's {error}: correct its config.json") from None
        _check_fit(dvae.config, prior.config, contrastive.config, tokenizer)
        self._inference_models: tuple[TokenDecoder, CLIP] | None = None
        self._free_gpu_bytes = 0  # before the first drawing

    def _bundle_default(self, setting: str, default: float = 1.0) -> float:
        """Return a number of `info`. Raises `UserError` if it has another type."""
        value = self.info.get(setting, default)
        if type(value) not in (int, float):
            raise UserError(f"the model's {setting} must be a number, not {value!r}: correct its config.json")
        return value

    @property
    def name(self) -> str:
        return str(self.info.get("name") or "unnamed")

    @property
    def device(self) -> torch.device:
        return self.prior.head.image.weight.device

    def to(self, device: torch.device | str) -> TextToImage:
        """Move all three models to a device. Return the pipeline."""
        for model in (self.dvae, self.prior, self.contrastive):
            model.to(device)
        self._inference_models, self._free_gpu_bytes = None, 0
        return self

    def __call__(
        self,
        caption: str,
        options: GenerationConfig = GenerationConfig(),
        *,
        n: int = 1,
        prompt_tokens: Tensor | None = None,
        progress: Advance | None = None,
        on_preview: OnPreview | None = None,
        preview_every: int = 2,
        **settings: Any,
    ) -> Drawings:
        """Draw a caption, or complete a picture: `pipe(caption, prompt_tokens=pipe.prime(picture, 6))`.

        Args:
            options: candidates, seed and sampler; `settings` override fields:
                `pipe(caption, candidates=8, temperature=0.9)`.
            n: number of drawings to return, distinct ones first. At least n candidates are drawn.
            prompt_tokens: fixed tokens of a picture, from `prime`.
            progress: called with the number of candidates drawn since the last call.
            on_preview: called with a `Preview` of a batch of candidates after every `preview_every` rows of tokens.

        Raises:
            UserError: the caption is empty or a setting is out of range.
        """
        if not isinstance(caption, str):
            raise UserError(f"the caption must be a string, not {caption!r}: draw several captions with draw_many")
        return self.draw_many(
            [caption], options, n=n, prompt_tokens=prompt_tokens, progress=progress, on_preview=on_preview,
            preview_every=preview_every, **settings,
        )[0]  # fmt: skip

    def prime(self, image: Image.Image, keep_rows: int | None = None, mask: Image.Image | None = None) -> Tensor:
        """Return the tokens [1, S] of a picture, `UNSET` where to draw (priming and inpainting, §2.6, Figure 14).

        Args:
            image: cropped to its central square and resized; white behind transparent pixels, as for `mask`.
            keep_rows: number of rows of tokens to keep, from the top.
            mask: alternative to `keep_rows`, a picture whose light pixels mark the tokens to redraw.

        Raises:
            UserError: both or neither of `keep_rows` and `mask` are given, or one is invalid.
        """
        if (keep_rows is None) == (mask is None):
            raise UserError("a picture needs either keep_rows or a mask: give one of the two")
        size, (h, w) = self.dvae.config.size, self.dvae.config.grid
        pixels = torch.from_numpy(augment_none(np.array(to_rgb(image)), size)).permute(2, 0, 1)
        tokens = self.dvae.tokenize(pixels[None].to(self.device))[0]
        unset = torch.ones(h, w, dtype=torch.bool)
        if keep_rows is not None:
            if keep_rows not in range(1, h):
                raise UserError(f"keep_rows must be from 1 to {h - 1} of the {h} rows of tokens, not {keep_rows!r}")
            unset[:keep_rows] = False
        elif mask is not None:
            light = torch.from_numpy(augment_none(np.array(to_rgb(mask)), size)).float().mean(-1)
            unset = light.view(h, size // h, w, size // w).amax((1, 3)) > 127
            if not unset.any():
                raise UserError("the mask is dark everywhere: make the part to redraw white")
        return torch.where(unset.flatten().to(tokens.device), UNSET, tokens)[None]

    def draw_many(
        self,
        captions: Sequence[str],
        options: GenerationConfig = GenerationConfig(),
        *,
        n: int = 1,
        seed: int | Sequence[int] | None = None,
        prompt_tokens: Tensor | None = None,
        progress: Advance | None = None,
        on_preview: OnPreview | None = None,
        preview_every: int = 2,
        **settings: Any,
    ) -> list[Drawings]:
        """Draw several captions; see `__call__`.

        `seed` is one for all captions or one each; `prompt_tokens` holds fixed tokens [B, S] (`sampling.generate`).
        """
        if isinstance(captions, str):
            raise UserError("draw_many takes a list of captions, not a string: put the caption into brackets")
        if n < 1:
            raise UserError(f"n, the number of drawings, must be at least 1, not {n}")
        try:
            options = replace(options, **settings)
        except ValueError as error:
            raise UserError(str(error)) from None
        seeds = _seeds(options.seed if seed is None else seed, len(captions))
        result = self.candidates(
            captions, max(n, options.candidates), seed=seeds, sampler=options, prompt_tokens=prompt_tokens,
            progress=progress, on_preview=on_preview, preview_every=preview_every,
        )  # fmt: skip
        order = distinct_first(best(result.scores, result.scores.shape[1]), result.tokens)[:, :n]
        return [
            Drawings(
                [
                    Drawing(
                        image=Image.fromarray(result.pictures[row, i].permute(1, 2, 0).numpy()),
                        caption=caption,
                        score=float(result.scores[row, i]),
                        seed=seeds[row],
                        candidate=int(i) + 1,
                        model=self.name,
                        settings=result.sampler.to_metadata(),
                    )
                    for i in order[row].tolist()
                ]
            )
            for row, caption in enumerate(captions)
        ]

    @torch.inference_mode()
    def candidates(
        self,
        captions: Sequence[str],
        count: int,
        *,
        seed: int | Sequence[int] = 0,
        sampler: Sampler = Sampler(),
        prompt_tokens: Tensor | None = None,
        progress: Advance | None = None,
        on_preview: OnPreview | None = None,
        preview_every: int = 2,
    ) -> Candidates:
        """Draw `count` candidates of each caption; return them unranked, on the CPU. Raises `UserError`."""
        if count < 1:
            raise UserError(f"the number of candidates must be at least 1, not {count}")
        if preview_every < 1:
            raise UserError(f"preview_every, a number of rows of tokens, must be at least 1, not {preview_every}")
        sampler = sampler.with_defaults(self.sampler)
        seeds = _seeds(seed, len(captions))
        text = rerank_text = self._encode(captions, self.prior.config.text_len)
        if self.contrastive.config.text_len != self.prior.config.text_len:
            rerank_text = self._encode(captions, self.contrastive.config.text_len)
        height, width = self.dvae.config.grid
        length = height * width
        side, device = self.dvae.config.size, self.device
        b = len(captions)
        tokens = torch.empty(b, count, length, dtype=torch.long)
        pictures = torch.empty(b, count, 3, side, side, dtype=torch.uint8)
        score = torch.empty(b, count)
        prior, contrastive = self._build_inference_models()
        inpainting = prompt_tokens is not None and bool((prompt_tokens != UNSET).any())
        sampled_tokens = reported = 0
        for rows, part in _batches(seeds, count, self.max_batch()):
            size = len(rows) * len(part)

            def report(positions: int, size: int = size) -> None:
                nonlocal sampled_tokens, reported
                sampled_tokens += positions * size
                if progress and (more := sampled_tokens // length - reported):
                    reported += more
                    progress(more)

            def preview(partial: Tensor, h: int, rows: list[int] = rows, part: range = part) -> None:
                if on_preview and h % preview_every == 0:
                    on_preview(Preview(rows, part, self.decode(partial[..., : h * width], h)))

            result = generate(
                prior, text[rows].to(device), part, sampler, seed=seeds[rows[0]],
                prompt_tokens=None if prompt_tokens is None else prompt_tokens[rows].to(device),
                store=self.inference_config.store, progress=report, on_preview=preview if on_preview else None,
            )  # fmt: skip
            decoded = self.decode(result.tokens, height)
            batch_score, columns = result.log_likelihood, slice(part.start, part.stop)
            if not inpainting:
                cosines = scores(contrastive, rerank_text[rows].to(device), decoded).float()
                batch_score = cosines + self.prior_score_weight * batch_score
            score[rows, columns] = batch_score.cpu()
            tokens[rows, columns], pictures[rows, columns] = result.tokens.cpu(), decoded.cpu()
        return Candidates(pictures, score, tokens, sampler)

    def decode(self, tokens: Tensor, rows: int) -> Tensor:
        """Decode tokens [b, n, rows * w] into pictures, uint8 [b, n, 3, height, W]."""
        c = self.dvae.config
        codes, states = math.prod(c.grid) * c.vocab, c.size**2 * c.width
        picture_bytes = 8 * codes + 4 * 4 * states  # int64 codes, and about four fp32 tensors of the widest layer
        parts = tokens.flatten(0, 1).split(max(1, MAX_DECODER_BYTES // picture_bytes))
        pictures = torch.cat([self.dvae.decode_tokens(part, (rows, c.grid[1])) for part in parts])
        return pictures.unflatten(0, tokens.shape[:2])

    def _encode(self, captions: Sequence[str], length: int) -> Tensor:
        for caption in captions:
            try:
                caption.encode()
            except UnicodeEncodeError:
                raise UserError(f"the caption {caption!r} is not valid Unicode text: check its encoding") from None
        return self.tokenizer.encode(captions, length)

    def max_batch(self) -> int:
        """Return the maximum number of candidates in one batch, limited by the memory of keys and values."""
        c, dtype = self.prior.config, self.inference_config.precision.dtype(self.device)
        like = torch.empty(1, c.heads, 0, c.width // c.heads, dtype=dtype, device="meta")
        stores = (self.inference_config.store(like, 1, pattern.cache_slots) for pattern in c.patterns)
        candidate_bytes = 2 * sum(store.bytes_per_candidate for store in stores)
        limit, cache_bytes = MAX_CPU_BATCH, MAX_CACHE_BYTES
        if self.device.type == "cuda":
            self._free_gpu_bytes = self._free_gpu_bytes or torch.cuda.mem_get_info(self.device)[0]
            limit, cache_bytes = MAX_GPU_BATCH, self._free_gpu_bytes // 4  # two CUDA graphs and a cache copied into one
        return max(1, min(limit, cache_bytes // candidate_bytes))

    @torch.inference_mode(False)  # the compiler does not support inference tensors
    def _build_inference_models(self) -> tuple[TokenDecoder, CLIP]:
        """Return decoder and contrastive model in the number format of inference, built once."""
        if self._inference_models is None:
            prior, contrastive = self.prior, self.contrastive
            dtype = self.inference_config.precision.dtype(self.device)
            if dtype == torch.bfloat16:
                contrastive = pack_linears(copy.deepcopy(contrastive).to(dtype))
            if dtype == torch.bfloat16 or self.inference_config.int8_weights:
                prior = copy.deepcopy(prior).to(dtype)
                if self.inference_config.int8_weights:
                    prior = convert(prior, Int8Linear)
                elif not self.inference_config.compiled:  # the compiler chooses the layout of weights
                    prior = pack_linears(prior)
            self._inference_models = build_decoder(prior, self.inference_config.compiled), contrastive
        return self._inference_models

    # ------------------------------------------------------------------------ bundles

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float16) -> Path:
        """Write a bundle atomically, replacing an existing one. Return the folder.

        With `dtype` `torch.int8`, the matrices of the prior and the contrastive model take half the space of half
        precision. Raises `UserError` if the folder has other content or a weight is not finite.
        """
        models = {"dvae": self.dvae, "prior": self.prior, "contrastive": self.contrastive}
        info = {"limner": __version__, **self.info}
        self.info = bundles.write(Path(folder), models, self.tokenizer, info, dtype)
        return Path(folder)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, device: torch.device | str | None = None, **settings: Any
    ) -> TextToImage:
        """Read a bundle onto `device` (by default a GPU if available); `settings` are those of `InferenceConfig`.

        Raises `UserError` if a part of the bundle is missing, damaged or inconsistent.
        """
        folder = pretrained.find_bundle(folder)
        models, tokenizer, info = bundles.read(folder)
        try:
            pipe = cls(**models, tokenizer=tokenizer, info=info, inference_config=InferenceConfig(**settings))
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return pipe.to(device)


def load(name_or_folder: str | Path = pretrained.DEFAULT, **options: Any) -> TextToImage:
    """Load a bundled model, by name, or any bundle, by folder.

    `options` are `device` and settings of `InferenceConfig`. Raises `UserError` if the model is missing or invalid.
    """
    return TextToImage.from_pretrained(pretrained.resolve_name(name_or_folder), **options)


def _seeds(seed: int | Sequence[int], count: int) -> list[int]:
    """Return a seed per caption, as Python integers, since numpy's overflow. Raises `UserError` for an invalid seed."""
    seeds = [seed] * count if isinstance(seed, (int, np.integer)) else list(seed)
    if len(seeds) != count:
        raise ValueError(f"{len(seeds)} seeds for {count} captions")
    try:
        for value in seeds:
            SEEDS.check("seed", value, whole=True)
    except InvalidSetting as error:
        raise UserError(str(error)) from None
    return [int(value) for value in seeds]


def _batches(seeds: Sequence[int], count: int, rows: int) -> list[tuple[list[int], range]]:
    """Return (caption indices, candidate indices) of each batch; captions with equal seeds share batches."""
    step = min(count, rows)
    parts = [range(i, min(i + step, count)) for i in range(0, count, step)]
    captions_per_batch = max(1, rows // step)
    by_seed: dict[int, list[int]] = {}
    for row, seed in enumerate(seeds):
        by_seed.setdefault(seed, []).append(row)
    return [
        (group[i : i + captions_per_batch], part)
        for group in by_seed.values()
        for i in range(0, len(group), captions_per_batch)
        for part in parts
    ]


def _check_fit(dvae: AnyDVAEConfig, prior: TransformerConfig, contrastive: CLIPConfig, tokenizer: Tokenizer) -> None:
    pairs = (
        ("grid of the prior", tuple(prior.grid), "grid of the dVAE", tuple(dvae.grid)),
        ("image vocabulary of the prior", prior.image_vocab, "codebook of the dVAE", dvae.vocab),
        ("picture of the contrastive model", contrastive.size, "picture of the dVAE", dvae.size),
        ("text vocabulary of the prior", prior.text_vocab, "tokenizer", tokenizer.vocab_size),
        ("text vocabulary of the contrastive model", contrastive.text_vocab, "tokenizer", tokenizer.vocab_size),
    )
    for left, a, right, b in pairs:
        if a != b:
            raise UserError(f"the models do not match: the {left} has size {a}, the {right} {b}")
