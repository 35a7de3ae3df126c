"""Reconstruction quality of a dVAE on unseen pictures.

Hard reconstructions (argmax codes, the prior's input): PSNR, codes in use and their perplexity over the whole set. For
scenes also the share of reconstructions that a scene parser reads as the same scene: equal attributes and background,
positions within half a unit. Single objects show which attributes a dVAE confuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from limner.evaluation.confidence import TEST_SEEDS_FROM, Estimate, mean, proportion
from limner.evaluation.report import SheetRow
from limner.evaluation.result import EvalResult
from limner.metrics.codebook import usage
from limner.models.dvae import DVAE, unmap_pixels
from limner.models.image_tokenizer import ImageTokenizer
from limner.objectives.elbo import gumbel_softmax
from limner.progress import Advance
from limner.tasks import rendering, scene_reader, scenes, verify
from limner.tasks.scenes import Scene, SceneObject, Split

_BATCH_SIZE = 64
_SHOWN = 24  # number of pictures on the page of results


def fresh_scenes(n: int, seed: int = TEST_SEEDS_FROM, split: Split | None = None, size: int = 48) -> Tensor:
    """Render scenes that no training set has, uint8 [n, 3, size, size].

    Without a split, scenes alternate between training and held-out combinations.
    """
    splits: tuple[Split, ...] = (split,) if split else ("train", "held-out")
    drawn = (scenes.sample_scene(np.random.default_rng([seed, i, 1]), split=splits[i % len(splits)]) for i in range(n))
    pictures = np.stack([rendering.render(scene, size) for scene in drawn])
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()


def psnr(a: UInt8[Tensor, "B 3 H W"], b: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, " B"]:
    """Peak signal-to-noise ratio in dB of each picture: uint8 [B, 3, H, W] twice -> float32 [B].

    The mean squared error counts as 0.01 at least, so equal pictures have 68 dB instead of infinity.
    """
    error = (a.float() - b.float()).square().flatten(1).mean(1)
    return 10 * torch.log10(255**2 / error.clamp_min(1e-2))


def reconstructions(dvae: ImageTokenizer, pictures: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (pictures, tokens, reconstructions) for batches of uint8 [B, 3, H, W], on the dVAE's device."""
    device = next(dvae.parameters()).device
    for part in (batch.to(device) for batch in pictures.split(_BATCH_SIZE)):
        tokens = dvae.tokenize(part)
        yield part, tokens, dvae.decode_tokens(tokens)


def measure(
    dvae: ImageTokenizer, pictures: Tensor, *, check_scenes: bool = False, progress: Advance | None = None
) -> EvalResult:
    """Reconstruct uint8 [B, 3, H, W] and measure the result; `check_scenes` is for pictures of scenes."""
    psnrs, used, same, sheet = [], [], list[bool](), list[SheetRow]()
    for part, tokens, decoded in reconstructions(dvae, pictures):
        used.append(tokens)
        psnrs.append(psnr(part, decoded))
        for i in range(min(len(part), _SHOWN - len(sheet))):
            sheet.append(_sheet_row(f"{psnrs[-1][i]:.1f} dB", part[i], decoded[i]))
        if check_scenes:
            same += map(_same_scene, *(p.permute(0, 2, 3, 1).cpu().numpy() for p in (part, decoded)))
        if progress:
            progress(len(part))
    quality, codes = torch.cat(psnrs).cpu(), usage(torch.cat(used), dvae.config.vocab)
    estimates = {
        "PSNR": mean(quality.numpy(), "dB"),
        "PSNR of the worst hundredth": Estimate(value=float(quality.quantile(0.01)), unit="dB"),
        f"codes in use, of {dvae.config.vocab:,}": Estimate(value=int(codes["codes"]), spec=",.0f"),
        "perplexity of the codes": Estimate(value=float(codes["perplexity"]), spec=",.0f"),
    }
    if check_scenes:
        estimates["same scene"] = proportion(np.array(same), [str(i) for i in range(len(same))])
    rows = {name: {"value": estimate} for name, estimate in estimates.items()}
    return EvalResult(title=f"{len(pictures):,} unseen pictures", rows=rows, sheet=sheet)


def codebook_metrics(model: ImageTokenizer, pixels: Tensor) -> dict[str, float]:
    """Return what a run logs of uint8 [B, 3, H, W]: PSNR of hard reconstructions, codes in use, perplexity."""
    quality, _, codes, perplexity = (row["value"].value for row in measure(model, pixels).rows.values())
    return {"psnr": quality, "codes": codes, "perplexity": perplexity}


def relaxation_gap(model: DVAE, pixels: Tensor, tau: float, hard: float) -> dict[str, float]:
    """Return the PSNR of relaxed reconstructions of uint8 [B, 3, H, W] at temperature `tau`, and its gap to `hard`."""
    psnrs = []
    for part in pixels.split(_BATCH_SIZE):
        generator = torch.Generator(part.device).manual_seed(0)
        mu = model.decode(gumbel_softmax(model.encode(part), tau, generator))[0]
        psnrs.append(psnr(part, unmap_pixels(torch.sigmoid(mu))))
    relaxed = float(torch.cat(psnrs).mean())
    return {"relaxed_psnr": relaxed, "gap": relaxed - hard}


def single_objects(seed: int = TEST_SEEDS_FROM, most: int | None = None) -> list[Scene]:
    """Return scenes of one object at a random place: two for each combination of attributes and background, or `most`
    of these at random."""
    rng, drawn = np.random.default_rng([seed, 2]), list[Scene]()
    combinations = product(scenes.SIZES, scenes.FILLS, scenes.COLORS, scenes.SHAPES, scenes.BACKGROUNDS)
    for size, fill, color, shape, background in (combination for combination in combinations for _ in range(2)):
        x, y = (int(rng.integers(scenes.UNITS - scenes.EXTENT[size] + 1)) for _ in range(2))
        item = SceneObject(shape=shape, color=color, size=size, fill=fill, x=x, y=y)
        drawn.append(Scene(objects=(item,), background=background))
    return [drawn[i] for i in np.sort(rng.permutation(len(drawn))[:most])]


def confusions(dvae: ImageTokenizer, originals: Sequence[Scene], progress: Advance | None = None) -> EvalResult:
    """Reconstruct scenes, one object each, and parse what they show: the same scene, another one, or neither."""
    size = dvae.config.size
    pictures = np.stack([rendering.render(scene, size) for scene in originals]).transpose(0, 3, 1, 2)
    readings, cases, sheet = list[str](), [], list[SheetRow]()
    for part, _, decoded in reconstructions(dvae, torch.from_numpy(pictures)):
        for picture, reconstructed in zip(part, decoded, strict=True):
            original = originals[len(readings)]
            shown = scene_reader.read(reconstructed.permute(1, 2, 0).cpu().numpy()).scene
            same = shown is not None and verify.scenes_match(original, shown)
            readings.append("the same scene" if same else "another scene" if shown and shown.objects else "unreadable")
            if not same:
                cases.append({"original": original.to_dict(), "shown": shown.to_dict() if shown else None})
                sheet.append(_sheet_row(f"{readings[-1]}: {original.objects[0].attributes}", picture, reconstructed))
        if progress:
            progress(len(decoded))
    clusters = [f"{scene.objects[0].attributes} {scene.background}" for scene in originals]
    rows = {
        name: {"share": proportion(np.array([reading == name for reading in readings]), clusters)}
        for name in ("the same scene", "another scene", "unreadable")
    }
    title = f"{len(originals):,} single objects, as the scene parser reads them"
    return EvalResult(title=title, rows=rows, cases=cases, sheet=sheet)


def _sheet_row(caption: str, original: UInt8[Tensor, "3 H W"], reconstruction: UInt8[Tensor, "3 H W"]) -> SheetRow:
    pictures = [(original, "original"), (reconstruction, "reconstruction")]
    labeled = [(Image.fromarray(x.permute(1, 2, 0).cpu().numpy()), label) for x, label in pictures]
    return SheetRow(caption=caption, pictures=labeled)


def _same_scene(original: np.ndarray, decoded: np.ndarray) -> bool:
    a, b = scene_reader.read(original).scene, scene_reader.read(decoded).scene
    return a is not None and b is not None and verify.scenes_match(a, b)
