"""Small-scale reproductions of the papers' findings, and of one later method: `limner reproduce NAME`.

An `Experiment` states the paper's claim and its source. Its function has a grid of settings and the criterion by which
a `Sweep` of trials decides whether the claim holds at this scale. The trials take a machine with two cores at most
twenty minutes.
"""

from importlib import import_module

from limner.experiments.report import Experiment

#: The module of each experiment, in the order of the papers' sections.
EXPERIMENTS = {
    "tau-gap": "dvae_variants",
    "kl-weight": "dvae_variants",
    "soft-targets": "prior_variants",
    "separate-softmax": "prior_variants",
    "padding": "prior_variants",
    "loss-weights": "prior_variants",
    "grad-scales": "sixteen_bits",
    "compression-rank": "gradient_compression",
    "fixed-q": "gradient_compression",
    "rerank-n": "drawings",
    "fid-blur": "fidelity",
    "overlap": "fidelity",
    "written-words": "written_words",
    "binding": "drawings",
    "image-to-image": "drawings",
    "sixteen-bit-moments": "sixteen_bits",
    "bandwidth": "bandwidth",
    "householder": "gradient_compression",
    "dion": "dion",
    "pooling": "dvae_variants",
    "tau-schedule": "dvae_variants",
    "pixel-density": "dvae_variants",
    "last-layer": "prior_variants",
    "switchback-accuracy": "eight_bits",
    "fp8-accuracy": "eight_bits",
    "fp8-layerscale": "float8",
    "switchback-speed": "switchback_speed",
    "switchback-training": "switchback_speed",
    "beta2-schedule": "optimizer_variants",
    "quantization-variance": "eight_bits",
    "inner-dimensions": "eight_bits",
    "loss-spikes": "spikes",
    "rms-predicts": "spikes",
    "stable-adamw": "spikes",
    "spike-remedies": "optimizer_variants",
    "optimizers": "optimizer_variants",
    "loss-scale": "sixteen_bits",
    "elastic-pipeline": "elastic_pipeline",
    "chunks": "elastic_pipeline",
    "detector": "detectors",
    "svcca": "svcca",
    "freeze-alpha": "freezing",
    "cache-timing": "freezing",
}


def load(name: str) -> Experiment:
    """Import one of `EXPERIMENTS`."""
    return getattr(import_module(f"{__name__}.{EXPERIMENTS[name]}"), name.replace("-", "_"))
