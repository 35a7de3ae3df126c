"""Base of optimizers of Adam's family: two moments and a step count for each tensor, in fp32 or in 16 bits.

A step skips tensors without gradient: their moments and counts do not advance, so bias correction stays right for
tensors whose updates are skipped (Wortsman et al. 2023, App. G, skip tensors with Inf or NaN).

16-bit moments (Ramesh et al. 2021, App. B.2 and D) are integer codes: 1-6-9 for the running mean, 0-6-10 for the
running variance. A step decodes the moments of a few tensors at a time, computes in fp32 and encodes them again. Groups
with `quantize_state` have 16-bit moments for tensors with two dimensions or more, except float64. "Store all gains,
biases, embeddings, and unembeddings in 32-bit precision, [...] and 32-bit Adam moments" (D.2): put embeddings and
output layers into a group with `quantize_state=False`.

Weights may take 16 bits as well (§2.4). Then unquantized moments and the whole update are fp32, and the last operation
rounds the weight stochastically, which preserves its expected value: rounding to nearest would lose every update below
half a step of the format (docs/log/2026-11-25.md, "Weights in 16 bits rounded at random"). The random numbers depend
only on the step count of a tensor and its index, so replicas stay equal and a resumed run equals an uninterrupted one.

State of a parameter, with the names of torch's AdamW: `step` (fp32, on the CPU), `exp_avg`, `exp_avg_sq`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from limner import compat
from limner.numerics.compile_elementwise import can_launch_triton
from limner.numerics.formats import E6M9, HALF_FORMATS, UE6M10
from limner.numerics.precision import upcast
from limner.numerics.seeding import rounding_seed
from limner.optim.dtensor import mean_over_shards, split_by_placement, to_local
from limner.optim.grad_access import grad_values

MOMENT_FORMATS = {"exp_avg": E6M9, "exp_avg_sq": UE6M10}
SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal
SETTING_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "lr": ("lr must be finite and 0 or more", lambda x: 0 <= x < inf),
    "betas": ("betas must be in [0, 1)", lambda x: all(0 <= beta < 1 for beta in x)),
    "momentum": ("momentum must be in [0, 1)", lambda x: 0 <= x < 1),
    "eps": (f"eps must be finite and at least {SMALLEST_NORMAL:.2g}", lambda x: SMALLEST_NORMAL <= x < inf),
    "weight_decay": ("weight_decay must be finite and 0 or more", lambda x: 0 <= x < inf),
    "power": ("power must be above 0", lambda x: x > 0),
    "max_exp_avg_sq": ("max_exp_avg_sq must be above 0", lambda x: x > 0),
}
CPU_CHUNK_VALUES = 1 << 17  # fits the cache of a core
_GPU_CHUNK_VALUES = 1 << 25  # many small tensors for each multi-tensor call
_TRITON_CHUNK_VALUES = 1 << 27  # the Triton kernel allocates little


def read_moment(state: Mapping[str, Tensor], moment: str) -> Tensor:
    """Local shard of a moment as numbers: the stored fp32 tensor, or a decoded copy."""
    stored = to_local(state[moment])
    return stored if stored.is_floating_point() else MOMENT_FORMATS[moment].unpack(stored)


def rms(optimizers: list[torch.optim.Optimizer]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tensors with a gradient and a running mean of squares, each with its RMS_t [] of the coming step.

    u_t = max(v_t / (1 - beta2^t), eps^2) with v_t = beta2 v_{t-1} + (1 - beta2) g_t^2, which AdamW16 bounds (B.2 of
    Ramesh et al. 2021). Sums over shards share one collective.
    """
    ratios: dict[Tensor, Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state.get(p, {})
                if p.grad is None or "exp_avg_sq" not in state:
                    continue
                beta2_warmup = "power" in group  # beta2 with warm-up begins at 0: no bias correction
                step = state["step"].double() + 1  # stays on its device: avoids a synchronization
                beta = 1 - step ** -group["power"] if beta2_warmup else torch.full_like(step, group["betas"][1])
                square = upcast(grad_values(p.grad)).square()
                v = beta * upcast(read_moment(state, "exp_avg_sq")) + (1 - beta) * square
                v = v.clamp_max(group.get("max_exp_avg_sq", inf))
                u = (v if beta2_warmup else v / (1 - beta**step)).clamp_min(max(group["eps"] ** 2, SMALLEST_NORMAL))
                ratios[p] = (square / u).sum()
    for tensors in split_by_placement(ratios):
        yield from zip(tensors, mean_over_shards([ratios[p] for p in tensors], tensors).sqrt(), strict=True)


class Coefficients(NamedTuple):
    """beta1, and for each of n tensors beta2 and the bias corrections of both moments."""

    beta1: float
    beta2: list[float]
    c1: list[float]
    c2: list[float]


class StepTensors(NamedTuple):
    """Local shards that a step updates, in fp32 or float64; 16-bit weights are fp32 copies. If `use_triton`, one kernel
    updates all tensors and decodes 16-bit moments itself."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    use_triton: bool


class CheckedOptimizer(torch.optim.Optimizer):
    """Base class of limner's optimizers, which checks groups. Subclasses implement `_step_group`."""

    updates_half_weights = False  # True if small updates of weights in 16 bits are not rounded away

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch. Raises `ValueError` for settings out of range or NaN, and for weights in 16 bits
        that the optimizer cannot update."""
        settings = self.defaults | param_group
        for name, (rule, fits) in SETTING_RULES.items():
            if name in settings and not fits(settings[name]):
                raise ValueError(f"{rule}, not {settings[name]}")
        super().add_param_group(param_group)
        if not self.updates_half_weights and any(p.dtype in HALF_FORMATS for p in param_group["params"]):
            name = type(self).__name__
            raise ValueError(f"{name} cannot update weights in 16 bits: keep them in fp32, or use AdamW16")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the loss of `closure`, which recomputes the gradients."""
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            self._step_group(group, [p for p in group["params"] if p.grad is not None])
        return loss

    def _step_group(self, group: Mapping[str, Any], params: list[Tensor]) -> None:
        """Update `params`, those of the group that have a gradient."""
        raise NotImplementedError


class MomentOptimizer(CheckedOptimizer):
    """Base class of optimizers with Adam's moments. The update is AdamW's, unless a subclass overrides `_update`."""

    updates_half_weights = True

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, ...], eps: float, weight_decay: float, **others: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **others})

    def _step_group(self, group: Mapping[str, Any], params: list[Tensor]) -> None:
        indices = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        for chunk in update_chunks(params, group.get("quantize_state", False)):
            self._step_chunk(group, chunk, [indices[p] for p in chunk])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does, but keep the dtype of every tensor: torch would convert codes to fp32. Settings
        that the state lacks, for instance one of torch's AdamW, keep their values."""
        before = [dict(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, previous in zip(self.param_groups, before, strict=True):
            group |= previous | group
        indices = (i for group in state_dict["param_groups"] for i in group["params"])
        params = (p for group in self.param_groups for p in group["params"])
        for i, p in zip(indices, params, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                device = "cpu" if key == "step" else p.device
                self.state[p][key] = value.to(device, copy=True)

    def _step_chunk(self, group: Mapping[str, Any], params: list[Tensor], indices: list[int]) -> None:
        states = [self._state(p, group.get("quantize_state", False)) for p in params]
        compat.foreach_add_([state["step"] for state in states], 1)
        grads = [grad_values(p.grad) for p in params if p.grad is not None]
        weights = [to_local(p).float() if p.dtype in HALF_FORMATS else to_local(p) for p in params]
        exp_avgs, exp_avg_sqs = ([to_local(state[moment]) for state in states] for moment in MOMENT_FORMATS)
        if not (use_triton := supports_triton(weights, grads, exp_avgs, exp_avg_sqs)):
            exp_avgs, exp_avg_sqs = ([read_moment(state, moment) for state in states] for moment in MOMENT_FORMATS)
        counts = [int(state["step"]) for state in states]
        self._update(group, params, StepTensors(weights, grads, exp_avgs, exp_avg_sqs, use_triton), counts)
        for p, weight, count, index in zip(params, weights, counts, indices, strict=True):
            if p.dtype in HALF_FORMATS:
                generator = torch.Generator(weight.device).manual_seed(rounding_seed(count, index))
                to_local(p).copy_(HALF_FORMATS[p.dtype].round(weight, generator))
        if not use_triton:
            for moment, values in zip(MOMENT_FORMATS, (exp_avgs, exp_avg_sqs), strict=True):
                for state, value in zip(states, values, strict=True):
                    if not (stored := to_local(state[moment])).is_floating_point():
                        MOMENT_FORMATS[moment].pack(value, out=stored)

    def _state(self, p: Tensor, quantize: bool) -> dict[str, Tensor]:
        if not (state := self.state[p]):
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            unquantized = torch.float32 if p.dtype in HALF_FORMATS else p.dtype
            quantize = quantize and supports_quantized_state(p)
            for moment, form in MOMENT_FORMATS.items():  # code 0 is the number 0
                state[moment] = torch.zeros_like(p, dtype=form.dtype if quantize else unquantized)
        return state

    def coefficients(self, group: Mapping[str, Any], counts: list[int]) -> Coefficients:
        """Return the coefficients of a step, from the step counts of its tensors (Kingma & Ba 2015, §3)."""
        beta1, beta2 = group["betas"]
        c1, c2 = ([1 - beta**count for count in counts] for beta in (beta1, beta2))
        return Coefficients(beta1, [beta2] * len(counts), c1, c2)

    def _update(self, group: Mapping[str, Any], params: list[Tensor], inputs: StepTensors, counts: list[int]) -> None:
        """Update weights and moments of `params` in place. `counts` are step counts, this step included."""
        lrs, bound = [group["lr"]] * len(counts), group.get("max_exp_avg_sq", inf)
        adamw_(inputs, lrs, self.coefficients(group, counts), group["eps"], group["weight_decay"], bound)


def supports_quantized_state(p: Tensor) -> bool:
    """Return True if moments of a tensor may be in 16 bits. float64 weights keep float64 moments."""
    return p.ndim >= 2 and p.dtype != torch.float64


def update_chunks(params: list[Tensor], quantize: bool = False) -> Iterator[list[Tensor]]:
    """Split parameters into lists, each updated by one sequence of multi-tensor operations.

    A large tensor is alone in its list, which bounds temporary memory. Small tensors share a list with others of the
    same device, dtype and format of moments, which reduces the number of calls. Raises `RuntimeError` for a sparse
    gradient.
    """
    if any(p.grad is not None and p.grad.layout != torch.strided for p in params):
        raise RuntimeError("limner's optimizers cannot use sparse gradients: give nn.Embedding sparse=False")
    waiting: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
    sizes: Counter[tuple[torch.device, torch.dtype, bool]] = Counter()
    for p in params:
        kind, limit = (p.device, p.dtype, quantize and supports_quantized_state(p)), _chunk_values(p)
        if p.numel() > limit:
            yield [p]
            continue
        if sizes[kind] + p.numel() > limit:
            yield waiting.pop(kind)
            del sizes[kind]
        waiting.setdefault(kind, []).append(p)
        sizes[kind] += p.numel()
    yield from waiting.values()


def _chunk_values(p: Tensor) -> int:
    if p.is_cuda:
        return _TRITON_CHUNK_VALUES if p.dtype == torch.float32 and can_launch_triton(p) else _GPU_CHUNK_VALUES
    return CPU_CHUNK_VALUES


def adamw_(
    inputs: StepTensors,
    lrs: list[float] | Tensor,
    coefficients: Coefficients,
    eps: float,
    weight_decay: float,
    max_exp_avg_sq: float = inf,
) -> None:
    """AdamW in place, with a learning rate, a beta2 and bias corrections c1, c2 for each tensor:

    m <- beta1 m + (1 - beta1) g
    v <- min(beta2 v + (1 - beta2) g^2, max_exp_avg_sq)
    p <- p - lr (m / c1 / (sqrt(v / c2) + eps) + weight_decay p)
    """
    params, grads, exp_avgs, exp_avg_sqs, use_triton = inputs
    beta1, beta2, c1, c2 = coefficients
    if use_triton:
        from limner.optim import triton_adamw

        triton_adamw.adamw_(inputs[:4], lrs, coefficients, eps, weight_decay, max_exp_avg_sq)
        return
    compat.foreach_lerp_(exp_avgs, grads, 1 - beta1)
    compat.foreach_mul_(exp_avg_sqs, beta2)
    compat.foreach_addcmul_(exp_avg_sqs, grads, grads, [1 - beta for beta in beta2])
    if max_exp_avg_sq < inf:
        compat.foreach_clamp_max_(exp_avg_sqs, max_exp_avg_sq)
    denominators = compat.foreach_div(exp_avg_sqs, c2)
    compat.foreach_sqrt_(denominators)
    compat.foreach_add_(denominators, eps)
    compat.foreach_mul_(denominators, c1)
    updates = compat.foreach_div(exp_avgs, denominators)
    if weight_decay:
        compat.foreach_add_(updates, params, alpha=weight_decay)
    compat.foreach_mul_(updates, list(lrs.unbind()) if isinstance(lrs, Tensor) else lrs)
    compat.foreach_sub_(params, updates)


def supports_triton(*lists: list[Tensor]) -> bool:
    """Return True if `triton_adamw.py` can update these tensors: weights, gradients and moments, on a GPU with Triton.

    Weights and gradients are fp32, moments of one dtype, all without gaps and with the strides of the weight.
    """
    params, grads, *moments = lists
    return (
        can_launch_triton(params[0])
        and {x.dtype for x in (*params, *grads)} == {torch.float32}
        and len({x.dtype for tensors in moments for x in tensors}) == 1
        and all(x.stride() == p.stride() for p, *others in zip(*lists, strict=True) for x in others)
        and all(p.is_contiguous() or p.is_contiguous(memory_format=torch.channels_last) for p in params)
    )
