from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from limner.numerics.precision import Auto, Bf16, Fp32, has_fast_bf16, product


def test_auto_is_bf16_exactly_where_the_processor_multiplies_it_faster() -> None:
    if not Path("/proc/cpuinfo").exists():
        pytest.skip("no list of the processor's features")
    flags = set(Path("/proc/cpuinfo").read_text().split())
    fast = "amx_bf16" in flags or {"sse4a", "avx512_bf16"} <= flags
    assert has_fast_bf16(torch.device("cpu")) == fast
    assert Auto().dtype("cpu") == (torch.bfloat16 if fast else torch.float32)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [(Bf16(), torch.bfloat16), (Fp32(), torch.float32), (Auto(), Auto().dtype("cpu"))],
)
def test_autocast_runs_matrix_products_in_the_chosen_format(precision, dtype) -> None:
    assert precision.dtype("cpu") == dtype
    x = torch.ones(2, 2)
    with precision.autocast("cpu"):
        assert (x @ x).dtype == dtype


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_products_of_16_bit_matrices_are_summed_in_32(device: str, batch: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(*batch, 40, 64, device=device).bfloat16() for _ in range(2))
    found, exact = product(a, b.mT), a.double() @ b.double().mT
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact.float(), rtol=0, atol=1e-4)
    torch.testing.assert_close(product(a.float(), b.float().mT), exact.float(), rtol=0, atol=1e-4)
    if device == "cpu":
        assert torch.backends.mkldnn.matmul.fp32_precision == "none"  # the setting is restored


@pytest.mark.parametrize("other", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_products_with_float64_are_float64(other: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 40, 64, dtype=torch.float64), torch.randn(3, 64, 7).to(other)
    for found, exact in ((product(a, b), a @ b.double()), (product(b.mT, a.mT), b.double().mT @ a.mT)):
        assert found.dtype == torch.float64 and torch.equal(found, exact)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert product(a, b).dtype == torch.float64


def test_products_of_fp16_are_not_rounded_to_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 has three bits less. Not every processor rounds where the setting allows it."""
    settings, multiply = [], torch.Tensor.__matmul__

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        settings.append(torch.backends.mkldnn.matmul.fp32_precision)
        return multiply(a, b)

    torch.manual_seed(0)
    a, b = torch.randn(40, 64).half(), torch.randn(64, 50).half()
    for left, right in ((a, b), (a, b.float()), (a.float(), b), (a, b.bfloat16())):
        exact = (left.double() @ right.double()).float()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "__matmul__", watched)
            found = product(left, right)
        assert found.dtype == torch.float32 and set(settings) == {"none"}
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-4)
