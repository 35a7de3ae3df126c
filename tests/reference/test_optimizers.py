"""limner's optimizers against the papers' algorithms in float64, step by step, and against other libraries."""

from collections.abc import Callable

import optimi
import pytest
import torch
from torch import Tensor, nn

from limner.numerics import compile_elementwise
from limner.numerics.formats import E6M9, UE6M10
from limner.optim import AdamW16, Beta2WarmupAdamW, Lion, StableAdamW, adam_base, stable_adamw

SHAPES = [(5, 7), (3,), (), (4, 3, 2, 2), (40, 30)]
STEPS = 12


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES)
    return [nn.Parameter(x.to(dtype)) for x in values]


def gradient(p: Tensor, step: int, i: int) -> Tensor | None:
    """Gradients of very different sizes, with an RMS spike at step 7; None in some steps."""
    generator = torch.Generator().manual_seed(1000 * step + i)
    grad = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 10.0 ** (i - 3) * (30 if step == 7 else 1)
    return None if (step + i) % 5 == 4 else grad.to(p.dtype)


def run(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype = torch.float64):
    """Parameters after `STEPS` steps with a falling learning rate, and the optimizer."""
    ps = parameters(dtype)
    optimizer = build(ps)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + step)
        for i, p in enumerate(ps):
            p.grad = gradient(p, step, i)
        optimizer.step()
    return ps, optimizer


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]


def textbook(rule: Rule, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Parameters after `STEPS` steps of `rule`, which updates v and u in place and returns the new p."""
    results = []
    for i, p in enumerate(parameters(dtype)):
        theta, v, u, t = p.detach().clone(), torch.zeros_like(p.detach()), torch.zeros_like(p.detach()), 0
        for step in range(STEPS):
            g = gradient(theta, step, i)
            if g is not None:
                t += 1  # steps of this tensor
                theta = rule(theta, g, v, u, t, 0.05 / (1 + step))
        results.append(theta)
    return results


def algorithm_2(clip_decay: bool, eps: float, decay: float) -> Rule:
    """Algorithm 2 as printed, with the maximum of F.2; its coefficients correct the bias of v and u."""

    def rule(theta: Tensor, g: Tensor, v: Tensor, u: Tensor, t: int, lr: float) -> Tensor:
        beta1, beta2 = (beta * (1 - beta ** (t - 1)) / (1 - beta**t) for beta in (0.9, 0.95))
        v.copy_(beta1 * v + (1 - beta1) * g)
        u.copy_(beta2 * u + (1 - beta2) * g**2)
        rms = (g**2 / u.clamp_min(eps**2)).mean().sqrt().item()
        eta = lr / max(1.0, rms)
        return theta - (eta if clip_decay else lr) * decay * theta - eta * v / (u.sqrt() + eps)

    return rule


def close(ours: list[nn.Parameter], theirs: list[Tensor], tolerance: float) -> None:
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.detach(), q.to(p.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("clip_decay", [True, False])
def test_stable_adamw_is_algorithm_2(clip_decay: bool, eps: float) -> None:
    def build(ps: list[nn.Parameter], **settings) -> StableAdamW:
        return StableAdamW(ps, betas=(0.9, 0.95), eps=eps, weight_decay=0.3, clip_decay=clip_decay, **settings)

    expected = textbook(algorithm_2(clip_decay, eps, 0.3))
    close(run(build)[0], expected, 1e-12)
    close(run(build, torch.float32)[0], expected, 2e-5)
    other = textbook(algorithm_2(not clip_decay, eps, 0.3))
    assert eps > 0.1 or max(float((a - b).abs().max()) for a, b in zip(expected, other, strict=True)) > 1e-3


def test_all_implementations_of_stable_adamw_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multi-tensor operations as on a GPU, strides that the fused loop cannot use, compiled code."""
    expected = textbook(algorithm_2(True, 1e-6, 0.3))

    def build(ps: list[nn.Parameter]) -> StableAdamW:
        return StableAdamW(ps, betas=(0.9, 0.95), weight_decay=0.3)

    with monkeypatch.context() as patch:
        patch.setattr(stable_adamw, "supports_fused", lambda *tensors: False)
        close(run(build)[0], expected, 1e-12)
    with monkeypatch.context() as patch:
        contiguous = gradient
        patch.setitem(
            globals(), "gradient", lambda p, *at: None if (g := contiguous(p, *at)) is None else _transposed_strides(g)
        )
        close(run(build)[0], expected, 1e-12)
    with monkeypatch.context() as patch:
        patch.setattr(compile_elementwise, "MIN_COMPILED_SIZE", 1000)
        patch.setattr(adam_base, "CPU_CHUNK_VALUES", 1000)
        close(run(build, torch.float32)[0], expected, 2e-5)


def _transposed_strides(g: Tensor) -> Tensor:
    """Equal values with the strides of a transposed tensor."""
    return g.mT.contiguous().mT if g.ndim >= 2 else g


def test_stable_adamw_equals_torch_optimi() -> None:
    """torch-optimi counts steps for all tensors together, so every tensor has a gradient in every step."""
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    a = StableAdamW(ours, lr=0.02, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.3)
    b = optimi.StableAdamW(theirs, lr=0.02, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.3, triton=False)
    for step in range(STEPS):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i)) * (
                1 + 99 * (step == 7)
            )
            q.grad = p.grad.clone()
        a.step()
        b.step()
        close(ours, [q.detach() for q in theirs], 2e-6)


def test_rms_is_that_of_the_last_step_before_clipping() -> None:
    ps, optimizer = run(lambda ps: StableAdamW(ps, betas=(0.9, 0.95), eps=1e-6))
    recorded = optimizer.rms((str(i), p) for i, p in enumerate(ps))
    missing = {i for i in range(len(ps)) if gradient(ps[i], STEPS - 1, i) is None}
    assert set(recorded) == {str(i) for i in range(len(ps)) if i not in missing} and missing
    for name, value in recorded.items():
        p, g = ps[int(name)], gradient(ps[int(name)], STEPS - 1, int(name))
        state = optimizer.state[p]
        u = state["exp_avg_sq"] / (1 - 0.95 ** int(state["step"]))
        assert value == pytest.approx((g**2 / u.clamp_min(1e-12)).mean().sqrt().item(), rel=1e-9)
    p = nn.Parameter(torch.zeros(3))
    spiking = StableAdamW([p])
    assert spiking.rms([("p", p)]) == {}
    for size in (1e-4, 1e-4, 1.0):
        p.grad = torch.full((3,), size)
        spiking.step()
    assert spiking.rms([("p", p)])["p"] > 1.5


@pytest.mark.parametrize("make", [StableAdamW, AdamW16])
def test_quantized_moments_are_rounded(make: type[torch.optim.Optimizer]) -> None:
    """Steps with 16-bit moments equal float64 steps that round the moments in between."""
    clip = 5.0 if make is AdamW16 else float("inf")

    def rule(theta: Tensor, g: Tensor, v: Tensor, u: Tensor, t: int, lr: float) -> Tensor:
        mean, variance = 0.9 * v + 0.1 * g, (0.95 * u + 0.05 * g**2).clamp_max(clip)
        hat = variance / (1 - 0.95**t)
        rms = 1.0 if make is AdamW16 else (g**2 / hat.clamp_min(1e-12)).mean().sqrt().clamp_min(1).item()
        quantized = theta.ndim >= 2
        v.copy_(E6M9.round(mean) if quantized else mean)
        u.copy_(UE6M10.round(variance) if quantized else variance)
        return theta - lr / rms * (0.3 * theta + mean / (1 - 0.9**t) / (hat.sqrt() + 1e-6))

    settings = {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.3}
    ps, optimizer = run(lambda ps: make([{"params": ps, "quantize_state": True}], **settings), torch.float32)
    for p in ps:
        dtypes = (torch.int16, torch.int16) if p.ndim >= 2 else (torch.float32, torch.float32)
        assert (optimizer.state[p]["exp_avg"].dtype, optimizer.state[p]["exp_avg_sq"].dtype) == dtypes
    close(ps, textbook(rule), 1e-3)  # codes differ by one where fp32 and float64 fall on two sides of a tie


def test_variance_is_clipped_before_it_is_used() -> None:
    p = nn.Parameter(torch.zeros(1))
    optimizer = AdamW16([p], lr=1.0, betas=(0.0, 0.5), weight_decay=0.0, eps=1e-30)
    p.grad = torch.tensor([100.0])
    optimizer.step()
    assert optimizer.state[p]["exp_avg_sq"].item() == 5.0
    torch.testing.assert_close(p.detach(), -torch.tensor([100 / (5 / 0.5) ** 0.5]))


def test_adamw16_in_fp32_is_torchs_adamw() -> None:
    def build(ps: list[nn.Parameter]) -> AdamW16:
        return AdamW16(
            [{"params": ps, "quantize_state": False}], betas=(0.9, 0.95), weight_decay=0.3, max_exp_avg_sq=float("inf")
        )

    close(run(build)[0], run(lambda ps: torch.optim.AdamW(ps, betas=(0.9, 0.95), weight_decay=0.3))[0], 1e-12)


def test_beta2_warms_up() -> None:
    def rule(theta: Tensor, g: Tensor, v: Tensor, u: Tensor, t: int, lr: float) -> Tensor:
        beta1, beta2 = 0.9 * (1 - 0.9 ** (t - 1)) / (1 - 0.9**t), 1 - t**-0.65
        v.copy_(beta1 * v + (1 - beta1) * g)
        u.copy_(beta2 * u + (1 - beta2) * g**2)
        return theta - lr * (0.3 * theta + v / (u.sqrt() + 1e-6))

    ps, _ = run(lambda ps: Beta2WarmupAdamW(ps, power=0.65, eps=1e-6, weight_decay=0.3))
    close(ps, textbook(rule), 1e-12)


def test_lion_moves_by_signs() -> None:
    def rule(theta: Tensor, g: Tensor, v: Tensor, u: Tensor, t: int, lr: float) -> Tensor:
        update = (0.9 * v + 0.1 * g).sign()
        v.copy_(0.99 * v + 0.01 * g)
        return theta - lr * (update + 0.3 * theta)

    close(run(lambda ps: Lion(ps, weight_decay=0.3))[0], textbook(rule), 1e-12)
