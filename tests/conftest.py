"""Two test processes share two cores: each computes with one thread. Tests for a GPU are skipped without one. What the
annotations of models, layers, objectives and sampling say of types and shapes is checked at each call."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts

import beartype
import pytest
import torch
from jaxtyping import config, install_import_hook

SHAPED = [
    "models", "objectives", "metrics", "layers.attention", "layers.masked", "layers.sparse", "layers.cross_entropy",
    "layers.patterns", "sampling.generate", "sampling.rerank",
]  # fmt: skip
install_import_hook([f"limner.{name}" for name in SHAPED], f"{beartype.__name__}.beartype")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture
def shapes_unchecked():
    """For what is compiled: the compiler cannot see through the checks."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
