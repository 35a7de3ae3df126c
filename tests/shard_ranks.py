"""Work of the ranks of tests/integration/test_shards.py."""

import json
import os
import resource
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from limner.config import to_dict
from limner.data.stream import Stream
from limner.distributed import sharded_checkpoint
from limner.distributed.powersgd import PowerSGD, PowerSGDConfig
from limner.distributed.replicated import Replicated
from limner.distributed.sharded import Sharded
from limner.errors import UserError
from limner.models.transformer import Transformer, TransformerConfig
from limner.numerics.precision import Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.optim.optimizers import AdamW16Config
from limner.training.checkpoint import Checkpointer, completed
from limner.training.config import TrainConfig
from limner.training.hooks import Hook
from limner.training.loop import Interrupted, train
from limner.training.metrics_log import read_metrics
from limner.training.parallel import Parallel, SingleProcess
from limner.training.state import restore, save
from limner.training.train_state import TrainState

STEPS, EVERY = 8, 4
CONFIG = TrainConfig(
    steps=STEPS, batch_size=8, optimizer=AdamW16Config(lr=0.01), ema_decay=0.9, precision=Fp32(), log_every=1,
    checkpoint_every=EVERY, eval_every=None, keep=9,
)  # fmt: skip


class Tokens:
    def __len__(self) -> int:
        return 50

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        rng = [np.random.default_rng(seed) for seed in seeds]
        text = np.stack([r.integers(0, 20, 8) for r in rng])
        image = np.stack([r.integers(0, 4, 9) + (i % 3) for i, r in zip(indices, rng, strict=True)])
        return {"text": torch.from_numpy(text), "image": torch.from_numpy(image)}


class Steps(Hook):
    """A hook whose state is a tensor and a list that changes in place. The last rank gets the signal at `stop`."""

    def __init__(self, stop: int = 0) -> None:
        self.stop, self.table, self.steps = stop, torch.zeros(3), []

    def after_update(self, run: TrainState) -> None:
        self.table += run.step
        self.steps.append(run.step)
        if run.step == self.stop and run.parallel.rank == run.parallel.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def state_dict(self) -> dict[str, Any]:
        return {"table": self.table, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.table, self.steps = state["table"], list(state["steps"])


class Slow(Checkpointer):
    """The first checkpoint does not get its name before training has gone on for two steps."""

    @contextmanager
    def create(self, step: int, *others: Any) -> Iterator[Path]:
        with super().create(step, *others) as fresh:
            yield fresh
            deadline = time.monotonic() + 120
            while step == EVERY and not any(r["step"] >= step + 2 for r in read_metrics(self.run / "metrics.jsonl")):
                if time.monotonic() > deadline:
                    raise OSError("training waits for the write")
                time.sleep(0.01)


def build() -> Transformer:
    """A model with tensors that 8 ranks cannot divide evenly."""
    torch.manual_seed(0)
    return TransformerConfig(
        text_vocab=20, image_vocab=8, text_len=8, grid=(3, 3), width=16, depth=2, heads=2, kernel=3
    ).build()


def parallel(replicas: int | str) -> Parallel:
    """Return FSDP with a number of replicas; 0 for ranks that hold all weights; -1 for one process; "narrow" for
    compression in 1-6-9 between ranks that hold all weights. Two and four replicas compress gradients, and their error
    buffers are part of the state."""
    if isinstance(replicas, str):
        return Replicated(PowerSGD)
    make = partial(PowerSGD, PowerSGDConfig(quantize=False)) if replicas in (2, 4) else None
    return SingleProcess() if replicas < 0 else Sharded(replicas, make) if replicas else Replicated()


class Killed(Hook):
    """The last rank is killed two steps after the first checkpoint, when that is on the disk."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def after_update(self, run: TrainState) -> None:
        if run.step == EVERY + 2 and run.parallel.rank == run.parallel.world_size - 1:
            while not completed(self.out):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


def learn_and_die(out: Path, replicas: int | str) -> None:
    learn(out, replicas, hooks=[Killed(out)])


def learn(
    out: Path, replicas: int | str, stop: int = 0, slow: bool = False, hooks: Sequence[Hook] = ()
) -> tuple[int, bool] | None:
    """Continue training. If the run is stopped, return its step and whether its state was on the disk by then."""
    stream, ours = Stream(Tokens(), 8, seed=3), parallel(replicas)
    files = (Slow if slow else Checkpointer)(out, CONFIG.keep)
    try:
        with ours.init_context():
            model = build()
        run = TrainState(model, Autoregressive(), CONFIG, parallel=ours)
        train(run, stream, out, hooks=[Steps(stop), *hooks], checkpointer=ours.checkpointer(files))
    except Interrupted as stopped:
        return stopped.step, (stopped.checkpoint / "SHA256SUMS").exists()
    finally:
        stream.close()
    return None


def pass_on(source: Path, target: Path, replicas: int) -> None:
    """Restore what is in one folder and save it in another."""
    ours, stream, hook = parallel(replicas), Stream(Tokens(), 8, seed=3), Steps()
    with ours.init_context():
        model = build()
    run = TrainState(model, Autoregressive(), CONFIG, parallel=ours)
    ours.shard_stream(stream)
    there, here = (ours.checkpointer(Checkpointer(folder, 1)) for folder in (source, target))
    description = json.loads(json.dumps({"training": to_dict(CONFIG)}))
    assert restore(run, stream, [hook], description, there)
    save(run, stream, [hook], description, here)
    here.flush()
    stream.close()


def draws(source: Path) -> tuple[list[float], list[float]]:
    """The first random numbers of a run that begins, and of one that resumes there: torch's, the objective's."""
    ours, stream, hook = parallel(0), Stream(Tokens(), 8, seed=3), Steps()

    def drawn(run: TrainState) -> list[float]:
        return [torch.rand(()).item(), torch.rand((), generator=run.generator).item()]

    began = drawn(TrainState(build(), Autoregressive(), CONFIG, parallel=ours))
    run = TrainState(build(), Autoregressive(), CONFIG, parallel=ours)
    description = json.loads(json.dumps({"training": to_dict(CONFIG)}))
    assert restore(run, stream, [hook], description, ours.checkpointer(Checkpointer(source, 9)))
    stream.close()
    return began, drawn(run)


def tensors(step: int) -> dict[str, dict[str, Tensor]]:
    """Return a sharded and a replicated tensor filled with the step."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    whole = torch.full((20_001, 8), float(step))
    return {"model": {"shared": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None), "common": whole[:9]}}


def save_on(out: Path, first: int) -> None:
    """Save one state after another until killed."""
    checkpointer = sharded_checkpoint.ShardedCheckpointer(Checkpointer(out, keep=2))
    checkpointer.acquire()
    for step in range(first, 10**6):
        checkpointer.save(step, tensors(step), {"step": step})


def fail(out: Path, rank: int) -> str:
    """Return the error of the next save after one rank loses the right to write large files."""
    checkpointer = sharded_checkpoint.ShardedCheckpointer(Checkpointer(out, keep=2))
    checkpointer.save(1, tensors(1), {"step": 1})
    checkpointer.flush()
    if distributed.get_rank() == rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    checkpointer.save(2, tensors(2), {"step": 2})
    with pytest.raises(UserError) as caught:
        checkpointer.save(3, tensors(3), {"step": 3})
    assert checkpointer.latest() == out / "checkpoints/step-00000001"
    return str(caught.value)


def apart(out: Path) -> str:
    """Return the error if each rank has a separate folder."""
    sharded_checkpoint.VISIBILITY_TIMEOUT = 0.2
    rank = distributed.get_rank()
    with pytest.raises(UserError) as caught:
        sharded_checkpoint.ShardedCheckpointer(Checkpointer(out / f"machine-{rank}", keep=2)).acquire()
    return str(caught.value)
