"""findings.md, from what `limner reproduce` wrote: `python docs/findings.py reproduced`.

Nothing is copied by hand: claims, verdicts and tables are those of the folder's NAME.json, charts those of NAME-1.svg.
A finding that the folder does not have stays as the page has it.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from limner.reproduce import NAMES

HERE = Path(__file__).parent
MARKS = {True: "holds", False: "does not hold", None: "is undecided"}
HEAD = """# The papers' findings, at the scale of two cores

Each is a command, `limner reproduce NAME`, which trains what it needs from fixed seeds and says whether the finding
holds here. `python docs/findings.py reproduced` writes this page from the results. Models have up to a few million
parameters and train for some hundred steps: what holds at the papers' scale need not hold here, nor the reverse.

| command | the finding | here |
|---|---|---|
"""


def main(folder: Path) -> None:
    """Write the folder's findings into findings.md, and copy their charts."""
    page, images = HERE / "findings.md", HERE / "images/findings"
    images.mkdir(parents=True, exist_ok=True)
    rows, parts = read(page.read_text("utf-8"))
    for name in NAMES:
        if (path := folder / f"{name}.json").exists():
            one = json.loads(path.read_text("utf-8"))
            rows[name] = f"| [`{name}`](#{name}) | {one['claim']} | {MARKS[one['holds']]} |"
            for old in images.glob(f"{name}-*.svg"):
                old.unlink()
            parts[name] = section(one, folder, images)
    there = [name for name in NAMES if name in parts]
    text = HEAD + "\n".join(rows[name] for name in there) + "\n\n" + "\n".join(parts[name] for name in there)
    page.write_text(text, encoding="utf-8")


def read(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """The lines of the page's first table, and its sections, by name."""
    rows = {found[1]: found[0] for found in re.finditer(r"^\| \[`([\w-]+)`\]\(#.*$", text, re.MULTILINE)}
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return rows, {part.split(maxsplit=2)[1]: part.rstrip("\n") + "\n" for part in parts}


def section(one: dict[str, Any], folder: Path, images: Path) -> str:
    """A finding: what the paper says, what was found, the table, the first two charts, and how it was trained."""
    header = one["header"]
    lines = [
        f"## {one['name']}\n",
        f"{one['claim']} ({one['source']}).\n",
        f"**This {MARKS[one['holds']]} here.** {one['verdict']}\n",
        "| " + " | ".join(map(str, header)) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(map(str, row)) + " |" for row in one["rows"]),
        "",
    ]
    for chart in sorted(folder.glob(f"{one['name']}-*.svg"))[:2]:
        shutil.copy(chart, images / chart.name)
        lines += [f"![{one['name']}](images/findings/{chart.name})", ""]
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in one["settings"].items())
    return "\n".join([*lines, f"Settings: {settings}.\n"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
