"""Figure 12: the scale of each resblock is recorded after each update, and charted."""

import pytest
import torch

from limner.experiments import sixteen_bits, sweep
from limner.experiments.sixteen_bits import NARROW_FORMAT, FastPerBlockGradScaler
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.training.config import TrainConfig
from limner.training.step import update
from limner.training.train_state import TrainState

MODEL = TransformerConfig(text_vocab=20, image_vocab=16, text_len=5, grid=(3, 3), width=16, depth=1, heads=2)


def test_scales_are_recorded_after_each_update():
    run = TrainState(MODEL.build(), Autoregressive(), TrainConfig(steps=3, batch_size=2, precision=Fp32()))
    hook = FastPerBlockGradScaler(run)
    batch = {"text": torch.ones(2, 5, dtype=torch.long), "image": torch.ones(2, 9, dtype=torch.long)}
    for _ in range(3):
        update(run, batch, [hook])
    assert [len(scales) for scales in hook.history] == [2, 2, 2]
    assert hook.history[-1] == pytest.approx(hook.scales.log2().tolist())


def test_scales_are_charted(tmp_path, monkeypatch):
    """Results without trials: scales of five resblocks that grow at different rates."""

    def run(folder, trial, settings, workers):
        scales = [[13 + step * i / 10 for i in range(5)] for step in range(10)]
        fast = [setting.get("scaler") is FastPerBlockGradScaler for setting in settings]
        return [{"loss": [1.0] * 15, "held_out": 1.0, "skipped": 0, "scales": scales if f else []} for f in fast]

    monkeypatch.setattr(sweep, "run_trials", run)
    finding = sixteen_bits.grad_scales.reproduce(tmp_path, True)
    assert str(NARROW_FORMAT) in finding.verdict and "span 3.6 powers of two" in finding.verdict
    curves = dict(finding.curves)["log2 of the scales, first seed"]
    assert list(curves) == ["resblock 1", "resblock 2", "resblock 4", "resblock 5"]
    assert curves["resblock 5"][0] == (0, 13) and curves["resblock 5"][-1] == (9, pytest.approx(16.6))
