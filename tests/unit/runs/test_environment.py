"""A run records the packages that trained it in a file that installs them."""

import platform
from importlib.metadata import version

import numpy
import torch
import yaml

import limner
from limner.runs.environment import environment_file


def test_versions_are_those_of_limners_packages():
    found = yaml.safe_load(environment_file())
    python, pip, packages = found["dependencies"]
    assert (python, pip) == (f"python={platform.python_version()}", "pip")
    pinned = dict(line.split("==") for line in packages["pip"])
    assert pinned["numpy"] == numpy.__version__ and pinned["limner"] == limner.__version__
    assert pinned["torch"] == torch.__version__.partition("+")[0]  # an index lacks local builds
    assert pinned["sympy"] == version("sympy")  # torch needs it
    assert "pytest" not in pinned and "mkdocs" not in pinned  # installed for development
