"""`limner detector DATA --out RUN`: train an object detector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import tyro
from tyro.conf import Positional, arg

from limner.cli import validate_choice
from limner.cli.arguments import NewFolder, parse, pop_option
from limner.errors import escape_control
from limner.evaluation.icon_composites import is_icons
from limner.models.detector import LayoutName
from limner.runs.detector import PRESETS, SCENES, DetectorRecipe, train_detector
from limner.validation import Validated


@dataclass(frozen=True, kw_only=True)
class TrainDetector(Validated):
    """Train an object detector, SSD or SSDlite, on synthetic scenes, composites of icons, or pictures with boxes.

    DATA is "scenes", the output of `limner data icons` or `limner data glyphs`, or a folder in COCO's format:
    annotations.json (or another single JSON file) and the pictures that it names. The same command resumes after an
    interruption. Measure the result with `limner evaluate detector RUN`.
    """

    data: Positional[str]
    """The word "scenes", or a folder."""
    out: Annotated[NewFolder, arg(metavar="FOLDER")]
    """Folder of the run."""
    settings: Annotated[DetectorRecipe, arg(name="")]


def main(argv: Sequence[str]) -> None:
    """Train a detector and print the command that evaluates it."""
    is_small = SCENES in argv or any(is_icons(word) for word in argv)
    layout = pop_option("--layout", argv)[0] or ("ssdlite48" if is_small else "ssdlite320")
    validate_choice(layout, list(PRESETS), "layout")
    required: Any = tyro.MISSING
    default = TrainDetector(data=required, out=required, settings=PRESETS[cast(LayoutName, layout)])
    options = parse(TrainDetector, argv, "limner detector", default)
    train_detector(options.settings, options.data, options.out)
    print(f"evaluate it: limner evaluate detector {escape_control(options.out)}")
