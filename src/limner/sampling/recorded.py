"""Decoding steps that are recorded once and replayed.

A step of a small model is hundreds of kernels of a few microseconds each, and a GPU is told of them one by
one more slowly than it runs them. Recorded as a CUDA graph, they run without being told. What is recorded
reads and writes fixed memory: so the token and the position lie in tensors that are filled before each replay,
and each step does the same whatever its position (`layers/cache.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from limner.layers.cache import Cache, Store
from limner.models.transformer import Transformer, TransformerConfig

Run = Callable[[], object]


class Decoder(Protocol):
    """What `generate` draws with: a `Transformer`, or one whose steps are `Recorded`."""

    @property
    def config(self) -> TransformerConfig: ...

    def prefill(self, text: Tensor, store: type[Store] = Store) -> tuple[Cache, Tensor]: ...

    def step(self, cache: Cache, token: Tensor) -> Tensor: ...


def decoder(model: Transformer, compile: bool = False) -> Decoder:
    """The model as it draws fastest where it is; compiled, that is faster still from some hundred pictures on."""
    if model.head.image.weight.device.type == "cuda":
        return Recorded(model, (lambda run: cuda_graph(compiled(run))) if compile else cuda_graph)
    return Recorded(model, compiled) if compile else model


def compiled(run: Run) -> Run:
    """`run` compiled by Inductor (on a CPU it needs a C++ compiler), which takes half a minute for each number of
    candidates. The weights become constants, laid out as they are multiplied: changed later, they have no effect."""
    from torch._inductor import config  # a second to import, so only now

    fast = torch.compile(run, fullgraph=True, dynamic=False)
    with config.patch(freezing=True):
        fast()
    return fast


def cuda_graph(run: Run) -> Run:
    """`run`, which must take and leave everything in fixed memory, as a CUDA graph; it runs twice to warm up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class Recorded:
    """A model whose decoding steps are recorded with the first token that a cache is given.

    The logits that `step` returns are overwritten by the next step.

    Args:
        record: turns a function without arguments into one that does the same to the same memory.
    """

    def __init__(self, model: Transformer, record: Callable[[Run], Run] = cuda_graph) -> None:
        self.model, self.record = model, record
        self._steps: _Steps | None = None

    @property
    def config(self) -> TransformerConfig:
        return self.model.config

    def prefill(self, text: Tensor, store: type[Store] = Store) -> tuple[Cache, Tensor]:
        self._steps = None  # frees the memory of the last picture's
        return self.model.prefill(text, store)

    def step(self, cache: Cache, token: Tensor) -> Tensor:
        if self._steps is None or self._steps.cache is not cache:
            self._steps = _Steps(self.model, cache, token, self.record)
        return self._steps(token)


class _Steps:
    """The steps of one cache, with the memory that they take the token and the position from."""

    logits: Tensor

    def __init__(self, model: Transformer, cache: Cache, token: Tensor, record: Callable[[Run], Run]) -> None:
        self.cache, self.token = cache, token.clone()
        self.position = torch.full((1,), int(cache.length), device=token.device)

        def run() -> None:
            self.logits = model.step(Cache(cache.layers, self.position.clone()), self.token)

        self.replay = record(run)

    def __call__(self, token: Tensor) -> Tensor:
        self.token.copy_(token)
        self.position.fill_(int(self.cache.length))
        self.replay()
        self.cache.length += 1
        return self.logits
