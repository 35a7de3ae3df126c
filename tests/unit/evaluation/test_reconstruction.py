"""Metrics of a dVAE, against stubs with known values."""

import numpy as np
import pytest
import torch
from torch import nn

from limner.evaluation.reconstruction import confusions, fresh_scenes, measure, single_objects
from limner.tasks import scenes
from tiny import tiny_pipe


class Lossless(nn.Module):
    """Stub of a dVAE that returns its input; of its four codes one has half of the uses."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.config = type("Config", (), {"vocab": 10, "size": 48})

    def tokenize(self, pixels):
        self.seen = pixels
        return torch.tensor([[0, 0, 0, 1, 2, 3]]).expand(len(pixels), -1)

    def decode_tokens(self, tokens):
        return self.change(self.seen)

    def change(self, pixels):
        return pixels


def measured(*arguments, **options):
    """The estimates of `measure` by name, and its result."""
    result = measure(*arguments, **options)
    return {name.split(",")[0]: row["value"] for name, row in result.rows.items()}, result


def test_lossless_reconstructions_have_the_same_scene():
    found, result = measured(Lossless(), fresh_scenes(6), check_scenes=True)
    assert found["same scene"].value == 1.0 and found["same scene"].low < 0.7  # of six pictures
    assert found["PSNR"].value > 60
    assert found["codes in use"].value == 4 and "codes in use, of 10" in result.table()
    p = np.array([0.5, 1 / 6, 1 / 6, 1 / 6])
    assert found["perplexity of the codes"].value == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-5)


def test_reconstructions_without_objects_have_another_scene():
    dvae = Lossless()
    dvae.change = lambda pixels: pixels[:, :, :1, :1].expand_as(pixels).contiguous()
    advanced = []
    found, result = measured(dvae, fresh_scenes(6), check_scenes=True, progress=advanced.append)
    assert found["same scene"].value == 0.0
    assert found["PSNR of the worst hundredth"].value <= found["PSNR"].value < 30
    assert found["PSNR"].low < found["PSNR"].value < found["PSNR"].high
    assert sum(advanced) == 6
    assert "dB" in result.table() and result.title == "6 unseen pictures"
    (original, _), (reconstruction, _) = result.sheet[5].pictures
    assert len(original.getcolors()) > 1 == len(reconstruction.getcolors())


def test_single_objects_show_each_combination_twice():
    originals = single_objects(seed=1)
    combinations = {(scene.objects[0].attributes, scene.background) for scene in originals}
    assert len(originals) == 2_400 and len(combinations) == 1_200
    assert originals == single_objects(seed=1) != single_objects(seed=2)
    assert originals == single_objects(seed=1, most=10_000)


def test_fewer_single_objects_are_a_sample_of_all_values():
    originals, few = single_objects(seed=1), single_objects(seed=1, most=100)
    assert len(few) == 100 and all(scene in originals for scene in few)
    assert {scene.background for scene in few} == set(scenes.BACKGROUNDS)
    assert {scene.objects[0].shape for scene in few} == set(scenes.SHAPES)


def test_confusions_tell_other_scenes_from_unreadable_pictures():
    originals = single_objects(seed=1)[::100]
    dvae, advanced = Lossless(), []
    shares = confusions(dvae, originals, advanced.append).rows
    assert shares["the same scene"]["share"].value == 1.0 and sum(advanced) == len(originals)

    dvae.change = lambda pixels: pixels.flip(-1)  # at another place
    result = confusions(dvae, originals)
    assert result.rows["another scene"]["share"].value > 0.8
    case = result.cases[0]
    assert len(result.sheet) == len(result.cases) and "scene: " in result.sheet[0].caption
    assert case["original"]["objects"][0]["x"] != case["shown"]["objects"][0]["x"]

    dvae.change = lambda pixels: pixels[:, :, :1, :1].expand_as(pixels).contiguous()
    result = confusions(dvae, originals)
    assert result.rows["unreadable"]["share"].right == len(result.cases) == len(originals)


def test_a_real_dvae_is_measured():
    found, _ = measured(tiny_pipe().dvae, fresh_scenes(3, size=24))
    assert "same scene" not in found
    assert 1 <= found["perplexity of the codes"].value <= found["codes in use"].value <= 32


def test_fresh_scenes_depend_only_on_the_seed():
    assert torch.equal(fresh_scenes(5, seed=2)[:3], fresh_scenes(3, seed=2))
    assert not torch.equal(fresh_scenes(3, seed=2), fresh_scenes(3, seed=3))
