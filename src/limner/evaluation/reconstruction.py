"""What a dVAE loses when pictures that it has not seen become tokens and pictures again.

Hard reconstructions (argmax codes, as the prior sees them): PSNR, the codes in use and their perplexity
over the whole set. For the scenes world also the share of reconstructions that the oracle reads as it
reads the originals: same things, looks, background, and places to within half a unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from limner.evaluation.confidence import PUBLISHED
from limner.json_files import write_json
from limner.metrics.codebook import usage
from limner.metrics.psnr import psnr
from limner.models.dvae import DVAE, unmap_pixels
from limner.models.patch_dvae import AnyDVAE
from limner.objectives.elbo import gumbel_softmax
from limner.progress import Advance
from limner.tasks import rendering, scene_reader, scenes, verify
from limner.tasks.scenes import Split

_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Measures over `pictures` pictures.

    Attributes:
        psnr: mean over pictures, in dB; `psnr_worst` is the first percentile.
        codes: in use at least once, of `vocab`; `perplexity` is exp of their entropy in nats.
        read_alike: share that the oracle reads as the originals; None for other pictures.
    """

    pictures: int
    psnr: float
    psnr_worst: float
    codes: int
    vocab: int
    perplexity: float
    read_alike: float | None = None

    def table(self) -> str:
        lines = [
            f"{self.pictures} unseen pictures",
            f"  PSNR          {self.psnr:.2f} dB (worst hundredth: {self.psnr_worst:.2f} dB)",
            f"  codes in use  {self.codes} of {self.vocab} ({self.codes / self.vocab:.0%}), "
            f"perplexity {self.perplexity:.0f}",
        ]
        if self.read_alike is not None:
            lines.append(f"  the oracle reads {self.read_alike:.1%} as it reads the originals")
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        write_json(path, asdict(self), indent=2)


def fresh_scenes(n: int, seed: int = PUBLISHED, split: Split | None = None, size: int = 48) -> Tensor:
    """Pictures of the scenes world that no training set holds, uint8 [n, 3, size, size].

    Without a split, held-out scenes and others take turns.
    """
    pictures = []
    for i in range(n):
        which: Split = split or ("train", "held-out")[i % 2]  # type: ignore[assignment]
        scene = scenes.sample_scene(np.random.default_rng([seed, i, 1]), split=which)
        pictures.append(rendering.render(scene, size))
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


def reconstructions(dvae: AnyDVAE, pictures: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Parts of uint8 [B, 3, H, W] on the dVAE's device, their tokens, and the pictures that these stand for."""
    device = next(dvae.parameters()).device
    for part in (some.to(device) for some in pictures.split(_BATCH)):
        tokens = dvae.tokens(part)
        yield part, tokens, dvae.pictures(tokens)


def measure(
    dvae: AnyDVAE,
    pictures: Tensor,
    *,
    read: bool = False,
    progress: Advance | None = None,
) -> Reconstruction:
    """Reconstruct uint8 [B, 3, H, W]; `read` asks the oracle, for pictures of the scenes world."""
    qualities, used, alike = [], [], 0
    for part, tokens, again in reconstructions(dvae, pictures):
        used.append(tokens)
        qualities.append(psnr(part, again))
        if read:
            alike += sum(map(_reads_alike, *(p.permute(0, 2, 3, 1).cpu().numpy() for p in (part, again))))
        if progress:
            progress(len(part))
    quality = torch.cat(qualities)
    codes = usage(torch.cat(used), dvae.config.vocab)
    return Reconstruction(
        pictures=len(pictures),
        psnr=float(quality.mean()),
        psnr_worst=float(quality.quantile(0.01)),
        codes=int(codes["codes"]),
        vocab=dvae.config.vocab,
        perplexity=float(codes["perplexity"]),
        read_alike=alike / len(pictures) if read else None,
    )


def health(model: AnyDVAE, pixels: Tensor) -> dict[str, float]:
    """What a run logs of uint8 [B, 3, H, W]: PSNR of hard reconstructions, codes in use, perplexity."""
    found = measure(model, pixels)
    return {"psnr": found.psnr, "codes": float(found.codes), "perplexity": found.perplexity}


def relaxation(model: DVAE, pixels: Tensor, tau: float, hard: float) -> dict[str, float]:
    """PSNR of relaxed reconstructions of uint8 [B, 3, H, W] at temperature `tau`, and how far it is above `hard`."""
    found = []
    for part in pixels.split(_BATCH):
        generator = torch.Generator(part.device).manual_seed(0)
        mu = model.decode(gumbel_softmax(model.encode(part), tau, generator))[0]
        found.append(psnr(part, unmap_pixels(torch.sigmoid(mu))))
    relaxed = float(torch.cat(found).mean())
    return {"relaxed_psnr": relaxed, "gap": relaxed - hard}


def _reads_alike(original: np.ndarray, again: np.ndarray) -> bool:
    a, b = scene_reader.read(original).scene, scene_reader.read(again).scene
    return a is not None and b is not None and verify.alike(a, b)
