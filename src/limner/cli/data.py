"""`limner data scenes | icons | glyphs | emoji | prepare | show | overlap`: make, prepare or look at training data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from limner.cli import run_subcommand
from limner.cli.arguments import NewFolder, OutputPNG
from limner.cli.find_overlap import overlap
from limner.data.filters import Filters
from limner.errors import UserError, did_you_mean, escape_control
from limner.progress import progress
from limner.tasks import iconify, svg_folder
from limner.tasks.build_glyphs import GlyphDataSettings, write_glyphs
from limner.tasks.build_icons import IconDataSettings, write_icons
from limner.tasks.build_scenes import SceneDataSettings, write_scenes
from limner.validation import Range, Validated

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image


_MAX_NAMED = 4  # styles that `limner data glyphs` prints


def main(argv: Sequence[str]) -> None:
    """Run a subcommand of `limner data`."""
    run_subcommand("limner data", (scenes, icons, glyphs, emoji, prepare, show, overlap), argv)


@dataclass(frozen=True, kw_only=True)
class WriteScenes:
    """Write synthetic scenes: pictures, several captions each, ground truth, and a split that holds
    out combinations of attributes. The same command writes the same bytes.
    """

    out: Positional[NewFolder]
    """New folder for tar shards."""
    settings: Annotated[SceneDataSettings, arg(name="")] = field(default_factory=SceneDataSettings)


def scenes(options: WriteScenes) -> None:
    """write the built-in synthetic scenes"""
    with progress("drawing scenes", options.settings.count, unit="scene") as bar:
        _print_summary(options.out, write_scenes(options.out, options.settings, bar.advance))


@dataclass(frozen=True, kw_only=True)
class WriteIcons:
    """Write icons of the same subjects by several artists, with style, license and author, pairs, and a split that
    holds out combinations of subject and style.

    Sets come from npm: `npm pack @iconify-json/twemoji` writes a .tgz. For more names of the subjects, also give the
    .tgz of `npm pack cldr-annotations-full`.
    """

    out: Positional[NewFolder]
    """New folder for tar shards."""
    files: Positional[tuple[Path, ...]]
    """Icon sets in Iconify's format: icons.json, or the .tgz of @iconify-json/NAME."""
    settings: Annotated[IconDataSettings, arg(name="")] = field(default_factory=IconDataSettings)
    all_licenses: bool = False
    """Also use sets without a permissive license, such as copyleft or unknown ones."""


def icons(options: WriteIcons) -> None:
    """write drawings of several icon sets"""
    if not options.files:
        raise UserError("limner data icons needs files of icon sets, such as the .tgz of `npm pack @iconify-json/NAME`")
    sets, keywords = [], []
    for path in options.files:
        if (words := iconify.read_keywords(path)) is not None:
            keywords.append(words)
        elif _has_usable_license(icon_set := iconify.read(path), options.all_licenses):
            sets.append(icon_set)
            credit = f"{icon_set.title}, by {icon_set.author} ({icon_set.license})"
            print(escape_control(f"{credit}: {len(icon_set.icons):,} drawings"))
    if not sets:
        raise UserError("no icon set has a permissive license: name another set or add --all-licenses")
    total = sum(len(icon_set.icons) for icon_set in sets)
    with progress("drawing icons", total, unit="icon") as bar:
        summary = write_icons(options.out, sets, options.settings, keywords=keywords, progress=bar.advance)
    _print_summary(options.out, summary)
    for group in ("joined", "kinds"):
        print(", ".join(f"{name} {count:,}" for name, count in summary[group].items()))


@dataclass(frozen=True, kw_only=True)
class WriteGlyphs:
    """Write monochrome icons of many sets: subject and style from their names, license and author, and a split that
    holds out combinations of subject and style, whole subjects, and whole sets.

    `npm pack @iconify/json` writes a .tgz with more than 200 sets. Brands, flags, animated icons, archived sets and
    sets in fixed colors are left out.
    """

    out: Positional[NewFolder]
    """New folder for tar shards."""
    files: Positional[tuple[Path, ...]]
    """The .tgz of @iconify/json, or single sets: icons.json, the .tgz of @iconify-json/NAME, or a folder of SVG files,
    whose name is the style."""
    settings: Annotated[GlyphDataSettings, arg(name="")] = field(default_factory=GlyphDataSettings)
    sets: Annotated[tuple[str, ...], arg(metavar="PREFIX ...")] = ()
    """Prefixes of the sets to use, such as ph lucide; by default all."""
    all_licenses: bool = False
    """Also use sets without a permissive license, such as CC-BY-SA or CC-BY-NC."""


def glyphs(options: WriteGlyphs) -> None:
    """write monochrome icons of many sets"""
    if not options.files:
        raise UserError("limner data glyphs needs files of icon sets: `npm pack @iconify/json` writes one")
    prefixes = set[str]()  # of all sets in the files

    def sets() -> Iterator[iconify.IconSet]:
        for path in options.files:
            own = path.is_dir()
            for icon_set in [svg_folder.read(path)] if own else iconify.read_sets(path):
                prefixes.add(icon_set.prefix)
                chosen = not options.sets or icon_set.prefix in options.sets
                if chosen and (own or _has_usable_license(icon_set, options.all_licenses)):
                    yield icon_set
        for name in options.sets:
            if name not in prefixes:
                raise UserError(f"no set {name!r} in these files: {did_you_mean(name, sorted(prefixes))}")

    with progress("drawing icons", unit="icon") as bar:
        summary = write_glyphs(options.out, sets(), options.settings, bar.advance)
    _print_summary(options.out, summary)
    styles = sorted(summary["styles"])
    named = f": {', '.join(map(escape_control, styles))}" if len(styles) <= _MAX_NAMED else ""
    print(f"{summary['subjects']:,} subjects, {len(styles):,} styles{named}")
    print(", ".join(f"{name} {count:,}" for name, count in summary["kinds"].items()))


def _has_usable_license(icon_set: iconify.IconSet, all_licenses: bool) -> bool:
    """Return True if the license of a set is permissive or all are asked for; otherwise print that it is skipped."""
    usable = icon_set.permissive or all_licenses
    if not usable:
        skipped = f"skipped {icon_set.title}, whose license is {icon_set.license}: --all-licenses includes it"
        print(escape_control(skipped))
    return usable


@dataclass(frozen=True, kw_only=True)
class WriteEmoji(Validated):
    """Write every emoji of an installed color-emoji font, with its names and a held-out split."""

    out: Positional[NewFolder]
    """New folder for tar shards."""
    size: Annotated[int, Range(8, 1_024)] = 64
    """Side of the pictures in pixels."""
    font: Path | None = None
    """Font file; by default the system's color-emoji font."""


def emoji(options: WriteEmoji) -> None:
    """write the emoji of an installed font"""
    from limner.tasks.emoji import all_emoji, write_emoji

    with progress("drawing emoji", len(all_emoji()), unit="emoji") as bar:
        summary = write_emoji(options.out, options.size, options.font, bar.advance)
    _print_counts(options.out, summary["kept"], summary["rejected"])


@dataclass(frozen=True, kw_only=True)
class Prepare(Validated):
    """Write the usable samples of a source to tar shards; count defects and rejections of filters.

    A source is a folder of pictures with .txt captions, a JSONL, CSV, Parquet or Arrow file with a caption
    column and image paths or bytes, a Hugging Face data set (cloned or saved to disk), or img2dataset's
    tar shards, also as a glob. Filters reject captions that are short, boilerplate or not English, and, as in the
    paper (appendix C), pictures with an aspect ratio outside [1/2, 2].
    """

    source: Positional[str]
    """Folder, file or glob (in quotes)."""
    out: Positional[NewFolder]
    """New folder for tar shards."""
    size: Annotated[int | None, Range(1, 4_096)] = None
    """Shrink pictures to this shorter side in pixels; smaller pictures keep their size."""
    held_out: Annotated[float, Range(0, lt=1)] = 0.02
    """Share of samples held out of training for evaluation; samples that name a split keep it."""
    caption: Annotated[str | None, arg(metavar="COLUMN")] = None
    """Caption column of a table; by default recognized by its name."""
    image: Annotated[str | None, arg(metavar="COLUMN")] = None
    """Image column of a table; by default recognized by its name."""
    allow_outside: bool = False
    """Allow a table to name files outside its folder."""
    filters: Annotated[Filters, arg(name="")] = field(default_factory=Filters)


def prepare(options: Prepare) -> None:
    """filter, shrink and pack your own data"""
    from limner.data.open_source import open_source
    from limner.data.prepare import prepare

    columns = {"caption": options.caption, "image": options.image}
    source = open_source(options.source, **columns, allow_outside=options.allow_outside)
    settings: dict[str, Any] = {"filters": options.filters, "size": options.size, "held_out": options.held_out}
    with progress("preparing", len(source), unit="sample") as bar:
        counts = prepare(source, options.out, **settings, progress=bar.advance)
    _print_counts(options.out, counts.kept, counts.rejected, counts.splits)


@dataclass(frozen=True, kw_only=True)
class Show(Validated):
    """Count the samples of a source by split, and unusable samples by reason; show some captions."""

    source: Positional[str]
    """Folder, file or glob (in quotes)."""
    captions: Annotated[int, Range(0, 1_000)] = 8
    """Number of captions to print."""
    output: OutputPNG = None
    """Write the samples of these captions as a contact sheet (PNG)."""
    augment: Literal["dvae", "prior"] | None = None
    """In -o, draw four augmented versions of each sample: of Listing 1 (the dVAE) or Listing 2 (the prior)."""


def show(options: Show) -> None:
    """count samples and show some of them"""
    from PIL import Image

    from limner.data.image_decode import decoded
    from limner.data.open_source import open_source
    from limner.data.sample import Rejected
    from limner.evaluation.report import SheetRow, contact_sheet, save_png

    if options.augment and options.output is None:
        raise UserError("--augment draws a contact sheet: name its file with -o FILE.png")
    source = open_source(options.source)
    rejected, splits = Counter[str](), Counter[str]()
    shown = {i * len(source) // options.captions for i in range(options.captions)}
    rows: list[SheetRow] = []
    with progress("reading", len(source), unit="sample") as bar:
        for i in range(len(source)):
            try:
                sample = source[i]
                with decoded(sample.image) as picture:
                    size = "{1} x {0}".format(*picture.shape)
                    thumbnail = Image.fromarray(picture) if i in shown else None
                    versions = _augmented(picture, options.augment) if thumbnail and options.augment else []
            except Rejected as defect:
                rejected[defect.reason] += 1
            else:
                splits[sample.meta.get("split", "no split")] += 1
                if thumbnail:
                    thumbnail.thumbnail((256, 256))
                    rows.append(SheetRow(caption=sample.captions[0], pictures=[(thumbnail, size), *versions]))
            bar.advance(1)
    _print_counts(options.source, splits.total(), rejected, splits)
    for row in rows:
        print(f"  {row.pictures[0][1]:>11}  {escape_control(row.caption)}")
    if options.output and rows:
        columns = 1 if options.augment else 4
        print(f"written: {escape_control(save_png(contact_sheet(rows, columns), options.output))}")


def _augmented(picture: np.ndarray, name: str) -> list[tuple[Image.Image, str]]:
    """Return four augmented versions of uint8 [H, W, 3], as large as a contact sheet shows them, with labels."""
    import numpy as np
    from PIL import Image

    from limner.data.augment import get_augment

    augment, rng = get_augment(name)[0], np.random.default_rng(0)
    return [(Image.fromarray(augment(picture, 144, rng)), f"{name}, {i + 1}") for i in range(4)]


def _print_summary(source: object, summary: Mapping[str, Any]) -> None:
    """Print the numbers of samples of a data set's summary."""
    _print_counts(source, summary["kept"], summary["rejected"], summary["splits"])


def _print_counts(source: object, kept: int, rejected: dict[str, int], splits: dict[str, int] | None = None) -> None:
    """Print the numbers of samples kept, rejected by reason, and in each split."""
    from limner.data.sample import describe_unread
    from limner.data.shard_writer import Counts

    counts = Counts(kept, Counter({escape_control(reason): n for reason, n in rejected.items()}))
    print(f"{escape_control(source)}\n{counts}")
    if splits:
        parts = [f"{name} {count:,}" for name, count in sorted(splits.items())]
        more = f" and {len(parts) - 20:,} more" if len(parts) > 20 else ""
        print(escape_control(f"by split: {', '.join(parts[:20])}{more}"))
        if warning := describe_unread({name: count for name, count in splits.items() if name != "no split"}):
            print(escape_control(warning))
