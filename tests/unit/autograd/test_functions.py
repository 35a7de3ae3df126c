"""Every custom autograd function: its gradient, its second derivative or its error; jvp and Hessians of models.

In float64 `gradcheck` compares with finite differences. Functions whose gradient differs from the derivative by design
(8-bit products, scales, rounding) are compared with a reference on values for which both must agree.
"""

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

import limner
from limner.attention.patterns import PATTERNS
from limner.attention.sparse import SparseAttention
from limner.experiments.float8 import DelayedScalingLinear
from limner.models.contrastive import CLIPConfig
from limner.models.transformer import TransformerConfig
from limner.numerics.formats import E6M9
from limner.objectives.contrastive import CLIPLoss
from limner.objectives.cross_entropy import _SummedCrossEntropy, linear_cross_entropy
from limner.quantization.low_precision import LowPrecisionLinear, StandardLinear
from limner.quantization.simulated_gradients import SimulatedGradientLinear, simulate_cast
from limner.training.grad_scaler import Scale, Unscale
from limner.training.parallel import SingleProcess

SCHEMES = [cls for cls in LowPrecisionLinear.__subclasses__() if cls is not StandardLinear]
#: Tests below, by function.
TESTED = {
    "Scale": "scales", "Unscale": "scales", "_AllGatherWithGrad": "gathering", "_RecomputedAttention": "attention",
    "_SummedCrossEntropy": "cross_entropy", "_LowPrecisionFunction": "8_bit", "_NoDoubleBackward": "8_bit",
    "_StandardFunction": "standard", "_RoundedGradient": "rounded",
    "_DelayedFunction": "delayed",
}  # fmt: skip


def doubles(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_every_function_has_a_test():
    found = set()
    for path in Path(limner.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and any(
                ast.unparse(base).endswith("autograd.Function") for base in node.bases
            ):
                found.add(node.name)
    assert found == TESTED.keys()
    names = [name for name in globals() if name.startswith("test_")]
    assert all(any(topic in name for name in names) for topic in TESTED.values())


def test_scales_multiply_and_divide_the_gradient():
    x, scale, one = doubles(3, 4), *torch.tensor([8.0, 1.0], dtype=torch.float64)

    def both(x, scale=scale):
        return Unscale.apply(Scale.apply(x, scale, None).sin(), scale)

    assert gradcheck(both, x)  # the factors cancel, which they do not in a second derivative
    assert gradgradcheck(lambda x: both(x, one), x)
    (scaled,) = torch.autograd.grad(Scale.apply(x, scale, None).sum(), x)
    (unscaled,) = torch.autograd.grad(Unscale.apply(x, scale).sum(), x)
    assert (scaled == 8).all() and (unscaled == 1 / 8).all()


def test_gathering_passes_the_gradient_of_the_own_rows():
    process, x = SingleProcess(), doubles(3, 4)
    assert gradcheck(process.all_gather_with_grad, x) and gradgradcheck(process.all_gather_with_grad, x)

    class Second(SingleProcess):
        """The second of two processes, whose other one holds ones."""

        rank, world_size = 1, 2

        def all_gather(self, values):
            return [torch.ones_like(values), values]

    assert gradcheck(Second().all_gather_with_grad, x)


@pytest.mark.parametrize("name", ["row", "column", "conv"])
def test_sparse_attention(name):
    attention = SparseAttention(PATTERNS[name]((3, 4), 3), 3)
    q, k, v = (doubles(1, 2, 15, 2, seed=seed) for seed in range(3))
    assert gradcheck(attention, (q, k, v), fast_mode=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice: build the model with pattern='dense'"):
        torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)


def test_cross_entropy():
    layer = torch.nn.Linear(3, 5, dtype=torch.float64)
    x, target = doubles(4, 3), torch.tensor([0, 4, 3, 2])

    def loss(x, weight, bias):
        return _SummedCrossEntropy.apply(x, weight, bias, target)

    inputs = (x, layer.weight, layer.bias)
    assert loss(*inputs) == linear_cross_entropy(x, layer, target)
    assert gradcheck(loss, inputs)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice: take F\.cross_entropy"):
        torch.autograd.grad(loss(*inputs), x, create_graph=True)


def test_the_standard_function():
    layer, x = StandardLinear(3, 5).double(), doubles(2, 4, 3)
    assert gradcheck(layer, x) and gradgradcheck(layer, x)
    values = [value.detach().requires_grad_() for value in layer.parameters()]

    def call(*values):
        return functional_call(layer, dict(zip(("weight", "bias"), values, strict=True)), x)

    assert gradcheck(call, values) and gradgradcheck(call, values)


@pytest.mark.parametrize("cls", SCHEMES)
def test_8_bit_layers_equal_linear_on_values_without_rounding(cls):
    """Integers of which one in each row and column is the largest are exact in int8, powers of two in float8."""
    generator = torch.Generator().manual_seed(0)

    def exact(rows, columns):
        largest, formats = 127, cls.scheme.format
        if formats != torch.int8:
            return 2.0 ** torch.randint(0, 3, (rows, columns), generator=generator)
        values = torch.randint(-largest, largest + 1, (rows, columns), generator=generator).float()
        for i in range(max(rows, columns)):
            values[i % rows, i % columns] = largest
        return values

    layer, x, upstream = cls(8, 8), exact(16, 8).requires_grad_(), exact(16, 8)
    layer.weight.data, layer.bias.data = exact(8, 8), torch.zeros(8)
    inputs = (x, layer.weight, layer.bias)
    ours = torch.autograd.grad(layer(x), inputs, upstream, create_graph=True)
    expected = torch.autograd.grad(F.linear(*inputs), inputs, upstream)
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(ours[1:], expected[1:], rtol=2**-8, atol=1e-2)  # 16 bits round the weight gradient
    with pytest.raises(RuntimeError, match="8-bit layers cannot be differentiated twice"):
        ours[0].sum().backward()


def test_delayed_scales_equal_linear_on_powers_of_two():
    """The first scales are those of the tensors, so that powers of two are exact in float8."""
    x, weight, upstream = (2.0 ** torch.randint(0, 3, (n, 8), generator=torch.Generator()) for n in (16, 8, 16))
    layer = DelayedScalingLinear(8, 8)
    layer.weight.data, layer.bias.data = weight, torch.zeros(8)
    inputs = (x.requires_grad_(), layer.weight, layer.bias)
    ours = torch.autograd.grad(layer(x), inputs, upstream)
    torch.testing.assert_close(ours, torch.autograd.grad(F.linear(*inputs), inputs, upstream))


def test_rounded_gradients():
    layer = torch.nn.Linear(3, 5)
    rounded, x = SimulatedGradientLinear(layer, E6M9), torch.randn(4, 3, requires_grad=True)
    upstream = torch.randn(4, 5)
    ours = torch.autograd.grad(rounded(x), (x, layer.weight), upstream)
    cast = simulate_cast(upstream, E6M9)
    expected = torch.autograd.grad(layer(x), (x, layer.weight), cast)
    torch.testing.assert_close(ours, tuple(simulate_cast(g, E6M9) for g in expected), rtol=0, atol=0)


def prior_loss():
    """The prior's loss by its logits, with dense attention: twice differentiable."""
    config = TransformerConfig(
        text_vocab=9, image_vocab=7, text_len=3, grid=(3, 4), width=8, depth=2, heads=2, pattern="dense"
    )
    text, image = torch.randint(0, 9, (2, 3)), torch.randint(0, 7, (2, 12))

    def loss(model):
        by_text, by_image = model(text, image)
        return F.cross_entropy(by_text.mT, text[:, 1:]) + F.cross_entropy(by_image.mT, image)

    return config.build().double(), loss


def contrastive_loss():
    config = CLIPConfig(text_vocab=9, text_len=3, size=8, patch=4, width=8, depth=1, heads=2, embedding=4)
    batch = {"pixels": torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8), "text": torch.randint(0, 9, (4, 3))}
    return config.build().double(), lambda model: CLIPLoss()(model, batch, 0, None)[0]


@pytest.mark.parametrize("make", [prior_loss, contrastive_loss])
def test_jvp_and_hessian_vector_products_equal_finite_differences(make):
    torch.manual_seed(0)
    model, loss = make()
    at = {name: p.detach() + 0.1 * torch.randn_like(p) for name, p in model.named_parameters()}
    direction = {name: torch.randn_like(p) for name, p in at.items()}

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self):
            return loss(self.model)

    def value(parameters):
        return functional_call(Loss(), {f"model.{name}": p for name, p in parameters.items()}, ())

    def moved(step):
        return {name: p + step * direction[name] for name, p in at.items()}

    gradient, step = torch.func.grad(value), 1e-5
    _, slope = torch.func.jvp(value, (at,), (direction,))
    assert slope.item() == pytest.approx(((value(moved(step)) - value(moved(-step))) / (2 * step)).item(), rel=1e-6)
    _, product = torch.func.jvp(gradient, (at,), (direction,))  # forward over reverse
    ahead, behind = gradient(moved(step)), gradient(moved(-step))
    for name, column in product.items():
        torch.testing.assert_close(column, (ahead[name] - behind[name]) / (2 * step), rtol=1e-4, atol=1e-6)
