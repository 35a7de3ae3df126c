"""Movement of tensors between processes when a layout changes (AutoDP of PipeTransformer, He et al. 2021, section 3.4).

A process that needs tensors of a parameter receives them from one that holds them. All processes compute the same list
of messages, so none asks for a tensor. Only tensors that exist are sent: a parameter that never had a gradient has no
moments.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from limner.training.state import optimizer_tensors
from limner.training.train_state import TrainState

__all__ = ["Message", "messages", "move", "named_states"]


class Message(NamedTuple):
    """A tensor that the rank `source` sends to the rank `target`. Keys are "GROUP/PARAMETER"."""

    key: str
    source: int
    target: int


def messages(held: Sequence[Collection[str]], needed: Sequence[Collection[str]]) -> list[Message]:
    """Return the messages after which each rank has all tensors of the parameters that it needs.

    Args:
        held: keys of the tensors of each rank.
        needed: names of the parameters of each rank.
    """
    holders: dict[str, list[int]] = {}
    for rank, keys in enumerate(held):
        for key in keys:
            holders.setdefault(key, []).append(rank)
    return [
        Message(key, ranks[target % len(ranks)], target)  # holders share the work
        for key, ranks in sorted(holders.items())
        for target, names in enumerate(needed)
        if key.partition("/")[2] in names and target not in ranks
    ]


def move(tensors: Mapping[str, Tensor], needed: Sequence[Collection[str]], device: torch.device) -> dict[str, Tensor]:
    """Exchange tensors between all processes; return those of the parameters that this process needs, by key.

    Args:
        tensors: tensors of this process by "GROUP/PARAMETER". Tensors of one key are equal on all processes.
        needed: names of the parameters of each rank.
        device: device on which tensors are sent and received.
    """
    rank, described = distributed.get_rank(), {key: (x.shape, x.dtype) for key, x in tensors.items()}
    held: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{}] * distributed.get_world_size()
    distributed.all_gather_object(held, described)
    moved = {key: x for key, x in tensors.items() if key.partition("/")[2] in needed[rank]}
    operations = []
    for message in messages(held, needed):
        if message.source == rank:
            sent = tensors[message.key].to(device).contiguous()
            operations.append(distributed.P2POp(distributed.isend, _as_bytes(sent), message.target))
        elif message.target == rank:
            shape, dtype = held[message.source][message.key]
            moved[message.key] = torch.empty(shape, dtype=dtype, device=device)
            operations.append(distributed.P2POp(distributed.irecv, _as_bytes(moved[message.key]), message.source))
    for work in distributed.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return moved


def _as_bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, which gloo sends for all formats."""
    return x.view(-1).view(torch.uint8)


def named_states(run: TrainState) -> dict[str, Tensor]:
    """Return the tensors of this process's parameters by "GROUP/PARAMETER"; a group for each optimizer state."""
    states = {f"model/{name}": p.detach() for name, p in run.model.named_parameters()}
    states |= {f"ema/{name}": x for name, x in (run.ema.state_dict() if run.ema else {}).items()}
    states |= {f"errors/{name}": x for name, x in run.parallel.reduction.mean_error_buffers().items()}
    for entry, tensor in optimizer_tensors(run.model, run.optimizers).items():
        key, _, name = entry.partition(".")
        states[f"{key}/{name}"] = tensor
    return {key: x for key, x in states.items() if not x.is_meta}
