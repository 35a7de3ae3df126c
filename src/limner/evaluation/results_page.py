"""A page of evaluations in one file: tables, curves and drawings of each, and how to compute them again."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import torch

from limner.evaluation.report import SheetRow, img_tag, save_page, table
from limner.evaluation.result import EvalResult
from limner.version import __version__

_DRAWINGS = 48  # per result


class Section(NamedTuple):
    """An evaluation: its name, what its results have in common, and the results."""

    name: str
    about: str
    results: Sequence[EvalResult]


def save_results_page(path: Path, model: str, sections: Sequence[Section], command: str) -> Path:
    """Write the evaluations of a model as a page; `command` computed them."""
    title = f"Evaluation of {model}" if len(sections) > 1 else f"{model}: {sections[0].name}"
    body = f'<h1>{escape(title)}</h1><p class="dim">With 95% intervals.</p>'
    for name, about, results in sections:
        body += f"<h2>{escape(', '.join(filter(None, (name, about))))}</h2>"
        for result in results:
            body += f"<h3>{escape(result.title)}</h3>{_table(result)}"
            body += f'<div class="charts">{"".join(result.charts)}</div>'
            body += f'<div class="sheet">{"".join(map(_figure, result.sheet[:_DRAWINGS]))}</div>'
        if settings := results[0].settings:
            body += f"<details><summary>settings</summary>{table(list(settings.items()))}</details>"
    versions = f"limner {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return save_page(path, title, f"{body}<h2>Again</h2><pre>{escape(command)}</pre><p class=dim>{versions}</p>")


def _table(result: EvalResult) -> str:
    columns = list(dict.fromkeys(column for row in result.rows.values() for column in row))
    rows = [[name, *(row.get(column, "") for column in columns)] for name, row in result.rows.items()]
    return f'<div class="scroll">{table(rows, ["", *columns])}</div>'


def _figure(row: SheetRow) -> str:
    pictures = "".join(
        f"<figure>{img_tag(picture, label, 144)}<figcaption>{escape(label)}</figcaption></figure>"
        for picture, label in row.pictures
    )
    verdict = {True: "good", False: "bad", None: "dim"}[row.right]
    return f'<article><h3 class="{verdict}">{escape(row.caption)}</h3><div class="pair">{pictures}</div></article>'
