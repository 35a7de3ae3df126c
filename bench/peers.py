"""Public priors as `prior.py` times them: the same width, depth and heads, 256 text and 1,024 image tokens.

Each is imported from a folder that the command line names. What their modules import and none of this
needs (torchvision, VQGAN's code, download helpers) is replaced by empty stand-ins, so that nothing of it
has to be installed.
"""

from __future__ import annotations

import importlib
import sys
from math import prod
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from limner.models.transformer import TransformerConfig
from limner.profiling.throughput import PLACES, GenerationTime, mean_step, seconds, trained

CPU = torch.device("cpu")


class LlamaGen:
    """FoundationVision/LlamaGen's text-to-image GPT without its dropouts: static cache, SwiGLU of the same cost."""

    def __init__(self, path: str, config: TransformerConfig) -> None:
        sys.path.insert(0, path)
        self.code = importlib.import_module("autoregressive.models.generate")
        gpt = importlib.import_module("autoregressive.models.gpt")
        self.config = config
        self.arguments = gpt.ModelArgs(
            dim=config.width, n_layer=config.depth, n_head=config.heads, vocab_size=config.image_vocab,
            cls_token_num=config.text_len, block_size=prod(config.grid), model_type="t2i", token_dropout_p=0.0,
            resid_dropout_p=0.0, ffn_dropout_p=0.0, class_dropout_prob=0.0,
        )  # fmt: skip
        self.build = lambda: gpt.Transformer(self.arguments)

    @torch.inference_mode()
    def drawing(self, n: int) -> GenerationTime:
        model, text, length = self.build().eval().bfloat16(), self.config.text_len, prod(self.config.grid)
        model.setup_caches(n, text + length, torch.bfloat16)
        caption = torch.randn(n, text, self.arguments.caption_dim, dtype=torch.bfloat16)
        token = None

        def prefill() -> None:
            nonlocal token
            token = self.code.prefill(model, caption, torch.arange(text), 1.0, temperature=1.0)

        def step(position: int) -> None:
            nonlocal token
            assert token is not None
            at = torch.tensor([text + position])
            token = self.code.decode_one_token(model, token.view(-1, 1), at, 1.0, True, temperature=1.0)[0]

        took = seconds(prefill, 1)
        cache = model.layers[0].attention.kv_cache.k_cache
        each = 2 * len(model.layers) * cache[0].numel() * cache.element_size()
        return GenerationTime(
            candidates=n, step=mean_step(step, length, 2), prefill=took, positions=length, each=each, shared=0
        )

    def training(self, batch: int) -> float:
        text, length = self.config.text_len, prod(self.config.grid)
        model, places = self.build().train(), torch.arange(text + length - 1)
        caption = torch.randn(batch, text, self.arguments.caption_dim)
        image = torch.randint(0, self.config.image_vocab, (batch, length))

        def objective(
            model: Any, batch: Any, step: int, generator: torch.Generator
        ) -> tuple[Tensor, dict[str, Tensor]]:
            return model(batch["image"][:, :-1], batch["caption"], places, targets=batch["image"])[1], {}

        return trained(model, objective, {"image": image, "caption": caption}, CPU)


def dalle_pytorch(path: str) -> Any:
    """The module of `dalle-pytorch` 1.6.6 that has its models."""
    sys.path.insert(0, path)
    for name in ("torchvision", "taming", "omegaconf", "pkg_resources", "requests", "regex", "ftfy"):
        sys.modules.setdefault(name, MagicMock())
    for name in ("taming.models", "taming.models.vqgan", "torchvision.transforms"):
        sys.modules.setdefault(name, MagicMock())
    return importlib.import_module("dalle_pytorch.dalle_pytorch")


class DallePytorch:
    """`dalle-pytorch` 1.6.6.

    As shipped, `generate_images` passes no cache on and computes the whole sequence for every token; drawn in
    batches of at most 8, since its work is in proportion. At its best (`optimize_for_inference`, the cache
    passed on) rows and columns are masked attention with a cache; its convolution has none, so the last layer
    is full there.
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
        together = n if self.best else min(n, 8)
        length = prod(c.grid)
        text = torch.randint(1, c.text_vocab, (1, c.text_len))
        image = torch.randint(0, c.image_vocab, (together, length))

        def choose(logits: Tensor) -> Tensor:
            return self.code.gumbel_sample(self.code.top_k(logits[:, -1], thres=0.5), temperature=1.0, dim=-1)

        if not self.best:  # its mean is near the cost at the middle of the picture
            middle = image[:, : length // 2]
            whole = seconds(lambda: choose(model(text.expand(together, -1), middle)), 1)
            return GenerationTime(
                candidates=n, step=whole * n / together, prefill=0.0, positions=length, each=0, shared=0
            )

        prefill = seconds(lambda: model(text, None, cache={}), 1)
        steps: list[float] = []
        each = 0
        for place in PLACES:
            position = min(max(1, int(place * length)), length - 2)  # the last token is never read
            cache: dict[str, Any] = {}
            model(text, image[:1, :position], cache=cache)
            cache = {name: _repeat(value, n) for name, value in cache.items()}
            each = max(each, sum(_bytes(value) for value in cache.values()) // n)
            full = text.expand(n, -1)
            steps.append(
                seconds(lambda f=full, p=position, c=cache: choose(model(f, image[:, : p + 1], cache=dict(c))), 2)
            )
        mean = sum(steps) / len(steps)
        return GenerationTime(candidates=n, step=mean, prefill=prefill, positions=length, each=each, shared=0)

    def training(self, batch: int) -> float:
        c = self.config
        model = self.build().train()
        text = torch.randint(1, c.text_vocab, (batch, c.text_len))
        image = torch.randint(0, c.image_vocab, (batch, prod(c.grid)))

        def objective(
            model: Any, batch: Any, step: int, generator: torch.Generator
        ) -> tuple[Tensor, dict[str, Tensor]]:
            return model(batch["text"], batch["image"], return_loss=True), {}

        return trained(model, objective, {"text": text, "image": image}, CPU)


def _repeat(value: Any, n: int) -> Any:
    """A cached value of one candidate for `n` of them."""
    if isinstance(value, Tensor):
        return value.repeat_interleave(n, 0)
    if isinstance(value, int):
        return value
    return type(value)(_repeat(part, n) for part in value)


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return 0 if isinstance(value, int) else sum(_bytes(part) for part in value)
