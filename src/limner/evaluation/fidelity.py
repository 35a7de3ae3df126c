"""Fidelity of drawings: distances between their features and those of real pictures (§3.1, Figure 9).

Captions of one half of the data are drawn, and compared with as many pictures of the other half. The *floor* compares
the captions' own pictures with the same reference, so it is what a perfect model would reach at this number of
pictures. FID is far from 0 there: its bias grows with features per picture. KID is unbiased, and leads.

In the papers' protocol the reference is every picture of the split, the captions' own included; the floor then compares
two halves of the pictures.

*Best of N* takes the best-scored of the first N candidates, for each N from one set of drawings. Candidates are
independent, so no N is favored, and every N has one picture per caption, so its FID has the same bias.

Intervals are 95% and resample captions against the same reference. A bootstrap replicate has fewer distinct drawings,
which raises a FID, so the replicates are shifted until their mean is the value.

Shapes: B captions, K values of N, P candidates, N drawings, U distinct winners, R rows of weights.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from limner.data.datasets import ImageCaptionDataset
from limner.data.sample import HELD_OUT, Rejected, Source, Subset, group_by_split
from limner.errors import UserError
from limner.evaluation.confidence import TEST_SEEDS_FROM, Estimate, wilson
from limner.evaluation.features import FeatureExtractor, concatenate, extract
from limner.evaluation.generate_batches import generate_batches
from limner.evaluation.overlap import read_seen
from limner.evaluation.report import chart
from limner.evaluation.result import EvalResult
from limner.metrics.features import Features
from limner.metrics.fidelity import compare
from limner.metrics.moments import Moments
from limner.pipeline import TextToImage
from limner.progress import Advance
from limner.sampling.generation_config import CANDIDATES, Sampler
from limner.validation import SEEDS, Range, Validated

_SHARES = ("precision", "recall", "coverage", "right")
_SPECS = {"kid": ".5f", **dict.fromkeys(_SHARES, ".1%")}  # formats of values
_PICTURES_PER_FEATURE = 10  # below, the bias of FID is large
_BATCH_SIZE = 256  # pictures that are decoded together

Checker = Callable[[np.ndarray, str], bool]  # True if a picture, uint8 [H, W, 3], shows what the caption says


@dataclass(frozen=True, kw_only=True)
class FidelitySettings(Validated):
    """Settings of an evaluation.

    Args:
        captions: maximum number of captions.
        best_of: values of N; each caption has as many candidates as the largest.
        blur: radii of a Gaussian filter on drawings and real pictures, in pixels of the model.
        reference: "rest", as many pictures as captions, of other captions; "all", every picture, and captions are
            sampled from all distinct ones.
        replicates: of the bootstrap.
        seed: caption i uses `drawing_seed(seed, i)`.
    """

    captions: Annotated[int, Range(1, 10**6)] = 1_000
    best_of: Annotated[tuple[int, ...], CANDIDATES] = (16,)
    blur: Annotated[tuple[float, ...], Range(0, 64)] = (0.0,)
    reference: Literal["rest", "all"] = "rest"
    replicates: Annotated[int, Range(20, 10_000)] = 100
    seed: Annotated[int, SEEDS] = TEST_SEEDS_FROM
    sampler: Sampler = field(default_factory=Sampler)


class FidelityTask(NamedTuple):
    """Captions to draw, and real pictures by their index in the source."""

    source: Source
    split: str
    captions: list[str]
    own: np.ndarray  # pictures that the floor compares with those of `rest`
    rest: np.ndarray
    reference: np.ndarray  # pictures that drawings are compared with: `rest`, or both


def fidelity_task(source: Source, settings: FidelitySettings, overlap: Path | None = None) -> FidelityTask:
    """Sample captions and pictures of the held-out split, or of the whole source without one; leave out those that
    training has seen, according to a file of `limner data overlap`.

    Raises `UserError` if fewer than two samples are readable, or the file belongs to other data.
    """
    splits = group_by_split(source)
    split = HELD_OUT if HELD_OUT in splits else "all"
    chosen = splits.get(HELD_OUT, source)
    if overlap:
        seen = read_seen(overlap, len(chosen))
        split, chosen = f"{split} without {len(seen):,} seen", Subset(chosen, sorted({*range(len(chosen))} - seen))
    captions: dict[int, tuple[str, ...]] = {}
    for i in np.random.default_rng(settings.seed).permutation(len(chosen)).tolist():
        try:
            captions[i] = chosen.captions(i)
        except Rejected:
            continue
        if settings.reference == "rest" and len(captions) == 2 * settings.captions:
            break
    indices = np.array(list(captions), int)
    if len(indices) < 2:
        raise UserError("fidelity needs two or more readable samples: inspect the data with `limner data show`")
    rng = np.random.default_rng([settings.seed, 1])
    first, second = np.split(indices, [len(indices) // 2])
    if settings.reference == "all":
        distinct = list(dict.fromkeys(caption for phrasings in captions.values() for caption in phrasings))
        drawn = [distinct[i] for i in rng.permutation(len(distinct))[: settings.captions]]
        return FidelityTask(chosen, split, drawn, first, second, indices)
    own, rest = first[: settings.captions], second[: settings.captions]
    return FidelityTask(chosen, split, [str(rng.choice(captions[i])) for i in own.tolist()], own, rest, rest)


def evaluate(
    pipe: TextToImage,
    extractor: FeatureExtractor,
    task: FidelityTask,
    settings: FidelitySettings = FidelitySettings(),
    *,
    statistics: Moments | None = None,
    check_picture: Checker | None = None,
    progress: Advance | None = None,
) -> list[EvalResult]:
    """Draw the captions and compare the drawings with real pictures, for each N and each radius.

    With `statistics` of other real pictures, drawings and the captions' own pictures are compared with these.
    `check_picture` adds the share of drawings that show what their caption says. `progress` advances by candidates.
    """
    own, rest = (_real_features(pipe, task.source, part, extractor, settings) for part in (task.own, task.rest))
    reference: Sequence[Features | Moments] = rest
    if statistics:
        reference = [statistics] * len(rest)
    elif settings.reference == "all":
        reference = [concatenate(halves) for halves in zip(own, rest, strict=True)]
    floors = [compare(a, statistics or b, extractor.name) for a, b in zip(own, rest, strict=True)]
    winners = _draw(pipe, extractor, task.captions, settings, check_picture, progress)
    weights = _bootstrap_weights(len(task.captions), settings)
    sampler = settings.sampler.with_defaults(pipe.defaults.sampler)
    common = {
        "model": pipe.name, "extractor": extractor.name, "version": extractor.version, "size": pipe.size,
        "split": task.split, "captions": len(task.captions), "real": len(task.reference),
        "reference": settings.reference, "seed": settings.seed, "replicates": settings.replicates,
        **sampler.to_metadata(),
    }  # fmt: skip
    results = []
    for (k, best_of), (r, radius) in product(enumerate(settings.best_of), enumerate(settings.blur)):
        picks = winners.index[:, k]
        values = compare(winners.features[r][picks], reference[r], extractor.name, weights)
        values |= {name: weights.double() @ x[picks].double() / len(picks) for name, x in winners.labels.items()}
        rows = {name: {"drawings": _estimate(name, value, len(picks))} for name, value in values.items()}
        for name, value in floors[r].items():
            rows[name]["floor"] = _estimate(name, value)
        title = f"{len(picks):,} drawings, best of {best_of:,}, blur {radius:g}; " + (
            f"statistics of other pictures; floor: {len(task.own):,}"
            if statistics
            else f"{len(task.reference):,} real pictures; floor: {len(task.own):,} and {len(task.rest):,}"
        )
        results.append(EvalResult(title=title, rows=rows, settings={**common, "best_of": best_of, "blur": radius}))
    _warn_of_bias(task, own[0], floors[0])
    return results


def summary(results: Sequence[EvalResult]) -> EvalResult:
    """Return one table of several conditions, with a column for each metric, and curves over N and the blur radius
    (Figure 9). Its cases are the results."""
    rows = {
        f"best of {result.settings['best_of']:,}, blur {result.settings['blur']:g}": {
            name.partition("[")[0]: row["drawings"] for name, row in result.rows.items()
        }
        for result in results
    }
    first = results[0].settings
    title = f"{first['captions']:,} drawings and {first['real']:,} real pictures, features of {first['extractor']}"
    charts = [*_charts(results, "blur", "radius"), *_charts(results, "best_of", "log2 N")]
    cases = [result.to_dict() for result in results]
    return EvalResult(title=title, rows=rows, cases=cases, settings=first, charts=charts)


def _charts(results: Sequence[EvalResult], setting: str, label: str) -> list[str]:
    """Return a chart of each metric over a setting, at the first value of the other one."""
    other = "best_of" if setting == "blur" else "blur"
    chosen = [result for result in results if result.settings[other] == results[0].settings[other]]
    charts = []
    for name in chosen[0].rows if len(chosen) > 1 else ():
        curves: dict[str, list[tuple[float, float]]] = {}
        for result in chosen:
            x = math.log2(result.settings[setting]) if setting == "best_of" else result.settings[setting]
            for column, estimate in result.rows[name].items():
                curves.setdefault(column, []).append((x, estimate.value))
        charts.append(chart(name, curves, label))
    return charts


class _Winners(NamedTuple):
    """The best of N drawings of each caption."""

    index: Tensor  # int64 [B, K], rows of features and labels
    features: list[Features]  # of U winners, for each radius
    labels: dict[str, Tensor]  # score, and 1 for a right drawing, [U]


def _draw(
    pipe: TextToImage, extractor: FeatureExtractor, captions: Sequence[str], settings: FidelitySettings,
    check_picture: Checker | None, progress: Advance | None,
) -> _Winners:  # fmt: skip
    """Draw all candidates, and extract the features of each picture that is the best for some N."""
    index, scores, right, count = [], [], list[float](), 0

    def winning_pictures() -> Iterator[Tensor]:
        nonlocal count
        pool = max(settings.best_of)
        for part, batch in generate_batches(pipe, captions, pool, settings.seed, settings.sampler, progress=progress):
            best = torch.stack([batch.scores[:, :n].argmax(1) for n in settings.best_of], 1)
            flat, inverse = torch.unique(best + pool * torch.arange(len(part))[:, None], return_inverse=True)
            index.append(inverse + count)
            count += len(flat)
            scores.append(batch.scores.flatten()[flat])
            pictures = batch.pictures.flatten(0, 1)[flat]
            if check_picture:
                arrays = pictures.permute(0, 2, 3, 1).contiguous().numpy()
                for picture, i in zip(arrays, (flat // pool).tolist(), strict=True):
                    right.append(float(check_picture(picture, captions[part.start + int(i)])))
            yield pictures

    features = extract(extractor, winning_pictures(), settings.blur)
    labels = {"score": torch.cat(scores)} | ({"right": torch.tensor(right)} if check_picture else {})
    return _Winners(torch.cat(index), features, labels)


def _real_features(
    pipe: TextToImage, source: Source, indices: np.ndarray, extractor: FeatureExtractor, settings: FidelitySettings
) -> list[Features]:
    dataset = ImageCaptionDataset(source, pipe.size)
    batches = (dataset.load(indices[i : i + _BATCH_SIZE])[1] for i in range(0, len(indices), _BATCH_SIZE))
    return extract(extractor, batches, settings.blur)


def _bootstrap_weights(count: int, settings: FidelitySettings) -> Tensor:
    """Return rows of weights [1 + replicates, count]: ones, and how often a resampling has each caption."""
    rng = np.random.default_rng([settings.seed, 2])
    resampled = rng.multinomial(count, np.full(count, 1 / count), settings.replicates)
    return torch.from_numpy(np.vstack([np.ones(count), resampled])).float()


def _estimate(name: str, values: Tensor, count: int = 0) -> Estimate:
    """Return the first value, with an interval from the others, which resample `count` captions."""
    kind, value = name.partition("[")[0], float(values[0])
    spec = _SPECS.get(kind, ".3f")
    if len(values) == 1:
        return Estimate(value=value, spec=spec)
    quantiles = torch.tensor([0.025, 0.975], dtype=values.dtype)
    low, high = (value + (values[1:] - values[1:].mean()).quantile(quantiles)).tolist()
    if kind in _SHARES:
        low, high = (max(low, 0), min(high, 1)) if low < high else wilson(value, count)
    return Estimate(value=value, spec=spec, low=min(low, value), high=max(high, value))


def _warn_of_bias(task: FidelityTask, real: Features, floor: Mapping[str, Tensor]) -> None:
    size, fewest = real.values.shape[1], min(len(task.captions), len(task.rest))
    if fewest < _PICTURES_PER_FEATURE * size:
        bias = next(float(value) for name, value in floor.items() if name.startswith("fid"))
        warnings.warn(
            f"{fewest:,} pictures are few for {size:,} features: a FID has a bias of about {bias:.3g} here, so "
            "compare models by KID, and FID only at the same number of pictures",
            stacklevel=3,
        )
