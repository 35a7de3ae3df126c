"""Near-duplicates between two sets of pictures (Ramesh et al. 2021, §3.2): which evaluation pictures training has seen.

Embeddings find pictures that mean the same; this finds pictures that *are* the same, although resized, compressed,
cropped, mirrored, turned, or of another brightness. Two stages:

1. Variants of a query (turned, zoomed, shifted, mirrored) propose the references whose normalized pixels, 16 x 16, are
   nearest: one matrix product for each chunk of references.
2. Each proposal is aligned by a search over angle, zoom and shift. Its similarity is the correlation of the normalized
   pixels, 32 x 32, where the two overlap.

The mean of each channel and the contrast of the whole are removed, so brightness does not count and color does.

Shapes: N queries, R references, V variants, K proposals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from PIL import Image
from torch import Tensor

from limner.data.datasets import ImageCaptionDataset
from limner.data.sample import Source
from limner.errors import UserError
from limner.evaluation.confidence import Estimate, proportion
from limner.evaluation.report import img_tag
from limner.evaluation.result import EvalResult
from limner.json_files import read_json
from limner.progress import Advance

__all__ = ["Matches", "Overlap", "closest", "compare", "read_seen", "thumbnails"]

_COARSE, _FINE = 16, 32  # pixels per side
_CHUNK = 8_192  # references in one product
_PAIRS = 4_096  # pairs aligned at the same time
_MIN_OVERLAP = 0.6  # of the area, for a similarity
_ZOOM = 1.12
_LUMA = (0.299, 0.587, 0.114)
_ANGLES = (0.0, 7.0, -7.0, 14.0, -14.0)  # degrees
_SHIFTS = (-0.12, 0.12)  # of half of a side
_STEPS = (4.0, 0.05, 0.06, 0.06)  # first steps of the search: degrees, log of the zoom, shifts
_ROUNDS = 5  # of the search; each halves the steps
_BATCH = 1_024  # pictures read at the same time
_SHOWN, _SHOWN_SIDE = 200, 64  # pairs on a page, pixels of each
_MIN_CONTRAST = 2 / 255  # standard deviation; a flat picture is like no other


@dataclass(frozen=True)
class Matches:
    """The closest reference of each query: its number, and its similarity, at most 1."""

    reference: Int64[Tensor, " N"]
    similarity: Float[Tensor, " N"]


def thumbnails(pictures: UInt8[Tensor, "N 3 H W"]) -> UInt8[Tensor, "N 3 32 32"]:
    """Shrink pictures to what `closest` compares. Color is smoothed twice as much as luma, since JPEG damages it."""
    small = F.adaptive_avg_pool2d(pictures.float(), _FINE)
    luma = (small * small.new_tensor(_LUMA)[:, None, None]).sum(1, keepdim=True)
    color = F.interpolate(F.avg_pool2d(small - luma, 2), scale_factor=2, mode="bilinear")
    return (luma + color).round().clamp(0, 255).to(torch.uint8)


def closest(
    queries: UInt8[Tensor, "N 3 32 32"],
    references: UInt8[Tensor, "R 3 32 32"],
    proposals: int = 16,
    progress: Advance | None = None,
) -> Matches:
    """Return the closest of R >= 1 references for each query. `progress` counts queries."""
    variants = torch.tensor(list(_variants()))
    index, variant = _propose(queries, references, variants, proposals)
    similarity, k = torch.empty(index.shape), index.shape[1]
    for rows in torch.arange(len(queries)).split(max(1, _PAIRS // k)):
        own = queries[rows].repeat_interleave(k, 0)
        pairs = own, references[index[rows].flatten()], variants[variant[rows].flatten()]
        similarity[rows] = _align(*pairs).view(-1, k)
        if progress:
            progress(len(rows))
    best = similarity.max(1)
    return Matches(index.gather(1, best.indices[:, None])[:, 0], best.values)


def _variants() -> Iterator[tuple[float, ...]]:
    """Yield (mirrored, degrees, log of the zoom, x, y) of the variants of a query."""
    zoom = math.log(_ZOOM)
    for mirrored in (0.0, 1.0):
        yield from ((mirrored, angle, 0.0, 0.0, 0.0) for angle in _ANGLES)
        yield from ((mirrored, 0.0, z, 0.0, 0.0) for z in (-zoom, zoom, 2 * zoom))
        yield from ((mirrored, 0.0, zoom, x, y) for x in _SHIFTS for y in _SHIFTS)
        yield from ((mirrored, angle, zoom, 0.0, 0.0) for angle in _ANGLES[1:3])


def _propose(
    queries: Tensor, references: Tensor, variants: Float[Tensor, "V 5"], k: int
) -> tuple[Int64[Tensor, "N K"], Int64[Tensor, "N K"]]:
    """Return the K references that some variant of each query is nearest to, and the variant."""
    n, k = len(queries), min(k, len(references))
    coarse = F.avg_pool2d(queries.float(), _FINE // _COARSE)
    warped = [_warp(coarse, variant.expand(n, -1))[0] for variant in variants]
    rows = torch.stack([_normalize(x, torch.ones_like(x[:, :1])).flatten(1) for x in warped], 1).to(torch.bfloat16)
    best, index, variant = (torch.full((n, k), fill) for fill in (-math.inf, 0, 0))
    for numbers in torch.arange(len(references)).split(_CHUNK):
        chunk = F.avg_pool2d(references[numbers].float(), _FINE // _COARSE)
        columns = _normalize(chunk, torch.ones_like(chunk[:, :1])).flatten(1).to(torch.bfloat16)
        for part in torch.arange(n).split(256):
            scores, which = (rows[part].flatten(0, 1) @ columns.T).view(len(part), len(variants), -1).float().max(1)
            all_scores = torch.cat([best[part], scores], 1)
            best[part], order = all_scores.topk(k, 1)
            index[part] = torch.cat([index[part], numbers.expand(len(part), -1)], 1).gather(1, order)
            variant[part] = torch.cat([variant[part], which], 1).gather(1, order)
    return index, variant


def _align(queries: Tensor, references: Tensor, start: Float[Tensor, "P 5"]) -> Float[Tensor, " P"]:
    """Return the best similarity of each pair that a pattern search from `start` finds."""
    x, y, place = queries.float(), references.float(), start.clone()
    best, steps = _similarity(x, y, place), torch.tensor(_STEPS)
    for _ in range(_ROUNDS):
        for axis in range(len(_STEPS)):
            for sign in (1, -1):
                moved = place.clone()
                moved[:, axis + 1] += sign * steps[axis]
                value = _similarity(x, y, moved)
                better = value > best
                best, place = torch.where(better, value, best), torch.where(better[:, None], moved, place)
        steps = steps / 2
    return best


def _similarity(x: Tensor, y: Tensor, place: Tensor) -> Float[Tensor, " P"]:
    """Return the correlation of warped `x` with `y` where they overlap; -1 if that is little."""
    warped, inside = _warp(x, place)
    a, b = _normalize(warped, inside), _normalize(y, inside)
    value = (a * b).flatten(1).sum(1)
    return value.masked_fill(inside.flatten(1).mean(1) < _MIN_OVERLAP, -1)


def _warp(x: Float[Tensor, "P 3 S S"], place: Float[Tensor, "P 5"]) -> tuple[Tensor, Tensor]:
    """Mirror, turn, zoom and shift pictures. Return them and 1 where they have content, [P, 1, S, S]."""
    mirrored, degrees, log_zoom, dx, dy = place.unbind(1)
    angle, zoom = torch.deg2rad(degrees), log_zoom.exp()
    cos, sin, flip = zoom * angle.cos(), zoom * angle.sin(), 1 - 2 * mirrored
    matrix = torch.stack([flip * cos, -flip * sin, dx, sin, cos, dy], 1).view(-1, 2, 3)
    grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
    inside = (grid.abs() <= 1).all(-1, keepdim=True).movedim(-1, 1).float()
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False), inside


def _normalize(x: Float[Tensor, "P 3 S S"], weight: Float[Tensor, "P 1 S S"]) -> Float[Tensor, "P 3 S S"]:
    """Remove each channel's mean and the contrast, where `weight` is 1; elsewhere 0. A flat picture becomes 0."""
    count = weight.sum((2, 3), keepdim=True).clamp_min(1)
    centered = (x - (x * weight).sum((2, 3), keepdim=True) / count) * weight
    norm = centered.flatten(1).norm(dim=1)
    floor = 255 * _MIN_CONTRAST * (3 * count.flatten()).sqrt()
    return centered / norm.clamp_min(1e-6)[:, None, None, None] * (norm > floor)[:, None, None, None]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The closest training picture of each evaluation picture, the closest pairs first.

    Attributes:
        samples: number of samples of the evaluation data, with unreadable ones.
        rows, references: numbers of the samples in their sources, [N].
        similarity: at most 1, [N].
        pictures: the first pairs, uint8 [n, 2, 3, H, W], and their captions.
    """

    samples: int
    rows: np.ndarray
    references: np.ndarray
    similarity: np.ndarray
    pictures: Tensor
    captions: list[tuple[str, str]]

    def result(self, threshold: float) -> EvalResult:
        """Return the share of pictures whose similarity is `threshold` or more, and quantiles of the similarity."""
        above, n = self.similarity >= threshold, len(self.similarity)
        estimates = {f"in training (similarity {threshold:g} or more)": proportion(above, [str(i) for i in range(n)])}
        for share in (0.5, 0.9, 0.99):
            name = f"similarity of the closest, quantile {share:g}"
            estimates[name] = Estimate(value=float(np.quantile(self.similarity, share)), spec=".3f")
        values = zip(self.rows.tolist(), self.references.tolist(), self.similarity.tolist(), strict=True)
        cases = [{"picture": row, "training": match, "similarity": round(value, 4)} for row, match, value in values]
        rows = {name: {"value": estimate} for name, estimate in estimates.items()}
        settings = {"threshold": threshold, "samples": self.samples}
        return EvalResult(title=f"{n:,} pictures", rows=rows, cases=cases, settings=settings)

    def page(self, threshold: float) -> str:
        """Return the body of a page: the closest pairs, and a line where the threshold is."""
        lead = "Each pair: left an evaluation picture, right the training picture that is closest to it."
        parts, marked = [f"<h1>Closest training pictures</h1><p>{lead}</p>"], False
        for pair, captions, value in zip(self.pictures, self.captions, self.similarity, strict=False):
            if not marked and value < threshold:
                parts.append(f"<h2>below the threshold of {threshold:g}</h2>")
                marked = True
            images = [Image.fromarray(x.permute(1, 2, 0).numpy()) for x in pair]
            figures = "".join(
                f"<figure>{img_tag(image, caption, 144)}<figcaption>{escape(caption[:80])}</figcaption></figure>"
                for image, caption in zip(images, captions, strict=True)
            )
            parts.append(f'<article><h3>{value:.3f}</h3><div class="pair">{figures}</div></article>')
        return "".join(parts)


def compare(evaluation: Source, training: Source, progress: Advance | None = None) -> Overlap:
    """Find the closest training picture of each evaluation picture. Unreadable pictures are left out.

    `progress` counts pictures of both sources. Raises `UserError` if no picture of a source is readable.
    """
    queries, rows = _read(evaluation, "evaluation", progress)
    references, numbers = _read(training, "training", progress)
    matches = closest(queries, references)
    order = matches.similarity.argsort(descending=True, stable=True).numpy()
    own, others = rows[order], numbers[matches.reference.numpy()[order]]
    shown = [ImageCaptionDataset(source, _SHOWN_SIDE) for source in (evaluation, training)]
    loaded = [data.load(index[:_SHOWN]) for data, index in zip(shown, (own, others), strict=True)]
    pictures = torch.stack([pixels for _, pixels, _, _ in loaded], 1)
    captions = list(zip(*([text[0] for text in texts] for _, _, texts, _ in loaded), strict=True))
    return Overlap(
        samples=len(evaluation), rows=own, references=others, similarity=matches.similarity.numpy()[order],
        pictures=pictures, captions=captions,
    )  # fmt: skip


def read_seen(path: Path, samples: int) -> set[int]:
    """Return the numbers of the pictures that training has seen, from a file of `Overlap.result` for `samples` samples.

    Raises `UserError` if it is another file, or belongs to other data.
    """
    try:
        result = read_json(path)["results"][0]
        threshold, expected = float(result["settings"]["threshold"]), int(result["settings"]["samples"])
        seen = {int(case["picture"]) for case in result["cases"] if float(case["similarity"]) >= threshold}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise UserError(f"{path} does not hold an overlap: write it with `limner data overlap -o`") from None
    if expected != samples or not all(0 <= i < samples for i in seen):
        raise UserError(f"{path} belongs to data of {expected:,} samples, not {samples:,}: look this data up again")
    return seen


def _read(source: Source, name: str, progress: Advance | None) -> tuple[Tensor, np.ndarray]:
    """Return thumbnails of all readable pictures, and their numbers."""
    data, parts, numbers = ImageCaptionDataset(source, _SHOWN_SIDE), [], []
    for index in np.array_split(np.arange(len(source)), -(-len(source) // _BATCH)):
        good, pixels, _, _ = data.load(index)
        parts.append(thumbnails(pixels))
        numbers.append(good)
        if progress:
            progress(len(index))
    if not sum(map(len, numbers)):
        raise UserError(f"the {name} data lacks a readable picture: inspect it with `limner data show`")
    return torch.cat(parts), np.concatenate(numbers)
