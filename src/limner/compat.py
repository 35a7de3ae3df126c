"""Private functions and classes of torch and tyro that limner uses, with the version that each was checked with.

A release of torch or tyro may change them, so `pyproject.toml` bounds both versions. To raise a bound, run the tests
with the new release, then set the versions here. Names resolve at their first use: importing this module imports
neither package.
"""

from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

_KERNELS = (  # functions of torch without a public name
    "foreach_add_", "foreach_addcmul_", "foreach_clamp_max_", "foreach_clamp_min_", "foreach_div", "foreach_div_",
    "foreach_lerp", "foreach_lerp_", "foreach_mul", "foreach_mul_", "foreach_norm", "foreach_sign_", "foreach_sqrt_",
    "foreach_sub_", "fused_adamw_", "int_mm", "scaled_mm", "softmax_backward_data", "weight_int8pack_mm",
)  # fmt: skip
PRIVATE = {
    **{name: (f"torch:_{name}", "torch 2.13") for name in _KERNELS},
    "linear_pointwise": ("torch:ops.mkldnn._linear_pointwise", "torch 2.13"),
    "reorder_linear_weight": ("torch:ops.mkldnn._reorder_linear_weight", "torch 2.13"),
    # What the CPU supports.
    "is_amx_tile_supported": ("torch.cpu:_is_amx_tile_supported", "torch 2.13"),
    "is_avx512_bf16_supported": ("torch.cpu:_is_avx512_bf16_supported", "torch 2.13"),
    "is_mkldnn_bf16_supported": ("torch:ops.mkldnn._is_mkldnn_bf16_supported", "torch 2.13"),
    "is_vnni_supported": ("torch.cpu:_is_vnni_supported", "torch 2.13"),
    # Dispatch, tensors without data, and collectives without processes.
    "CollectiveOp": ("torch.distributed._tools.fake_collectives:CollectiveOp", "torch 2.13"),
    "FakeStore": ("torch.testing._internal.distributed.fake_pg:FakeStore", "torch 2.13"),
    "FakeTensor": ("torch._subclasses.fake_tensor:FakeTensor", "torch 2.13"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor:FakeTensorMode", "torch 2.13"),
    "TorchDispatchMode": ("torch.utils._python_dispatch:TorchDispatchMode", "torch 2.13"),
    "active_fake_mode": ("torch._guards:active_fake_mode", "torch 2.13"),
    "local_scalar_dense": ("torch:ops.aten._local_scalar_dense.default", "torch 2.13"),
    "tree_leaves": ("torch.utils._pytree:tree_leaves", "torch 2.13"),
    "unset_fake_temporarily": ("torch._subclasses.fake_tensor:unset_fake_temporarily", "torch 2.13"),
    # The autograd graph; the functions below read its nodes.
    "current_autograd_node": ("torch._C:_current_autograd_node", "torch 2.13"),
    "next_sequence_nr": ("torch._C._autograd:_get_sequence_nr", "torch 2.13"),
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


def sequence_nr(node: Any) -> int:
    """Return the number of a node of the autograd graph: it counts the nodes that the thread's forward pass creates."""
    return node._sequence_nr()


def gradient_metadata(node: Any) -> Any:
    """Return `shape` and `dtype` of the gradients that enter a node, one for each output of its operation."""
    return node._input_metadata


def forward_class(node: Any) -> type | None:
    """Return the subclass of `torch.autograd.Function` that created a node; None for operations of torch."""
    return getattr(node, "_forward_cls", None)


def packed_tensors(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names of a node's saved tensors, and what the `pack` of `saved_tensors_hooks` returned for each.

    Unlike the attributes `_saved_NAME`, this does not unpack, which would recompute under checkpointing. Numbers and
    undefined tensors are not packed.
    """
    for attribute in dir(node):
        if attribute.startswith("_raw_saved_"):
            name, value = attribute.removeprefix("_raw_saved_"), getattr(node, attribute)
            values = {name: value} if not isinstance(value, tuple) else {f"{name}[{i}]": x for i, x in enumerate(value)}
            yield from ((key, saved.data) for key, saved in values.items() if saved.unpack_hook is not None)
