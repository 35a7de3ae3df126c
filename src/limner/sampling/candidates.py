"""Candidates of captions: the prior samples tokens, the dVAE decodes them, the contrastive model scores the pictures.

Weights are converted once for inference. On hardware with fast bf16 products the prior and the contrastive model
compute in bf16, with matrices packed for the processor; otherwise in fp32. The prior's matrices may be in 8 bits.
The memory of keys and values limits a batch.

Shapes: B captions, N candidates of each, T text positions, S image positions, H x W pixels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from limner.attention.kv_store import Int8KVStore, KVStore
from limner.errors import UserError
from limner.models.contrastive import CLIP
from limner.models.image_tokenizer import ImageTokenizer
from limner.models.transformer import Transformer
from limner.numerics.precision import Auto, Precision
from limner.progress import Advance
from limner.quantization.convert import convert
from limner.quantization.inference_linear import Int8Linear, pack_linears
from limner.sampling.cuda_graph import build_decoder
from limner.sampling.generate import UNSET
from limner.sampling.generation_config import Sampler
from limner.sampling.parallel import generate
from limner.sampling.rerank import scores
from limner.validation import SEEDS, InvalidSetting

__all__ = ["CandidateGenerator", "Candidates", "InferenceConfig", "OnPreview", "Preview", "Prompts", "caption_seeds"]

MAX_CPU_BATCH = 256  # candidates in one batch on a CPU; larger batches exceed its caches
MAX_CACHE_BYTES = 1 << 30  # of keys and values in one batch on a CPU; on a GPU, a quarter of the free memory
MAX_GPU_BATCH = 1_024  # candidates in one batch on a GPU
MAX_DECODER_BYTES = 1 << 30  # of codes and activations in the dVAE's decoder

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


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Inputs of B captions.

    Attributes:
        text, rerank_text: int64 [B, T], the captions' tokens for the prior and for the contrastive model.
        seeds: one for each caption.
        image: int64 [B, S], fixed image tokens, `UNSET` where to sample; None to sample all.
    """

    text: Tensor
    rerank_text: Tensor
    seeds: Sequence[int]
    image: Tensor | None = None


class CandidateGenerator:
    """Models that are ready for inference on their device.

    Args:
        dvae, prior, contrastive: models on one device. They are not changed.
        prior_score_weight: weight of the prior's log-probability in the score.
    """

    @torch.inference_mode(False)  # the compiler does not support inference tensors
    def __init__(
        self, dvae: ImageTokenizer, prior: Transformer, contrastive: CLIP, prior_score_weight: float,
        config: InferenceConfig,
    ) -> None:  # fmt: skip
        self.dvae, self.config, self.prior_score_weight = dvae, config, prior_score_weight
        self.device = prior.head.image.weight.device
        dtype = config.precision.dtype(self.device)
        if dtype == torch.bfloat16:
            contrastive = pack_linears(copy.deepcopy(contrastive).to(dtype))
        if dtype == torch.bfloat16 or config.int8_weights:
            prior = copy.deepcopy(prior).to(dtype)
            if config.int8_weights:
                prior = convert(prior, Int8Linear)
            elif not config.compiled:  # the compiler chooses the layout of weights
                prior = pack_linears(prior)
        self.decoder, self.contrastive = build_decoder(prior, config.compiled, config.store), contrastive
        self._free_gpu_bytes = 0  # before the first batch

    @torch.inference_mode()
    def __call__(
        self,
        prompts: Prompts,
        count: int,
        sampler: Sampler,
        progress: Advance | None = None,
        on_preview: OnPreview | None = None,
        preview_every: int = 2,
    ) -> Candidates:
        """Draw `count` candidates of each caption, on the CPU.

        Calls `progress` with the number of candidates drawn since the last call, and `on_preview` with a `Preview` of
        a batch after every `preview_every` rows of tokens. Raises `UserError` if a model's output is not finite.
        """
        height, width = self.dvae.config.grid
        length = height * width
        side, device = self.dvae.config.size, self.device
        b = len(prompts.seeds)
        tokens = torch.empty(b, count, length, dtype=torch.long)
        pictures = torch.empty(b, count, 3, side, side, dtype=torch.uint8)
        score = torch.empty(b, count)
        inpainting = prompts.image is not None and bool((prompts.image != UNSET).any())
        sampled_tokens = reported = 0
        for rows, part in _batches(prompts.seeds, count, self.max_batch()):
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
                self.decoder, prompts.text[rows].to(device), part, sampler, seed=prompts.seeds[rows[0]],
                prompt_tokens=None if prompts.image is None else prompts.image[rows].to(device),
                progress=report, on_preview=preview if on_preview else None,
            )  # fmt: skip
            decoded = self.decode(result.tokens, height)
            batch_score, columns = result.log_likelihood, slice(part.start, part.stop)
            if not inpainting:
                cosines = scores(self.contrastive, prompts.rerank_text[rows].to(device), decoded).float()
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

    def max_batch(self) -> int:
        """Return the maximum number of candidates in one batch, limited by the memory of keys and values."""
        c, dtype = self.decoder.config, self.config.precision.dtype(self.device)
        like = torch.empty(1, c.heads, 0, c.width // c.heads, dtype=dtype, device="meta")
        stores = (self.config.store(like, 1, pattern.cache_slots()) for pattern in c.patterns)
        candidate_bytes = 2 * sum(store.bytes_per_candidate for store in stores)
        limit, cache_bytes = MAX_CPU_BATCH, MAX_CACHE_BYTES
        if self.device.type == "cuda":
            self._free_gpu_bytes = self._free_gpu_bytes or torch.cuda.mem_get_info(self.device)[0]
            limit, cache_bytes = MAX_GPU_BATCH, self._free_gpu_bytes // 4  # two CUDA graphs and a cache copied into one
        return max(1, min(limit, cache_bytes // candidate_bytes))


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


def caption_seeds(seed: int | Sequence[int], count: int) -> list[int]:
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
