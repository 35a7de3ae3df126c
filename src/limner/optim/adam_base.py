"""What optimisers of Adam's family share: two moments for each tensor, in fp32 or in 16 bits, and a count of its steps.

A tensor without gradient is left out of a step: its moments stay and its own count does not advance, so that the bias
correction stays right for tensors whose updates are skipped (App. G of Wortsman et al. 2023 skips those with Inf or
NaN).

Moments in 16 bits (App. B.2 and D of Ramesh et al. 2021) are codes: 1-6-9 for the running mean, 0-6-10 for the running
variance. A step unpacks those of a few tensors at a time, computes in fp32, and packs them again; `read` and `write`
are all that knows of it. Which tensors: groups of parameters say `packed`, and of these the tensors with two dimensions
or more, unless they are float64. "Store all gains, biases, embeddings, and unembeddings in 32-bit precision, [...] and
32-bit Adam moments" (D.2): gains and biases have one dimension; embeddings and output layers belong into a group with
`packed=False`.

Weights may be in 16 bits, too ("most parameters, Adam moments, and activations are stored in 16-bit precision", §2.4).
Then their moments, if not packed, are fp32, and so is the whole update; the weight is rounded once, at its end, up or
down at random, such that its mean is what was computed. The paper does not say how it rounds. To the nearest number,
what is less than half a step would be lost, in every update:
docs/log/2026-11-25.md, "Weights in 16 bits rounded at random" has what was measured. The random numbers
follow from a tensor's count of steps and its place in the optimiser, so that processes which hold the same weights go
on to hold the same, and a run that goes on draws those of one that was never stopped.

State of a parameter, under the names that torch's AdamW has for it: `step` (fp32, on the CPU), `exp_avg`, `exp_avg_sq`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from limner.numerics.compile_elementwise import triton_launches
from limner.numerics.formats import E6M9, HALVES, UE6M10
from limner.optim.dtensor import local
from limner.optim.grad_access import read as read_gradient

FORMATS = {"exp_avg": E6M9, "exp_avg_sq": UE6M10}
SMALLEST = torch.finfo(torch.float32).tiny  # above zero, of full precision
_SETTINGS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "lr": ("lr is finite and 0 or more", lambda x: 0 <= x < inf),
    "betas": ("betas are in [0, 1)", lambda x: all(0 <= beta < 1 for beta in x)),
    "momentum": ("momentum is in [0, 1)", lambda x: 0 <= x < 1),
    "eps": (f"eps is finite and at least {SMALLEST:.2g}, since 0 / 0 is no update", lambda x: SMALLEST <= x < inf),
    "weight_decay": ("weight_decay is finite and 0 or more", lambda x: 0 <= x < inf),
    "power": ("power is above 0", lambda x: x > 0),
    "most": ("most is above 0", lambda x: x > 0),
}
_AT_ONCE = 1 << 17  # values of small tensors that are updated together, within a core's cache
_GPU_AT_ONCE = 1 << 25  # on a GPU, where a call takes longer than a small tensor
_ONE_KERNEL = 1 << 27  # where one kernel takes them, and nothing is copied


def require(group: Mapping[str, Any]) -> None:
    """Raises `ValueError` if a setting of a group of parameters cannot be; NaN can nowhere."""
    for name, (says, fits) in _SETTINGS.items():
        if name in group and not fits(group[name]):
            raise ValueError(f"{says}, not {group[name]}")


def refuse_halves(kind: str, parameters: Iterable[Tensor]) -> None:
    """Raises `ValueError` if one of the parameters is in 16 bits, in which that optimiser would lose small updates."""
    if any(p.dtype in HALVES for p in parameters):
        raise ValueError(f"{kind} has no update for weights in 16 bits: keep them in fp32, or take AdamW16, say")


def read(state: Mapping[str, Tensor], moment: str) -> Tensor:
    """A moment as a number: itself in fp32, or unpacked; of a shared one this process's shard."""
    kept = local(state[moment])
    return kept if kept.is_floating_point() else FORMATS[moment].unpack(kept)


def write(state: Mapping[str, Tensor], moment: str, value: Tensor) -> None:
    """Keep what `read` gave, after it has changed in place."""
    kept = local(state[moment])
    if not kept.is_floating_point():
        FORMATS[moment].pack(value, out=kept)


class StepTensors(NamedTuple):
    """What a step is given of each tensor, in fp32 (or float64): this process's shards, or all; of weights in 16 bits
    copies. `at_once`: one kernel takes them, to which moments may be codes."""

    weights: list[Tensor]
    gradients: list[Tensor]
    means: list[Tensor]
    variances: list[Tensor]
    at_once: bool


class MomentOptimizer(torch.optim.Optimizer):
    """The step, but for what it does with gradients and moments: `_update` of a subclass."""

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, ...], eps: float, weight_decay: float, **others: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **others})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. Raises `ValueError` for settings that cannot be."""
        require(self.defaults | param_group)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. A `closure` computes the loss anew, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        places = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        for group in self.param_groups:
            packed = group.get("packed", False)
            for parameters in together((p for p in group["params"] if p.grad is not None), packed):
                self._step(group, parameters, [places[p] for p in parameters])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but that every tensor stays as it was saved: torch makes codes fp32. Settings that another
        optimiser of this family has not saved, torch's AdamW say, stay as they are."""
        before = [dict(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, before, strict=True):
            group |= own | group
        numbers = (i for group in state_dict["param_groups"] for i in group["params"])
        parameters = (p for group in self.param_groups for p in group["params"])
        for i, p in zip(numbers, parameters, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                device = "cpu" if key == "step" else p.device
                self.state[p][key] = value.to(device, copy=True)

    def _step(self, group: Mapping[str, Any], parameters: list[Tensor], places: list[int]) -> None:
        states = [self._state(p, group.get("packed", False)) for p in parameters]
        torch._foreach_add_([state["step"] for state in states], 1)
        gradients = [read_gradient(p.grad) for p in parameters if p.grad is not None]
        weights = [local(p).float() if p.dtype in HALVES else local(p) for p in parameters]
        means, variances = ([local(state[moment]) for state in states] for moment in FORMATS)
        if not (at_once := one_kernel(weights, gradients, means, variances)):
            means, variances = ([read(state, moment) for state in states] for moment in FORMATS)
        counts = [int(state["step"]) for state in states]
        self._update(group, parameters, StepTensors(weights, gradients, means, variances, at_once), counts)
        for p, weight, count, place in zip(parameters, weights, counts, places, strict=True):
            if p.dtype in HALVES:
                generator = torch.Generator(weight.device).manual_seed(_seed(count, place))
                local(p).copy_(HALVES[p.dtype].rounded(weight, generator))
        if not at_once:
            for moment, values in zip(FORMATS, (means, variances), strict=True):
                for state, value in zip(states, values, strict=True):
                    write(state, moment, value)

    def _state(self, p: Tensor, packed: bool) -> dict[str, Tensor]:
        state = self.state[p]
        packed = packed and packs(p)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            for moment, its_format in FORMATS.items():
                plain = torch.float32 if p.dtype in HALVES else p.dtype
                dtype = its_format.dtype if packed else plain  # code 0 is the number 0
                state[moment] = torch.zeros_like(p, dtype=dtype)
        return state

    def _update(self, group: Mapping[str, Any], whole: list[Tensor], given: StepTensors, counts: list[int]) -> None:
        """Change weights and moments in place, of the `whole` parameters. `counts` are the steps of each tensor, this
        one included."""
        raise NotImplementedError


def packs(p: Tensor) -> bool:
    """Whether moments of a tensor may be in 16 bits: not those of float64, whose updates are to be exact."""
    return p.ndim >= 2 and p.dtype != torch.float64


def together(parameters: Iterable[Tensor], packed: bool = False) -> Iterator[list[Tensor]]:
    """Parameters in lists that are updated at once: large ones alone, so that a step needs little memory beyond the
    state, and small ones of one device and dtype together, so that it needs few calls; those whose moments are `packed`
    apart from others, since one kernel may take them. Raises `RuntimeError` for a sparse gradient."""
    parameters = list(parameters)
    if any(p.grad is not None and p.grad.layout != torch.strided for p in parameters):
        raise RuntimeError("sparse gradients have no update here: give nn.Embedding sparse=False")
    waiting: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
    sizes: dict[tuple[torch.device, torch.dtype, bool], int] = {}
    for p in parameters:
        kind, size = (p.device, p.dtype, packed and packs(p)), p.numel()
        most = _most(p)
        if size > most:
            yield [p]
            continue
        if sizes.get(kind, 0) + size > most:
            yield waiting.pop(kind)
            sizes[kind] = 0
        waiting.setdefault(kind, []).append(p)
        sizes[kind] = sizes.get(kind, 0) + size
    yield from waiting.values()


def _most(p: Tensor) -> int:
    """Values of a list of tensors like this one."""
    if not p.is_cuda:
        return _AT_ONCE
    return _ONE_KERNEL if p.dtype == torch.float32 and triton_launches(p) else _GPU_AT_ONCE


def adamw_(
    given: StepTensors,
    *,
    rates: list[float] | Tensor,
    betas: tuple[float, list[float]],
    corrections: tuple[list[float], list[float]],
    eps: float,
    weight_decay: float,
    most: float = inf,
) -> None:
    """AdamW of each tensor, in place, with a learning rate, a beta2 and bias corrections of its own:

    m <- beta1 m + (1 - beta1) g
    v <- min(beta2 v + (1 - beta2) g^2, most)
    p <- p - rate (m / c1 / (sqrt(v / c2) + eps) + weight_decay p)
    """
    parameters, gradients, means, variances, at_once = given
    (beta1, beta2), (c1, c2) = betas, corrections
    if at_once:
        from limner.optim import triton_adamw

        triton_adamw.adamw_(
            parameters, gradients, means, variances, rates=rates, betas=betas, corrections=corrections, eps=eps,
            weight_decay=weight_decay, most=most,
        )  # fmt: skip
        return
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(variances, beta2)
    torch._foreach_addcmul_(variances, gradients, gradients, [1 - beta for beta in beta2])
    if most < inf:
        torch._foreach_clamp_max_(variances, most)
    below = torch._foreach_div(variances, c2)
    torch._foreach_sqrt_(below)
    torch._foreach_add_(below, eps)
    torch._foreach_mul_(below, c1)
    updates = torch._foreach_div(means, below)
    if weight_decay:
        torch._foreach_add_(updates, parameters, alpha=weight_decay)
    torch._foreach_mul_(updates, list(rates.unbind()) if isinstance(rates, Tensor) else rates)
    torch._foreach_sub_(parameters, updates)


def one_kernel(*lists: list[Tensor]) -> bool:
    """Whether `triton_adamw.py` takes these: weights and gradients in fp32 and moments of one kind, on a GPU with
    Triton, each tensor in memory as its weight is and without gaps."""
    parameters, gradients, *moments = lists
    if not triton_launches(parameters[0]):
        return False
    return (
        {x.dtype for x in (*parameters, *gradients)} == {torch.float32}
        and len({x.dtype for some in moments for x in some}) == 1
        and all(x.stride() == p.stride() for p, *others in zip(*lists, strict=True) for x in others)
        and all(p.is_contiguous() or p.is_contiguous(memory_format=torch.channels_last) for p in parameters)
    )


def corrections(beta: float, counts: list[int]) -> list[float]:
    """1 - beta^t of each tensor (Kingma & Ba 2015, §3)."""
    return [1 - beta**count for count in counts]


def _seed(count: int, place: int) -> int:
    """The seed of the rounding of the tensor at `place` in its step `count`: 32 bits, all that a generator on the CPU
    reads. Seeds of a tensor repeat after 2^32 steps; those of two tensors are alike only steps far apart."""
    return (count * 2_654_435_769 + place) % 2**32
