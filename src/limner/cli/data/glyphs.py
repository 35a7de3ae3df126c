"""`limner data glyphs`: write monochrome icons of many sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable, parse
from limner.cli.data.shared import has_usable_license, print_counts
from limner.errors import UserError, did_you_mean
from limner.progress import progress
from limner.tasks import iconify
from limner.tasks.build_glyphs import GlyphDataSettings, write_glyphs


@dataclass(frozen=True, kw_only=True)
class WriteGlyphs:
    """Write monochrome icons of many sets: subject and style from their names, license and author, and a split that
    holds out combinations of subject and style, whole subjects, and whole sets.

    `npm pack @iconify/json` writes a .tgz with more than 200 sets. Brands, flags, animated icons, archived sets and
    sets in fixed colors are left out.
    """

    out: Positional[Path]
    """New folder for tar shards."""
    files: Positional[tuple[Path, ...]]
    """The .tgz of @iconify/json, or single sets: icons.json, or the .tgz of @iconify-json/NAME."""
    settings: Annotated[GlyphDataSettings, arg(name="")] = field(default_factory=GlyphDataSettings)
    sets: Annotated[tuple[str, ...], arg(metavar="PREFIX ...")] = ()
    """Prefixes of the sets to use, such as ph lucide; by default all."""
    all_licenses: bool = False
    """Also use sets without a permissive license, such as CC-BY-SA or CC-BY-NC."""


def main(argv: Sequence[str]) -> None:
    """write monochrome icons of many sets"""
    options = parse(WriteGlyphs, argv, "limner data glyphs")
    if not options.files:
        raise UserError("limner data glyphs needs files of icon sets: `npm pack @iconify/json` writes one")
    check_writable(options.out, folder=True)
    prefixes = set[str]()  # of all sets in the files

    def sets() -> Iterator[iconify.IconSet]:
        for path in options.files:
            for icon_set in iconify.read_sets(path):
                prefixes.add(icon_set.prefix)
                if options.sets and icon_set.prefix not in options.sets:
                    continue
                if has_usable_license(icon_set, options.all_licenses):
                    yield icon_set
        for name in options.sets:
            if name not in prefixes:
                raise UserError(f"no set {name!r} in these files: {did_you_mean(name, sorted(prefixes))}")

    with progress("drawing icons", unit="icon") as bar:
        summary = write_glyphs(options.out, sets(), options.settings, bar.advance)
    print_counts(options.out, summary["kept"], summary["rejected"], summary["splits"])
    print(f"{summary['subjects']:,} subjects, {len(summary['styles']):,} styles")
    print(", ".join(f"{name} {count:,}" for name, count in summary["kinds"].items()))
