"""Triton's kernels of int8 layers, without a GPU: against torch's under the interpreter, and compiled ahead of time."""

from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from in_a_process import passes  # noqa: E402

CHECKS = Path(__file__).with_name("triton_kernels.py")


def test_under_the_interpreter():
    passes(CHECKS, TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_on_a_gpu():
    passes(CHECKS)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_kernels_compile_for_gpus(capability, dtype):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from limner.layers import triton_int8 as module

    target = GPUTarget("cuda", capability, 32)

    def machine_code(kernel, pointers, **constants):
        numbers = [name for name in kernel.arg_names if name not in pointers and name not in constants]
        signature = {**pointers, **dict.fromkeys(numbers, "i32"), **dict.fromkeys(constants, "constexpr")}
        ordered = {name: signature[name] for name in kernel.arg_names}
        made = triton.compile(
            ASTSource(fn=kernel, signature=ordered, constexprs=constants), target, {"enable_fp_fusion": False}
        )
        return made.asm["ptx"], made.asm["cubin"]

    x = f"*{dtype}"
    rows = machine_code(module.row_wise_kernel, {"x": x, "values": "*i8", "scale": "*fp32"}, BLOCK=1024)
    tile = machine_code(module.scaled_kernel, {"x": x, "values": "*i8", "inverse": "*fp32"}, TILE=64)
    assert all(code for _, code in (rows, tile))
    pointers = {"a": "*i8", "b": "*i8", "y": x, "scale_a": "*fp32", "scale_b": "*fp32", "bias": "*fp32"}
    flags = {"BY_ROW": True, "BY_COLUMN": True, "BIAS": True, "EVEN": capability == 90}
    ptx, code = machine_code(module.product_kernel.fn, pointers, **flags, M=64, N=64, K=64)
    assert code and "mma" in ptx and "s8" in ptx  # the tensor cores' product of integers
