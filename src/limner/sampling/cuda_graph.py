"""Decoding steps captured once as a CUDA graph and replayed.

A step of a small model consists of hundreds of kernels of a few microseconds each. On a GPU, launching them one by one
takes longer than running them; a CUDA graph launches all in one call. A graph reads and writes fixed memory. So the
token and the position are tensors that are filled before each replay, a step does the same work at every position
(`attention/cache.py`), and a cache is copied into the graph's memory.

Shapes: M rows, W tokens of a step, V image vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from limner.attention.cache import KVCache
from limner.attention.kv_store import KVStore
from limner.models.transformer import Transformer
from limner.sampling.decoder import TokenDecoder

Thunk = Callable[[], object]
Capture = Callable[[Thunk], Thunk]

_MAX_GRAPHS = 2  # each holds the memory of a cache: one for full batches, one for a smaller last batch


def build_decoder(model: Transformer, compile: bool = False, store: type[KVStore] = KVStore) -> TokenDecoder:
    """Return the fastest decoder of the model on its device.

    Compiled steps are faster, but the first use of each number of candidates takes half a minute or more
    (`aot_inductor.py`).
    """
    on_gpu = model.head.image.weight.device.type == "cuda"
    if not (compile or on_gpu):
        return TokenDecoder(model, store)
    return GraphedDecoder(model, cuda_graph if on_gpu else eager, compile, store)


def eager(run: Thunk) -> Thunk:
    """Return `run` itself, launched again by each call."""
    return run


def cuda_graph(run: Thunk) -> Thunk:
    """Capture `run`, which must read and write fixed memory, as a CUDA graph, after two calls to warm up."""
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


class GraphedDecoder(TokenDecoder):
    """A decoder whose step is captured with the first cache of a shape, and replayed for later caches.

    The next step overwrites the logits that `step` returned. Rows at several positions use no graph, since their
    shapes change whenever a row joins or leaves. Rows with a given picture use none either.

    Args:
        capture: turns a function without arguments into one with the same effect on the same memory.
        compile: compile steps before capturing them.
    """

    max_window = 1  # each window would need a graph, and its attention a kernel

    def __init__(
        self, model: Transformer, capture: Capture = cuda_graph, compile: bool = False, store: type[KVStore] = KVStore
    ) -> None:
        super().__init__(model, store)
        self.capture, self.compile = capture, compile
        self._steps: list[GraphedStep] = []  # least recently used first

    def step(self, cache: KVCache, tokens: Int64[Tensor, "M W"]) -> Float[Tensor, "M W V"]:
        if cache.places or cache.added is not None or (isinstance(cache.length, Tensor) and cache.length.ndim == 2):
            return super().step(cache, tokens)
        with torch.inference_mode(False), torch.no_grad():  # torch.compile cannot use inference tensors
            return self._graphed_step(cache, tokens)(cache, tokens)

    def _graphed_step(self, cache: KVCache, tokens: Tensor) -> GraphedStep:
        loaded = next((step for step in self._steps if step.layers is cache.layers), None)
        if loaded is not None and loaded.tokens.shape == tokens.shape:
            return loaded
        step = next((step for step in self._steps if step.fits(cache, tokens)), None)
        if step is None:
            del self._steps[: 1 - _MAX_GRAPHS]
            step = GraphedStep(self, cache, tokens)
        else:
            self._steps.remove(step)
        self._steps.append(step)
        step.load(cache)
        return step


class GraphedStep:
    """A captured step for caches of one shape, with its fixed memory, which holds one cache at a time."""

    logits: Tensor

    def __init__(self, decoder: GraphedDecoder, cache: KVCache, tokens: Tensor) -> None:
        self.layers, self.tokens = cache.copy().layers, tokens.clone()
        self.position = torch.atleast_1d(torch.as_tensor(cache.length, device=tokens.device)).clone()
        self.owner: Callable[[], KVCache | None] = lambda: None

        if decoder.compile:
            from limner.sampling.aot_inductor import load_or_compile

            step = load_or_compile(decoder.model, self.layers, self.tokens, self.position)
            memory = KVCache(self.layers).buffers

            def run() -> None:
                self.logits = step(self.tokens, self.position, memory)
        else:

            def run() -> None:
                self.logits = TokenDecoder(decoder.model).step(KVCache(self.layers, self.position), self.tokens)

        self.replay = decoder.capture(run)

    def fits(self, cache: KVCache, tokens: Tensor) -> bool:
        ours, theirs = ([(x.shape, x.dtype) for x in KVCache(layers).buffers] for layers in (self.layers, cache.layers))
        return self.tokens.shape == tokens.shape and ours == theirs

    def load(self, cache: KVCache) -> None:
        """Copy the cache into the fixed memory. The cache that was there moves to new memory."""
        if (before := self.owner()) is not None and before.layers is self.layers:
            before.layers = before.copy().layers
        for ours, theirs in zip(KVCache(self.layers).buffers, cache.buffers, strict=True):
            ours.copy_(theirs)
        cache.layers, self.owner = self.layers, ref(cache)

    def __call__(self, cache: KVCache, tokens: Tensor) -> Tensor:
        self.tokens.copy_(tokens)
        if isinstance(cache.length, int):
            self.position.fill_(cache.length)  # a copy from the CPU's memory would wait for the GPU
        else:
            self.position.copy_(cache.length)
        self.replay()
        cache.advance(tokens.shape[1])
        return self.logits
