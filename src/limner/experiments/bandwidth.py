"""Table 2: bytes that PowerSGD sends from a machine whose m GPUs share the weights.

Real processes take one step: two simulated machines with m processes each, connected by gloo. The kernel counts the
bytes that a process writes into its sockets. A reducer that sends nothing measures the traffic within a machine.

The paper's shards are d x (d / m), or d x (4d / m) in the MLP. All are split along the side that makes factors small,
so P and Q together have r (m + 2) / (2 d m) of the gradients' numbers. Here queries, keys and values are one matrix
with one P. In units of d:

                           shard      P and Q
    queries, keys, values  3 / m x 1  r (3 / m + 1) / m
    output                 1 / m x 1  r (1 / m + 1) / m
    MLP, each              4 / m x 1  r (4 / m + 1) / m

The sum is r (m + 3) / (3 d m) of the numbers: at eight shards and equal rank, 27% less than the paper's.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from limner.distributed.gradient_reducers import Fp32Reducer
from limner.distributed.powersgd import PowerSGD, PowerSGDConfig
from limner.distributed.sharded import Sharded
from limner.errors import UserError
from limner.experiments.report import Finding, experiment
from limner.experiments.sweep import Result, Sweep, process_pool
from limner.models.transformer import TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.optim.param_groups import block_matrices
from limner.planner.cost import compression_rate
from limner.training.train_module import Trainable

HEADER_BYTES = 4096  # bytes of headers per step


class NoCommunication(Fp32Reducer):
    """A reducer that sends nothing."""

    def reduce(self, bucket: str) -> Any:
        return iter(())


def our_share(d: int, r: int, m: int) -> float:
    """Return the share of the gradients' numbers sent in our layout."""
    return r * (m + 3) / (3 * d * m)


def trial(*, shards: int, **settings: Any) -> Result:
    """Return the bytes that the first of two machines' processes writes in one step, by reducer, and the numbers of
    parameters."""
    size = 2 * shards
    with tempfile.TemporaryDirectory() as folder, process_pool(size) as pool:
        running = [pool.submit(measure, rank, size, f"{folder}/store", **settings) for rank in range(size)]
        return running[0].result()


def measure(rank: int, size: int, store: str, *, ranks: tuple[int, ...], width: int, depth: int) -> Result:
    """Return the result of `trial` for one of its processes."""
    distributed.init_process_group("gloo", store=distributed.FileStore(store, size), rank=rank, world_size=size)
    reducers: dict[str, Any] = {"within": NoCommunication, "plain": Fp32Reducer}
    for r in ranks:
        reducers[f"fp32 {r}"] = partial(PowerSGD, PowerSGDConfig(rank=r, quantize=False))
        reducers[f"1-6-9 {r}"] = partial(PowerSGD, PowerSGDConfig(rank=r))
    config = TransformerConfig(text_vocab=8, image_vocab=8, text_len=4, grid=(2, 2), width=width, depth=depth, heads=2)
    model = config.build()
    result: Result = {
        "matrices": sum(p.numel() for p in block_matrices(model)),
        "all": sum(p.numel() for p in model.parameters()),
    }
    for name, make in reducers.items():
        strategy, model = Sharded(2, make), config.build()
        compute = strategy.prepare(Trainable(model, Autoregressive()), torch.device("cpu"), torch.float32)
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        for _ in range(2):  # the first step opens connections
            distributed.barrier()
            before = written_bytes()
            compute({"text": tokens, "image": tokens}, 0, None)[0].backward()
            strategy.reduce(list(model.parameters()))
            distributed.barrier()
            result[name] = written_bytes() - before
            for p in model.parameters():
                p.grad = None
    distributed.destroy_process_group()
    return result


def written_bytes(counters: Path = Path("/proc/self/io")) -> int:
    """Return the bytes this process has written to files and sockets. Raises `UserError` except on Linux."""
    try:
        lines = counters.read_text().splitlines()
    except OSError:
        raise UserError(f"cannot read {counters}: this finding counts bytes on Linux only") from None
    return int(next(line for line in lines if line.startswith("wchar:")).split()[1])


@experiment(
    "PowerSGD sends r (m + 2) / (2 d m) of the numbers of the gradients: 5 r / 8 d with eight GPUs per machine",
    "Ramesh et al. 2021, App. E.1, Table 2",
)
def bandwidth(folder: Path, quick: bool) -> Finding:
    """Compare counted bytes with our formula and the paper's."""
    machines, ranks, d = ((1,), (8,), 256) if quick else ((1, 2, 4), (16, 32, 64), 256)
    sweep = Sweep(folder, trial, {m: {"shards": m, "ranks": ranks} for m in machines}, width=d, depth=2)
    rows, worst = [], 0.0
    for m, runs in sweep.runs.items():
        (sent,) = runs.results
        uncompressed = (sent["all"] - sent["matrices"]) * 4 / m
        matrices = sent["plain"] - sent["within"] - uncompressed
        tolerance = HEADER_BYTES / matrices
        for r in ranks:
            shares = [(sent[f"{form} {r}"] - sent["within"] - uncompressed) / matrices for form in ("fp32", "1-6-9")]
            expected = our_share(d, r, m)
            worst = max(worst, abs(shares[0] - expected) - tolerance, abs(2 * shares[1] - expected) - 2 * tolerance)
            formulas = (*shares, expected, 1 - compression_rate(d, r, m))
            rows.append((m, r, f"{matrices:,.0f}", f"{uncompressed:,.0f}", *(f"{share:.4f}" for share in formulas)))
    return Finding(
        holds=worst <= 0,
        verdict=f"The bytes sent {'match' if worst <= 0 else 'do not match'} the formula of our layout up to a few "
        "headers, and 1-6-9 sends half of them. For the paper's largest model (r = 896, d = 3968, m = 8), the paper's "
        f"layout sends {1 - compression_rate(3968, 896):.1%} of the numbers, ours {our_share(3968, 896, 8):.1%}.",
        header=("m", "r", "bytes of matrices", "uncompressed bytes", "share sent, fp32", "share sent, 1-6-9",
                "our formula", "the paper's formula"),
        rows=rows,
        settings=sweep.settings,
    )  # fmt: skip
