"""The prior's speed in drawing and training, against its peers and against what the machine allows.

    python bench/prior.py                          # the paper's pattern against our own dense decoder
    python bench/prior.py --llamagen PATH          # and against LlamaGen's GPT, from a checkout of its source

Every side is a process of its own with the same width, depth and heads, 256 text and 1,024 image tokens,
8,192 image codes, random weights, bf16. The processes take turns, round after round; what is printed are
medians over the rounds and the ratios within each. A step of drawing is timed at several places of the
picture, since a cache of columns grows; a picture is the prefill and 1,024 such steps.

    sparse     TransformerConfig(pattern="paper"): caches of what is visible, the text shared by candidates
    dense      the same model with pattern="dense" and, as usual, the text's cache copied for each candidate
    llamagen   autoregressive/models/gpt.py with its static cache; SwiGLU of the same cost

The floor of a step is its arithmetic at the rate of a large bf16 product plus its bytes (weights, cache) at
the rate of a large copy, both measured in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TEXT, GRID, CODES, WORDS = 256, (32, 32), 8_192, 16_384
PLACES = (4, 256, 512, 768, 1_016)  # image positions at which steps are timed
SIDES = ("sparse", "dense", "llamagen")


def seconds(function: Callable[[], object], times: int) -> float:
    """Median of several calls, after one that warms up."""
    function()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


class Ours:
    """Our transformer, `pattern` "paper" or "dense"."""

    def __init__(self, pattern: str, options: argparse.Namespace) -> None:
        from limner.models.transformer import TransformerConfig
        from limner.sampling.generate import Sampler

        self.pattern, self.sampler = pattern, Sampler()
        self.config = TransformerConfig(
            text_vocab=WORDS, image_vocab=CODES, text_len=TEXT, grid=GRID, width=options.width, depth=options.depth,
            heads=options.heads, pattern=pattern,
        )  # fmt: skip

    @torch.inference_mode()
    def decode(self, n: int) -> dict[str, float]:
        model = self.config.build().eval().bfloat16()
        shared = self.pattern == "paper"
        text = torch.randint(0, WORDS, (1, TEXT)).expand(1 if shared else n, -1)
        began = time.perf_counter()
        cache, logits = model.prefill(text)
        prefill = time.perf_counter() - began
        cache, uniform = cache.expand(n if shared else 1), torch.rand(n)
        token = self.sampler(logits.expand(n, -1), uniform)

        def step() -> None:
            nonlocal token
            token = self.sampler(model.step(cache, token), uniform)

        took = []
        for place in PLACES:
            cache.length = place
            took.append(seconds(step, 4))
        prefix = sum(layer.prefix_keys.numel() for layer in cache.layers) * 4 / (1 if shared else n)
        own, shared_bytes = (0, prefix) if shared else (prefix, 0)
        each = cache.bytes_per_candidate + own
        return {"step": statistics.mean(took), "prefill": prefill, "cache": each, "shared": shared_bytes}

    def train(self, batch: int) -> float:
        from limner.objectives.autoregressive import Autoregressive

        model = self.config.build()
        data = {"text": torch.randint(0, WORDS, (batch, TEXT)), "image": torch.randint(0, CODES, (batch, 1_024))}
        return trained(model, lambda: Autoregressive()(model, data, 0, None)[0])

    def memory(self, batch: int) -> dict[str, float]:
        """Peak of one attention, forward and backward, over what was there before: row attention, computed
        sparsely or by torch's kernel under the dense mask."""
        from torch.nn.functional import scaled_dot_product_attention

        from limner.layers.attention import visible
        from limner.layers.sparse import SparseAttention

        c = self.config
        path, mask = SparseAttention("row", TEXT + 1, GRID), visible("row", TEXT + 1, GRID)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return path(q, k, v) if self.pattern == "paper" else scaled_dot_product_attention(q, k, v, attn_mask=mask)

        n = TEXT + 1 + GRID[0] * GRID[1]
        for small in (True, False):
            rows = 1 if small else batch
            q, k, v = (
                torch.randn(rows, c.heads, n, c.width // c.heads, dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            )
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            attend(q, k, v).sum().backward()
        return {"peak": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)}


class LlamaGen:
    """FoundationVision/LlamaGen's text-to-image GPT, without its dropouts."""

    def __init__(self, options: argparse.Namespace) -> None:
        sys.path.insert(0, options.llamagen)
        from autoregressive.models import generate, gpt  # pyright: ignore[reportMissingImports]

        self.generate = generate
        arguments = gpt.ModelArgs(
            dim=options.width, n_layer=options.depth, n_head=options.heads, vocab_size=CODES, cls_token_num=TEXT,
            block_size=GRID[0] * GRID[1], model_type="t2i", token_dropout_p=0.0, resid_dropout_p=0.0,
            ffn_dropout_p=0.0, class_dropout_prob=0.0,
        )  # fmt: skip
        self.build = lambda: gpt.Transformer(arguments)
        self.caption = arguments.caption_dim

    @torch.inference_mode()
    def decode(self, n: int) -> dict[str, float]:
        model = self.build().eval().bfloat16()
        model.setup_caches(n, TEXT + GRID[0] * GRID[1], torch.bfloat16)
        caption = torch.randn(n, TEXT, self.caption, dtype=torch.bfloat16)
        began = time.perf_counter()
        token = self.generate.prefill(model, caption, torch.arange(TEXT), 1.0, temperature=1.0)
        prefill = time.perf_counter() - began
        place = torch.zeros(1, dtype=torch.long)

        def step() -> None:
            nonlocal token
            token = self.generate.decode_one_token(model, token.view(-1, 1), place, 1.0, True, temperature=1.0)[0]

        took = []
        for at in PLACES:
            place.fill_(TEXT + at)
            took.append(seconds(step, 2))
        cache = model.layers[0].attention.kv_cache.k_cache
        each = 2 * len(model.layers) * cache[0].numel() * cache.element_size()
        return {"step": statistics.mean(took), "prefill": prefill, "cache": each, "shared": 0}

    def train(self, batch: int) -> float:
        model, places = self.build(), torch.arange(TEXT + GRID[0] * GRID[1] - 1)
        caption, image = torch.randn(batch, TEXT, self.caption), torch.randint(0, CODES, (batch, 1_024))
        return trained(model, lambda: model(image[:, :-1], caption, places, targets=image)[1])


def trained(model: nn.Module, loss: Callable[[], Tensor]) -> float:
    """Seconds of a training step: forward and backward under bf16 autocast, AdamW."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return seconds(step, 3)


def machine() -> dict[str, float]:
    """FLOP/s of a large bf16 product and bytes/s of a large copy, read and written."""
    a, b = (torch.randn(2_048, 2_048, dtype=torch.bfloat16) for _ in range(2))
    x = torch.empty(1 << 28, dtype=torch.uint8)
    y = torch.empty_like(x)
    return {"gemm": 2 * 2_048**3 / seconds(lambda: a @ b, 8), "copy": 2 * len(x) / seconds(lambda: y.copy_(x), 4)}


def work(side: str, options: argparse.Namespace) -> None:
    """Answer commands on stdin with one line of JSON each."""
    torch.manual_seed(0)
    made: Any = LlamaGen(options) if side == "llamagen" else Ours({"sparse": "paper"}.get(side, side), options)
    for line in sys.stdin:
        command, value = line.split()
        answer = machine() if command == "machine" else getattr(made, command)(int(value))
        print(json.dumps(answer), flush=True)


class Side:
    """A worker process."""

    def __init__(self, name: str) -> None:
        arguments = [sys.executable, __file__, *sys.argv[1:], "--worker", name]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, command: str, value: int = 0) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(command, value, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a worker stopped: its error is above")
        return json.loads(line)


def floor(options: argparse.Namespace, n: int, found: dict[str, Any]) -> float:
    """Seconds that a step of the sparse side takes at least."""
    from limner.layers.cache import held
    from limner.models.transformer import TransformerConfig

    c = TransformerConfig(grid=GRID, text_len=TEXT, width=options.width, depth=options.depth, heads=options.heads)
    weights = 12 * c.depth * c.width**2 + c.width * CODES
    image = sum(held(kind, GRID) if kind != "column" else GRID[0] / 2 for kind in c.kinds)
    flops = n * (2 * weights + 4 * c.width * (image + c.depth * (TEXT + 1)))
    read = 2 * weights + n * image * 2 * c.width * 2 + found["many"]["sparse"]["shared"]
    return flops / found["machine"]["gemm"] + read / found["machine"]["copy"]


def main() -> None:
    parser = argparse.ArgumentParser(description="the prior against its peers")
    parser.add_argument("--llamagen", help="a checkout of FoundationVision/LlamaGen")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options)
        return

    there = options.llamagen and (Path(options.llamagen) / "autoregressive/models/gpt.py").exists()
    if not there:
        print("llamagen: skipped, give --llamagen PATH of a checkout")
    sides = {name: Side(name) for name in SIDES if there or name != "llamagen"}
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads, bf16")
    print(f"width {options.width}, {options.depth} layers, {options.heads} heads, {TEXT} text and {GRID} image tokens")
    peaks = {name: sides[name].ask("memory", options.batch)["peak"] for name in ("sparse", "dense")}
    tasks = [("many", "decode", options.candidates), ("one", "decode", 1), ("train", "train", options.batch)]
    rounds: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        found: dict[str, Any] = {"machine": sides["sparse"].ask("machine")}
        for task, command, value in tasks:
            found[task] = {name: side.ask(command, value) for name, side in sides.items()}
        rounds.append(found)
    show(options, rounds, list(sides), peaks)


def show(options: argparse.Namespace, rounds: list[dict[str, Any]], sides: list[str], peaks: dict[str, float]) -> None:
    def median(value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(value(found) for found in rounds)

    def picture(found: dict[str, Any], task: str, side: str) -> float:
        return found[task][side]["prefill"] + GRID[0] * GRID[1] * found[task][side]["step"]

    rates = {name: median(lambda found, name=name: found["machine"][name]) for name in ("gemm", "copy")}
    print(f"bf16 product {rates['gemm'] / 1e12:.2f} TFLOP/s, copy {rates['copy'] / 1e9:.1f} GB/s")
    for task, n in (("many", options.candidates), ("one", 1)):
        print(f"\n{f'drawing, {n} of one caption':26}      step     prefill  pictures/s  sparse is  MB a candidate")
        for side in sides:
            step = median(lambda found, side=side, task=task: found[task][side]["step"])
            prefill = median(lambda found, side=side, task=task: found[task][side]["prefill"])
            speed = median(lambda found, side=side, task=task, n=n: n / picture(found, task, side))
            ratio = median(lambda found, s=side, t=task: picture(found, t, s) / picture(found, t, "sparse"))
            cache = rounds[0][task][side]["cache"] / 1e6
            print(f"  {side:<24} {step * 1e3:6.1f} ms {prefill:9.2f} s {speed:11.3f} {ratio:9.1f}x {cache:15.2f}")
    over = median(lambda found: found["many"]["sparse"]["step"] / floor(options, options.candidates, found))
    print(f"  step of the sparse side over its floor: {over:.2f}")
    print(f"\n{f'training, batch {options.batch}':26}      step  sparse is")
    for side in sides:
        step = median(lambda found, side=side: found["train"][side])
        ratio = median(lambda found, side=side: found["train"][side] / found["train"]["sparse"])
        print(f"  {side:<24} {step * 1e3:6.0f} ms {ratio:9.2f}x")
    print(f"  useful arithmetic over the product's rate: {median(lambda found: useful(options, found)):.0%}")
    sparse, dense = (peaks[name] / 1e6 for name in ("sparse", "dense"))
    print(f"  peak of one attention: sparse {sparse:.0f} MB, torch's kernel under a dense mask {dense:.0f} MB")


def useful(options: argparse.Namespace, found: dict[str, Any]) -> float:
    from limner.models.transformer import TransformerConfig
    from limner.recipes.plan import Plan

    config = TransformerConfig(
        text_vocab=WORDS, image_vocab=CODES, text_len=TEXT, grid=GRID, width=options.width, depth=options.depth,
        heads=options.heads,
    )  # fmt: skip
    flops = Plan(config=config, gpus=1, batch=options.batch).flops()
    return flops / found["train"]["sparse"] / found["machine"]["gemm"]


if __name__ == "__main__":
    main()
