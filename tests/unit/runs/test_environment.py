"""A run says with which packages it was trained, in a file that installs them again."""

import platform
from importlib.metadata import version

import numpy
import torch
import yaml

import limner
from limner.runs.environment import environment_file


def test_versions_are_those_of_the_imported_packages():
    found = yaml.safe_load(environment_file())
    python, pip, packages = found["dependencies"]
    assert (python, pip) == (f"python={platform.python_version()}", "pip")
    pinned = dict(line.split("==") for line in packages["pip"])
    assert pinned["numpy"] == numpy.__version__ and pinned["limner"] == limner.__version__
    assert pinned["torch"] == torch.__version__.partition("+")[0]  # an index lacks local builds
    assert pinned["PyYAML"] == version("pyyaml") and "mkdocs" not in pinned  # installed here, but not imported
