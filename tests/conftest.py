"""Two test processes share two cores: each computes with one thread. Tests for a GPU are skipped without one. What
annotations say of types and shapes is checked at each call."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts

import beartype
import pytest
import torch
from jaxtyping import config, install_import_hook

#: The modules whose annotations name shapes, but for
#:
#: - quantization.low_precision, products and quantize: torch makes operators of their functions and reads
#:   annotations, which it does not find in a function that is checked;
#: - attention.cache: the compiler makes its dataclasses, and does not know those that are checked;
#: - evaluation.zero_shot: its tests give it stand-ins for a model and a source;
#: - experiments.replicas, tiny_models and spikes: the protocols that they name cannot be checked at run
#: time.
#:
#: What other processes compute (`ranks.py`) is not checked.
SHAPED = [
    "models", "objectives", "metrics", "numerics.formats", "attention.attention", "objectives.cross_entropy",
    "quantization.inference_linear", "quantization.simulated_gradients", "attention.patterns", "attention.sparse",
    "distributed.powersgd", "distributed.gradient_reducers", "distributed.replicated", "planner.grad_histogram",
    "experiments.gradient_compression", "experiments.dion", "experiments.switchback_speed", "sampling.generate",
    "sampling.cuda_graph", "sampling.parallel", "sampling.rerank",
]  # fmt: skip
# Where an annotation says float, a whole number is one.
CHECK = f"{beartype.__name__}.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
install_import_hook([f"limner.{name}" for name in SHAPED], CHECK)


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
