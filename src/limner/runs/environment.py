"""The packages of a run with their versions, as an environment file that conda and pip understand."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import packages_distributions, version

_HEAD = "# Packages that this run imported: conda env create -f environment.yml"


def environment_file() -> str:
    """Return an `environment.yml` of the distributions that this process has imported.

    A local version such as "+cpu" is left out, since package indexes lack such builds.
    """
    modules = {name.partition(".")[0] for name in sys.modules}
    imported = {name for module, names in packages_distributions().items() if module in modules for name in names}
    pinned = [f"{name}=={version(name).partition('+')[0]}" for name in sorted(imported | {"limner"}, key=str.lower)]
    lines = [_HEAD, "name: limner", "dependencies:", f"- python={platform.python_version()}", "- pip", "- pip:"]
    return "\n".join([*lines, *(f"  - {line}" for line in pinned)]) + "\n"
