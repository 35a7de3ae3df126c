"""Private functions and classes of torch and tyro that limner uses, with the version that each was checked with.

A release of torch or tyro may change them, so `pyproject.toml` bounds both versions. To raise a bound, run the tests
with the new release, then set the versions here. Names resolve at their first use: importing this module imports
neither package.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

PRIVATE = {
    # Kernels without a public name.
    "foreach_add_": ("torch:_foreach_add_", "torch 2.13"),
    "foreach_addcmul_": ("torch:_foreach_addcmul_", "torch 2.13"),
    "foreach_clamp_max_": ("torch:_foreach_clamp_max_", "torch 2.13"),
    "foreach_clamp_min_": ("torch:_foreach_clamp_min_", "torch 2.13"),
    "foreach_div": ("torch:_foreach_div", "torch 2.13"),
    "foreach_div_": ("torch:_foreach_div_", "torch 2.13"),
    "foreach_lerp": ("torch:_foreach_lerp", "torch 2.13"),
    "foreach_lerp_": ("torch:_foreach_lerp_", "torch 2.13"),
    "foreach_mul": ("torch:_foreach_mul", "torch 2.13"),
    "foreach_mul_": ("torch:_foreach_mul_", "torch 2.13"),
    "foreach_norm": ("torch:_foreach_norm", "torch 2.13"),
    "foreach_sign_": ("torch:_foreach_sign_", "torch 2.13"),
    "foreach_sqrt_": ("torch:_foreach_sqrt_", "torch 2.13"),
    "foreach_sub_": ("torch:_foreach_sub_", "torch 2.13"),
    "fused_adamw_": ("torch:_fused_adamw_", "torch 2.13"),
    "int_mm": ("torch:_int_mm", "torch 2.13"),
    "scaled_mm": ("torch:_scaled_mm", "torch 2.13"),
    "softmax_backward_data": ("torch:_softmax_backward_data", "torch 2.13"),
    "weight_int8pack_mm": ("torch:_weight_int8pack_mm", "torch 2.13"),
    "linear_pointwise": ("torch:ops.mkldnn._linear_pointwise", "torch 2.13"),
    "reorder_linear_weight": ("torch:ops.mkldnn._reorder_linear_weight", "torch 2.13"),
    # What the CPU supports.
    "is_amx_tile_supported": ("torch.cpu:_is_amx_tile_supported", "torch 2.13"),
    "is_avx512_bf16_supported": ("torch.cpu:_is_avx512_bf16_supported", "torch 2.13"),
    "is_mkldnn_bf16_supported": ("torch:ops.mkldnn._is_mkldnn_bf16_supported", "torch 2.13"),
    "is_vnni_supported": ("torch.cpu:_is_vnni_supported", "torch 2.13"),
    # Dispatch, tensors without data, collectives without processes, and trackers.
    "CollectiveOp": ("torch.distributed._tools.fake_collectives:CollectiveOp", "torch 2.13"),
    "FakeStore": ("torch.testing._internal.distributed.fake_pg:FakeStore", "torch 2.13"),
    "FakeTensor": ("torch._subclasses.fake_tensor:FakeTensor", "torch 2.13"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor:FakeTensorMode", "torch 2.13"),
    "MemTracker": ("torch.distributed._tools.mem_tracker:MemTracker", "torch 2.13"),
    "TorchDispatchMode": ("torch.utils._python_dispatch:TorchDispatchMode", "torch 2.13"),
    "local_scalar_dense": ("torch:ops.aten._local_scalar_dense.default", "torch 2.13"),
    "tree_leaves": ("torch.utils._pytree:tree_leaves", "torch 2.13"),
    "unset_fake_temporarily": ("torch._subclasses.fake_tensor:unset_fake_temporarily", "torch 2.13"),
    # The compiler; its modules take a second to import.
    "TorchDynamoException": ("torch._dynamo.exc:TorchDynamoException", "torch 2.13"),
    "aoti_compile_and_package": ("torch._inductor:aoti_compile_and_package", "torch 2.13"),
    "aoti_load_package": ("torch._inductor:aoti_load_package", "torch 2.13"),
    "dynamo_config": ("torch._dynamo:config", "torch 2.13"),
    "fresh_inductor_cache": ("torch._inductor.utils:fresh_cache", "torch 2.13"),
    "has_triton_package": ("torch.utils._triton:has_triton_package", "torch 2.13"),
    # Events of tyro's parser, before it prints an error.
    "tyro_errors": ("tyro:_errors", "tyro 1.0"),
}


def __getattr__(name: str) -> Any:
    """Return and keep the private object that `PRIVATE` names."""
    if name not in PRIVATE:
        raise AttributeError(f"limner.compat lists no private name {name!r}")
    value = globals()[name] = resolve_name(PRIVATE[name][0])
    return value
