"""`limner demo`: train on synthetic scenes, draw, and write a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from limner.cli.arguments import check_writable, parse
from limner.errors import escape_control
from limner.runs.demo_options import Demo


def main(argv: Sequence[str]) -> None:
    """Run the demo and print its results and output files."""
    options = parse(Demo, argv, "limner demo")
    check_writable(options.out, folder=True)
    from limner.runs.demo import run

    result = run(options)
    print(result.table())
    out = Path(escape_control(options.out))
    print(f"report:        {out / 'report.html'}")
    print(f"contact sheet: {out / 'contact.png'}")
    print(f'draw more:     limner draw "a large green cross on a pink background" --model {out / "run"}')
