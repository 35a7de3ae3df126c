"""Which parameters are decayed, and which are the matrices of blocks.

Weight decay shrinks a weight towards zero. For matrices that is a useful prior; for what is one
number per channel (gains, biases, a learned temperature) and for embedding tables, whose rows are
not seen in every batch, it is mostly harm. The paper decays everything (A.2, B.2 name no
exception), which "all" keeps.
"""

from typing import Any, Literal

from torch import nn

from limner.optim.dtensor import sharded

Decayed = Literal["matrices", "all"]


def block_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trainable matrices within repeated blocks (an `nn.ModuleList`), in the model's order: no
    embedding, no output layer."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {p for blocks in lists for p in blocks.parameters() if p.ndim == 2 and p.requires_grad}
    return [p for p in model.parameters() if p in inside]


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    decayed: Decayed = "matrices",
    exclude: frozenset[nn.Parameter] = frozenset(),
) -> list[dict[str, Any]]:
    """Groups for a torch optimiser over the trainable parameters but those to `exclude`, each
    parameter once, in the model's order.

    "matrices" decays tensors of two or more dimensions (dense and convolution kernels) except
    embedding tables: those of `nn.Embedding`, also where tied to a dense layer, and the parameters
    that a module names in a class attribute `no_weight_decay` (learned positions kept as a bare
    parameter). "all" decays everything.
    """
    exempt = set()
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        names = own if isinstance(module, nn.Embedding) else getattr(module, "no_weight_decay", ())
        exempt.update(id(own[name]) for name in names)

    def decays(p: nn.Parameter) -> bool:
        return decayed == "all" or (p.ndim >= 2 and id(p) not in exempt)

    trainable = [p for p in model.parameters() if p.requires_grad and p not in exclude]
    groups = [
        {"params": [p for p in trainable if decays(p) == decayed and sharded(p) == shared], "weight_decay": decay}
        for decayed, decay in ((True, weight_decay), (False, 0.0))
        for shared in (False, True)  # which no operation takes in one list
    ]
    return [group for group in groups if group["params"]]
