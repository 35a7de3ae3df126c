"""Two test processes share two cores: each computes with one thread. Tests for a GPU are skipped without one."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
