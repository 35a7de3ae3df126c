"""`limner finetune BUNDLE DATA --out RUN`: teach a bundle new pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

from limner.cli.arguments import NewFolder, parse, pop_option
from limner.errors import escape_control
from limner.runs.finetune import finetune
from limner.runs.finetune_methods import METHODS, FinetuneConfig, LoRA
from limner.validation import Validated


@dataclass(frozen=True, kw_only=True)
class Finetune(Validated):
    """Teach a bundle a few new pictures with their captions.

    Half of each batch are drawings of the bundle itself, or its training pictures, so that it forgets little. New and
    ordinary pictures are scored every few steps, training stops by itself, and the best step is kept. The same command
    resumes after an interruption.
    """

    bundle: Annotated[Positional[str], arg(metavar="NAME|FOLDER")]
    """Name of a bundled model, or a folder that `limner train` wrote."""
    data: Positional[str]
    """New pictures with captions: a folder, a file or a glob (in quotes)."""
    out: Annotated[NewFolder, arg(metavar="FOLDER")]
    """Folder of the run, for RUN/adapter and RUN/bundle."""
    ordinary: Annotated[str | None, arg(metavar="FILE|DATA")] = None
    """Captions of the kind that the bundle draws: a text file with one per line, or its training data; by default those
    of the bundled model `scenes`. A bundle with training pictures, such as `glyphs`, rehearses these instead."""
    method: Literal[tuple(METHODS)] = LoRA.name  # pyright: ignore[reportInvalidTypeForm]
    """Part of the prior that trains: low-rank updates in a small file (lora), all weights (full), or all weights, of
    which leading blocks freeze (elastic). Its settings are options."""
    settings: Annotated[FinetuneConfig, arg(name="")]


def main(argv: Sequence[str]) -> None:
    """Train, and print what the bundle has learned and forgotten."""
    method = METHODS.get(pop_option("--method", argv)[0] or "", LoRA)  # `parse` rejects other names
    required: Any = tyro.MISSING
    default = Finetune(bundle=required, data=required, out=required, settings=method())
    options = parse(Finetune, argv, "limner finetune", default)
    best = finetune(options.bundle, options.data, options.out, options.settings, options.ordinary)
    bundle, out = escape_control(options.bundle), escape_control(options.out)
    print(best.summary())
    model = f"{bundle} --adapter {escape_control(options.out / 'adapter')}" if method is LoRA else out
    print(f'draw with it: limner draw "..." --model {model}')
