"""The protocol of blocks, by which code outside a model finds them: for sharding, compression, scaling and monitors.

A model shows its blocks as entries of an `nn.ModuleList`, such as `blocks` of the prior or the two towers of CLIP. A
resblock x + branch(norm(x)) is any module with the children `norm` and `branch`.
"""

from torch import nn

from limner.errors import UserError


def block_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the lists of blocks by name, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}


def named_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of all lists by name, in the model's order."""
    return {f"{name}.{i}": block for name, blocks in block_lists(model).items() for i, block in enumerate(blocks)}


def resblocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the resblocks by name, in the model's order."""
    return {
        name: module
        for name, module in model.named_modules()
        if {"norm", "branch"} <= {child for child, _ in module.named_children()}
    }


def leading_part(model: nn.Module, depth: int) -> list[nn.Module]:
    """Return the modules before block `depth`: `embed` and the first `depth` of `blocks`, or [] for depth 0. Raises
    `UserError` if the model lacks the two."""
    embed, blocks = getattr(model, "embed", None), getattr(model, "blocks", None)
    if not isinstance(embed, nn.Module) or not isinstance(blocks, nn.ModuleList):
        raise UserError(f"a {type(model).__name__} cannot be frozen block by block: train it without freezing")
    return [embed, *blocks[:depth]] if depth else []
