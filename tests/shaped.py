"""The modules whose annotations name shapes: tests check them at each call. What other processes compute is not
checked (`ranks.py`)."""

SHAPED = [
    "models", "objectives", "metrics", "layers.attention", "layers.masked", "layers.sparse", "layers.cross_entropy",
    "layers.patterns", "sampling.generate", "sampling.rerank",
]  # fmt: skip
