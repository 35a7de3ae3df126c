"""Costs of a prior's units against the plan of a launch on one GPU."""

from dataclasses import replace

import pytest

from limner.models.transformer import TransformerConfig
from limner.optim.optimizers import AdamW16Config, AdamWConfig
from limner.planner.cost import HALF, training_flops
from limner.planner.gpus import GPUS
from limner.planner.launch import Launch
from limner.planner.launch_search import Cluster, LaunchEstimate
from limner.planner.pipeline_costs import peak_bytes, pipelines, prior_units
from limner.planner.pipeline_search import PipelineEstimate
from limner.planner.pipeline_simulator import Pipeline
from limner.quantization.precisions import Fp16Weights
from limner.training.config import TrainConfig

MODEL = TransformerConfig(text_vocab=512, image_vocab=256, text_len=15, grid=(16, 16), width=128, depth=6, heads=2)
TRAINING = TrainConfig(steps=1, batch_size=32, optimizer=AdamWConfig(), ema_decay=0.9)


def launch(gpus=1, **changes):
    return Launch(config=MODEL, training=replace(TRAINING, **changes), gpus=gpus)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"checkpoint_activations": True},
        {"precision": Fp16Weights(), "optimizer": AdamW16Config()},
        {"ema_on_cpu": True, "optimizer": AdamW16Config()},
    ],
)
def test_units_sum_to_the_launch_on_one_gpu(changes):
    whole = launch(batch_size=4, **changes)
    units = prior_units(whole, rate=1e9)
    assert len(units) == 2 + 2 * MODEL.depth
    flops = 1e9 * sum(unit.forward + unit.backward for unit in units)
    assert flops == pytest.approx(training_flops(MODEL, 1, whole.training.checkpoint_activations), rel=1e-4)
    stored = 4 * sum(unit.stored for unit in units)
    expected = replace(whole.activations, copies=False).stored
    head_gradients = (MODEL.text_vocab + MODEL.image_vocab) * MODEL.width * 4
    assert stored == sum(expected.values()) - head_gradients
    copies = 0 if whole.stores_16bit else HALF * whole.shard_values[0]
    assert sum(unit.weights for unit in units) == whole.state["weights"] + copies
    assert sum(unit.gradients for unit in units) == whole.state["gradients"]
    moments = whole.state["moments"] + whole.state.get("averaged weights", 0)
    assert sum(unit.moments for unit in units) == pytest.approx(moments)


@pytest.mark.parametrize("changes", [{}, {"checkpoint_activations": True}, {"precision": Fp16Weights()}])
def test_one_stage_has_the_time_and_memory_of_a_launch_on_one_gpu(changes):
    """The pipeline adds gradients to stored activations; in the launch they replace each other."""
    whole = launch(batch_size=4, **changes)
    timed = LaunchEstimate(launch=whole, cluster=Cluster(gpu="v100-16gb"))
    units = prior_units(whole, GPUS["v100-16gb"].peak_flops * GPUS["v100-16gb"].mfu)
    settings = Pipeline(stages=(), devices=1, microbatches=1)
    one = PipelineEstimate(units=units, boundaries=(0, len(units)), samples=4, settings=settings)
    assert one.seconds == pytest.approx(timed.compute_seconds, rel=1e-4)
    (peak,) = peak_bytes(whole, one)
    assert whole.peak <= 1.02 * peak <= 1.02 * (whole.peak + whole.state["gradients"] + whole.activations.workspace)


def test_pipelines_stay_within_a_machine_and_divide_state_and_activations():
    found = {e.settings.devices: e for e in pipelines(launch(gpus=16), Cluster(gpu="v100-16gb", per_machine=4))}
    assert set(found) == {2, 4}
    assert all(e.settings.replicas * k == 16 and e.boundaries[-1] == 14 for k, e in found.items())
    assert all(e.samples * e.settings.microbatches * e.settings.replicas == 32 for e in found.values())
    assert max(peak_bytes(launch(gpus=16), found[4])) < max(peak_bytes(launch(gpus=16), found[2]))
    assert pipelines(launch(gpus=1), Cluster(gpu="v100-16gb")) == []


def test_the_link_between_machines_carries_gradients():
    within, across, slow = (
        pipelines(launch(gpus=8), Cluster(gpu="v100-16gb", per_machine=m, link=link))
        for m, link in ((8, None), (4, None), (4, 1e6))
    )
    two = [next(e for e in found if e.settings.devices == 2) for found in (within, across, slow)]
    assert two[0].seconds < two[1].seconds < two[2].seconds
    gradients = sum(unit.gradients for unit in two[2].units)
    assert two[2].seconds == pytest.approx(2 * 3 / 4 * gradients / 1e6, rel=0.05)  # 4 replicas
