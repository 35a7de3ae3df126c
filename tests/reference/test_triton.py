"""Triton's kernels without a GPU: against torch's operations under the interpreter, and compiled ahead of time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")


def passes(checks, **environment):
    """In a process of its own: Triton decides for the interpreter when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", Path(__file__).with_name(checks)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr


CHECKS = pytest.mark.parametrize("checks", ["triton_int8.py", "triton_decoding.py", "triton_optimizers.py"])


@CHECKS
def test_under_the_interpreter(checks):
    passes(checks, TRITON_INTERPRET="1")


@pytest.mark.gpu
@CHECKS
def test_on_a_gpu(checks):
    passes(checks)


CAPABILITIES = pytest.mark.parametrize("capability", [80, 90])


def compiled(kernel, capability, kinds, other, constants, **options):
    """The machine code and what it was made of, by name. `kinds` are those of the arguments, or `other`."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {**kinds, **dict.fromkeys(constants, "constexpr")}
    signature = {name: kinds.get(name, other) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, GPUTarget("cuda", capability, 32), options).asm
    assert made["cubin"]
    return made


@CAPABILITIES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_kernels_of_int8_layers_compile_for_gpus(capability, dtype):
    from limner.layers import triton_int8 as module

    def code(kernel, pointers, **constants):
        return compiled(kernel, capability, pointers, "i32", constants, enable_fp_fusion=False)

    x = f"*{dtype}"
    code(module.row_wise_kernel, {"x": x, "values": "*i8", "scale": "*fp32"}, BLOCK=1024)
    code(module.scaled_kernel, {"x": x, "values": "*i8", "inverse": "*fp32"}, TILE=64)
    pointers = {"a": "*i8", "b": "*i8", "y": x, "scale_a": "*fp32", "scale_b": "*fp32", "bias": "*fp32"}
    flags = {"BY_ROW": True, "BY_COLUMN": True, "BIAS": True, "EVEN": capability == 90}
    ptx = code(module.product_kernel.fn, pointers, **flags, M=64, N=64, K=64)["ptx"]
    assert "mma" in ptx and "s8" in ptx  # the tensor cores' product of integers


@CAPABILITIES
@pytest.mark.parametrize(("dtype", "some"), [("fp32", 16), ("bf16", 1), ("bf16", 16)])
def test_the_kernel_of_decoding_compiles_for_gpus(capability, dtype, some):
    from limner.layers import triton_decode as module

    constants = {"C": 64, "SOME": some, "KEYS": module._KEYS, "SLOTS": module._SLOTS[some]}
    states = ("q", "k", "v", "prefix_keys", "prefix_values", "keys", "values", "hole_bias", "out")
    kinds = {**dict.fromkeys(states, f"*{dtype}"), "position": "*i64", "scale": "fp32"}
    made = compiled(module.attend_kernel, capability, kinds, "i32", constants, num_warps=module._WARPS[some])
    assert ("mma" in made["ptx"]) == (some > 1 and dtype == "bf16")


@CAPABILITIES
@pytest.mark.parametrize("packed", [True, False])
def test_kernels_of_optimisers_compile_for_gpus(capability, packed):
    from limner.optim import triton_adamw as module

    constants = {"PACKED": packed, "BLOCK": module._BLOCK, "BLOCKS": module._BLOCKS, "ALIGNED": 16}
    kinds = {"rows": "*i64", "owners": "*i32", "rates": "*fp32", "own": "*fp32", "floors": "*fp32", "parts": "*fp32"}
    for kernel in (module.adamw_kernel, module.ratios_kernel):
        made = compiled(kernel, capability, {**kinds, "n": "i32"}, "fp32", constants, enable_fp_fusion=False)
        assert "ld.global.v4.b32" in made["ptx"]  # whole pieces are read 16 bytes at once
