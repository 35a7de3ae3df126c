"""Write findings.md from the results of `limner reproduce`: `python docs/findings.py reproduced`.

Claims, verdicts and tables come from the folder's NAME.json, charts from NAME-1.svg and NAME-2.svg. The page keeps its
introduction, and the sections of findings that the folder lacks.
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


def main(folder: Path) -> None:
    """Write the folder's findings into findings.md, and copy their charts."""
    page, images = HERE / "findings.md", HERE / "images/findings"
    images.mkdir(parents=True, exist_ok=True)
    introduction, rows, sections = read(page.read_text("utf-8"))
    for name in EXPERIMENTS:
        if (path := folder / f"{name}.json").exists():
            finding = json.loads(path.read_text("utf-8"))
            rows[name] = f"| [`{name}`](#{name}) | {finding['claim']} | {OUTCOMES[finding['holds']]} |"
            for old in images.glob(f"{name}-*.svg"):
                old.unlink()
            sections[name] = section(finding, folder, images)
    available = [name for name in EXPERIMENTS if name in sections]
    table = "\n".join(rows[name] for name in available)
    page.write_text(f"{introduction}{table}\n\n" + "\n".join(sections[name] for name in available), encoding="utf-8")


def read(text: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """Return the page up to the first finding in its table, the lines of the table and the sections by name."""
    lines = list(re.finditer(r"^\| \[`([\w-]+)`\]\(#.*$", text, re.MULTILINE))
    rows = {line[1]: line[0] for line in lines}
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    by_name = {section_text.split(maxsplit=2)[1]: section_text.rstrip("\n") + "\n" for section_text in sections}
    return text[: lines[0].start()], rows, by_name


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
