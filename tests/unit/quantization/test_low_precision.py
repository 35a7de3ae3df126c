"""Layers in 8 bits: the paper's algorithms written out, and everything that may be around a layer."""

import copy
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.func import functional_call, grad, hessian, vmap
from torch.utils.checkpoint import checkpoint

from limner.numerics.precision import has_fast_bf16
from limner.quantization import (
    Fp8SwitchBackLinear,
    Fp8TensorWiseLinear,
    LLMInt8Linear,
    StandardLinear,
    SwitchBackLinear,
    SwitchBackMLinear,
    SwitchBackQLinear,
)
from limner.quantization.convert import convert
from limner.quantization.low_precision import to_linear
from limner.quantization.quantize import E4M3, E5M2, round_to_float8

COUNTED = [
    SwitchBackLinear, SwitchBackMLinear, SwitchBackQLinear, LLMInt8Linear, Fp8SwitchBackLinear, Fp8TensorWiseLinear
]  # fmt: skip
KINDS = [*COUNTED, StandardLinear]
every = pytest.mark.parametrize("kind", KINDS)
SIXTEEN = (SwitchBackLinear, SwitchBackMLinear, SwitchBackQLinear, Fp8SwitchBackLinear)  # of their weight gradients
BF16 = SIXTEEN if has_fast_bf16(torch.device("cpu")) else ()


def back(values, dim=None):
    """The numbers in 8 bits, as fp64: one scale for the slices along `dim`, or for all."""
    values = values.detach().double()
    absmax = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    return torch.round(values * 127 / absmax) * absmax / 127


def float8_back(values, format, dim=None):
    values = values.detach().double()
    scale = (values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)) / torch.finfo(format).max
    return round_to_float8(values / scale, format).double() * scale


def expected(kind, x, weight, bias, g):
    """Output and gradients of Algorithms 1, 3, 4 and 5, in fp64."""
    rows, columns = partial(back, dim=1), partial(back, dim=0)
    by_x, by_weight = (g, weight), (g, x)  # what the two gradients are products of
    if kind in (SwitchBackLinear, SwitchBackMLinear):
        forward, by_x = (rows(x), back(weight)), (rows(g), back(weight))
        by_weight = (g, rows(x) if kind is SwitchBackMLinear else x)
    elif kind in (SwitchBackQLinear, LLMInt8Linear):
        forward, by_x = (rows(x), rows(weight)), (rows(g), columns(weight))
        by_weight = (columns(g), columns(x)) if kind is LLMInt8Linear else (g, x)
    elif kind in (Fp8SwitchBackLinear, Fp8TensorWiseLinear):
        dim, w = (1 if kind is Fp8SwitchBackLinear else None), float8_back(weight, E4M3)
        x8, g8 = float8_back(x, E4M3, dim), float8_back(g, E5M2, dim)
        forward, by_x, by_weight = (x8, w), (g8, w), (g8, x8) if dim is None else (g, x)
    else:
        forward = x, weight
    if kind in BF16:
        by_weight = tuple(p.bfloat16() for p in by_weight)
    (a, w), (g1, w1), (g2, x2) = ((p.detach().double() for p in pair) for pair in (forward, by_x, by_weight))
    y = a @ w.mT + (0 if bias is None else bias.detach().double())
    return y, g1 @ w1, g2.mT @ x2, g.double().sum(0)


def run(layer, x, g):
    """Output and gradients; `layer` may be compiled."""
    x = x.detach().requires_grad_()
    y = layer(x)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    return y.detach(), *torch.autograd.grad(y, [x, *parameters], g.to(y.dtype))


@every
@pytest.mark.parametrize(("b", "n", "m"), [(1, 1, 1), (5, 7, 3), (70, 48, 33), (33, 64, 128)])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_the_algorithms(kind, b, n, m, bias):
    torch.manual_seed(b)
    layer, x, g = kind(n, m, bias), torch.randn(b, n), torch.randn(b, m)
    want = expected(kind, x, layer.weight, layer.bias, g)
    found = run(layer, x, g)
    assert len(found) == 3 + bias
    for name, one, other in zip(("y", "x", "weight", "bias"), found, want, strict=False):
        rounded = name == "weight" and kind in BF16
        torch.testing.assert_close(one.double(), other, rtol=2**-8 if rounded else 1e-4, atol=1e-3 if rounded else 1e-4)


@every
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_small_layers_are_right_in_every_layout(kind, n):
    """A side of 1 has strides that some kernels refuse."""
    torch.manual_seed(n)
    for b, m in product((1, 2, 3, 4), repeat=2):
        layer, x, g = kind(n, m), torch.randn(b, n), torch.randn(b, m)
        want = expected(kind, x, layer.weight, layer.bias, g)
        turned = x.mT.clone(memory_format=torch.contiguous_format).mT
        for y, by in product((x, turned), (g, g.mT.clone(memory_format=torch.contiguous_format).mT)):
            for i, (one, other) in enumerate(zip(run(layer, y, by), want, strict=True)):
                rounded = i == 2 and kind in BF16
                tolerance = {"rtol": 2**-8 if rounded else 1e-4, "atol": 1e-2 if rounded else 1e-4}
                torch.testing.assert_close(one.double(), other, **tolerance)


@every
def test_zero_rows_and_no_rows_are_safe(kind):
    layer, x = kind(8, 4), torch.randn(3, 8)
    x[1] = 0
    g = torch.randn(3, 4)
    g[2] = 0
    found = run(layer, x, g)
    assert all(value.isfinite().all() for value in found)
    torch.testing.assert_close(found[0][1], layer.bias)
    assert not found[1][2].any()
    layer.weight.data.zero_()
    torch.testing.assert_close(run(layer, x, g)[0], layer.bias.expand(3, 4))
    y, by_x, *by_parameters = run(layer, torch.randn(2, 0, 8), torch.randn(2, 0, 4))
    assert y.shape == (2, 0, 4) and by_x.shape == (2, 0, 8)
    assert not any(value.any() for value in by_parameters)


@every
def test_only_what_is_needed_is_computed(kind):
    layer = kind(8, 4)
    x, g = torch.randn(3, 8), torch.randn(3, 4)
    for frozen in (("weight",), ("bias",), ("weight", "bias")):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name not in frozen)
        layer.counter.counts.clear()
        assert len(run(layer, x, g)) == 4 - len(frozen)
        done = {product for product, _, _ in layer.counter.counts}
        if kind in COUNTED:
            assert done == {"forward", "input gradient"} | ({"weight gradient"} if "weight" not in frozen else set())
    layer.requires_grad_(True)
    layer.counter.counts.clear()
    layer(x).sum().backward()  # x needs none
    assert "input gradient" not in {product for product, _, _ in layer.counter.counts}


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("kind", "backend"),
    [*((kind, "aot_eager") for kind in KINDS), (SwitchBackLinear, "inductor"), (SwitchBackMLinear, "inductor")],
)
def test_compiled_it_is_the_same_and_counts_the_same(kind, backend):
    torch.manual_seed(0)
    layer, x, g = kind(48, 33), torch.randn(5, 7, 48), torch.randn(5, 7, 33)
    want, each = run(layer, x, g), layer.counter.counts.total()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for one, other in zip(run(compiled, x, g), want, strict=True):
        torch.testing.assert_close(one, other)
    assert layer.counter.counts.total() == 2 * each == (6 if kind in COUNTED else 0)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("kind", COUNTED)
def test_blocks_of_a_model_share_the_code_that_is_compiled_for_one(kind):
    torch._dynamo.reset()
    blocks, compiled = [nn.Sequential(nn.LayerNorm(8), kind(8, 8)) for _ in range(12)], CompileCounter()
    for block in blocks:
        block.compile(backend=compiled)
    x = y = torch.randn(4, 8, requires_grad=True)
    for block in blocks:
        y = block(y)
    y.sum().backward()
    assert compiled.frame_count == 1
    assert all(block[1].counter.counts == blocks[0][1].counter.counts for block in blocks)
    assert blocks[0][1].counter.counts.total() == 3 and x.grad is not None


@pytest.mark.parametrize("kind", COUNTED)
def test_checkpointing_computes_the_forward_product_again_and_says_so(kind):
    torch.manual_seed(0)
    layer, x, g = kind(16, 8), torch.randn(4, 16), torch.randn(4, 8)
    want = run(layer, x, g)
    layer.counter.counts.clear()

    class Saved(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=False)

    assert all(torch.equal(one, other) for one, other in zip(run(Saved(), x, g), want, strict=True))
    times = {product: times for (product, _, _), times in layer.counter.counts.items()}
    assert times == {"forward": 2, "input gradient": 1, "weight gradient": 1}


@every
def test_under_autocast_results_have_16_bits_and_gradients_the_parameters_format(kind):
    torch.manual_seed(0)
    layer, x = kind(16, 8), torch.randn(4, 16, requires_grad=True)
    exact = F.linear(x, layer.weight, layer.bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=0.1, atol=0.1)
    y.float().square().sum().backward()
    assert {p.grad.dtype for p in (x, *layer.parameters())} == {torch.float32}
    if kind in SIXTEEN:
        assert ("weight gradient", "bfloat16" if kind in BF16 else "float32", "") in layer.counter.counts
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


@every
def test_autocast_leaves_float64_as_it_is(kind):
    layer, x = kind(8, 4).double(), torch.randn(3, 8, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == nn.Linear(8, 4).double()(x).dtype == torch.float64


@every
def test_function_transforms_see_an_ordinary_layer(kind):
    torch.manual_seed(0)
    layer, x = kind(12, 6), torch.randn(5, 3, 12)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return functional_call(layer, parameters, (x,)).square().sum()

    found = grad(loss)(parameters, x)
    loss(parameters, x).backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.grad)
    for_each = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i, own in enumerate(x):
        for name, value in grad(loss)(parameters, own).items():
            torch.testing.assert_close(for_each[name][i], value)


@pytest.mark.parametrize("kind", COUNTED)
def test_second_derivatives_raise(kind):
    layer, x = kind(4, 4), torch.randn(2, 4, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice: convert the model"):
        first.sum().backward()
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        torch.autograd.grad(first.sum(), x)


@pytest.mark.parametrize("kind", COUNTED)
def test_second_derivatives_raise_in_function_transforms(kind):
    """A second derivative of zero would be silently wrong."""
    layer, x = kind(4, 4), torch.randn(2, 4)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return functional_call(layer, parameters, (x,)).pow(3).sum()

    def linear(parameters, x):  # whose upstream gradient depends on nothing
        return functional_call(layer, parameters, (x,)).sum()

    for twice in (
        grad(lambda x: grad(linear)(parameters, x)["weight"].sum()),
        lambda x: grad(lambda parameters: grad(linear, argnums=1)(parameters, x).sum())(parameters),
        grad(lambda x: grad(loss, argnums=1)(parameters, x).sum()),
        grad(lambda x: grad(loss)(parameters, x)["weight"].sum()),
        hessian(lambda x: loss(parameters, x)),
    ):
        with pytest.raises((RuntimeError, NotImplementedError), match="twice|jvp"):
            twice(x)


@every
def test_an_ordinary_layer_is_taken_over_and_given_back(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Sequential(nn.Linear(4, 3))).eval()
    before, parameters = model.state_dict(), list(model.parameters())
    x = torch.randn(5, 8)
    exact = model(x)
    convert(model, kind.from_linear)
    assert type(model[0]) is kind and not model[0].training
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(before)
    torch.testing.assert_close(model(x), exact, atol=0.1, rtol=0.1)
    twin = copy.deepcopy(model)
    twin(x)
    assert model[0].counter.counts.total() == (1 if kind in COUNTED else 0) == twin[0].counter.counts.total()
    to_linear(model)
    assert type(model[0]) is type(model[1][0]) is nn.Linear and not model[0].training
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(model(x), exact)


@every
def test_inputs_of_wrong_width_or_integer_dtype_raise(kind):
    layer = kind(8, 4)
    for x, is_ in (
        (torch.randn(4, 6), r"float32 \[4, 6\]"),
        (torch.tensor(1.0), r"float32 \[\]"),
        (torch.ones(2, 8, dtype=torch.long), r"int64 \[2, 8\]"),
    ):
        with pytest.raises(RuntimeError, match=f"floating-point .* 8 features in the last dimension, not {is_}"):
            layer(x)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@every
def test_no_outputs_one_row_and_no_memory_are_as_of_an_ordinary_layer(kind):
    for outputs, shape, device in ((0, (2, 8), "cpu"), (4, (8,), "cpu"), (4, (2, 8), "meta")):
        layer, ordinary = kind(8, outputs, device=device), nn.Linear(8, outputs, device=device)
        x = torch.ones(shape, device=device, requires_grad=True)
        y, expected = layer(x), ordinary(x)
        assert (y.shape, y.dtype, y.device) == (expected.shape, expected.dtype, expected.device)
        y.sum().backward()
        assert x.grad.shape == x.shape and layer.weight.grad.shape == layer.weight.shape


def test_saved_for_backward_by_m_is_a_quarter():
    held = {}
    for kind in (SwitchBackLinear, SwitchBackMLinear):
        sizes = []

        def pack(x, sizes=sizes):
            sizes.append(x.nbytes)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            kind(256, 256)(torch.randn(512, 256, requires_grad=True))
        held[kind] = sum(sizes)
    assert held[SwitchBackMLinear] < 0.27 * held[SwitchBackLinear]
