"""`limner finetune BUNDLE DATA --out RUN`: teach a bundle new pictures by a LoRA adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import NewFolder, parse
from limner.errors import escape_control
from limner.runs.finetune import FinetuneConfig, finetune
from limner.validation import Validated


@dataclass(frozen=True, kw_only=True)
class Finetune(Validated):
    """Teach a bundle a few new pictures with their captions, by a LoRA adapter of its prior.

    Half of each batch are drawings of the bundle itself, so that it forgets little. New and ordinary pictures are
    scored every few steps, training stops by itself, and the best step is kept. The same command resumes after an
    interruption.
    """

    bundle: Annotated[Positional[str], arg(metavar="NAME|FOLDER")]
    """Name of a bundled model, or a folder that `limner train` wrote."""
    data: Positional[str]
    """New pictures with captions: a folder, a file or a glob (in quotes)."""
    out: Annotated[NewFolder, arg(metavar="FOLDER")]
    """Folder of the run, for RUN/adapter and RUN/bundle."""
    ordinary: Annotated[str | None, arg(metavar="FILE|DATA")] = None
    """Captions of the kind that the bundle draws: a text file with one per line, or its training data; by default those
    of the bundled model `scenes`."""
    settings: Annotated[FinetuneConfig, arg(name="")] = FinetuneConfig()


def main(argv: Sequence[str]) -> None:
    """Train an adapter, and print what it has learned and forgotten."""
    options = parse(Finetune, argv, "limner finetune")
    best = finetune(options.bundle, options.data, options.out, options.settings, options.ordinary)
    bundle, adapter = escape_control(options.bundle), escape_control(options.out / "adapter")
    print(best.summary())
    print(f'draw with it: limner draw "..." --model {bundle} --adapter {adapter}')
