"""The parts of a bundle as functions of tensors alone, which `torch.export` can record.

`WithWeights` makes the weights an argument: the ONNX files refer to those of the bundle.

Shapes: M rows, W tokens of a step, T text positions, S image positions, V image vocabulary, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.func import functional_call

from limner.attention.cache import KVCache, LayerKVCache
from limner.models.contrastive import CLIP
from limner.models.image_tokenizer import ImageTokenizer
from limner.models.transformer import Transformer
from limner.sampling.decoder import TokenDecoder


class Part(nn.Module):
    """A function of tensors by a `model`. `inputs` and `outputs` are the tensors' names."""

    inputs: Sequence[str]
    outputs: Sequence[str]

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class WithWeights(nn.Module):
    """A part as a function of the model's weights and of the other tensors."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self._part = [part]  # not a submodule, whose weights a graph would include

    def forward(self, weights: Mapping[str, Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        return functional_call(self._part[0], {f"model.{key}": value for key, value in weights.items()}, tensors)


class Prefill(Part):
    """The prior reads a caption: text [1, T] -> logits [1, V] of the first token, and the prefix (`prefix_of`).

    A prior that can follow a picture reads [1, T + S]."""

    def __init__(self, prior: Transformer, window: int) -> None:
        super().__init__(prior)
        self.decoder, self.window = TokenDecoder(prior), window
        self.inputs, self.outputs = ["text"], ["logits", *_prefix_names(prior)]

    def forward(self, text: Tensor) -> tuple[Tensor, ...]:
        cache, logits = self.decoder.prefill(text, self.window)
        return logits[:, 0], *prefix_of(cache)


class Step(Part):
    """The prior reads more tokens [M, W] of each row, from positions [M, 1] -> logits [M, W, V], keys and values.

    The caches of candidates are inputs and outputs, since ONNX graphs write no memory in place.
    """

    def __init__(self, prior: Transformer, layers: Sequence[LayerKVCache]) -> None:
        super().__init__(prior)
        self.decoder, self.layers = TokenDecoder(prior), layers
        prefix, states = _prefix_names(prior), _names("states", 2 * len(layers))
        self.split = len(prefix)
        self.inputs = ["tokens", "position", *prefix, *states]
        self.outputs = ["logits", *(f"next_{name}" for name in states)]

    def forward(self, tokens: Tensor, position: Tensor, *buffers: Tensor) -> tuple[Tensor, ...]:
        prefix, states = buffers[: self.split], [x.clone() for x in buffers[self.split :]]
        layers = [
            layer.bind(iter((*prefix[2 * i : 2 * i + 2], *states[2 * i : 2 * i + 2])))
            for i, layer in enumerate(self.layers)
        ]
        added = prefix[-1] if len(prefix) % 2 else None
        return self.decoder.step(KVCache(layers, position, added=added), tokens), *states


class Decode(Part):
    """The dVAE draws tokens: [M, S] -> pictures, uint8 [M, 3, H, W]."""

    inputs, outputs = ("tokens",), ("pictures",)
    model: ImageTokenizer

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return (self.model.decode_tokens(tokens),)


class Encode(Part):
    """The dVAE encodes pictures, uint8 [M, 3, H, W] -> tokens [M, S]."""

    inputs, outputs = ("pictures",), ("tokens",)
    model: ImageTokenizer

    def forward(self, pictures: Tensor) -> tuple[Tensor, ...]:
        return (self.model.tokenize(pictures),)


class Score(Part):
    """The contrastive model scores pictures, uint8 [M, 3, H, W], for a caption [1, T] -> [M]."""

    inputs, outputs = ("text", "pictures"), ("scores",)
    model: CLIP

    def forward(self, text: Tensor, pictures: Tensor) -> tuple[Tensor, ...]:
        return (self.model.encode_image(pictures) @ self.model.encode_padded(text)[0],)


def prefix_of(cache: KVCache) -> list[Tensor]:
    """Return what rows read of their caption: keys and values of each layer, and what a given picture adds, if any."""
    prefix = [x for layer in cache.layers for x in (layer.prefix_keys, layer.prefix_values)]
    return prefix if cache.added is None else [*prefix, cache.added]


def _prefix_names(prior: Transformer) -> list[str]:
    return _names("prefix", 2 * prior.config.depth + (prior.config.condition_blocks > 0))


def _names(stem: str, count: int) -> list[str]:
    return [f"{stem}_{i}" for i in range(count)]
