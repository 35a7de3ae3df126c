"""`limner evaluate fidelity`: KID, FID and other distances of drawings from real pictures."""

from __future__ import annotations

from pathlib import Path

from limner.cli.evaluate.options import ScoreFidelity
from limner.cli.evaluate.output import Evaluated
from limner.errors import UserError
from limner.progress import progress


def fidelity(options: ScoreFidelity) -> Evaluated:
    """how close are drawings to real pictures (KID, FID and others)?"""
    from limner.data.open_source import open_source
    from limner.evaluation.features import open_extractor
    from limner.evaluation.fidelity import FidelitySettings, evaluate, fidelity_task, summary
    from limner.metrics.moments import Moments
    from limner.pipeline import load
    from limner.tasks.captions import parse, parse_pair
    from limner.tasks.verify import satisfies

    if not options.best_of or not options.blur:
        raise UserError("--best-of and --blur need at least one number")
    named = options.reference if isinstance(options.reference, str) else "rest"
    statistics = Moments.from_file(options.reference) if isinstance(options.reference, Path) else None
    if statistics and any(options.blur):
        raise UserError("--blur needs real pictures, which statistics lack: leave out --blur")
    settings = FidelitySettings(
        captions=options.captions, best_of=options.best_of, blur=options.blur, reference=named, seed=options.seed,
        sampler=options.sampler,
    )  # fmt: skip
    source, pipe = open_source(options.data), load(options.model)
    extractor, task = open_extractor(options.extractor, pipe), fidelity_task(source, settings, options.without)
    checker = satisfies if all(parse(caption) or parse_pair(caption) for caption in task.captions) else None
    with progress("drawing and comparing", len(task.captions) * max(options.best_of), unit="drawing") as bar:
        results = evaluate(
            pipe, extractor, task, settings, statistics=statistics, check_picture=checker, progress=bar.advance
        )
    return Evaluated(model=pipe.name, about=task.split, results=results if len(results) == 1 else [summary(results)])
