"""`limner data scenes | icons | emoji | prepare | show`: make, prepare or look at training data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from limner.cli import dispatch
from limner.cli.arguments import parse, place
from limner.data.filters import Filters
from limner.errors import UserError, printable
from limner.progress import progress
from limner.ranges import SEEDS, Checked, OutOfRange, Range


@dataclass(frozen=True, kw_only=True)
class WriteScenes(Checked):
    """Write the synthetic world: pictures, several phrasings each, ground truth, and a split that holds
    out combinations of attributes. The same command writes the same bytes.
    """

    out: Positional[Path]
    """A new folder, for tar shards."""
    count: Annotated[int, Range(1, 10**9)] = 20_000
    seed: Annotated[int, SEEDS] = 0
    size: Annotated[int, Range(24, 1_536)] = 48
    """Side of the pictures in pixels, a multiple of 24."""
    kind: Literal["described", "crowded"] = "described"
    """Scenes that captions describe, or crowded ones to train a dVAE on."""
    held_out: Annotated[float, Range(0, 1)] = 0.05
    """Share of samples with a held-out combination."""
    pairs: Annotated[float, Range(0, 1)] = 0.1
    """Share of top-and-bottom pairs ("the exact same scene on the top as a sketch at the bottom")."""
    things: Annotated[tuple[float, float, float, float], Range(0)] = (3, 5, 1, 1)
    """How often described scenes have one, two, three and four things, relative to each other."""
    in_order: Annotated[float, Range(0, 1)] = 0.0
    """How often captions of two things are made to say the upper or left one first; the others say either first. A
    model learns "above" and "below" sooner if one order is rarer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % 24:
            raise OutOfRange("size", f"must be a multiple of 24, not {self.size}")
        if not sum(self.things):
            raise OutOfRange("things", "must have one share above 0 at least")


@dataclass(frozen=True, kw_only=True)
class WriteEmoji(Checked):
    """Write every emoji of an installed colour-emoji font, with its names and a held-out split."""

    out: Positional[Path]
    """A new folder, for tar shards."""
    size: Annotated[int, Range(8, 1_024)] = 64
    """Side of the pictures in pixels."""
    font: Path | None = None
    """A font file, if the system's own is not found or not wanted."""


@dataclass(frozen=True, kw_only=True)
class WriteIcons(Checked):
    """Write drawings of the same subjects by several artists, with style, licence and author, pairs, and a split that
    holds out combinations of subject and style.

    Sets come from npm: `npm pack @iconify-json/twemoji` leaves a .tgz. For further names of the subjects, give the
    .tgz of `npm pack cldr-annotations-full` too.
    """

    out: Positional[Path]
    """A new folder, for tar shards."""
    files: Positional[tuple[Path, ...]]
    """Icon sets in Iconify's format: icons.json, or the .tgz of @iconify-json/NAME."""
    size: Annotated[int, Range(16, 1_024)] = 64
    """Side of the pictures in pixels, an even number."""
    background: str = "white"
    """What drawings lie on: a color of CSS, as white or #ffeecc."""
    pairs: Annotated[float, Range(0, 1)] = 0.25
    """How many drawings come a second time, on top of a pair ("the exact same tiger on the top as a line drawing at
    the bottom")."""
    tones: Annotated[int, Range(0, 100)] = 1
    """Drawings with a skin tone of each subject and style, at most; the one without comes in any case."""
    styles: Annotated[int, Range(1, 1_000)] = 1
    """Leave out subjects that fewer styles have: few styles and many subjects are much to learn by heart."""
    categories: tuple[str, ...] = ()
    """Leave out subjects that no set files under one of these ("Food & Drink", say)."""
    all_licenses: bool = False
    """Take sets whose licence is not a permissive one, too: share-alike, or unknown."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % 2:
            raise OutOfRange("size", f"must be even, not {self.size}")


@dataclass(frozen=True, kw_only=True)
class Prepare(Checked):
    """Write the good samples of a source to tar shards; defects and what the filters reject are counted.

    A source is a folder of pictures with .txt captions, a JSONL, CSV, Parquet or Arrow file with a caption
    column and image paths or bytes, a data set of Hugging Face (cloned or saved to disk), or img2dataset's
    tar shards, also by glob. The filters are those of the paper (appendix C).
    """

    source: Positional[str]
    """A folder, a file or a glob (in quotes)."""
    out: Positional[Path]
    """A new folder, for tar shards."""
    size: Annotated[int | None, Range(1, 4_096)] = None
    """Shrink pictures to this shorter side; never enlarges."""
    held_out: Annotated[float, Range(0, below=1)] = 0.02
    """Share of samples to keep from training, for evaluation; samples that name a split stay in it."""
    caption: str | None = None
    """The caption column of a table, if its name does not show it."""
    image: str | None = None
    """The image column of a table, if its name does not show it."""
    allow_outside: bool = False
    """Let a table name files outside its own folder."""
    filters: Annotated[Filters, arg(name="")] = field(default_factory=Filters)


@dataclass(frozen=True, kw_only=True)
class Show(Checked):
    """Count the samples of a source by split, and the unusable ones by reason; show some captions."""

    source: Positional[str]
    """A folder, a file or a glob (in quotes)."""
    captions: Annotated[int, Range(0, 1_000)] = 8
    """Captions to print."""
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write those samples as a contact sheet (PNG)."""


def main(argv: Sequence[str]) -> None:
    dispatch("limner data", {"scenes": scenes, "icons": icons, "emoji": emoji, "prepare": prepare, "show": show}, argv)


def scenes(argv: Sequence[str]) -> None:
    """write the built-in synthetic world"""
    options = parse(WriteScenes, argv, "limner data scenes")
    place(options.out, folder=True)
    from limner.worlds.writing import write_scenes

    with progress("drawing scenes", options.count, unit="scene") as bar:
        summary = write_scenes(
            options.out, options.count, options.seed, size=options.size, kind=options.kind,
            held_out=options.held_out, pairs=options.pairs, things=options.things,
            in_order=options.in_order, progress=bar.advance,
        )  # fmt: skip
    _tell(options.out, summary["kept"], summary["rejected"], summary["splits"])


def emoji(argv: Sequence[str]) -> None:
    """write the emoji of an installed font"""
    options = parse(WriteEmoji, argv, "limner data emoji")
    place(options.out, folder=True)
    from limner.worlds.emoji import all_emoji, build

    with progress("drawing emoji", len(all_emoji()), unit="emoji") as bar:
        counts = build(options.out, options.size, options.font, bar.advance)
    _tell(options.out, counts.kept, counts.rejected)


def icons(argv: Sequence[str]) -> None:
    """write drawings of several icon sets"""
    options = parse(WriteIcons, argv, "limner data icons")
    if not options.files:
        raise UserError("name the files of icon sets, such as the .tgz that `npm pack @iconify-json/NAME` leaves")
    place(options.out, folder=True)
    from limner.worlds import iconify
    from limner.worlds.icon_writing import write_icons

    sets, keywords = [], []
    for path in options.files:
        if (words := iconify.keywords(path)) is not None:
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
            options.out, sets, keywords=keywords, size=options.size, background=options.background,
            pairs=options.pairs, tones=options.tones, styles=options.styles, categories=options.categories,
            progress=bar.advance,
        )  # fmt: skip
    _tell(options.out, summary["kept"], summary["rejected"], summary["splits"])
    for what in ("joined", "kinds"):
        print(", ".join(f"{name} {count:,}" for name, count in summary[what].items()))


def prepare(argv: Sequence[str]) -> None:
    """filter, shrink and pack data of your own"""
    options = parse(Prepare, argv, "limner data prepare")
    place(options.out, folder=True)
    from limner.data.prepare import prepare as write
    from limner.data.sources import open_source

    source = open_source(
        options.source, caption=options.caption, image=options.image, allow_outside=options.allow_outside
    )
    with progress("preparing", len(source), unit="sample") as bar:
        counts = write(
            source, options.out, filters=options.filters, size=options.size, held_out=options.held_out,
            progress=bar.advance,
        )  # fmt: skip
    _tell(options.out, counts.kept, counts.rejected, counts.splits)


def show(argv: Sequence[str]) -> None:
    """count samples and show some of them"""
    options = parse(Show, argv, "limner data show")
    if options.output:
        place(options.output)
    from PIL import Image

    from limner.data.pictures import decoded
    from limner.data.samples import Rejected
    from limner.data.sources import open_source
    from limner.evaluation.report import Row, contact_sheet, save_png

    source = open_source(options.source)
    rejected, splits, kept = Counter[str](), Counter[str](), 0
    wanted = {i * len(source) // options.captions for i in range(options.captions)}
    rows: list[Row] = []
    with progress("reading", len(source), unit="sample") as bar:
        for i in range(len(source)):
            try:
                sample = source[i]
                with decoded(sample.image) as picture:
                    size = "{1} x {0}".format(*picture.shape)
                    thumbnail = Image.fromarray(picture) if i in wanted else None
                    if thumbnail:
                        thumbnail.thumbnail((256, 256))
            except Rejected as defect:
                rejected[defect.reason] += 1
            else:
                kept += 1
                splits[sample.meta.get("split", "no split")] += 1
                if thumbnail:
                    rows.append(Row(caption=sample.captions[0], pictures=[(thumbnail, size)]))
            bar.advance(1)
    _tell(options.source, kept, rejected, splits)
    for row in rows:
        print(f"  {row.pictures[0][1]:>11}  {printable(row.caption)}")
    if options.output and rows:
        print(f"written: {printable(save_png(contact_sheet(rows, columns=4), options.output))}")


def _tell(where: object, kept: int, rejected: dict[str, int], splits: dict[str, int] | None = None) -> None:
    from limner.data.prepare import Counts
    from limner.data.samples import unread

    print(f"{printable(where)}\n{Counts(kept, {printable(reason): n for reason, n in rejected.items()})}")
    if splits:
        listed = [f"{name} {count:,}" for name, count in sorted(splits.items())]
        more = f" and {len(listed) - 20:,} more" if len(listed) > 20 else ""
        print(printable(f"by split: {', '.join(listed[:20])}{more}"))
        if lost := unread({name: count for name, count in splits.items() if name != "no split"}):
            print(printable(lost))
