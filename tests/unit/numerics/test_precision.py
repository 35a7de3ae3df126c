from pathlib import Path

import pytest
import torch

from limner.numerics.precision import autocast, choose_precision, has_fast_bf16


def test_auto_is_bf16_exactly_where_the_processor_has_it() -> None:
    if not Path("/proc/cpuinfo").exists():
        pytest.skip("no list of the processor's features")
    flags = set(Path("/proc/cpuinfo").read_text().split())
    fast = bool(flags & {"amx_bf16", "avx512_bf16"})
    assert has_fast_bf16(torch.device("cpu")) == fast
    assert choose_precision("cpu") == (torch.bfloat16 if fast else torch.float32)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_autocast_runs_matrix_products_in_the_chosen_format(name, dtype) -> None:
    assert choose_precision("cpu", name) == dtype
    x = torch.ones(2, 2)
    with autocast("cpu", dtype):
        assert (x @ x).dtype == dtype
