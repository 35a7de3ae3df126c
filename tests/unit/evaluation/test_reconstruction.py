"""Metrics of a dVAE, against stubs with known values."""

import numpy as np
import pytest
import torch
from torch import nn

from limner.evaluation.reconstruction import fresh_scenes, measure
from tiny import tiny_pipe


class Lossless(nn.Module):
    """Stub of a dVAE that returns its input; of its four codes one has half of the uses."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.config = type("Config", (), {"vocab": 10})

    def tokenize(self, pixels):
        self.seen = pixels
        return torch.tensor([[0, 0, 0, 1, 2, 3]]).expand(len(pixels), -1)

    def decode_tokens(self, tokens):
        return self.change(self.seen)

    def change(self, pixels):
        return pixels


def test_lossless_reconstructions_have_the_same_scene():
    result = measure(Lossless(), fresh_scenes(6), check_scenes=True)
    assert result.same_scene == 1.0
    assert result.psnr > 60
    assert (result.codes, result.vocab) == (4, 10)
    p = np.array([0.5, 1 / 6, 1 / 6, 1 / 6])
    assert result.perplexity == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-5)


def test_reconstructions_without_objects_have_another_scene():
    dvae = Lossless()
    dvae.change = lambda pixels: pixels[:, :, :1, :1].expand_as(pixels).contiguous()
    advanced = []
    result = measure(dvae, fresh_scenes(6), check_scenes=True, progress=advanced.append)
    assert result.same_scene == 0.0
    assert result.psnr_worst <= result.psnr < 30
    assert sum(advanced) == 6
    assert "dB" in result.table()


def test_a_real_dvae_is_measured():
    result = measure(tiny_pipe().dvae, fresh_scenes(3, size=24))
    assert result.same_scene is None
    assert 1 <= result.perplexity <= result.codes <= 32


def test_fresh_scenes_depend_only_on_the_seed():
    assert torch.equal(fresh_scenes(5, seed=2)[:3], fresh_scenes(3, seed=2))
    assert not torch.equal(fresh_scenes(3, seed=2), fresh_scenes(3, seed=3))
