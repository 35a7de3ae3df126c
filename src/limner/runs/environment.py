"""The packages of a run with their versions, as an environment file that conda and pip understand."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version

_HEAD = "# Packages that limner used in this run: conda env create -f environment.yml"


def environment_file() -> str:
    """Return an `environment.yml` of limner, its requirements and theirs, without those that are not installed.

    A local version such as "+cpu" is left out, since package indexes lack such builds.
    """
    found = dict[str, str]()
    _add("limner", found, ("dev", "docs"))
    pinned = [f"  - {name}=={number.partition('+')[0]}" for name, number in sorted(found.items())]
    head = [_HEAD, "name: limner", "dependencies:", f"- python={platform.python_version()}", "- pip", "- pip:"]
    return "\n".join([*head, *pinned]) + "\n"


def _add(package: str, found: dict[str, str], without: tuple[str, ...] = ()) -> None:
    """Add a package and its requirements to `found`; of limner also those of its extras, but `without`."""
    name = re.sub(r"[-_.]+", "-", package).lower()
    if name in found:
        return
    try:
        found[name] = version(name)
    except PackageNotFoundError:  # an extra that is not installed, or another platform's package
        return
    for requirement in requires(name) or ():
        extra = re.search(r"extra *== *['\"]([\w-]+)", requirement)
        if extra is None or (name == "limner" and extra[1] not in without):
            _add(re.match(r"[\w.-]+", requirement)[0], found)  # type: ignore[index]  (a requirement begins with a name)
