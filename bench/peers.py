"""Public priors for `prior.py`: the same width, depth and heads, 256 text and 1,024 image tokens.

Each is imported from a folder named on the command line. Modules that they import but do not use here (torchvision,
VQGAN, download helpers) are replaced by mocks, so that they need not be installed.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from math import prod
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from limner.models.transformer import TransformerConfig
from limner.planner.throughput import TIMED_POSITIONS, GenerationTime, mean_step, median_seconds, time_train_step

CPU = torch.device("cpu")


class LlamaGen:
    """FoundationVision/LlamaGen's text-to-image GPT without its dropouts: static cache, SwiGLU of the same cost.

    With `compiled`, steps of drawing and training are compiled as its scripts `sample_t2i.py --compile` and
    `train_t2i.py` do. The prefill is not: it runs once for a whole picture.
    """

    def __init__(
        self, path: str, config: TransformerConfig, device: torch.device = CPU, compiled: bool = False
    ) -> None:
        sys.path.insert(0, path)
        self.code = importlib.import_module("autoregressive.models.generate")
        gpt = importlib.import_module("autoregressive.models.gpt")
        self.config, self.device, self.compiled = config, device, compiled
        self.arguments = gpt.ModelArgs(
            dim=config.width, n_layer=config.depth, n_head=config.heads, vocab_size=config.image_vocab,
            cls_token_num=config.text_len, block_size=prod(config.grid), model_type="t2i", token_dropout_p=0.0,
            resid_dropout_p=0.0, ffn_dropout_p=0.0, class_dropout_prob=0.0,
        )  # fmt: skip
        self.build = lambda: gpt.Transformer(self.arguments)

    @torch.no_grad()
    def drawing(self, n: int) -> GenerationTime:
        # LlamaGen chooses this form of attention for Inductor to fuse. Without a compiler, torch chooses.
        with self.device, sdpa_kernel(SDPBackend.MATH) if self.compiled else nullcontext():
            return self._drawing(n)

    def _drawing(self, n: int) -> GenerationTime:
        model, text, length = self.build().eval().bfloat16(), self.config.text_len, prod(self.config.grid)
        model.setup_caches(n, text + length, torch.bfloat16)
        if self.compiled:
            torch.compiler.reset()  # otherwise a second number of pictures compiles for any number, to slower code
            model.compile(mode="reduce-overhead", fullgraph=True)
        caption = torch.randn(n, text, self.arguments.caption_dim, dtype=torch.bfloat16)
        at = torch.empty(1, dtype=torch.int)
        token: Tensor | None = None

        def prefill() -> None:
            nonlocal token
            token = self.code.prefill(model.forward, caption, torch.arange(text), 1.0, temperature=1.0)

        def step(position: int) -> None:
            nonlocal token
            assert token is not None
            at.fill_(text + position)
            token = self.code.decode_one_token(model, token.view(-1, 1), at, 1.0, True, temperature=1.0)[0]

        prefill_seconds = median_seconds(prefill, 1)
        cache = model.layers[0].attention.kv_cache.k_cache
        cache_bytes = 2 * len(model.layers) * cache[0].numel() * cache.element_size()
        return GenerationTime(
            candidates=n,
            step=mean_step(step, length, 4),
            prefill=prefill_seconds,
            positions=length,
            cache_bytes=cache_bytes,
            shared_bytes=0,
        )

    def training(self, batch: int) -> float:
        text, length = self.config.text_len, prod(self.config.grid)
        with self.device:
            model, positions = self.build().train(), torch.arange(text + length - 1)
            caption = torch.randn(batch, text, self.arguments.caption_dim)
            image = torch.randint(0, self.config.image_vocab, (batch, length))
        if self.compiled:
            model.compile()

        def objective(
            model: Any, batch: Any, step: int, generator: torch.Generator
        ) -> tuple[Tensor, dict[str, Tensor]]:
            return model(batch["image"][:, :-1], batch["caption"], positions, targets=batch["image"])[1], {}

        return time_train_step(model, objective, {"image": image, "caption": caption}, self.device)


def dalle_pytorch(path: str) -> Any:
    """Import the models of `dalle-pytorch` 1.6.6."""
    sys.path.insert(0, path)
    for name in ("torchvision", "taming", "omegaconf", "pkg_resources", "requests", "regex", "ftfy"):
        sys.modules.setdefault(name, MagicMock())
    for name in ("taming.models", "taming.models.vqgan", "torchvision.transforms"):
        sys.modules.setdefault(name, MagicMock())
    return importlib.import_module("dalle_pytorch.dalle_pytorch")


class DallePytorch:
    """`dalle-pytorch` 1.6.6.

    Unchanged, `generate_images` does not pass its cache on and recomputes the whole sequence for every token; batches
    have at most 8 candidates, since the time is proportional. At its fastest (`optimize_for_inference`, cache passed
    on) rows and columns are masked attention with a cache. Its convolution lacks a cache, so the last layer is full.
    """

    def __init__(self, path: str, config: TransformerConfig, best: bool) -> None:
        self.code: Any = dalle_pytorch(path)
        self.config, self.best = config, best
        last = "full" if best else "conv_like"
        names = {"row": "axial_row", "column": "axial_col", "conv": last}
        self.kinds = tuple(names[pattern.name] for pattern in config.patterns)

    def build(self) -> Any:
        c = self.config
        pixels = self.code.DiscreteVAE(
            image_size=8 * c.grid[0], num_layers=3, num_tokens=c.image_vocab, codebook_dim=8, hidden_dim=8
        )
        return self.code.DALLE(
            dim=c.width, vae=pixels, num_text_tokens=c.text_vocab, text_seq_len=c.text_len, depth=c.depth,
            heads=c.heads, dim_head=c.width // c.heads, attn_types=self.kinds, optimize_for_inference=self.best,
        )  # fmt: skip

    @torch.inference_mode()
    def drawing(self, n: int) -> GenerationTime:
        model, c = self.build().eval().bfloat16(), self.config
        batch_size = n if self.best else min(n, 8)
        length = prod(c.grid)
        text = torch.randint(1, c.text_vocab, (1, c.text_len))
        image = torch.randint(0, c.image_vocab, (batch_size, length))

        def choose(logits: Tensor) -> Tensor:
            return self.code.gumbel_sample(self.code.top_k(logits[:, -1], thres=0.5), temperature=1.0, dim=-1)

        if not self.best:  # the mean is close to the cost at the middle of the picture
            middle = image[:, : length // 2]
            whole = median_seconds(lambda: choose(model(text.expand(batch_size, -1), middle)), 1)
            return GenerationTime(
                candidates=n, step=whole * n / batch_size, prefill=0.0, positions=length, cache_bytes=0, shared_bytes=0
            )

        prefill = median_seconds(lambda: model(text, None, cache={}), 1)
        steps: list[float] = []
        cache_bytes = 0
        for fraction in TIMED_POSITIONS:
            position = min(max(1, int(fraction * length)), length - 2)  # the last token is not an input
            cache: dict[str, Any] = {}
            model(text, image[:1, :position], cache=cache)
            cache = {name: _repeat(value, n) for name, value in cache.items()}
            cache_bytes = max(cache_bytes, sum(_bytes(value) for value in cache.values()) // n)
            full = text.expand(n, -1)
            steps.append(
                median_seconds(
                    lambda f=full, p=position, c=cache: choose(model(f, image[:, : p + 1], cache=dict(c))), 2
                )
            )
        mean = sum(steps) / len(steps)
        return GenerationTime(
            candidates=n, step=mean, prefill=prefill, positions=length, cache_bytes=cache_bytes, shared_bytes=0
        )

    def training(self, batch: int) -> float:
        c = self.config
        model = self.build().train()
        text = torch.randint(1, c.text_vocab, (batch, c.text_len))
        image = torch.randint(0, c.image_vocab, (batch, prod(c.grid)))

        def objective(
            model: Any, batch: Any, step: int, generator: torch.Generator
        ) -> tuple[Tensor, dict[str, Tensor]]:
            return model(batch["text"], batch["image"], return_loss=True), {}

        return time_train_step(model, objective, {"text": text, "image": image}, CPU)


def _repeat(value: Any, n: int) -> Any:
    """Repeat a cached value for `n` candidates."""
    if isinstance(value, Tensor):
        return value.repeat_interleave(n, 0)
    if isinstance(value, int):
        return value
    return type(value)(_repeat(part, n) for part in value)


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return 0 if isinstance(value, int) else sum(_bytes(part) for part in value)
