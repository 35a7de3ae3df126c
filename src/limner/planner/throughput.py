"""Measured speed of sampling and training a prior; `cost.py` calculates it.

Weights are random, since speed does not depend on them. A sampling step is timed at several positions of the picture,
because column caches grow. The time of a picture is the prefill plus a step per position. The lower bound of a step is
its FLOPs at the rate of a large matrix product plus its bytes at the rate of a large copy, both from `measure_rates`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import nn

from limner.attention.cache import KVCache
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Auto
from limner.objectives.autoregressive import Autoregressive
from limner.optim.optimizers import AdamWConfig
from limner.planner.cost import decode_step, training_flops
from limner.quantization.inference_linear import pack_linears
from limner.sampling.cuda_graph import build_decoder
from limner.sampling.generate import sample_token
from limner.sampling.generation_config import Sampler
from limner.training.config import TrainConfig
from limner.training.step import update
from limner.training.train_module import Batch, Objective
from limner.training.train_state import TrainState

Times = Mapping[str, list[float]]

TIMED_POSITIONS = (0.0, 0.25, 0.5, 0.75, 0.99)  # fractions of a picture


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Rates of a large matrix product in the training format (FLOP/s) and a large copy (bytes/s, read plus write)."""

    gemm: float
    copy: float


@dataclass(frozen=True, kw_only=True)
class GenerationTime:
    """Time to generate `candidates` of one caption in a batch.

    Args:
        step, prefill: seconds.
        positions: of a picture.
        cache_bytes: of the KV cache, per candidate.
        shared_bytes: of the KV cache shared by all candidates.
    """

    candidates: int
    step: float
    prefill: float
    positions: int
    cache_bytes: int
    shared_bytes: int

    @property
    def seconds(self) -> float:
        """Time for all candidates."""
        return self.prefill + self.positions * self.step

    @property
    def pictures_per_second(self) -> float:
        return self.candidates / self.seconds


def time_rounds(functions: Mapping[str, Callable[[], object]], rounds: int) -> Times:
    """Return the seconds of each function in each round, after a warm-up round."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: times[1:] for name, times in seconds.items()}


def median_seconds(function: Callable[[], object], times: int) -> float:
    """Return the median time of `times` calls after a warm-up call."""
    return statistics.median(time_rounds({"": function}, times)[""])


def mean_step(step: Callable[[int], object], positions: int, times: int) -> float:
    """Return the time of `step(position)`, averaged over a picture of `positions` positions."""
    return statistics.mean(
        median_seconds(partial(step, int(fraction * positions)), times) for fraction in TIMED_POSITIONS
    )


def measure_rates(device: torch.device) -> DeviceRates:
    """Measure the rates of a device: a square product of side 2,048 (8,192 on a GPU) and a copy of 256 MiB."""
    side = 2_048 if device.type == "cpu" else 8_192
    a, b = (torch.randn(side, side, device=device).to(Auto().dtype(device)) for _ in range(2))
    x = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return DeviceRates(
        gemm=2 * side**3 / median_seconds(lambda: a @ b, 8), copy=2 * len(x) / median_seconds(lambda: y.copy_(x), 4)
    )


def prepare_generation(
    config: TransformerConfig, candidates: int, device: torch.device, *, shared: bool = True, compiled: bool = False
) -> tuple[Callable[[], object], KVCache, Callable[[int], None]]:
    """Return the prefill, the cache and `step(position)` of generation as the pipeline does it, for use in inference
    mode. Without `shared`, each candidate has a copy of the text's keys and values, as in most implementations."""
    with torch.inference_mode(False), torch.random.fork_rng(devices=()), device:
        torch.manual_seed(0)  # equal weights hit the cache of compiled steps
        model = config.build().to(device, Auto().dtype(device)).eval()
    decoder = build_decoder(model if compiled else pack_linears(model), compiled)
    sampler, uniform = Sampler(), torch.rand(candidates, device=device)
    text = torch.randint(0, config.text_vocab, (1, config.text_len), device=device)
    cache, logits = decoder.prefill(text)
    cache = cache.expand(candidates)
    if not shared:
        cache = repeat_prefix(cache, candidates)
    token = sample_token(sampler, logits[:, 0].expand(candidates, -1), uniform)

    def step(position: int) -> None:
        nonlocal token
        cache.length = position
        token = sample_token(sampler, decoder.step(cache, token[:, None])[:, 0], uniform)

    return lambda: decoder.prefill(text), cache, step


@torch.inference_mode()
def time_generation(
    config: TransformerConfig, candidates: int, device: torch.device, *, shared: bool = True, compiled: bool = False
) -> GenerationTime:
    """Time generation (`prepare_generation`)."""
    prefill, cache, step = prepare_generation(config, candidates, device, shared=shared, compiled=compiled)
    prefix = sum(x.prefix_keys.nbytes + x.prefix_values.nbytes for x in cache.layers) // (1 if shared else candidates)
    cache_bytes = cache.bytes_per_candidate
    return GenerationTime(
        candidates=candidates, step=mean_step(step, prod(config.grid), 4), prefill=median_seconds(prefill, 1),
        positions=prod(config.grid), cache_bytes=cache_bytes if shared else cache_bytes + prefix,
        shared_bytes=prefix if shared else 0,
    )  # fmt: skip


def min_step_seconds(config: TransformerConfig, candidates: int, rates: DeviceRates) -> float:
    """Return a lower bound of the time of a sampling step."""
    flops, bytes_read = decode_step(config, candidates)
    return flops / rates.gemm + bytes_read / rates.copy


def time_training(config: TransformerConfig, batch: int, device: torch.device, *, checkpointing: bool = False) -> float:
    """Return the time of a training step with AdamW, in the training format."""
    text = torch.randint(0, config.text_vocab, (batch, config.text_len))
    image = torch.randint(0, config.image_vocab, (batch, prod(config.grid)))
    tokens = {"text": text, "image": image}
    with device:
        model = config.build().to(device)
    objective = Autoregressive(logit_operands="autocast")  # as in the implementations to compare
    return time_train_step(model, objective, tokens, device, checkpointing=checkpointing)


def time_train_step(
    model: nn.Module, objective: Objective, batch: Batch, device: torch.device, *, checkpointing: bool = False
) -> float:
    """Return the time of a training step of any model."""
    config = TrainConfig(steps=1, optimizer=AdamWConfig(lr=1e-4), clip_norm=None, checkpoint_activations=checkpointing)
    run = TrainState(model.train(), objective, config, device)
    on_device = {name: tensor.to(device) for name, tensor in batch.items()}
    return median_seconds(lambda: update(run, on_device), 3)


def utilization(config: TransformerConfig, batch: int, step: float, rates: DeviceRates) -> float:
    """Return the FLOP/s of a training step of `step` seconds as a share of the matrix product's."""
    return training_flops(config, batch) / step / rates.gemm


def repeat_prefix(cache: KVCache, n: int) -> KVCache:
    """Return the cache with a copy of the prefix per candidate."""
    layers = [
        replace(
            x, prefix_keys=x.prefix_keys.repeat_interleave(n, 0), prefix_values=x.prefix_values.repeat_interleave(n, 0)
        )
        for x in cache.layers
    ]
    return KVCache(layers, cache.length)
