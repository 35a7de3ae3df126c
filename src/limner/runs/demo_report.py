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
    shown: Sequence[SceneSample],
    result: composition.CompositionResult,
    took: Mapping[str, float],
) -> str:
    """Return the body of the web page. `recipe` is the trained one; `took` has seconds by phase."""
    k = demo.candidates
    best, first = result.rate(k), result.rate(1)
    trained = "Three models were" if demo.from_scratch else "A prior and a contrastive model were"
    parts = [
        "<h1>limner demo</h1>",
        f'<p class="lead">{trained} trained here, from random weights, on {demo.scenes:,} pictures of a small '
        f"synthetic world. Of {best.total} captions whose combinations were held out of training, the chosen "
        f"drawing has everything right for <b>{best.value:.0%}</b> (best of {k}), "
        f"against {first.value:.0%} with a single drawing.</p>",
        "<h2>Drawings</h2>",
        '<p class="dim">The best of each row was chosen by the contrastive model (blue frame); an oracle that reads '
        "pictures without a learned model says what is right (green line).</p>",
        *(_article(one) for one in shown),
        f"<h2>Score over {best.total} held-out captions</h2>",
        report.table(
            [
                (name, f"{result.single(kind).value:.1%}", *_cells(result, k, kind))
                for name, kind in result.groups().items()
            ],
            ("captions", "any candidate", "best of 1", f"best of {k}", f"any of {k} right"),
        ),
        '<p class="dim">With 95% intervals. Right means: number, size, fill, color and shape of all things, their '
        "relation, and the background.</p>",
        "<h2>Training</h2>",
        f'<div class="charts">{"".join(_charts(demo.out / "run"))}</div>',
        "<h2>Time</h2>",
        report.table([*((name, clock(s)) for name, s in took.items()), ("in all", clock(sum(took.values())))]),
        "<h2>Settings</h2>",
        report.table(_settings(demo, recipe, pipe)),
    ]
    return "\n".join(parts)


def _cells(result: composition.CompositionResult, k: int, kind: str | None) -> tuple[str, str, str]:
    return str(result.rate(1, kind)), str(result.rate(k, kind)), str(result.ceiling(k, kind))


def _article(one: SceneSample) -> str:
    right = bool(one.right[one.best])
    verdict = '<span class="good">right</span>' if right else '<span class="bad">not as the caption says</span>'
    strip = []
    for i in range(len(one.pictures)):
        kind = " ".join(name for name, on in (("chosen", i == one.best), ("right", one.right[i])) if on)
        tag = report.img_tag(one.picture(i), f"candidate {i + 1}", 48)
        title = f"candidate {i + 1}, score {float(one.scores[i]):.3f}"
        strip.append(tag.replace("<img ", f'<img class="{kind}" title="{title}" ', 1))
    return (
        f"<article><h3>{escape(one.caption)}</h3>"
        f'<div class="pair"><figure>{report.img_tag(one.picture(one.best), "best drawing", 192)}'
        f"<figcaption>drawn: {verdict}, score {float(one.scores[one.best]):.3f}</figcaption></figure>"
        f"<figure>{report.img_tag(one.real(), 'real scene', 192)}<figcaption>a real scene</figcaption></figure></div>"
        f'<div class="strip">{"".join(strip)}</div><small>{int(one.right.sum())} of {len(one.right)} candidates '
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
