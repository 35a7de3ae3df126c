"""`limner data icons`: write drawings of several icon sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable, parse
from limner.cli.data.shared import print_counts
from limner.errors import UserError, escape_control
from limner.progress import progress
from limner.validation import InvalidSetting, Range, Validated


@dataclass(frozen=True, kw_only=True)
class WriteIcons(Validated):
    """Write icons of the same subjects by several artists, with style, license and author, pairs, and a split that
    holds out combinations of subject and style.

    Sets come from npm: `npm pack @iconify-json/twemoji` writes a .tgz. For more names of the subjects, also give the
    .tgz of `npm pack cldr-annotations-full`.
    """

    out: Positional[Path]
    """New folder for tar shards."""
    files: Positional[tuple[Path, ...]]
    """Icon sets in Iconify's format: icons.json, or the .tgz of @iconify-json/NAME."""
    size: Annotated[int, Range(16, 1_024)] = 64
    """Side of the pictures in pixels, an even number."""
    margin: Annotated[int, Range(0, 256)] = 0
    """Empty border in pixels, so that random crops in training do not cut the drawing."""
    background: Annotated[str, arg(metavar="COLOR")] = "white"
    """Background color in CSS syntax, such as white or #ffeecc."""
    pairs: Annotated[float, Range(0, 100)] = 0.25
    """Mean number of pairs per drawing as the top half ("the exact same tiger on the top as a line drawing at the
    bottom"): with 0.25, every fourth drawing is the top of one pair."""
    tones: Annotated[int, Range(0, 100)] = 1
    """Maximum number of skin-tone variants per subject and style, in addition to the drawing without a tone."""
    styles: Annotated[int, Range(1, 1_000)] = 1
    """Leave out subjects that exist in fewer styles; many subjects in few styles need much memorization."""
    categories: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ()
    """Keep only subjects that a set lists in one of these categories, such as "Food & Drink"."""
    all_licenses: bool = False
    """Also use sets without a permissive license, such as copyleft or unknown ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % 2:
            raise InvalidSetting("size", f"must be even, not {self.size}")
        if 4 * self.margin > self.size:
            raise InvalidSetting("margin", f"must be at most a quarter of size, {self.size // 4}, not {self.margin}")


def main(argv: Sequence[str]) -> None:
    """write drawings of several icon sets"""
    options = parse(WriteIcons, argv, "limner data icons")
    if not options.files:
        raise UserError("limner data icons needs files of icon sets, such as the .tgz of `npm pack @iconify-json/NAME`")
    check_writable(options.out, folder=True)
    from limner.tasks import iconify
    from limner.tasks.build_icons import write_icons

    sets, keywords = [], []
    for path in options.files:
        if (words := iconify.read_keywords(path)) is not None:
            keywords.append(words)
            continue
        icon_set = iconify.read(path)
        title, author, license = icon_set.title, icon_set.author, icon_set.license
        if icon_set.permissive or options.all_licenses:
            sets.append(icon_set)
            print(escape_control(f"{title}, by {author} ({license}): {len(icon_set.icons):,} drawings"))
        else:
            print(escape_control(f"skipped {title}, whose license is {license}: --all-licenses includes it"))
    if not sets:
        raise UserError("no icon set has a permissive license: name another set or add --all-licenses")
    total = sum(len(icon_set.icons) for icon_set in sets)
    with progress("drawing icons", total, unit="icon") as bar:
        summary = write_icons(
            options.out, sets, keywords=keywords, size=options.size, margin=options.margin,
            background=options.background, pairs=options.pairs, tones=options.tones, styles=options.styles,
            categories=options.categories, progress=bar.advance,
        )  # fmt: skip
    print_counts(options.out, summary["kept"], summary["rejected"], summary["splits"])
    for group in ("joined", "kinds"):
        print(", ".join(f"{name} {count:,}" for name, count in summary[group].items()))
