"""Training in 8 bits: the loss falls, a resumed run is equal bit for bit, and the report names the kernels."""

import json
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from limner.numerics.precision import Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.optim.optimizers import AdamWConfig
from limner.quantization.precisions import Fp8SwitchBack, Fp8TensorWise, LLMInt8, SwitchBack, SwitchBackM, SwitchBackQ
from limner.quantization.products import counts_from_json
from limner.training.config import TrainConfig
from limner.training.kernel_report import FILE, KernelReport
from limner.training.loop import train
from limner.training.metrics_log import read_metrics
from limner.training.train_state import TrainState
from tokens_in_turn import PRIOR, Tokens

CONFIG = TrainConfig(
    steps=20, batch_size=8, accumulate=2, optimizer=AdamWConfig(lr=5e-3), ema_decay=0.9, log_every=1, checkpoint_every=7
)
PRECISIONS = [SwitchBack(), SwitchBackM(), SwitchBackQ(), LLMInt8(), Fp8SwitchBack(), Fp8TensorWise()]


def run(out, config):
    torch.manual_seed(0)
    model = PRIOR.build()
    train(TrainState(model, Autoregressive(), config), Tokens(), out, hooks=[KernelReport(out)])
    return model, [row["loss"] for row in read_metrics(out / "metrics.jsonl")]


def counted(out):
    found = json.loads((out / FILE).read_text())
    return found, sum((counts_from_json(layer["products"]) for layer in found["layers"]), Counter())


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: type(precision).__name__)
def test_training_resumes_bit_for_bit_and_counts_every_product(precision, tmp_path):
    config = replace(CONFIG, precision=precision)
    model, losses = run(tmp_path / "whole", config)
    exact = run(tmp_path / "exact", replace(CONFIG, precision=Fp32()))[1]
    assert losses[-1] < 0.8 * losses[0] and losses[-1] == pytest.approx(exact[-1], rel=0.05)
    assert losses != exact
    assert {type(x) for x in model.modules() if isinstance(x, nn.Linear)} == {nn.Linear}

    run(tmp_path / "parts", replace(config, steps=7))
    shutil.copytree(tmp_path / "parts", tmp_path / "killed")
    (tmp_path / "killed" / FILE).unlink()  # what a kill may leave: the checkpoint alone
    for out in ("parts", "killed"):
        again, _ = run(tmp_path / out, config)
        assert [row["loss"] for row in read_metrics(tmp_path / out / "metrics.jsonl")] == losses
        for one, other in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
            assert torch.equal(one, other)
        assert counted(tmp_path / out) == counted(tmp_path / "whole")

    found, counts = counted(tmp_path / "whole")
    assert (found["step"], found["precision"]) == (20, type(precision).__name__)
    low = [layer for layer in found["layers"] if layer["kind"] != "Linear"]
    assert len(low) == 8 and low[0]["name"] == "blocks.0.attention.branch.qkv"
    assert [layer["name"] for layer in found["layers"] if layer not in low] == ["head.text", "head.image"]
    products = Counter()
    for (product, _, _), n in counts.items():
        products[product] += n
    assert set(products.values()) == {20 * 2 * 8}  # updates, micro-batches, layers
    low = "simulated" if "Fp8" in found["precision"] else "_int_mm"
    kernels = {product: {k for (p, k, _) in counts if p == product} for product in products}
    assert kernels["forward"] == kernels["input gradient"] == {low}
    assert (kernels["weight gradient"] == {low}) == isinstance(precision, LLMInt8 | Fp8TensorWise)


def test_checkpointed_activations_give_the_same_losses_and_count_what_is_computed_again(tmp_path):
    config = replace(CONFIG, steps=3, precision=SwitchBack())
    plain, again = (
        run(tmp_path / name, replace(config, checkpoint_activations=name == "again"))[1] for name in ("plain", "again")
    )
    assert plain == again
    forward = {name: sum(n for (p, _, _), n in counted(tmp_path / name)[1].items() if p == "forward")
               for name in ("plain", "again")}  # fmt: skip
    assert forward["again"] == 2 * forward["plain"]
