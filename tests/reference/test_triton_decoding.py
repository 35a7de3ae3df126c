"""Triton's kernel of decoding, without a GPU: against torch's operations under the interpreter, and compiled ahead of
time."""

from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from in_a_process import passes  # noqa: E402

CHECKS = Path(__file__).with_name("triton_decoding.py")


def test_under_the_interpreter():
    passes(CHECKS, TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_on_a_gpu():
    passes(CHECKS)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("dtype", "some"), [("fp32", 16), ("bf16", 1), ("bf16", 16)])
def test_it_compiles_for_gpus(capability, dtype, some):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from limner.layers import triton_decode as module

    constants = {"C": 64, "SOME": some, "KEYS": module._KEYS, "SLOTS": module._SLOTS[some]}
    states = ("q", "k", "v", "prefix_keys", "prefix_values", "keys", "values", "hole_bias", "out")
    kinds = {**dict.fromkeys(states, f"*{dtype}"), "position": "*i64", "scale": "fp32"}
    kinds |= dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in module.attend_kernel.arg_names}
    made = triton.compile(
        ASTSource(fn=module.attend_kernel, signature=signature, constexprs=constants),
        GPUTarget("cuda", capability, 32),
    )
    assert made.asm["cubin"]
    assert ("mma" in made.asm["ptx"]) == (some > 1 and dtype == "bf16")
