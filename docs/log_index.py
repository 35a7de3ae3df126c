"""The table of contents of `docs/log/index.md`, from the titles of the entries.

`python docs/log_index.py` rewrites it.
"""

import re
from pathlib import Path
from typing import NamedTuple

LOG = Path(__file__).parent / "log"
TITLE = re.compile(r"^## (\d{4}-\d\d-\d\d): (.+) \((taken|not taken|partly taken|measured)\)$", re.MULTILINE)
HEAD = "| date | experiment | verdict |\n|---|---|---|\n"


class Entry(NamedTuple):
    """An experiment: its file, date, topic with the key number, and verdict."""

    path: Path
    date: str
    topic: str
    verdict: str

    @property
    def anchor(self) -> str:
        """The heading's anchor, the same on GitHub and in mkdocs."""
        return re.sub(r"[^\w -]", "", f"{self.date}: {self.topic} ({self.verdict})").lower().replace(" ", "-")


def entries() -> list[Entry]:
    """Return all entries, newest first."""
    pages = sorted(LOG.glob("[0-9]*.md"), reverse=True)
    return [Entry(page, *title) for page in pages for title in TITLE.findall(page.read_text(encoding="utf-8"))]


def table() -> str:
    """Return the table of contents in Markdown."""
    return HEAD + "".join(f"| {e.date} | [{e.topic}]({e.path.name}#{e.anchor}) | {e.verdict} |\n" for e in entries())


if __name__ == "__main__":
    index = LOG / "index.md"
    index.write_text(index.read_text(encoding="utf-8").partition(HEAD)[0] + table(), encoding="utf-8")
