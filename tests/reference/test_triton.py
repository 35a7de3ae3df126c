"""Triton's kernels without a GPU: against torch's operations in the interpreter, and compiled ahead of time."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")


def run_checks(checks, **environment):
    """Run a file in a new process, since Triton selects the interpreter when it is imported."""
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", Path(__file__).with_name(checks)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-4_000:] + process.stderr


CHECKS = pytest.mark.parametrize(
    "checks", ["triton_int8.py", "triton_fused.py", "triton_decoding.py", "triton_optimizers.py"]
)


@pytest.mark.slow
@CHECKS
def test_in_the_interpreter(checks):
    run_checks(checks, TRITON_INTERPRET="1")


@pytest.mark.gpu
@CHECKS
def test_on_a_gpu(checks):
    run_checks(checks)


CAPABILITIES = pytest.mark.parametrize("capability", [80, 90])


def compiled(kernel, capability, kinds, other, constants, **options):
    """Compile a kernel to machine code and its intermediate forms, by name. `kinds` are types of arguments, `other` the
    default."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {**kinds, **dict.fromkeys(constants, "constexpr")}
    signature = {name: kinds.get(name, other) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    stages = triton.compile(source, GPUTarget("cuda", capability, 32), options).asm
    assert stages["cubin"]
    return stages


@CAPABILITIES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_kernels_of_int8_layers_compile_for_gpus(capability, dtype):
    from limner.quantization import triton_int8 as module

    def code(kernel, pointers, **constants):
        return compiled(kernel, capability, pointers, "i32", constants, enable_fp_fusion=False)

    x = f"*{dtype}"
    code(module.row_wise_kernel, {"x": x, "values": "*i8", "scale": "*fp32"}, BLOCK=1024)
    code(module.quantize_kernel, {"x": x, "values": "*i8", "inverse": "*fp32"}, TILE=64)
    pointers = {"a": "*i8", "b": "*i8", "y": x, "scale_a": "*fp32", "scale_b": "*fp32", "bias": "*fp32"}
    flags = {"BY_ROW": True, "BY_COLUMN": True, "BIAS": True, "EVEN": capability == 90}
    ptx = code(module.product_kernel.fn, pointers, **flags, M=64, N=64, K=64)["ptx"]
    assert "mma" in ptx and "s8" in ptx  # integer products of the tensor cores


@CAPABILITIES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_kernels_of_fused_int8_layers_compile_for_gpus(capability, dtype, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench/gpu")
    module = importlib.import_module("fused_int8")
    pointers = {"x": f"*{dtype}", "u": f"*{dtype}", "g": f"*{dtype}", "out": "*bf16", "values": "*i8", "n": "i32"}
    options = {"num_warps": 16, "enable_fp_fusion": False}
    compiled(module.norm_kernel, capability, {**pointers, "eps": "fp32"}, "*fp32", {"BLOCK": 4_096}, **options)
    for backward in (True, False):
        constants = {"BACKWARD": backward, "BLOCK": 16_384}
        compiled(module.gelu_kernel, capability, pointers, "*fp32", constants, **options)


@CAPABILITIES
@pytest.mark.parametrize(("dtype", "candidates"), [("fp32", 16), ("bf16", 1), ("bf16", 16)])
def test_the_decoding_kernel_compiles_for_gpus(capability, dtype, candidates):
    from limner.attention import triton_decode as module

    constants = {
        "C": 64,
        "CANDIDATES": candidates,
        "KEYS": module.KEYS_PER_BLOCK,
        "SLOTS": module.SLOTS_PER_BLOCK[candidates],
    }
    states = ("q", "k", "v", "prefix_keys", "prefix_values", "keys", "values", "gap_bias", "out")
    kinds = {**dict.fromkeys(states, f"*{dtype}"), "position": "*i64", "scale": "fp32"}
    stages = compiled(module.attend_kernel, capability, kinds, "i32", constants, num_warps=module.WARPS[candidates])
    assert ("mma" in stages["ptx"]) == (candidates > 1 and dtype == "bf16")


@CAPABILITIES
@pytest.mark.parametrize("quantized", [True, False])
def test_optimizer_kernels_compile_for_gpus(capability, quantized):
    from limner.optim import triton_adamw as module

    constants = {
        "QUANTIZED": quantized,
        "BLOCK": module.BLOCK_VALUES,
        "BLOCKS": module.BLOCKS_PER_PROGRAM,
        "ALIGNED": 16,
    }
    pointers = dict.fromkeys(("lrs", "coefficients", "floors", "parts"), "*fp32")
    kinds = {"rows": "*i64", "owners": "*i32", "n": "i32", **pointers}
    for kernel in (module.adamw_kernel, module.ratios_kernel):
        stages = compiled(kernel, capability, kinds, "fp32", constants, enable_fp_fusion=False)
        assert "ld.global.v4.b32" in stages["ptx"]  # 16-byte reads of whole pieces
