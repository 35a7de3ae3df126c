"""Triton's kernel of optimisers, without a GPU: against torch's under the interpreter, and compiled ahead of time."""

from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from in_a_process import passes  # noqa: E402

CHECKS = Path(__file__).with_name("triton_optimizers.py")


def test_under_the_interpreter():
    passes(CHECKS, TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_on_a_gpu():
    passes(CHECKS)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("packed", [True, False])
def test_kernels_compile_for_gpus(capability, packed):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from limner.optim import triton_adamw as module

    constants = {"PACKED": packed, "BLOCK": module._BLOCK, "BLOCKS": module._BLOCKS, "ALIGNED": 16}
    tables = {"rows": "*i64", "owners": "*i32", "rates": "*fp32", "own": "*fp32", "floors": "*fp32", "parts": "*fp32"}
    for kernel in (module.adamw_kernel, module.ratios_kernel):
        kinds = {**tables, "n": "i32", **dict.fromkeys(constants, "constexpr")}
        signature = {name: kinds.get(name, "fp32") for name in kernel.arg_names}
        made = triton.compile(
            ASTSource(fn=kernel, signature=signature, constexprs=constants),
            GPUTarget("cuda", capability, 32),
            {"enable_fp_fusion": False},
        )
        assert made.asm["cubin"]
        assert "ld.global.v4.b32" in made.asm["ptx"]  # whole pieces are read 16 bytes at once
