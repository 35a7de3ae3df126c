"""What a prior costs on this machine, measured; `cost.py` calculates what it should cost.

Weights are random, since speed does not depend on them. A step of drawing is timed at several places of the
picture, because caches of columns grow; a picture is the prefill and a step for each of its positions. The
floor of a step is its arithmetic at the rate of a large matrix product and its bytes at the rate of a large
copy, both measured by `machine`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import nn

from limner.layers.cache import Cache
from limner.layers.inference_linear import prepacked
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Auto
from limner.objectives.autoregressive import Autoregressive
from limner.optim.optimizers import AdamWConfig
from limner.profiling.cost import Cost
from limner.sampling.cuda_graph import build_decoder
from limner.sampling.generate import sample_token
from limner.sampling.generation_config import Sampler
from limner.training.config import TrainConfig
from limner.training.step import update
from limner.training.train_module import Batch, Objective
from limner.training.train_state import Run

PLACES = (0.0, 0.25, 0.5, 0.75, 0.99)  # of a picture, where a step is timed


@dataclass(frozen=True, kw_only=True)
class Machine:
    """FLOP/s of a large product in the format of training, bytes/s of a large copy, read and written."""

    gemm: float
    copy: float


@dataclass(frozen=True, kw_only=True)
class DrawingTime:
    """Drawing `candidates` of one caption together.

    Args:
        step, prefill: seconds.
        positions: of a picture.
        each, shared: bytes of the cache, for each candidate and for all of them together.
    """

    candidates: int
    step: float
    prefill: float
    positions: int
    each: int
    shared: int

    @property
    def seconds(self) -> float:
        """For all candidates."""
        return self.prefill + self.positions * self.step

    @property
    def pictures(self) -> float:
        """A second."""
        return self.candidates / self.seconds


def seconds(function: Callable[[], object], times: int) -> float:
    """Median of several calls, after one that warms up."""
    found = []
    for _ in range(times + 1):
        _settle()
        began = time.perf_counter()
        function()
        _settle()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def mean_step(step: Callable[[int], object], positions: int, times: int) -> float:
    """Seconds of `step(position)`, averaged over a picture with this many positions."""
    return statistics.mean(seconds(partial(step, int(place * positions)), times) for place in PLACES)


def machine(device: torch.device) -> Machine:
    """Measured with a square product of 2,048 (8,192 on a GPU) and a copy of a quarter of a gigabyte."""
    side = 2_048 if device.type == "cpu" else 8_192
    a, b = (torch.randn(side, side, device=device).to(Auto().dtype(device)) for _ in range(2))
    x = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return Machine(gemm=2 * side**3 / seconds(lambda: a @ b, 8), copy=2 * len(x) / seconds(lambda: y.copy_(x), 4))


@torch.inference_mode()
def drawing(
    config: TransformerConfig, candidates: int, device: torch.device, *, shared: bool = True, compiled: bool = False
) -> DrawingTime:
    """Time drawing as the pipeline does it. Without `shared`, each candidate has the text's keys and values
    copied, as is usual elsewhere."""
    with torch.inference_mode(False), torch.random.fork_rng(devices=()), device:
        torch.manual_seed(0)  # with the same weights each time, compiled steps are found again
        model = config.build().to(device, Auto().dtype(device)).eval()
    model = build_decoder(model if compiled else prepacked(model), compiled)
    sampler, uniform = Sampler(), torch.rand(candidates, device=device)
    text = torch.randint(0, config.text_vocab, (1, config.text_len), device=device)
    prefill = seconds(lambda: model.prefill(text), 1)
    cache, logits = model.prefill(text)
    cache = cache.expand(candidates)
    prefix = sum(x.prefix_keys.nbytes + x.prefix_values.nbytes for x in cache.layers)
    if not shared:
        cache = _copied(cache, candidates)
    token = sample_token(sampler, logits.expand(candidates, -1), uniform)

    def step(position: int) -> None:
        nonlocal token
        cache.length = position
        token = sample_token(sampler, model.step(cache, token), uniform)

    each = cache.bytes_per_candidate
    return DrawingTime(
        candidates=candidates, step=mean_step(step, prod(config.grid), 4), prefill=prefill, positions=prod(config.grid),
        each=each if shared else each + prefix, shared=prefix if shared else 0,
    )  # fmt: skip


def floor(config: TransformerConfig, candidates: int, here: Machine) -> float:
    """Seconds that a step of drawing takes at least."""
    flops, read = Cost(config=config).drawing(candidates)
    return flops / here.gemm + read / here.copy


def training(config: TransformerConfig, batch: int, device: torch.device, *, checkpointing: bool = False) -> float:
    """Seconds per step of the training loop, in the format of training, with AdamW."""
    text = torch.randint(0, config.text_vocab, (batch, config.text_len))
    image = torch.randint(0, config.image_vocab, (batch, prod(config.grid)))
    parts = {"text": text, "image": image}
    with device:
        model = config.build().to(device)
    return trained(model, Autoregressive(), parts, device, checkpointing=checkpointing)


def trained(
    model: nn.Module, objective: Objective, batch: Batch, device: torch.device, *, checkpointing: bool = False
) -> float:
    """Seconds of a training step of any model."""
    config = TrainConfig(steps=1, optimizer=AdamWConfig(lr=1e-4), clip_norm=None, checkpoint_activations=checkpointing)
    run = Run(model.train(), objective, config, device)
    on_device = {name: tensor.to(device) for name, tensor in batch.items()}
    return seconds(lambda: update(run, on_device), 3)


def useful(config: TransformerConfig, batch: int, step: float, here: Machine) -> float:
    """The share of the product's rate that a training step of this length reaches."""
    return Cost(config=config, gpus=1, batch=batch).flops() / step / here.gemm


def _copied(cache: Cache, n: int) -> Cache:
    """The same for `n` candidates that share nothing."""
    layers = [
        replace(
            x, prefix_keys=x.prefix_keys.repeat_interleave(n, 0), prefix_values=x.prefix_values.repeat_interleave(n, 0)
        )
        for x in cache.layers
    ]
    return Cache(layers, cache.length)


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
