"""The evidence lower bound of the dVAE and its relaxation (Ramesh et al. 2021, Eq. 1, App. A).

    ELB = E_{z ~ q(z|x)} ln p(x | z) - beta * KL(q(z|x) || uniform)

The categorical q cannot be sampled with a gradient, so z is a gumbel-softmax at temperature tau,
which becomes one-hot as tau -> 0. The likelihood is a logit-Laplace. Everything is divided by the
number of pixel values, so that with 8x downsampling beta weighs the KL by beta / 192.

On small, flat pictures this objective collapses to a few codes. The bundled `scenes` was trained with
`codebook_elbo.py`, which does not collapse; the codes of `icons` are clusters of patches (`models/patch_dvae.py`).

Shapes: B batch, H x W pixels, h x w grid, V codes.
"""

from dataclasses import dataclass, field
from math import log

import torch
from jaxtyping import Float, Num
from torch import Tensor

from limner.metrics.codebook import usage
from limner.models.dvae import DVAE, map_pixels
from limner.optim.schedules import Anneal
from limner.validation import Range

__all__ = ["RelaxedELB", "check_tau", "gumbel_softmax", "kl_to_uniform", "logit_laplace_nll"]


def logit_laplace_nll(
    x: Float[Tensor, "*#shape"], mu: Float[Tensor, "*#shape"], log_b: Float[Tensor, "*#shape"]
) -> Float[Tensor, "..."]:
    """-ln f(x | mu, b) of Equation 2, elementwise, for x in (0, 1)."""
    return log_b + log(2) + torch.log(x * (1 - x)) + (torch.logit(x) - mu).abs() * torch.exp(-log_b)


def gumbel_softmax(
    logits: Float[Tensor, "B V h w"], tau: float, generator: torch.Generator | None
) -> Float[Tensor, "B V h w"]:
    """A relaxed one-hot sample over dim 1 (Jang et al. 2016): softmax((logits + gumbel) / tau)."""
    logits = logits.movedim(1, -1)  # contiguous in channels-last memory: no copies around the softmax
    # -ln(-ln u) with u uniform: four times as fast on a CPU as torch's `exponential_`.
    uniform = torch.empty_like(logits).uniform_(1e-9, 1 - 1e-7, generator=generator)
    return (logits - uniform.log_().neg_().log_()).mul_(1 / tau).softmax(-1).movedim(-1, 1)


def kl_to_uniform(log_q: Float[Tensor, "B V h w"]) -> Float[Tensor, " B"]:
    """KL(q || uniform over V), summed over the positions: [B, V, h, w] -> [B]."""
    return (log_q.exp() * (log_q + log(log_q.shape[1]))).sum((1, 2, 3))


def check_tau(tau: Anneal) -> None:
    """Raise `InvalidSetting` for a temperature so small that a step between start and end may round to 0."""
    for name in ("start", "end"):
        Range(1e-6).check(f"tau.{name}", getattr(tau, name))


@dataclass(frozen=True, kw_only=True)
class RelaxedELB:
    """The paper's objective, with its schedules (App. A.2): the defaults are the paper's numbers.

    Args:
        beta: weight of the KL.
        tau: temperature of the relaxation.
    """

    beta: Anneal = field(default=Anneal(start=0.0, end=6.6, steps=5_000))
    tau: Anneal = field(default=Anneal(start=1.0, end=1 / 16, steps=150_000))

    def __post_init__(self) -> None:
        check_tau(self.tau)

    def nll(
        self, x: Float[Tensor, "B 3 H W"], mu: Float[Tensor, "B 3 H W"], log_b: Float[Tensor, "B 3 H W"]
    ) -> Float[Tensor, "B 3 H W"]:
        """Return -ln p(x | z) of the mapped pixels x, elementwise."""
        return logit_laplace_nll(x, mu, log_b)

    def __call__(
        self, model: DVAE, batch: dict[str, Tensor], step: int, generator: torch.Generator | None
    ) -> tuple[Float[Tensor, ""], dict[str, Num[Tensor, ""]]]:
        pixels = batch["pixels"]
        tau, beta = self.tau(step), self.beta(step)
        logits = model.encode(pixels)
        mu, log_b = model.decode(gumbel_softmax(logits, tau, generator))
        nll = self.nll(map_pixels(pixels), mu, log_b).mean()
        kl = kl_to_uniform(logits.log_softmax(1)).mean() / pixels[0].numel()
        loss = nll + beta * kl
        metrics = {"nll": nll.detach(), "kl": kl.detach(), **usage(logits.argmax(1), logits.shape[1])}
        return loss, metrics | {"tau": torch.tensor(tau), "beta": torch.tensor(beta)}
