"""`limner data icons`: write drawings of several icon sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from limner.cli.arguments import parse, place
from limner.cli.data.shared import tell
from limner.errors import UserError, printable
from limner.progress import progress
from limner.validation import Checked, OutOfRange, Range


@dataclass(frozen=True, kw_only=True)
class WriteIcons(Checked):
    """Write icons of the same subjects by several artists, with style, license and author, pairs, and a split that
    holds out combinations of subject and style.

    Sets come from npm: `npm pack @iconify-json/twemoji` writes a .tgz. For more names of the subjects, also give the
    .tgz of `npm pack cldr-annotations-full`.
    """

    out: Positional[Path]
    """A new folder for tar shards."""
    files: Positional[tuple[Path, ...]]
    """Icon sets in Iconify's format: icons.json, or the .tgz of @iconify-json/NAME."""
    size: Annotated[int, Range(16, 1_024)] = 64
    """Side of the pictures in pixels, an even number."""
    margin: Annotated[int, Range(0, 256)] = 0
    """Empty border in pixels, so that random crops in training do not cut the drawing."""
    background: str = "white"
    """Background color in CSS syntax, such as white or #ffeecc."""
    pairs: Annotated[float, Range(0, 100)] = 0.25
    """Mean number of pairs per drawing as the top half ("the exact same tiger on the top as a line drawing at the
    bottom"): with 0.25, every fourth drawing is the top of one pair."""
    tones: Annotated[int, Range(0, 100)] = 1
    """Maximum number of skin-tone variants per subject and style, in addition to the drawing without a tone."""
    styles: Annotated[int, Range(1, 1_000)] = 1
    """Leave out subjects that exist in fewer styles; many subjects in few styles need much memorization."""
    categories: tuple[str, ...] = ()
    """Keep only subjects that a set lists in one of these categories, such as "Food & Drink"."""
    all_licenses: bool = False
    """Also use sets without a permissive license, such as copyleft or unknown ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % 2:
            raise OutOfRange("size", f"must be even, not {self.size}")
        if 4 * self.margin > self.size:
            raise OutOfRange("margin", f"must be a quarter of the size at most, {self.size // 4}, not {self.margin}")


def main(argv: Sequence[str]) -> None:
    """write drawings of several icon sets"""
    options = parse(WriteIcons, argv, "limner data icons")
    if not options.files:
        raise UserError("name the files of icon sets, such as the .tgz that `npm pack @iconify-json/NAME` leaves")
    place(options.out, folder=True)
    from limner.tasks import iconify
    from limner.tasks.build_icons import write_icons

    sets, keywords = [], []
    for path in options.files:
        if (words := iconify.read_keywords(path)) is not None:
            keywords.append(words)
            continue
        one = iconify.read(path)
        if one.permissive or options.all_licenses:
            sets.append(one)
            print(printable(f"{one.title}, by {one.author} ({one.license}): {len(one.icons):,} drawings"))
        else:
            print(printable(f"{one.title} is left out: its licence is {one.license} (--all-licenses takes it)"))
    if not sets:
        raise UserError("no icon set is left to draw: name one whose licence is permissive, or take --all-licenses")
    total = sum(len(one.icons) for one in sets)
    with progress("drawing icons", total, unit="icon") as bar:
        summary = write_icons(
            options.out, sets, keywords=keywords, size=options.size, margin=options.margin,
            background=options.background, pairs=options.pairs, tones=options.tones, styles=options.styles,
            categories=options.categories, progress=bar.advance,
        )  # fmt: skip
    tell(options.out, summary["kept"], summary["rejected"], summary["splits"])
    for what in ("joined", "kinds"):
        print(", ".join(f"{name} {count:,}" for name, count in summary[what].items()))
