"""`limner data icons`: write drawings of several icon sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable, parse
from limner.cli.data.shared import has_usable_license, print_counts
from limner.errors import UserError, escape_control
from limner.progress import progress
from limner.tasks import iconify
from limner.tasks.build_icons import IconDataSettings, write_icons


@dataclass(frozen=True, kw_only=True)
class WriteIcons:
    """Write icons of the same subjects by several artists, with style, license and author, pairs, and a split that
    holds out combinations of subject and style.

    Sets come from npm: `npm pack @iconify-json/twemoji` writes a .tgz. For more names of the subjects, also give the
    .tgz of `npm pack cldr-annotations-full`.
    """

    out: Positional[Path]
    """New folder for tar shards."""
    files: Positional[tuple[Path, ...]]
    """Icon sets in Iconify's format: icons.json, or the .tgz of @iconify-json/NAME."""
    settings: Annotated[IconDataSettings, arg(name="")] = field(default_factory=IconDataSettings)
    all_licenses: bool = False
    """Also use sets without a permissive license, such as copyleft or unknown ones."""


def main(argv: Sequence[str]) -> None:
    """write drawings of several icon sets"""
    options = parse(WriteIcons, argv, "limner data icons")
    if not options.files:
        raise UserError("limner data icons needs files of icon sets, such as the .tgz of `npm pack @iconify-json/NAME`")
    check_writable(options.out, folder=True)
    sets, keywords = [], []
    for path in options.files:
        if (words := iconify.read_keywords(path)) is not None:
            keywords.append(words)
            continue
        icon_set = iconify.read(path)
        if has_usable_license(icon_set, options.all_licenses):
            sets.append(icon_set)
            credit = f"{icon_set.title}, by {icon_set.author} ({icon_set.license})"
            print(escape_control(f"{credit}: {len(icon_set.icons):,} drawings"))
    if not sets:
        raise UserError("no icon set has a permissive license: name another set or add --all-licenses")
    total = sum(len(icon_set.icons) for icon_set in sets)
    with progress("drawing icons", total, unit="icon") as bar:
        summary = write_icons(options.out, sets, options.settings, keywords=keywords, progress=bar.advance)
    print_counts(options.out, summary["kept"], summary["rejected"], summary["splits"])
    for group in ("joined", "kinds"):
        print(", ".join(f"{name} {count:,}" for name, count in summary[group].items()))
