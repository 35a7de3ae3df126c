"""Speed of the prior in generation and training, compared with peers and with the hardware's limits.

    python bench/prior.py                          # the paper's pattern against our dense decoder
    python bench/prior.py --llamagen PATH          # and against LlamaGen, from a checkout of its source
    python bench/prior.py --dalle-pytorch PATH     # and against dalle-pytorch, from a folder filled by
        pip install --no-deps --target PATH dalle-pytorch==1.6.6 einops rotary-embedding-torch \
            axial-positional-embedding

Every model runs in a separate process with the same width, depth and heads, 256 text and 1,024 image tokens, 8,192
image codes, random weights, bf16. The processes are timed alternately in rounds. The output has medians over rounds,
and medians of the ratios within a round. `limner bench` measures the first two alone.

    sparse     TransformerConfig(pattern="paper"): caches of visible positions, the text shared by candidates
    dense      the same model with pattern="dense" and, as usual, a copy of the text's cache per candidate
    llamagen   its GPT with a static cache
    dalle      dalle-pytorch at its fastest: masks instead of its sparse layers, cache passed on
    shipped    dalle-pytorch unchanged: no cache, its own sparse layers
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from limner.models.transformer import TransformerConfig
from limner.planner import throughput
from limner.planner.throughput import DeviceRates, GenerationTime

CPU = torch.device("cpu")


class Limner:
    """limner's transformer with `pattern` "paper" or "dense"; `compiled` refers to the steps of drawing."""

    def __init__(
        self, config: TransformerConfig, dense: bool, device: torch.device = CPU, compiled: bool = False
    ) -> None:
        self.config, self.dense = replace(config, pattern="dense" if dense else "paper"), dense
        self.device, self.compiled = device, compiled

    def drawing(self, n: int) -> GenerationTime:
        return throughput.time_generation(self.config, n, self.device, shared=not self.dense, compiled=self.compiled)

    def training(self, batch: int) -> float:
        return throughput.time_training(self.config, batch, self.device)

    def memory(self, batch: int) -> float:
        """Return the increase of peak bytes by one row attention, forward and backward, computed sparsely or by torch's
        kernel with a dense mask."""
        from torch.nn.functional import scaled_dot_product_attention

        from limner.attention.attention import attention_mask
        from limner.attention.patterns import row
        from limner.attention.sparse import SparseAttention

        c = self.config
        prefix = c.text_len + 1
        path, mask = SparseAttention(row(c.grid), prefix), attention_mask(row(c.grid), prefix)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, k, v, attn_mask=mask) if self.dense else path(q, k, v)

        n = prefix + c.grid[0] * c.grid[1]
        before = 0
        for rows in (1, batch):  # the first call includes permanent allocations of libraries
            q, k, v = (
                torch.randn(rows, c.heads, n, c.width // c.heads, dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            )
            before = _peak()
            attend(q, k, v).sum().backward()
        return _peak() - before


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def work(side: str, options: argparse.Namespace) -> None:
    """Reply to each command on stdin with one line of JSON."""
    torch.manual_seed(0)
    config = _config(options)
    model: Any
    if side in ("sparse", "dense"):
        model = Limner(config, side == "dense")
    else:
        import peers

        model = (
            peers.LlamaGen(options.llamagen, config)
            if side == "llamagen"
            else peers.DallePytorch(options.dalle_pytorch, config, best=side == "dalle")
        )
    for line in sys.stdin:
        command, value = line.split()
        reply = throughput.measure_rates(CPU) if command == "machine" else getattr(model, command)(int(value))
        print(json.dumps(reply if isinstance(reply, int | float) else asdict(reply)), flush=True)


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
            raise SystemExit("a worker stopped: see its error above")
        return json.loads(line)


def main() -> None:
    """Start a worker per model, time them alternately, and print the tables."""
    parser = argparse.ArgumentParser(description="speed of the prior and its peers")
    parser.add_argument("--llamagen", help="a checkout of FoundationVision/LlamaGen")
    parser.add_argument("--dalle-pytorch", help="a folder with dalle_pytorch and its three dependencies")
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

    names = ["sparse", "dense"]
    for peer, path, file in (
        (["llamagen"], options.llamagen, "autoregressive/models/gpt.py"),
        (["dalle", "shipped"], options.dalle_pytorch, "dalle_pytorch/dalle_pytorch.py"),
    ):
        if path and (Path(path) / file).exists():
            names += peer
        else:
            print(f"{peer[0]}: skipped, {file} not found in {path or 'a folder given for it'}")
    sides = {name: Side(name) for name in names}
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads, bf16")
    print(f"width {options.width}, {options.depth} layers, {options.heads} heads, 256 text and 32 x 32 image tokens")
    peaks = {name: sides[name].ask("memory", options.batch) for name in ("sparse", "dense")}
    tasks = [("many", "drawing", options.candidates), ("one", "drawing", 1), ("train", "training", options.batch)]
    rounds: list[dict[str, Any]] = []
    for number in range(options.rounds):
        times: dict[str, Any] = {"machine": DeviceRates(**sides["sparse"].ask("machine"))}
        for task, command, value in tasks:
            times[task] = {}
            for name, side in sides.items():
                if name == "shipped" and number and command == "drawing":  # takes minutes, and is slower by far
                    times[task][name] = rounds[0][task][name]
                    continue
                reply = side.ask(command, value)
                times[task][name] = GenerationTime(**reply) if command == "drawing" else reply
        rounds.append(times)
    show(options, rounds, list(sides), peaks)


def show(options: argparse.Namespace, rounds: list[dict[str, Any]], sides: list[str], peaks: dict[str, float]) -> None:
    """Print tables of medians over rounds, with the rates of the machine."""

    def median(value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(value(found) for found in rounds)

    config = _config(options)
    gemm, copy = median(lambda found: found["machine"].gemm), median(lambda found: found["machine"].copy)
    print(f"bf16 product {gemm / 1e12:.2f} TFLOP/s, copy {copy / 1e9:.1f} GB/s")
    for task, n in (("many", options.candidates), ("one", 1)):
        print(f"\n{f'drawing, {n} of one caption':26}       step     prefill  pictures/s  sparse is  MB per candidate")
        for side in sides:
            step = median(lambda found, s=side, t=task: found[t][s].step)
            prefill = median(lambda found, s=side, t=task: found[t][s].prefill)
            pictures = median(lambda found, s=side, t=task: found[t][s].pictures_per_second)
            ratio = median(lambda found, s=side, t=task: found[t][s].seconds / found[t]["sparse"].seconds)
            cache = rounds[0][task][side].cache_bytes / 1e6
            print(f"  {side:<24} {step * 1e3:7.1f} ms {prefill:9.2f} s {pictures:11.4f} {ratio:9.1f}x {cache:17.2f}")
        over = median(lambda f, n=n, t=task: f[t]["sparse"].step / throughput.min_step_seconds(config, n, f["machine"]))
        print(f"  step of the sparse side over its lower bound: {over:.2f}")
    print(f"\n{f'training, batch {options.batch}':26}       step  sparse is")
    for side in sides:
        step = median(lambda found, side=side: found["train"][side])
        ratio = median(lambda found, side=side: found["train"][side] / found["train"]["sparse"])
        print(f"  {side:<24} {step * 1e3:7.0f} ms {ratio:9.2f}x")
    share = median(lambda f: throughput.utilization(config, options.batch, f["train"]["sparse"], f["machine"]))
    print(f"  utilization: {share:.0%} of the product's rate")
    sparse, dense = (peaks[name] / 1e6 for name in ("sparse", "dense"))
    print(f"  peak of one attention: sparse {sparse:.0f} MB, torch's kernel under a dense mask {dense:.0f} MB")


def _config(options: argparse.Namespace) -> TransformerConfig:
    return TransformerConfig(width=options.width, depth=options.depth, heads=options.heads)


if __name__ == "__main__":
    main()
