"""Parameter groups by weight decay, and the matrices of transformer blocks.

Weight decay shrinks weights towards zero, a useful prior for matrices. It mostly harms parameters with one number per
channel (gains, biases, a learned temperature) and embedding tables, because a batch contains few of their rows. The
paper decays everything (A.2, B.2 name no exception), which is the scope "all".
"""

from typing import Any, Literal

from torch import nn

from limner.blocks import block_lists
from limner.optim.dtensor import is_dtensor

DecayScope = Literal["matrices", "all"]


def block_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable matrices within a model's blocks, in model order."""
    lists = block_lists(model).values()
    inside = {p for blocks in lists for p in blocks.parameters() if p.ndim == 2 and p.requires_grad}
    return [p for p in model.parameters() if p in inside]


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    decay_scope: DecayScope = "matrices",
    exclude: frozenset[nn.Parameter] = frozenset(),
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: each trainable parameter outside `exclude` once, in model order.

    "matrices" decays tensors of two or more dimensions (dense and convolution kernels) except embedding tables: those
    of `nn.Embedding`, also where tied to a dense layer, and the parameters that a module names in a class attribute
    `no_weight_decay` (learned positions in a bare parameter). "all" decays everything.
    """
    exempt = set()
    for module in model.modules():
        parameters = dict(module.named_parameters(recurse=False))
        names = parameters if isinstance(module, nn.Embedding) else getattr(module, "no_weight_decay", ())
        exempt.update(id(parameters[name]) for name in names)

    def decays(p: nn.Parameter) -> bool:
        return decay_scope == "all" or (p.ndim >= 2 and id(p) not in exempt)

    trainable = [p for p in model.parameters() if p.requires_grad and p not in exclude]
    groups = [
        {"params": [p for p in trainable if decays(p) == decayed and is_dtensor(p) == sharded], "weight_decay": decay}
        for decayed, decay in ((True, weight_decay), (False, 0.0))
        for sharded in (False, True)  # torch's multi-tensor operations cannot mix them
    ]
    return [group for group in groups if group["params"]]
