"""The report of a demo: a web page with drawings, scores, training curves and times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

import torch

from limner.evaluation import composition, report
from limner.evaluation.scene_sheet import SceneSample
from limner.pipeline import TextToImage
from limner.progress import clock
from limner.recipes.recipe import Recipe
from limner.runs.demo_options import Demo
from limner.training.metrics_log import read_metrics

_CURVES = {
    "dvae": ("dVAE", ("loss", "eval/psnr")),
    "prior": ("prior", ("image", "text", "eval/image")),
    "contrastive": ("contrastive model", ("loss", "eval/accuracy")),
}


def page(
    demo: Demo,
    recipe: Recipe,
    pipe: TextToImage,
    samples: Sequence[SceneSample],
    result: composition.CompositionResult,
    timings: Mapping[str, float],
) -> str:
    """Return the body of the web page. `recipe` is the trained one; `timings` has seconds by phase."""
    k = demo.candidates
    best, first = result.rate(k), result.rate(1)
    trained = "Three models were" if demo.from_scratch else "A prior and a contrastive model were"
    parts = [
        "<h1>limner demo</h1>",
        f'<p class="lead">{trained} trained here, from random weights, on {demo.scenes:,} pictures of a small '
        f"synthetic world. Of {best.total} captions with held-out combinations, the chosen "
        f"drawing is right for <b>{best.value:.0%}</b> (best of {k}), "
        f"compared with {first.value:.0%} for a single drawing.</p>",
        "<h2>Drawings</h2>",
        '<p class="dim">The best of each row was chosen by the contrastive model (blue frame); a scene '
        "parser without learned parts found the right ones (green line).</p>",
        *(_article(sample) for sample in samples),
        f"<h2>Score over {best.total} held-out captions</h2>",
        report.table(
            [
                (name, f"{result.single(kind).value:.1%}", *_cells(result, k, kind))
                for name, kind in result.groups().items()
            ],
            ("captions", "any candidate", "best of 1", f"best of {k}", f"any of {k} right"),
        ),
        '<p class="dim">With 95% intervals. Right means: number, size, fill, color and shape of all objects, their '
        "relation, and the background.</p>",
        "<h2>Training</h2>",
        f'<div class="charts">{"".join(_charts(demo.out / "run"))}</div>',
        "<h2>Time</h2>",
        report.table([*((name, clock(s)) for name, s in timings.items()), ("total", clock(sum(timings.values())))]),
        "<h2>Settings</h2>",
        report.table(_settings(demo, recipe, pipe)),
    ]
    return "\n".join(parts)


def _cells(result: composition.CompositionResult, k: int, kind: str | None) -> tuple[str, str, str]:
    return str(result.rate(1, kind)), str(result.rate(k, kind)), str(result.ceiling(k, kind))


def _article(sample: SceneSample) -> str:
    right = bool(sample.right[sample.best])
    verdict = '<span class="good">right</span>' if right else '<span class="bad">wrong</span>'
    strip = []
    for i in range(len(sample.pictures)):
        kind = " ".join(name for name, on in (("chosen", i == sample.best), ("right", sample.right[i])) if on)
        tag = report.img_tag(sample.picture(i), f"candidate {i + 1}", 48)
        title = f"candidate {i + 1}, score {float(sample.scores[i]):.3f}"
        strip.append(tag.replace("<img ", f'<img class="{kind}" title="{title}" ', 1))
    return (
        f"<article><h3>{escape(sample.caption)}</h3>"
        f'<div class="pair"><figure>{report.img_tag(sample.picture(sample.best), "best drawing", 192)}'
        f"<figcaption>drawn: {verdict}, score {float(sample.scores[sample.best]):.3f}</figcaption></figure>"
        f"<figure>{report.img_tag(sample.real(), 'real scene', 192)}<figcaption>real scene</figcaption></figure></div>"
        f'<div class="strip">{"".join(strip)}</div><small>{int(sample.right.sum())} of {len(sample.right)} candidates '
        "are right</small></article>"
    )


def _charts(folder: Path) -> Iterator[str]:
    for name, (title, keys) in _CURVES.items():
        rows = read_metrics(folder / name / "metrics.jsonl")
        for key in keys:
            points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
            yield report.chart(
                f"{title}: {key.removeprefix('eval/')}" + (" (held out)" if "/" in key else ""), {key: points}
            )


def _settings(demo: Demo, recipe: Recipe, pipe: TextToImage) -> list[tuple[str, object]]:
    size, (h, w) = pipe.dvae.config.size, pipe.dvae.config.grid

    def sizes(model: torch.nn.Module, steps: int) -> str:
        return f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {steps:,} steps"

    return [
        ("pictures", f"{size} x {size} pixels, {h} x {w} tokens"),
        ("prior", sizes(pipe.prior, recipe.prior.training.steps)),
        ("contrastive model", sizes(pipe.contrastive, recipe.contrastive.training.steps)),
        ("dVAE", "trained here" if demo.from_scratch else "bundled"),
        ("seed", demo.seed),
        ("torch", torch.__version__),
        ("threads", torch.get_num_threads()),
    ]
