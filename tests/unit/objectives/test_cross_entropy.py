"""The fused loss against torch's cross-entropy over all logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

from limner.objectives import cross_entropy
from limner.objectives.cross_entropy import linear_cross_entropy


def both(n: int, width: int, vocab: int, seed: int, upstream: float, absent: float):
    torch.manual_seed(seed)
    layer, x = nn.Linear(width, vocab), torch.randn(n, width)
    target = torch.randint(0, vocab, (n,)).where(torch.rand(n) >= absent, torch.tensor(-1))
    found = []
    for loss in (
        lambda x: linear_cross_entropy(x, layer, target),
        lambda x: F.cross_entropy(layer(x).float(), target, ignore_index=-1, reduction="sum"),
    ):
        layer.zero_grad()
        states = x.clone().requires_grad_()
        value = loss(states)
        (upstream * value).backward()
        found.append([value.detach(), states.grad, layer.weight.grad, layer.bias.grad])
    return found


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 20),
    width=st.integers(1, 9),
    vocab=st.integers(1, 30),
    logits=st.sampled_from([1, 50, 1 << 20]),
    upstream=st.sampled_from([1.0, -0.3, 1e-6]),
    absent=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 999),
)
def test_loss_and_gradients_equal_those_of_all_logits(n, width, vocab, logits, upstream, absent, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "LOGITS_PER_CHUNK", logits)
        for got, want in zip(*both(n, width, vocab, seed, upstream, absent), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * abs(upstream))


def test_under_autocast_products_run_in_16_bits_and_gradients_stay_in_32():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused, plain = both(64, 32, 50, 0, 1 / 64, 0.2)
    exact, _ = both(64, 32, 50, 0, 1 / 64, 0.2)
    for half, usual, full in zip(fused, plain, exact, strict=True):
        assert half.dtype == torch.float32
        error, bound = (half - full).norm(), (usual - full).norm()
        assert error <= 1.5 * bound + 1e-6 and (full.norm() < 1e-6 or error > 0)


def test_under_autocast_logits_are_not_rounded():
    torch.manual_seed(0)
    layer, x, target = nn.Linear(64, 300), 8 * torch.randn(32, 64), torch.randint(0, 300, (32,))
    nn.init.normal_(layer.weight)  # logits up to 200, where bf16 has steps of 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, layer, target)
    logits = x.bfloat16().double() @ layer.weight.bfloat16().double().T + layer.bias.double()
    exact = F.cross_entropy(logits, target, reduction="sum")
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)


def test_where_nothing_learns_it_gives_the_loss_alone():
    layer, x, target = nn.Linear(4, 7), torch.randn(5, 4), torch.randint(0, 7, (5,))
    with torch.no_grad():
        loss = linear_cross_entropy(x, layer, target)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, F.cross_entropy(layer(x), target, reduction="sum"))
