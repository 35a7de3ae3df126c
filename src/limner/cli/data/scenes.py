"""`limner data scenes`: write the built-in synthetic scenes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable, parse
from limner.cli.data.shared import print_counts
from limner.progress import progress
from limner.tasks.build_scenes import SceneDataSettings, write_scenes


@dataclass(frozen=True, kw_only=True)
class WriteScenes:
    """Write synthetic scenes: pictures, several captions each, ground truth, and a split that holds
    out combinations of attributes. The same command writes the same bytes.
    """

    out: Positional[Path]
    """New folder for tar shards."""
    settings: Annotated[SceneDataSettings, arg(name="")] = field(default_factory=SceneDataSettings)


def main(argv: Sequence[str]) -> None:
    """write the built-in synthetic scenes"""
    options = parse(WriteScenes, argv, "limner data scenes")
    check_writable(options.out, folder=True)
    with progress("drawing scenes", options.settings.count, unit="scene") as bar:
        summary = write_scenes(options.out, options.settings, bar.advance)
    print_counts(options.out, summary["kept"], summary["rejected"], summary["splits"])
