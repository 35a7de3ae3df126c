"""Models built in shards: the values of one process, and the memory of a part."""

import ctypes
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from limner.bundles import load_model
from limner.distributed.powersgd import PowerSGD, PowerSGDConfig
from limner.distributed.sharded import Sharded, Zero2
from limner.models.contrastive import CLIPConfig
from limner.models.dvae import DVAEConfig
from limner.models.patch_dvae import PatchDVAEConfig
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Bf16, Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.objectives.elbo import RelaxedELB
from limner.optim.dtensor import full_tensor, is_dtensor
from limner.optim.optimizers import AdamWConfig
from limner.planner.memory_tracker import MemoryTracker, storage_bytes
from limner.quantization.precisions import SwitchBack
from limner.runs.stages import init_from_codebook
from limner.training.config import TrainConfig
from limner.training.parallel import Parallel, SingleProcess
from limner.training.step import update
from limner.training.train_state import TrainState
from ranks import on_ranks
from tiny import tiny_pipe

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch lacks process groups")

PRIOR = TransformerConfig(
    text_vocab=20, image_vocab=9, text_len=8, grid=(3, 3), width=16, depth=2, heads=2, layer_scale=True, qk_norm=True
)
CONFIGS: dict[str, Any] = {
    "prior": PRIOR,
    "dvae": DVAEConfig(size=16, width=8, groups=2, blocks=1, vocab=10, code_width=8),
    "patches": PatchDVAEConfig(size=16, vocab=10, width=12, pixel_blocks=1),
    "contrastive": CLIPConfig(size=16, patch=8, width=16, depth=1, heads=2, embedding=8, text_vocab=20, text_len=8),
}
CODES = torch.linspace(0, 1, 9 * 12).view(9, 12).sin()


class Odd(nn.Module):
    """Parameters that are tied, cut unevenly, empty on some processes, filled in other ways, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 7) for _ in range(2))
        self.one, self.other = nn.Linear(5, 3, bias=False), nn.Linear(5, 3, bias=False)
        self.other.weight = self.one.weight
        nn.init.trunc_normal_(self.one.weight, std=0.5)
        self.short = nn.Parameter(torch.empty(1, 3).exponential_(), requires_grad=False)
        self.number = nn.Parameter(torch.rand(()))
        nn.init.xavier_normal_(self.blocks[1].weight)  # type: ignore[arg-type]
        self.register_buffer("noise", torch.randn(4, 2))


def build(kind: str) -> nn.Module:
    if kind == "odd":
        return Odd()
    if kind.endswith(".safetensors"):
        return load_model(Path(kind).parent, Path(kind).stem)  # type: ignore[arg-type]
    return CONFIGS[kind].build()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: full_tensor(x.detach()).clone(memory_format=torch.preserve_format)
        for name, x in model.state_dict().items()
    }


def begun(kind: str, replicas: int, seed: bool) -> tuple[Any, ...]:
    """A model's shards before and after `init_from_codebook`; the generator's state; which parameters are whole."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    parallel = Sharded(replicas) if distributed.is_initialized() else SingleProcess()
    torch.manual_seed(0 if seed else rank)
    with parallel.init_context():
        model: Any = build(kind)
    found = values(model), torch.get_rng_state()
    if kind == "prior":
        init_from_codebook(model, CODES)
        found = values(model) | {f"before.{name}": x for name, x in found[0].items()}, torch.get_rng_state()
    ties = kind == "odd" and model.one.weight is model.other.weight
    return *found, ties, [name for name, p in model.named_parameters() if not is_dtensor(p)]


def all_begun(kinds: list[str], replicas: int, seed: bool) -> dict[str, Any]:
    return {kind: begun(kind, replicas, seed) for kind in kinds}


@pytest.mark.parametrize(("ranks", "replicas", "seed"), [(3, 1, True), (4, 2, False)])
def test_values_are_those_of_one_process(ranks: int, replicas: int, seed: bool, tmp_path: Path) -> None:
    """Weights of a new model, and of a model in a bundle."""
    tiny_pipe().save_pretrained(tmp_path)
    kinds = [*CONFIGS, "odd", *(str(tmp_path / f"{name}.safetensors") for name in ("dvae", "prior", "contrastive"))]
    alone = all_begun(kinds, 1, True)
    for rank in on_ranks(ranks, all_begun, kinds, replicas, seed):
        for kind, (expected, state, ties, _) in alone.items():
            found, its_state, its_ties, not_cut = rank[kind]
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), (kind, name)
            assert torch.equal(its_state, state) and its_ties == ties
            assert not_cut == (["number"] if kind == "odd" else ["log_scale"] if "contrastive" in kind else [])


def learn(parallel: Parallel, kind: str, precision: Any, whole_first: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three updates; weights and their averages afterwards."""
    torch.manual_seed(0)
    with nullcontext() if whole_first else parallel.init_context():
        model = build(kind)
    if kind == "dvae":
        batch, objective = {"pixels": torch.arange(4 * 3 * 16 * 16).view(4, 3, 16, 16).to(torch.uint8)}, RelaxedELB()
    else:
        text, image = torch.arange(4 * 8).view(4, 8) % 20, torch.arange(4 * 9).view(4, 9) % 7
        batch, objective = {"text": text, "image": image}, Autoregressive()
    config = TrainConfig(steps=3, batch_size=4, precision=precision, optimizer=AdamWConfig(lr=0.01), ema_decay=0.5)
    run = TrainState(model, objective, config, parallel=parallel)  # type: ignore[arg-type]
    share = {name: x.chunk(parallel.world_size)[parallel.rank] for name, x in batch.items()}
    losses = [run.loss for _ in range(3) if update(run, share)]
    assert run.ema
    averages = {f"ema.{name}": full_tensor(x) for name, x in run.ema.state_dict().items()}
    return losses, values(run.model) | averages


CASES: dict[str, tuple[int, Any, str, Any]] = {
    "sharded": (2, Sharded, "prior", Fp32()),
    "in 8 bits": (2, Sharded, "prior", SwitchBack()),
    "convolutions": (2, Sharded, "dvae", Fp32()),
    "zero2": (2, Zero2, "prior", Bf16()),
    "compressed": (4, lambda: Sharded(2, partial(PowerSGD, PowerSGDConfig(rank=4))), "prior", Fp32()),
}


def learned(cases: list[str]) -> dict[str, Any]:
    return {
        name: [learn(make(), *of, built) for built in (True, False)] for name in cases for _, make, *of in [CASES[name]]
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_does_not_know_how_the_model_was_built(ranks: int) -> None:
    cases = [name for name, (needs, *_) in CASES.items() if needs == ranks]
    for rank in on_ranks(ranks, learned, cases):
        for (losses, state), (other_losses, other) in rank.values():
            assert losses == other_losses and len(set(losses)) == 3
            assert all(torch.equal(other[name], value) for name, value in state.items())
        if "sharded" in rank:
            alone, _ = learn(SingleProcess(), "prior", Fp32(), False)
            assert rank["sharded"][1][0] == pytest.approx(alone, rel=1e-5)


LARGE = TransformerConfig(text_vocab=64, image_vocab=64, text_len=8, grid=(3, 3), width=512, depth=16, heads=8)


def grown(replicas: int, whole_first: bool = False) -> tuple[int, int, int]:
    """Bytes: the most that tensors had and that the process grew by while a model was built and made ready, and what it
    holds of the weights then."""
    parallel, config = Sharded(replicas), TrainConfig(steps=1, precision=Fp32())

    def ready(model: TransformerConfig) -> TrainState:
        with nullcontext() if whole_first else parallel.init_context():
            built = model.build()
        return TrainState(built, Autoregressive(), config, parallel=parallel)

    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed is given back, as of larger models
    ready(PRIOR)  # what is imported and made at the first call
    distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
    before = memory("VmRSS")
    with MemoryTracker() as watch:
        run = ready(LARGE)
    return watch.peak, memory("VmHWM") - before, storage_bytes(run.parameters)


def memory(kind: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux reports a process's peak memory")
@pytest.mark.parametrize(("ranks", "replicas"), [(4, 1), (2, 1), (4, 2)])
def test_building_takes_the_memory_of_a_part(ranks: int, replicas: int) -> None:
    with torch.device("meta"):
        sizes = [p.nbytes for p in LARGE.build().parameters()]
    for peak, resident, held in on_ranks(ranks, grown, replicas):
        assert held == pytest.approx(sum(sizes) * replicas / ranks, rel=0.01)
        assert peak <= held + 2 * max(sizes)  # what is drawn, and this process's part of it
        assert resident <= held + 6 * max(sizes) < held + sum(sizes) / 7
