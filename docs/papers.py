"""Write concepts/papers.md, the coverage of the papers by the code, from the table papers.toml.

`python docs/papers.py` writes the page. A row of the table is a claim of a paper; the comment at the top of the table
explains its fields.
"""

import posixpath
import re
import tomllib
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
TABLE, PAGE = HERE / "papers.toml", HERE / "concepts/papers.md"
STATUSES = ("works", "partial", "missing", "not applicable")
HEADER = """# Coverage of the papers

Each claim of the papers, the files that implement or test it, and its status. `python docs/papers.py` writes this page
from the table `docs/papers.toml`, and a test checks the files, names and commands in it.

- **works**: the code does what the claim states. A difference that does not change the result may follow. An
  experiment can be repeated, at small scale; the [findings](../findings.md) state which claims hold there.
- **partial**: the code does a part of it, or differs. The reason follows.
- **missing**: the code does not do it. The reason follows.
- **not applicable**: nothing to implement, or data and services of others.

Words in capitals in a command are placeholders.

"""


class Claim(NamedTuple):
    """A claim of a paper: a row of the table. `where` holds (file, name defined in the file or "")."""

    paper: str
    part: str
    id: str
    section: str
    claim: str
    status: str
    where: tuple[tuple[str, str], ...] = ()
    command: str = ""
    reason: str = ""


def claims() -> list[Claim]:
    """Return the rows of the table in order."""
    return [
        Claim(paper=part["paper"], part=part["title"], **{**row, "where": tuple(map(_place, row.get("where", ())))})
        for part in _table()["part"]
        for row in part["claim"]
    ]


def page() -> str:
    """Return the page in Markdown."""
    titles = {paper: entry["title"] for paper, entry in _table()["paper"].items()}
    rows = claims()
    lines = [f"| paper | {' | '.join(STATUSES)} | claims |", "|---|" + "---|" * (len(STATUSES) + 1)]
    for paper, title in titles.items():
        lines.append(f"| [{title}](#{_anchor(title)}) | {_counts([row for row in rows if row.paper == paper])} |")
    lines.append(f"| all | {_counts(rows)} |")
    for paper, title in titles.items():
        lines += ["", f"## {title}"]
        for part, group in groupby((row for row in rows if row.paper == paper), key=lambda row: row.part):
            lines += ["", f"### {part}", "", "| section | claim | where | status | command |", "|---|---|---|---|---|"]
            lines += [_line(row) for row in group]
    return HEADER + "\n".join(lines) + "\n"


def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text("utf-8"))


def _place(text: str) -> tuple[str, str]:
    path, _, name = text.partition(": ")
    return path, name


def _counts(rows: list[Claim]) -> str:
    number = Counter(row.status for row in rows)
    return " | ".join(str(n) for n in [*(number[status] for status in STATUSES), len(rows)])


def _anchor(title: str) -> str:
    """The heading's anchor, the same on GitHub and in mkdocs."""
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


def _line(row: Claim) -> str:
    places = [
        _link(path, [name for _, name in group]) for path, group in groupby(row.where, key=lambda place: place[0])
    ]
    status = f"{row.status}: {row.reason}" if row.reason else row.status
    command = f"`{row.command}`" if row.command else ""
    return f"| {row.section} | {row.claim} | {'<br>'.join(places)} | {status} | {command} |"


def _link(path: str, names: list[str]) -> str:
    target = posixpath.relpath(path, f"docs/{PAGE.parent.name}")
    shown = f"[`{path.removeprefix('src/limner/')}`]({target})"
    return " ".join([shown, ", ".join(f"`{name}`" for name in names if name)]).strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
