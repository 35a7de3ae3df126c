"""Decoding steps that are recorded once and replayed.

A step of a small model is hundreds of kernels of a few microseconds each, and launching them one by one takes
longer than running them on a GPU. Recorded as a CUDA graph, they are launched at once. A recording
reads and writes fixed memory. So the token and the position lie in tensors that are filled before each replay,
each step does the same whatever its position (`layers/cache.py`), and a cache is copied into the recording's memory.

Shapes: B captions, M rows, T text positions, V image vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable
from weakref import ref

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from limner.layers.cache import Cache, Store, Together
from limner.models.transformer import Transformer, TransformerConfig

Task = Callable[[], object]

_SHAPES = 2  # recordings kept, each with the memory of its cache: one for full batches, one for a smaller last batch


@runtime_checkable
class TokenDecoder(Protocol):
    """What `generate` draws with: a `Transformer`, or one whose steps are `Recorded`."""

    @property
    def config(self) -> TransformerConfig: ...

    def prefill(self, text: Int64[Tensor, "B T"], store: type[Store] = Store) -> tuple[Cache, Float[Tensor, "B V"]]: ...

    def step(self, cache: Cache | Together, token: Int64[Tensor, " M"]) -> Float[Tensor, "M V"]: ...


def decoder(model: Transformer, compile: bool = False) -> TokenDecoder:
    """The model in the form that draws fastest on its device. Compiled steps are faster still, but the first use of
    each number of candidates takes half a minute or more (`aot_inductor.py`)."""
    on_gpu = model.head.image.weight.device.type == "cuda"
    if not (compile or on_gpu):
        return model
    return Recorded(model, cuda_graph if on_gpu else as_it_is, compile)


def as_it_is(run: Task) -> Task:
    """`run` unrecorded: launched anew each time."""
    return run


def cuda_graph(run: Task) -> Task:
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
    """A model whose decoding steps are recorded with the first cache of a shape, and replayed for all others.

    The logits that `step` returns are overwritten by the next step. Rows that are at several positions go through
    the model itself, since their shape changes whenever a row joins or leaves.

    Args:
        record: turns a function without arguments into one that does the same to the same memory.
        compile: before they are recorded, steps are compiled.
    """

    def __init__(self, model: Transformer, record: Callable[[Task], Task] = cuda_graph, compile: bool = False) -> None:
        self.model, self.record, self.compile = model, record, compile
        self._steps: list[_Steps] = []  # the most recently used last

    @property
    def config(self) -> TransformerConfig:
        return self.model.config

    def prefill(self, text: Int64[Tensor, "B T"], store: type[Store] = Store) -> tuple[Cache, Float[Tensor, "B V"]]:
        return self.model.prefill(text, store)

    def step(self, cache: Cache | Together, token: Int64[Tensor, " M"]) -> Float[Tensor, "M V"]:
        if isinstance(cache, Together):
            return self.model.step(cache, token)
        with torch.inference_mode(False), torch.no_grad():  # the compiler is for ordinary tensors
            return self._steps_of(cache, token)(cache, token)

    def _steps_of(self, cache: Cache, token: Tensor) -> _Steps:
        if (here := next((one for one in self._steps if one.layers is cache.layers), None)) is not None:
            return here
        steps = next((one for one in self._steps if one.fits(cache)), None)
        if steps is None:
            del self._steps[: 1 - _SHAPES]
            steps = _Steps(self, cache, token)
        else:
            self._steps.remove(steps)
        self._steps.append(steps)
        steps.take(cache)
        return steps


class _Steps:
    """The steps of caches of one shape, and the memory that they work on, which holds one cache at a time."""

    logits: Tensor

    def __init__(self, of: Recorded, cache: Cache, token: Tensor) -> None:
        self.layers, self.token = cache.copy().layers, token.clone()
        self.position = torch.full((1,), int(cache.length), device=token.device)
        self.owner: Callable[[], Cache | None] = lambda: None

        if of.compile:
            from limner.sampling.aot_inductor import compiled

            step, memory = compiled(of.model, self.layers, self.token, self.position), Cache(self.layers).memory

            def run() -> None:
                self.logits = step(self.token, self.position, memory)
        else:

            def run() -> None:
                self.logits = of.model.step(Cache(self.layers, self.position.clone()), self.token)

        self.replay = of.record(run)

    def fits(self, cache: Cache) -> bool:
        mine, its = ([(x.shape, x.dtype) for x in Cache(layers).memory] for layers in (self.layers, cache.layers))
        return mine == its

    def take(self, cache: Cache) -> None:
        """Copy the cache into this memory; a cache that is still in it moves to memory of its own."""
        if (before := self.owner()) is not None and before.layers is self.layers:
            before.layers = before.copy().layers
        for mine, its in zip(Cache(self.layers).memory, cache.memory, strict=True):
            mine.copy_(its)
        cache.layers, self.owner = self.layers, ref(cache)

    def __call__(self, cache: Cache, token: Tensor) -> Tensor:
        self.token.copy_(token)
        self.position.fill_(int(cache.length))
        self.replay()
        cache.advance()
        return self.logits
