"""Write findings.md from the results of `limner reproduce`: `python docs/findings.py reproduced`.

Claims, verdicts and tables come from the folder's NAME.json, charts from NAME-1.svg and NAME-2.svg. The page keeps the
sections of findings that the folder lacks.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from limner.experiments import EXPERIMENTS

HERE = Path(__file__).parent
OUTCOMES = {True: "holds", False: "does not hold", None: "is undecided"}
HEADER = """# The papers' findings, at the scale of two cores

Each finding has a command, `limner reproduce NAME`, which trains small models from fixed seeds and reports whether the
finding holds here. `python docs/findings.py reproduced` writes this page from the results. Models have up to a few
million parameters and train for some hundred steps: a finding can hold at one scale and not at the other.

| command | the finding | here |
|---|---|---|
"""


def main(folder: Path) -> None:
    """Write the folder's findings into findings.md, and copy their charts."""
    page, images = HERE / "findings.md", HERE / "images/findings"
    images.mkdir(parents=True, exist_ok=True)
    rows, sections = read(page.read_text("utf-8"))
    for name in EXPERIMENTS:
        if (path := folder / f"{name}.json").exists():
            finding = json.loads(path.read_text("utf-8"))
            rows[name] = f"| [`{name}`](#{name}) | {finding['claim']} | {OUTCOMES[finding['holds']]} |"
            for old in images.glob(f"{name}-*.svg"):
                old.unlink()
            sections[name] = section(finding, folder, images)
    available = [name for name in EXPERIMENTS if name in sections]
    text = (
        HEADER + "\n".join(rows[name] for name in available) + "\n\n" + "\n".join(sections[name] for name in available)
    )
    page.write_text(text, encoding="utf-8")


def read(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the lines of the page's first table and its sections, by name."""
    rows = {match[1]: match[0] for match in re.finditer(r"^\| \[`([\w-]+)`\]\(#.*$", text, re.MULTILINE)}
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return rows, {section_text.split(maxsplit=2)[1]: section_text.rstrip("\n") + "\n" for section_text in sections}


def section(finding: dict[str, Any], folder: Path, images: Path) -> str:
    """Return the section of a finding: claim, verdict, table, the first two charts, and settings."""
    header = finding["header"]
    lines = [
        f"## {finding['name']}\n",
        f"{finding['claim']} ({finding['source']}).\n",
        f"**This {OUTCOMES[finding['holds']]} here.** {finding['verdict']}\n",
        "| " + " | ".join(map(str, header)) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(map(str, row)) + " |" for row in finding["rows"]),
        "",
    ]
    for chart in sorted(folder.glob(f"{finding['name']}-*.svg"))[:2]:
        shutil.copy(chart, images / chart.name)
        lines += [f"![{finding['name']}](images/findings/{chart.name})", ""]
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in finding["settings"].items())
    return "\n".join([*lines, f"Settings: {settings}.\n"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
