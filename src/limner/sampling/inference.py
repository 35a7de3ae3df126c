"""Models in the number formats of inference.

Weights are converted once. On hardware with fast bf16 products the prior and the contrastive model compute in bf16,
with matrices packed for the processor; otherwise in fp32. The prior's matrices may be in 8 bits. The memory of keys and
values limits the candidates that are sampled at the same time.
"""

from __future__ import annotations

import copy
import math
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
from limner.quantization.convert import convert
from limner.quantization.inference_linear import Int8Linear, pack_linears
from limner.sampling.cuda_graph import build_decoder
from limner.sampling.rerank import scores

__all__ = ["InferenceConfig", "InferenceModels"]

MAX_CPU_BATCH = 256  # candidates in one batch on a CPU; larger batches exceed its caches
MAX_CACHE_BYTES = 1 << 30  # of keys and values in one batch on a CPU; on a GPU, a quarter of the free memory
MAX_GPU_BATCH = 1_024  # candidates in one batch on a GPU
MAX_DECODER_BYTES = 1 << 30  # of codes and activations in the dVAE's decoder


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


class InferenceModels:
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

    def decode(self, tokens: Tensor, rows: int) -> Tensor:
        """Decode tokens [b, n, rows * w] into pictures, uint8 [b, n, 3, height, W]."""
        c = self.dvae.config
        codes, states = math.prod(c.grid) * c.vocab, c.size**2 * c.width
        picture_bytes = 8 * codes + 4 * 4 * states  # int64 codes, and about four fp32 tensors of the widest layer
        parts = tokens.flatten(0, 1).split(max(1, MAX_DECODER_BYTES // picture_bytes))
        pictures = torch.cat([self.dvae.decode_tokens(part, (rows, c.grid[1])) for part in parts])
        return pictures.unflatten(0, tokens.shape[:2])

    def closest(self, text: Tensor, tokens: np.ndarray) -> int:
        """Return which picture, of tokens [K, S], the contrastive model scores highest for a caption [T]."""
        pictures = self.decode(torch.from_numpy(tokens).to(self.device)[None], self.dvae.config.grid[0])
        return int(scores(self.contrastive, text.to(self.device)[None], pictures)[0].argmax())

    def max_rows(self) -> int:
        """Return the maximum number of rows of a batch, limited by the memory of keys and values."""
        c, dtype = self.decoder.config, self.config.precision.dtype(self.device)
        like = torch.empty(1, c.heads, 0, c.width // c.heads, dtype=dtype, device="meta")
        stores = (self.config.store(like, 1, pattern.cache_slots()) for pattern in c.patterns)
        candidate_bytes = 2 * sum(store.bytes_per_candidate for store in stores)
        limit, cache_bytes = MAX_CPU_BATCH, MAX_CACHE_BYTES
        if self.device.type == "cuda":
            self._free_gpu_bytes = self._free_gpu_bytes or torch.cuda.mem_get_info(self.device)[0]
            limit, cache_bytes = MAX_GPU_BATCH, self._free_gpu_bytes // 4  # two CUDA graphs and a cache copied into one
        return max(1, min(limit, cache_bytes // candidate_bytes))
