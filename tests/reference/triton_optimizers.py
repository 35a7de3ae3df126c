"""Triton's optimizer kernels against torch's operations: on a GPU or, with TRITON_INTERPRET=1 set before Triton is
imported, in its interpreter. `test_triton.py` runs this file in a new process."""

from functools import partial

import pytest
import torch
import triton
from torch import nn

from limner.numerics.formats import E6M9, UE6M10
from limner.optim import AdamW16, Beta2WarmupAdamW, StableAdamW, adam_base, triton_adamw

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
SHAPES = [(5, 7), (3,), (), (0, 4), (4, 3, 2, 2), (40_000,), (190, 180)]  # the last two are several pieces
KINDS = {
    "AdamW16": AdamW16,
    "AdamW16, unbounded": lambda ps: AdamW16(ps, max_exp_avg_sq=float("inf")),
    "StableAdamW": StableAdamW,
    "StableAdamW, 16 bits": lambda ps: StableAdamW(ps, quantize_state=True),
    "StableAdamW, lr decay": lambda ps: StableAdamW(ps, clip_decay=False),
    "Beta2WarmupAdamW": Beta2WarmupAdamW,
}


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Use the kernels also without a GPU; collect (kernel, dtype of the moments)."""
    seen = set()
    monkeypatch.setattr(adam_base, "can_launch_triton", lambda x: True)
    for name in ("adamw_", "sums_of_ratios"):

        def recording(kernel, function, *args, **settings):
            variances = args[0][3] if kernel == "adamw_" else args[1]
            seen.add((kernel, variances[0].dtype))
            return function(*args, **settings)

        monkeypatch.setattr(triton_adamw, name, partial(recording, name, getattr(triton_adamw, name)))
    return seen


def parameters():
    torch.manual_seed(0)
    ps = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in SHAPES]
    ps[4].data = ps[4].data.contiguous(memory_format=torch.channels_last)
    return ps


def trained(build, steps=6):
    ps = parameters()
    optimizer = build(ps)
    for step in range(steps):
        for i, p in enumerate(ps):
            torch.manual_seed(100 * step + i)
            p.grad = torch.randn_like(p) * 10.0 ** (i - 3) * (30 if step == 3 else 1)
            if (step + i) % 5 == 4:
                p.grad = None
        optimizer.step()
    return ps, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_equal_multi_tensor_operations(kind, monkeypatch, calls):
    ours, optimizer = trained(KINDS[kind])
    assert ("adamw_", torch.float32) in calls
    quantized = any(state["exp_avg"].dtype == torch.int16 for state in optimizer.state.values())
    assert (("adamw_", torch.int16) in calls) == quantized
    assert (("sums_of_ratios", torch.int16) in calls) == (quantized and kind.startswith("Stable"))
    monkeypatch.setattr(adam_base, "can_launch_triton", lambda x: False)
    theirs, reference = trained(KINDS[kind])
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        for moment in adam_base.MOMENT_FORMATS:
            a, b = (adam_base.read_moment(o.state[x], moment) for o, x in ((optimizer, p), (reference, q)))
            step = 2.0**-9 if optimizer.state[p][moment].dtype == torch.int16 else 1e-5
            torch.testing.assert_close(a, b, rtol=step, atol=float(b.abs().max()) * 1e-6 if b.numel() else 0.0)


def edge_cases(n):
    """Normal numbers over the whole range of fp32, ties, ends of the formats, infinities and NaN."""
    torch.manual_seed(1)
    x = torch.randn(n) * torch.exp2(150 * torch.rand(n) - 100)
    x[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 16.0, 3.4e38])
    codes = torch.arange(n - 8 - n // 2, dtype=torch.int32).to(torch.int16)
    values = E6M9.unpack(codes)
    x[n // 2 + 8 :] = values * (1 + 2.0**-10)  # halfway to the next, for most
    return x


def test_codes_equal_those_of_the_formats():
    """For a step that keeps means and variances, and for one that replaces them by those of the gradients."""
    x = edge_cases(1 << 14)
    for beta1, beta2 in ((1.0, 1.0), (0.0, 0.0)):
        means, variances = E6M9.pack(x.flip(0)), UE6M10.pack(x.flip(0).abs())
        before = means.clone(), variances.clone()
        p, g, m, v = (y.clone().to(DEVICE) for y in (torch.zeros_like(x), x, means, variances))
        lrs = torch.zeros(1, device=DEVICE)
        triton_adamw.adamw_(([p], [g], [m], [v]), lrs, (beta1, [beta2], [1.0], [1.0]), eps=1e-8, weight_decay=0.0)
        finite = x.abs() < 1e18  # with finite squares: 0 times infinity is NaN
        expected_codes = before if beta1 else (E6M9.pack(x), UE6M10.pack(x * x))
        for form, codes, expected in zip((E6M9, UE6M10), (m, v), expected_codes, strict=True):
            assert torch.equal(form.unpack(codes.cpu())[finite], form.unpack(expected)[finite])  # 0 equals -0


def test_gradients_that_are_not_finite_propagate():
    for wrong in (torch.nan, torch.inf):
        p, g, m, v = (torch.ones(50, device=DEVICE) for _ in range(4))
        g[17] = wrong
        sums = triton_adamw.sums_of_ratios([g, g[:9]], [v, v[:9]], 0.9, [1e-8, 1e-8])
        assert sums.isfinite().tolist() == [False, True]
        lrs = torch.ones(1, device=DEVICE)
        triton_adamw.adamw_(([p], [g], [m], [v]), lrs, (0.9, [0.9], [1.0], [1.0]), eps=1e-8, weight_decay=0.0)
        assert p.isnan().sum() == 1 and p[17].isnan()
