"""PowerSGD in gloo processes: against the algorithm written plainly, with values that are not finite, and with errors
that skipped updates hand back."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from limner.distributed import powersgd
from limner.distributed.gradient_reducers import PendingWork, Replicas, buckets, unpack_error
from limner.distributed.overlapped_reducer import OverlappedReducer
from limner.distributed.powersgd import PowerSGD, PowerSGDConfig, orthonormal
from limner.distributed.replicated import Replicated
from limner.distributed.sharded import Sharded
from limner.errors import UserError
from limner.models.transformer import TransformerConfig
from limner.numerics.formats import E6M9
from limner.numerics.precision import Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.optim.dtensor import full_tensor
from limner.optim.optimizers import AdamWConfig
from limner.training.config import TrainConfig
from limner.training.grad_scaler import scaling
from limner.training.hooks import Hook
from limner.training.parallel import Parallel, SingleProcess
from limner.training.step import update
from limner.training.train_module import Trainable
from limner.training.train_state import TrainState
from ranks import left_out, on_ranks

PRIOR = TransformerConfig(
    text_vocab=20, image_vocab=8, text_len=8, grid=(3, 3), width=32, depth=2, heads=2, kernel=3
)  # fmt: skip


class Many(Replicas):
    """So many replicas, which all bring what this one does."""

    def __init__(self, count: int) -> None:
        self.many = count

    @property
    def count(self) -> int:
        return self.many

    def mean(self, values: Tensor) -> PendingWork:
        yield from ()


@pytest.mark.parametrize(("narrow", "most"), [(True, 8), (False, 4)])
def test_errors_of_many_replicas_are_their_mean_in_a_checkpoint(narrow, most):
    """At 16 bytes per weight those of all take as much as all else."""
    config = PowerSGDConfig(rank=3, quantize=narrow)
    for count in (1, most, most + 1):
        reduction = OverlappedReducer(PowerSGD(config), buckets(model := One(12, 20)), Many(count))
        own = {"blocks.0.weight": E6M9.round(torch.randn(12, 20))}
        reduction.load_state_dict(own)
        kept, shared = reduction.error_buffers(), reduction.state_dict()
        assert bool(kept) == (not shared) == (count <= most)
        assert torch.equal(reduction.mean_error_buffers()["blocks.0.weight"], own["blocks.0.weight"])
        other = OverlappedReducer(PowerSGD(config), buckets(model), Many(count))
        other.load_state_dict(shared, [kept] if kept else [])
        assert torch.equal(other.mean_error_buffers()["blocks.0.weight"], own["blocks.0.weight"])


def test_errors_of_another_number_of_replicas_are_averaged_in_all_formats():
    numbers = [torch.randn(12, 20) for _ in range(3)]
    parts = [{"blocks.0.weight": x} for x in (E6M9.pack(numbers[0]), *numbers[1:])]
    numbers[0] = E6M9.round(numbers[0])
    for count in (1, 2, 3):
        reduction = OverlappedReducer(PowerSGD(PowerSGDConfig(rank=3, quantize=False)), buckets(One(12, 20)), Many(2))
        reduction.load_state_dict({"blocks.0.weight": torch.ones(12, 20)}, iter(parts[:count]))  # in the place of that
        found = reduction.mean_error_buffers()["blocks.0.weight"]
        torch.testing.assert_close(found, torch.stack(numbers[:count]).mean(0))
        assert count > 1 or torch.equal(found, numbers[0])


def averages(reduction: OverlappedReducer, model: nn.Module) -> list[Tensor]:
    """Complete the reduction; return the gradients of all parameters, in order, and discard them."""
    reduction.complete()
    found = {}
    for part in reduction.parts(model.parameters()):
        assert all((p.grad is not None) == any(p is other for other in part) for p in model.parameters())
        for p in part:
            found[p], p.grad = p.grad.clone(), None
    return [found[p] for p in model.parameters()]


SCALE = 8.0


def scaled(changes: bool) -> list[Tensor]:
    """The gradients of a matrix whose loss is scaled, by another scale in each step if that changes."""
    model = One(12, 20)
    scale = torch.tensor(SCALE)
    reduction = OverlappedReducer(
        PowerSGD(PowerSGDConfig(rank=3, quantize=False)), buckets(model), Replicas(distributed.group.WORLD)
    )
    reduction.scales[model.blocks[0].weight] = scale
    found = []
    for step in range(3):
        scale.fill_(SCALE * (step + 1) if changes else SCALE)
        model.zero_grad()
        (model.blocks[0].weight * gradient_of(12, 20, step, distributed.get_rank()) * scale).sum().backward()
        found += averages(reduction, model)
    return found


def test_a_scale_that_changes_leaves_the_buffers_alone():
    for ours, theirs in zip(on_ranks(1, scaled, True)[0], on_ranks(1, scaled, False)[0], strict=True):
        torch.testing.assert_close(ours, theirs)


class Reference:
    """Steps 2 to 12 of App. E.2 for one matrix of all replicas."""

    def __init__(self, replicas: int, start: Tensor, narrow: bool) -> None:
        self.start, self.replicas = start, replicas
        self.rounded: Callable[[Tensor], Tensor] = E6M9.round if narrow else lambda x: x
        self.errors: list[Tensor] = []

    def step(self, gradients: list[Tensor]) -> Tensor:
        self.errors = self.errors or [torch.zeros_like(g) for g in gradients]
        self.errors = [self.rounded(e + g) for e, g in zip(self.errors, gradients, strict=True)]
        p = self._mean([e @ self.start for e in self.errors])
        eye = p.norm(dim=0).max() * torch.eye(*p.shape)
        p = self.rounded(torch.linalg.qr(p + 1e-6 * eye).Q)
        q = self._mean([e.T @ p for e in self.errors])
        self.errors = [self.rounded(e - p @ q.T) for e in self.errors]
        return p @ q.T

    def _mean(self, parts: list[Tensor]) -> Tensor:
        return self.rounded(torch.stack([self.rounded(x) for x in parts]).mean(0))


class One(nn.Module):
    """A block with a matrix."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(columns, rows, bias=False)])


def one_matrix(rows: int, columns: int, narrow: bool, steps: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """The gradients of a matrix over some steps, what is kept, and Q_0."""
    model, reducer = One(rows, columns), PowerSGD(PowerSGDConfig(rank=3, quantize=narrow))
    reduction = OverlappedReducer(reducer, buckets(model), Replicas(distributed.group.WORLD))
    p, found = model.blocks[0].weight, []
    for step in range(steps):
        p.grad = None
        (p * gradient_of(rows, columns, step, distributed.get_rank())).sum().backward()
        found += averages(reduction, model)
    return found, reduction.mean_error_buffers()["blocks.0.weight"], unpack_error(reducer.blocks["blocks.0"][0].q0)


def gradient_of(rows: int, columns: int, step: int, rank: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(10 * step + rank)) * 0.01


CASES = [(12, 20, False), (20, 12, False), (12, 20, True)]


def matrices() -> list[tuple[list[Tensor], Tensor, Tensor]]:
    return [one_matrix(*case, 4) for case in CASES]


@pytest.fixture(scope="module")
def factored() -> list[list[tuple[list[Tensor], Tensor, Tensor]]]:
    return on_ranks(3, matrices)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_updates_equal_the_papers_algorithm(factored, case):
    rows, columns, narrow = CASES[case]
    found = [rank[case] for rank in factored]
    turn = (lambda x: x.T) if rows > columns else (lambda x: x)
    plain = Reference(3, found[0][2], narrow)
    for step in range(4):
        should = turn(plain.step([turn(gradient_of(rows, columns, step, rank)) for rank in range(3)]))
        for gradients, _, _ in found:
            assert (gradients[step] - should).norm() < (3e-3 if narrow else 1e-5) * should.norm()
    for _, kept, _ in found:
        mean = turn(torch.stack(plain.errors).mean(0))
        assert (kept - mean).norm() < (1e-2 if narrow else 1e-5) * mean.norm()


def of_size(size: float, narrow: bool) -> Tensor:
    """Return compressed gradients of values of about this size, divided by it."""
    model = One(64, 256)
    reduction = OverlappedReducer(
        PowerSGD(PowerSGDConfig(rank=8, quantize=narrow)), buckets(model), Replicas(distributed.group.WORLD)
    )
    p, found = model.blocks[0].weight, torch.zeros(64, 256)
    for step in range(2):
        p.grad = None
        (p * gradient_of(64, 256, step, 0) * (size / 0.01)).sum().backward()
        found += averages(reduction, model)[0] / size
    return found


def of_sizes() -> dict[float, Tensor]:
    sizes = {2.0**-60: False, 2.0**-40: True, 2.0**-10: True, 2.0: True}
    return {1.0: of_size(1.0, False)} | {size: of_size(size, narrow) for size, narrow in sizes.items()}


def test_gradients_of_any_size_have_the_same_directions():
    """Also where P and Q would reach the end of 1-6-9, or where eps would be larger than P."""
    (found,) = on_ranks(1, of_sizes)
    for size, gradient in found.items():
        assert (gradient - found[1.0]).norm() < 5e-3 * found[1.0].norm(), size


@pytest.mark.parametrize("shape", [(5, 8, 3), (1, 40, 40), (2, 6, 1)])
def test_columns_are_orthonormal_even_of_matrices_of_no_rank(shape):
    for p in (torch.randn(shape), torch.zeros(shape), torch.ones(shape) + 1e-6 * torch.randn(shape)):
        q = orthonormal(p)
        torch.testing.assert_close(q.mT @ q, torch.eye(shape[-1]).expand(shape[0], -1, -1), atol=1e-5, rtol=0)
        span = q @ (q.mT @ p)
        torch.testing.assert_close(span, p, atol=1e-4, rtol=0)
        g = torch.randn(shape[0], shape[-1], 9)
        torch.testing.assert_close((q @ g).norm(), g.norm())  # step 9: the length is that of Q


WRONG = ("gradient", "p", "q", "buffer", "outside")


VALUES = (float("inf"), float("nan"))


class Two(nn.Module):
    """Two blocks and something outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 12) for _ in range(2)])
        self.outside = nn.Linear(12, 2)


def with_wrong_values(where: str, value: float) -> dict[str, Any]:
    """A step in which something of the first block is not finite in process 1, between steps in which nothing is."""
    torch.manual_seed(0)
    model, rank = Two(), distributed.get_rank()
    reducer = PowerSGD(PowerSGDConfig(rank=3, quantize=False))
    reduction = OverlappedReducer(reducer, buckets(model), Replicas(distributed.group.WORLD))
    matrix, other = reducer.blocks["blocks.0"][0], reducer.blocks["blocks.1"][0]
    grads = []
    for step in range(3):
        model.zero_grad()
        torch.manual_seed(10 * step + rank)
        own = [torch.randn_like(p) for p in model.parameters()]
        loss = sum((p * x).sum() for p, x in zip(model.parameters(), own, strict=True))
        before = matrix.buffer.clone()
        spoiled = step == 1 and rank == 1
        if spoiled and where == "gradient":
            loss = loss + model.blocks[0].weight[3, 4] * value
        if spoiled and where == "outside":
            loss = loss + model.outside.bias[0] * value
        if spoiled and where == "buffer":
            matrix.buffer[1, 1] = value
        if spoiled and where in "pq":
            matrix.q0 = matrix.q0 * (value if where == "p" else 1e-3)
        if spoiled and where == "q":
            matrix.buffer.fill_(2e38)  # E and P are finite, E^T P is not
        loss.backward()
        grads.append(averages(reduction, model))
        if step == 1:
            kept, kept_other, added = matrix.buffer.clone(), other.buffer.clone(), matrix.buffer - before - own[0]
            unchanged = torch.equal(kept, before)
            if spoiled:  # what was put there to go wrong
                matrix.q0 = PowerSGD(reducer.config).make_matrix("blocks.0.weight", model.blocks[0].weight).q0
                matrix.buffer.clamp_(-1e3, 1e3)
    return {"kept": kept, "other": kept_other, "grads": grads, "added": added, "unchanged": unchanged}


def all_wrong_values() -> dict[str, dict[str, Any]]:
    return {f"{where} {value}": with_wrong_values(where, value) for where in WRONG for value in VALUES}


@pytest.fixture(scope="module")
def spoiled() -> list[dict[str, dict[str, Any]]]:
    return on_ranks(3, all_wrong_values)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("where", WRONG)
def test_a_value_that_is_not_finite_stops_the_block_on_all_replicas_and_nothing_more(spoiled, where, value):
    found = [rank[f"{where} {value}"] for rank in spoiled]
    for rank, result in enumerate(found):
        first, second, third = result["grads"]
        assert all(g.isfinite().all() for g in (*first, *third))
        if where == "outside":
            assert all(g.isfinite().all() for g in second[:4]) and not all(g.isfinite().all() for g in second[4:])
            continue
        assert not second[0].isfinite().any() and all(g.isfinite().all() for g in second[1:])
        zeroed = rank == 1 and where == "buffer"
        assert result["kept"].isfinite().all() and (result["kept"] == 0).all() == zeroed
        assert result["other"].isfinite().all()
        if where == "gradient" and rank == 1:  # step 2
            assert result["unchanged"]
        elif where == "gradient" or rank != 1:  # step 12: the gradient of a finite replica stays in its buffer
            torch.testing.assert_close(result["added"], torch.zeros(12, 16), atol=1e-5, rtol=0)
        assert all(torch.equal(a, b) for a, b in zip(second[1:], found[0]["grads"][1][1:], strict=True))


class Failing(PowerSGD):
    """On this process a column of P becomes `value` in step 5 while `fails`."""

    value, fails = 0.0, False

    def orthonormal(self, p: Tensor) -> Tensor:
        p = super().orthonormal(p)
        if self.fails:
            p[0, 2, 1] = self.value
        return p


def with_wrong_columns(value: float, narrow: bool) -> dict[str, Any]:
    """Three steps; in the second one P is wrong in process 1 after it was averaged."""
    model, reducer = One(12, 20), Failing(PowerSGDConfig(rank=3, quantize=narrow))
    reduction = OverlappedReducer(reducer, buckets(model), Replicas(distributed.group.WORLD))
    p, found = model.blocks[0].weight, []
    reducer.value = value
    for step in range(3):
        reducer.fails = step == 1 and distributed.get_rank() == 1
        p.grad = None
        (p * gradient_of(12, 20, step, distributed.get_rank())).sum().backward()
        found += averages(reduction, model)
    return {"given": found, "kept": reduction.mean_error_buffers()["blocks.0.weight"]}


WRONG_COLUMNS = [(value, narrow) for value in VALUES for narrow in (False, True)]


def all_wrong_columns() -> list[dict[str, Any]]:
    return [with_wrong_columns(*case) for case in WRONG_COLUMNS]


@pytest.fixture(scope="module")
def wrong_columns() -> list[list[dict[str, Any]]]:
    return on_ranks(3, all_wrong_columns)


@pytest.mark.parametrize("case", range(len(WRONG_COLUMNS)))
def test_a_factor_that_is_not_finite_on_one_replica_alone_stops_the_block_on_all(wrong_columns, case):
    first = wrong_columns[0][case]
    for found in (rank[case] for rank in wrong_columns):
        assert not found["given"][1].isfinite().any()
        assert all(torch.equal(found["given"][step], first["given"][step]) for step in (0, 2))
    should = sum(gradient_of(12, 20, step, rank) for step in range(3) for rank in range(3)) / 3
    left = first["given"][0] + first["given"][2] + first["kept"] - should  # nothing was lost
    assert left.norm() < (4e-3 if WRONG_COLUMNS[case][1] else 1e-5) * should.norm()


def test_an_eighth_is_the_rank_and_small_matrices_stay_whole():
    reducer = PowerSGD()
    model = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(64, 64), nn.Linear(1, 64), nn.LayerNorm(64)])})
    reducer.attach(buckets(model), Replicas.__new__(Replicas))  # without a group: nothing is sent
    assert [(m.name, m.q0.shape) for m in reducer.matrices()] == [("list.0.weight", (64, 8))]
    assert reducer.summary() == "gradients of 1 of 2 matrices are compressed to rank 8"
    (matrix,) = reducer.matrices()
    assert matrix.q0.dtype == matrix.buffer.dtype == torch.int16  # 1-6-9, E.2 step 3
    assert powersgd.EPS == 1e-6


def test_a_rank_that_compresses_nothing_is_an_error():
    blocks = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(64, 64)])})
    with pytest.raises(
        UserError,
        match="two factors of rank 32 .* than any of the 1 matrices .* a lower --grad-compression.rank",
    ):
        PowerSGD(PowerSGDConfig(rank=32)).attach(buckets(blocks), Replicas.__new__(Replicas))
    reducer = PowerSGD()
    reducer.attach(buckets(nn.Sequential(nn.Conv2d(3, 8, 3))), Replicas.__new__(Replicas))
    assert "lacks blocks" in reducer.summary()


def described() -> str:
    parallel = Sharded(2, partial(PowerSGD, PowerSGDConfig(rank=7)))
    parallel.prepare(Trainable(PRIOR.build(), Autoregressive()), torch.device("cpu"), torch.float32)
    return parallel.reduction.summary()


def test_the_highest_rank_of_shards_is_reported():
    assert set(on_ranks(4, described)) == {"gradients of 8 of 8 matrices are compressed to rank 6 over 2 shards"}


STEPS = 6


SPOILED = {  # whose gradient is not finite in process 1, by step
    1: ("blocks.0.mlp.branch.down", "weight", torch.nan),
    2: ("head.norm", "weight", torch.inf),
    4: ("blocks.1.attention.norm", "bias", -torch.inf),  # no matrix: those of its block are finite
}


BUCKET = "blocks.0.mlp."  # whose matrices lack finite gradients in step 1


SCALINGS = ("none", "resblocks", "resblocks-partial", "tensors")


class Spoiled(torch.autograd.Function):
    """Identity; one number of the gradient of `p` is `value`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor, value: float) -> Tensor:
        ctx.save_for_backward(p)
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        wrong = torch.zeros_like(ctx.saved_tensors[0])
        wrong.view(-1)[0] = ctx.value
        return upstream[0], wrong, None


class Gradients(Hook):
    """Records the gradients of each update; none of a skipped one."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def before_step(self, run: TrainState) -> None:
        self.steps.append({})

    def before_update(self, run: TrainState) -> None:
        names = run.model.named_parameters()
        self.steps[-1] |= {name: full_tensor(p.grad).clone() for name, p in names if p.grad is not None}


def learn(
    parallel: Parallel, kind: Any, rows: slice = slice(None)
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the gradients applied in each step, and the error buffers at the end; weights hardly change. `rows` is
    the part of each batch to take."""
    torch.manual_seed(0)
    config = TrainConfig(
        steps=STEPS, batch_size=8, precision=Fp32(), optimizer=AdamWConfig(lr=1e-12), clip_norm=None, scaling=kind
    )
    run = TrainState(PRIOR.build(), Autoregressive(), config, parallel=parallel)
    hooks = [*scaling(run), applied := Gradients()]
    for step in range(STEPS):
        g = torch.Generator().manual_seed(step)
        batch = {"text": torch.randint(0, 20, (8, 8), generator=g), "image": torch.randint(0, 8, (8, 9), generator=g)}
        batch = {name: x[rows] for name, x in batch.items()}
        handles = []
        if step in SPOILED and parallel.rank == 1:
            path, name, value = SPOILED[step]

            def spoil(module: nn.Module, _: Any, out: Tensor, name: str = name, value: float = value) -> Tensor:
                return Spoiled.apply(out, getattr(module, name), value)  # type: ignore[no-any-return]

            handles = [run.model.get_submodule(path).register_forward_hook(spoil)]
        update(run, {name: x.chunk(parallel.world_size)[parallel.rank] for name, x in batch.items()}, hooks)
        for handle in handles:
            handle.remove()
    return applied.steps, left_out(parallel)


def all_of(shards: int) -> dict[str, Any]:
    make = partial(PowerSGD, PowerSGDConfig(rank=8, quantize=False))
    return {kind: learn(Sharded(2, make) if shards > 1 else Replicated(make), kind) for kind in SCALINGS}


@pytest.fixture(scope="module", params=[1, 2], ids=["whole", "shards"])
def measured(request: pytest.FixtureRequest) -> tuple[int, dict[str, Any]]:
    return request.param, on_ranks(2 * request.param, all_of, request.param)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCALINGS)
def test_applied_and_kept_parts_add_up_to_the_gradients(measured, kind):
    shards, found = measured
    steps, kept = found[kind]
    true, _ = learn(SingleProcess(), "none")
    first_half, _ = learn(SingleProcess(), "none", slice(0, 4))
    skipped = {"none": {1, 2, 4}, "resblocks": {1, 2, 4}, "resblocks-partial": {2}, "tensors": set()}[kind]
    assert {step for step, gradients in enumerate(steps) if not gradients} == skipped
    for name in kept:
        applied = sum(step[name] for step in steps if name in step)
        should = sum(step[name] for step in true)
        if name.startswith(BUCKET) and shards > 1:
            continue  # a shard is finite, another is not
        if name == SPOILED[1][0] + ".weight":  # the gradient of process 0 is kept, that of process 1 lost
            should = should - true[1][name] + first_half[1][name] / 2
        assert (applied + kept[name] - should).norm() < 1e-5 * should.norm(), name
