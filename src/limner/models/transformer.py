"""The prior: a decoder-only transformer over text and image tokens (Ramesh et al. 2021, §2.2, App. B).

    text_0 ... text_{T-1}  START  image_0 ... image_{S-1}

Embeddings (Figure 10): a text token is its vocabulary embedding plus a position embedding; a text
position without a token has a padding token that is learned for that position; an image token is its vocabulary
embedding plus a row and a column embedding. Every position predicts the next one: text positions a
text token, START and the image positions an image token. `condition.py` adds what a given picture shows.

Training computes and stores logits in fp32 in every precision (App. D.2), from operands that `Autoregressive` sets. A
model that draws in bf16 rounds its logits: on a CPU, a bf16 product with fp32 results would read twice the memory.

`embed`, `blocks` and `head` are the whole model. Code that shards, freezes, scales or caches uses these three names,
and `run` applies some of the blocks.

Shapes: B batch, T text positions, S = h * w image positions, P = T + 1, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import prod
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from limner.attention.attention import Attention, AttentionFn
from limner.attention.patterns import PATTERNS, Pattern, paper_pattern
from limner.attention.sparse import training_attention
from limner.models.condition import Condition
from limner.numerics.precision import upcast
from limner.text import PAD
from limner.validation import InvalidSetting, Range, Validated, invalid_choice

__all__ = ["MLP", "SIZES", "Block", "Embedding", "Head", "LayerScale", "Resblock", "Transformer", "TransformerConfig"]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Validated):
    """Vocabulary sizes, lengths, widths and attention patterns.

    Args:
        text_vocab, image_vocab: numbers of BPE and dVAE tokens.
        text_len: T, text positions.
        grid: (h, w) of the image tokens.
        width: D, a multiple of `heads`.
        depth, heads: layers, and attention heads of each.
        pattern: "paper" for the paper's order of three patterns, or one of `PATTERNS` for all layers, such as "dense".
        kernel: side of the convolutional window.
        layer_scale, qk_norm: extensions that keep features small, for 8-bit formats.
        condition_blocks: layers that read a given picture (`condition.py`); 0 if the model takes captions alone.
    """

    text_vocab: Annotated[int, Range(2, 2**24)] = 16_384
    image_vocab: Annotated[int, Range(2, 2**24)] = 8_192
    text_len: Annotated[int, Range(1, 2**14)] = 256
    grid: Annotated[tuple[int, int], Range(1, 2**14)] = (32, 32)
    width: Annotated[int, Range(1, 2**16)] = 3_968
    depth: Annotated[int, Range(1, 4_096)] = 64
    heads: Annotated[int, Range(1, 2**12)] = 62
    pattern: str = "paper"
    kernel: Annotated[int, Range(1, 255)] = 11
    layer_scale: bool = False
    qk_norm: bool = False
    condition_blocks: Annotated[int, Range(0, 4_096)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pattern not in (names := ["paper", *PATTERNS]):
            raise InvalidSetting("pattern", invalid_choice(self.pattern, names))
        if self.width % self.heads:
            raise InvalidSetting("width", f"must be a multiple of heads, {self.heads}, not {self.width}")
        if self.kernel % 2 == 0:
            raise InvalidSetting("kernel", f"must be odd, not {self.kernel}")
        if prod(self.grid) > 2**16:
            raise InvalidSetting("grid", f"must have at most {2**16:,} positions, not {prod(self.grid):,}")

    @cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        """Attention patterns of the layers, first to last."""
        names = paper_pattern(self.depth) if self.pattern == "paper" else (self.pattern,) * self.depth
        by_name = {name: PATTERNS[name](self.grid, self.kernel) for name in sorted(set(names))}
        return tuple(by_name[name] for name in names)

    def block(self) -> Block:
        """Build a layer."""
        return Block(self.width, self.heads, self.layer_scale, self.qk_norm)

    def build(self) -> Transformer:
        return Transformer(self)


#: Sizes from a laptop's to the paper's. The last three are those of Table 1. Heads have width 64, as in the paper.
SIZES = {
    name: TransformerConfig(width=width, depth=depth, heads=width // 64)
    for name, (width, depth) in {
        "tiny": (256, 6), "small": (512, 8), "base": (768, 16), "large": (1_024, 24), "xl": (2_048, 24),
        "dalle-3b": (1_920, 64), "dalle-6b": (2_688, 64), "dalle-12b": (3_968, 64),
    }.items()
}  # fmt: skip


class Embedding(nn.Module):
    """Embeddings of text and image tokens (Figure 10)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        d, (h, w) = config.width, config.grid
        self.grid = config.grid
        self.text = nn.Embedding(config.text_vocab, d)
        self.text_position = nn.Embedding(config.text_len, d)
        self.padding = nn.Embedding(config.text_len, d)
        self.start = nn.Parameter(torch.empty(d))
        self.image = nn.Embedding(config.image_vocab, d)
        self.row = nn.Embedding(h, d)
        self.column = nn.Embedding(w, d)
        blocks = [config.block() for _ in range(config.condition_blocks)]
        self.condition = Condition(blocks, d, h * w) if blocks else None

    def prefix(self, text: Int64[Tensor, "B T"]) -> Float[Tensor, "B T+1 D"]:
        """Embed text [B, T] with PAD, followed by START: [B, P, D]."""
        has_token = (text != PAD)[..., None]
        tokens = self.text(text.clamp_min(0)) + self.text_position.weight
        x = torch.where(has_token, tokens, self.padding.weight)
        return torch.cat([x, self.start.expand(len(x), 1, -1)], 1)

    def tokens(self, image: Int64[Tensor, "B n"], begin: int | Tensor = 0) -> Float[Tensor, "B n D"]:
        """Embed image tokens [B, n] at raster positions begin ... begin + n - 1: [B, n, D].

        `begin` is a number, int64 [1], or int64 [B, 1] with a position for each row.
        """
        position = begin + torch.arange(image.shape[1], device=image.device)
        return self.image(image) + self.row(position // self.grid[1]) + self.column(position % self.grid[1])

    def given(self, picture: Int64[Tensor, "B S"]) -> Float[Tensor, "B S D"]:
        """Return what is added to the embeddings that predict image_0 ... image_{S-1}, given the tokens of a picture,
        [B, S]: 0 where they are PAD."""
        assert self.condition
        return torch.where((picture != PAD)[..., None], self.condition(self.tokens(picture.clamp_min(0))), 0.0)


class MLP(nn.Module):
    """Two linear layers with GELU; the inner width is four times the outer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class LayerScale(nn.Module):
    """Learned factor for each channel, initially zero: the block begins as the identity, and its branch grows slowly
    (Touvron et al. 2021; Wortsman et al. 2023, §2.3)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Resblock(nn.Module):
    """Residual block x + branch(norm(x)), with an optional `layer_scale` of the branch.

    The branch leaves the identity path at `norm` and joins it after `branch`. A forward pre-hook of `norm` and a
    forward hook of `branch` therefore act on all gradients of this resblock and on no others (Figure 4).
    """

    def __init__(self, width: int, branch: nn.Module, layer_scale: bool = False) -> None:
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(width), branch
        self.scale = LayerScale(width) if layer_scale else nn.Identity()
        self.checkpointing = False

    def forward(self, x: Tensor, *attention_fn: AttentionFn) -> Tensor:
        if self.checkpointing and self.training:
            return checkpoint(self._sum, x, *attention_fn, use_reentrant=False)
        return self._sum(x, *attention_fn)

    def _sum(self, x: Tensor, *attention_fn: AttentionFn) -> Tensor:
        return x + self.scale(self.branch(self.norm(x), *attention_fn))


class Block(nn.Module):
    """Layer of two resblocks: attention and an MLP."""

    def __init__(self, width: int, heads: int, layer_scale: bool = False, qk_norm: bool = False) -> None:
        super().__init__()
        self.attention = Resblock(width, Attention(width, heads, qk_norm), layer_scale)
        self.mlp = Resblock(width, MLP(width), layer_scale)

    def forward(self, x: Tensor, attention_fn: AttentionFn) -> Tensor:
        return self.mlp(self.attention(x, attention_fn))


class Head(nn.Module):
    """Final LayerNorm and one output matrix for each vocabulary."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.text = nn.Linear(config.width, config.text_vocab)
        self.image = nn.Linear(config.width, config.image_vocab)


class Transformer(nn.Module):
    """The prior (see the module's docstring). `states` is for training; `sampling/decoder.py` decodes with a cache."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(config.block() for _ in range(config.depth))
        self.head = Head(config)
        patterns = {pattern.name: pattern for pattern in config.patterns}
        self.attention_fns = nn.ModuleDict({n: training_attention(p, config.text_len + 1) for n, p in patterns.items()})
        self.apply(self._init)
        nn.init.normal_(self.embed.start, std=0.02)
        for block in self.blocks:  # residual branches start small, as in GPT-2
            for name in ("attention.branch.out", "mlp.branch.down"):
                nn.init.normal_(
                    block.get_submodule(name).weight,  # pyright: ignore[reportArgumentType]
                    std=0.02 / (2 * config.depth) ** 0.5,
                )

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def set_checkpointing(self, on: bool) -> None:
        """Recompute each resblock's activations in the backward pass instead of storing them (§2.4)."""
        for module in self.modules():
            if isinstance(module, Resblock):
                module.checkpointing = on

    def forward(
        self, text: Int64[Tensor, "B _"], image: Int64[Tensor, "B S"]
    ) -> tuple[Float[Tensor, "B _ V_text"], Float[Tensor, "B S V_image"]]:
        """Return teacher-forced logits in fp32 (or fp64): [B, T - 1, V_text] and [B, S, V_image]."""
        states = self.outputs(self.run(self.inputs(text, image)), text[:, : self.config.text_len])
        heads = self.head.text, self.head.image
        with torch.autocast(text.device.type, enabled=False):
            text_logits, image_logits = (
                F.linear(upcast(x), upcast(head.weight), upcast(head.bias))
                for x, head in zip(states, heads, strict=True)
            )
        return text_logits, image_logits

    def inputs(self, text: Int64[Tensor, "B _"], image: Int64[Tensor, "B S"]) -> Float[Tensor, "B n D"]:
        """Return the input of the first block, the embeddings of all positions: [B, n, D] with n = P + S.

        `text` [B, T] may continue with the tokens of a given picture, [B, T + S].
        """
        text, picture = text[:, : self.config.text_len], text[:, self.config.text_len :]
        x = torch.cat([self.embed.prefix(text), self.embed.tokens(image)], 1)
        return x + F.pad(self.embed.given(picture), (0, 0, text.shape[1], 1)) if picture.shape[1] else x

    def outputs(
        self, x: Float[Tensor, "B n D"], text: Int64[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T-1 D"], Float[Tensor, "B n-T-1 D"]]:
        """Return the inputs of the head's two output matrices from the output of the last block, with n = P + S.

        They are [B, T - 1, D], which predicts text[:, 1:], and [B, S, D], which predicts the image.
        """
        x, t = self.head.norm(x), text.shape[1]
        return x[:, : t - 1], x[:, t:-1]

    def run(
        self,
        x: Float[Tensor, "B n D"],
        start: int = 0,
        stop: int | None = None,
        attention_fns: Iterable[AttentionFn] | None = None,
    ) -> Float[Tensor, "B n D"]:
        """Apply the blocks from `start` to before `stop`: [B, n, D] -> [B, n, D].

        `attention_fns` are the attention functions of all blocks; the default is that of training, with n = P + S.
        """
        if attention_fns is None:
            attention_fns = [self.attention_fns[pattern.name] for pattern in self.config.patterns]
        for block, attention_fn in islice(zip(self.blocks, attention_fns, strict=True), start, stop):
            x = block(x, attention_fn)
        return x
