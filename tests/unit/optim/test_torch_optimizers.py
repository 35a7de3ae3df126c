"""limner's optimizers as torch optimizers: groups, states, closures, schedulers, rejected inputs."""

import copy
import io
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from limner.optim import AdamW16, Beta2WarmupAdamW, Lion, Muon, StableAdamW
from limner.optim.adam_base import rms

Make = Callable[..., torch.optim.Optimizer]
MAKES = [AdamW16, Beta2WarmupAdamW, Lion, StableAdamW, lambda ps: StableAdamW(ps, quantize_state=True)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(36, 2))


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        net(torch.randn(2, 3, 5, 5, generator=generator)).square().sum().backward()
        if step % 3 == 1:
            net[0].bias.grad = None  # pyright: ignore
        optimizer.step()


@pytest.mark.parametrize("make", MAKES)
def test_training_resumes_from_a_saved_state_bit_for_bit(make: Make) -> None:
    whole, part = model(), model()
    steps(whole, make(whole.parameters()), 0, 6)
    before = make(part.parameters())
    steps(part, before, 0, 3)
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after = make(part.parameters())
    after.load_state_dict(torch.load(file, weights_only=True))
    for p in part.parameters():
        for key, value in before.state[p].items():
            loaded = after.state[p][key]
            assert loaded.dtype == value.dtype and torch.equal(loaded, value) and loaded is not value
            assert loaded.stride() == value.stride()
    steps(part, after, 3, 6)
    assert all(map(torch.equal, whole.parameters(), part.parameters()))


@pytest.mark.parametrize("make", MAKES)
def test_loss_falls_with_closures_schedulers_and_groups(make: Make) -> None:
    torch.manual_seed(0)
    net, x, y = nn.Linear(8, 1), torch.randn(64, 8), torch.randn(64, 1)
    optimizer = make([{"params": [net.weight]}, {"params": [net.bias], "lr": 1e-5}])
    for group, lr in zip(optimizer.param_groups, (0.02, 0.0), strict=True):
        group["lr"] = lr
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    bias = net.bias.detach().clone()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(50):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert losses[-1] < 0.95 * losses[0] and optimizer.param_groups[0]["lr"] < 0.02
    assert torch.equal(net.bias, bias)  # its learning rate is zero


def test_the_state_is_that_of_torchs_adamw() -> None:
    """A run that started with torch's AdamW continues with AdamW16."""
    a = model()
    theirs = torch.optim.AdamW(a.parameters(), weight_decay=0.0)
    steps(a, theirs, 0, 3)
    b = copy.deepcopy(a)
    ours = AdamW16([{"params": list(b.parameters()), "quantize_state": False}])
    ours.load_state_dict({**ours.state_dict(), "state": theirs.state_dict()["state"]})
    ours.param_groups[0].update(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    steps(a, theirs, 3, 6)
    steps(b, ours, 3, 6)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_quantized_state_takes_half_the_memory() -> None:
    p, embedding = nn.Parameter(torch.zeros(30, 20)), nn.Parameter(torch.zeros(30, 20))
    optimizer = AdamW16([{"params": [p]}, {"params": [embedding], "quantize_state": False}])
    p.grad, embedding.grad = torch.ones_like(p), torch.ones_like(p)
    optimizer.step()

    def size(parameter: nn.Parameter) -> int:
        return sum(state.nbytes for name, state in optimizer.state[parameter].items() if name != "step")

    assert size(p) == 600 * 4 and size(embedding) == 600 * 8


def test_tensors_without_gradient_keep_their_step_count() -> None:
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = StableAdamW([a, b])
    for i in range(3):
        a.grad, b.grad = torch.ones(3), torch.ones(3) if i == 0 else None
        optimizer.step()
    assert int(optimizer.state[a]["step"]) == 3 and int(optimizer.state[b]["step"]) == 1
    assert optimizer.rms([("a", a), ("b", b)]).keys() == {"a"}


@pytest.mark.parametrize("make", [*MAKES, Muon])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("betas", betas) for betas in ((0.9, 1.0), (math.nan, 0.9), (-0.1, 0.9))),
        *((name, value) for name in ("lr", "weight_decay") for value in (-1.0, math.nan, math.inf)),
        *(("eps", value) for value in (0.0, -1e-8, math.nan, 1e-46)),
        *(("power", value) for value in (0.0, math.nan)),
        *(("momentum", value) for value in (1.0, math.nan)),
    ],
)
def test_invalid_settings_are_rejected_also_of_a_group(make: Make, name: str, wrong: object) -> None:
    p, q = (nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
    optimizer = make([p])
    if name not in optimizer.defaults:
        return
    with pytest.raises(ValueError, match=rf"^{name} must be .*, not .*"):
        make([{"params": [p], name: wrong}])
    with pytest.raises(ValueError, match=rf"^{name} must be .*, not .*"):
        optimizer.add_param_group({"params": [q], name: wrong})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [AdamW16, Beta2WarmupAdamW, StableAdamW, lambda ps: StableAdamW(ps, quantize_state=True)]
)
def test_weights_in_16_bits_follow_those_in_fp32(make: Make, dtype: torch.dtype) -> None:
    """Ten updates, each a thousandth of a bfloat16 step, arrive on average."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.full((400, 400), 0.75))  # halfway between two powers of two
    q = nn.Parameter(p.detach().to(dtype))
    full, half = make([p]), make([q])
    for optimizer in (full, half):
        for group in optimizer.param_groups:
            group.update(lr=4e-6, weight_decay=0.0)
    for _ in range(10):
        p.grad, q.grad = torch.full_like(p, 0.25), torch.full_like(q, 0.25)
        full.step()
        half.step()
    moved = p.detach()[0, 0].item() - 0.75
    assert moved == pytest.approx(-4e-5, rel=0.01)
    step = 2**-11 if dtype == torch.float16 else 2**-8  # spacing of numbers in 1/2 .. 1
    deviation = (10 * abs(moved / 10) * step / p.numel()) ** 0.5  # of the mean of stochastically rounded values
    assert q.detach().float().mean().item() - 0.75 == pytest.approx(moved, abs=5 * deviation + 1e-7)
    moments = [value for name, value in half.state[q].items() if name != "step"]
    assert all(value.dtype in (torch.float32, torch.int16) for value in moments)


@pytest.mark.parametrize("make", [Lion, Muon])
def test_optimizers_without_fp32_updates_reject_weights_in_16_bits(make: Make) -> None:
    with pytest.raises(ValueError, match=r"cannot update weights in 16 bits: keep them in fp32, or use AdamW16"):
        make([nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))])


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("twin", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_trains_like_the_original_bit_for_bit(
    make: Make, twin: Callable[..., tuple[nn.Module, torch.optim.Optimizer]]
) -> None:
    net = model()
    optimizer = make(net.parameters())
    steps(net, optimizer, 0, 3)
    other, copied = twin((net, optimizer))
    if isinstance(copied, StableAdamW):
        assert copied.rms(other.named_parameters()) == {}
    steps(net, optimizer, 3, 6)
    steps(other, copied, 3, 6)
    assert all(map(torch.equal, net.parameters(), other.parameters()))
    if isinstance(copied, StableAdamW) and isinstance(optimizer, StableAdamW):
        assert copied.rms(other.named_parameters()) == optimizer.rms(net.named_parameters()) != {}


@pytest.mark.parametrize("make", MAKES)
def test_training_continues_from_a_state_of_torchs_adamw(make: Make) -> None:
    net = model()
    before = torch.optim.AdamW(net.parameters(), lr=3e-4, betas=(0.8, 0.9))
    steps(net, before, 0, 3)
    after = make(net.parameters())
    before_loading = {
        name: value for name, value in after.param_groups[0].items() if name not in before.param_groups[0]
    }
    after.load_state_dict(before.state_dict())
    (group,) = after.param_groups
    assert (
        group["lr"] == 3e-4
        and group["betas"] == (0.8, 0.9)
        and {name: group[name] for name in before_loading} == before_loading
    )
    steps(net, after, 3, 6)
    assert all(p.isfinite().all() for p in net.parameters())
    if not isinstance(after, Lion):  # pyright: ignore
        assert int(after.state[net[2].weight]["step"]) == 6  # pyright: ignore


@pytest.mark.parametrize("make", [AdamW16, Beta2WarmupAdamW, StableAdamW])
@pytest.mark.parametrize("eps", [1e-23, 1.2e-38])
@pytest.mark.parametrize("size", [3, 400])
def test_zero_gradients_and_a_tiny_eps_give_no_nan(make: Make, eps: float, size: int) -> None:
    p = nn.Parameter(torch.ones(size, size))
    optimizer = make([p], eps=eps, weight_decay=0.0)
    for scale in (0.0, 1e-30, 1.0):
        p.grad = torch.zeros(size, size)
        p.grad[0] = scale
        for _, value in rms([optimizer]):
            assert value.isfinite()
        optimizer.step()
        assert p.isfinite().all()
    if isinstance(optimizer, StableAdamW):
        assert 0 < optimizer.rms([("p", p)])["p"] < 2


@pytest.mark.parametrize("make", MAKES)
def test_sparse_gradients_are_rejected_before_the_state_changes(make: Make) -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = make(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="cannot use sparse gradients: give nn.Embedding sparse=False"):
        optimizer.step()
    assert not optimizer.state[table.weight]


@pytest.mark.parametrize("make", MAKES)
def test_weights_in_float64_have_moments_in_float64(make: Make) -> None:
    p = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    optimizer = make([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert p.isfinite().all()
    assert {value.dtype for name, value in optimizer.state[p].items() if name != "step"} == {torch.float64}
