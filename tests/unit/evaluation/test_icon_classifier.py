"""The judge learns which subject and which style, whatever is done to single pixels, and is kept."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from limner.evaluation.icon_classifier import JudgeConfig, Labelled, augmented, trained
from limner.training.loop import Interrupted
from toy_icons import STYLES, SUBJECTS, picture

SMALL = JudgeConfig(width=8, steps=80, batch_size=20, lr=1e-2)


def toys() -> Labelled:
    pairs = [(subject, style) for subject in SUBJECTS for style in STYLES]
    pictures = torch.stack([torch.from_numpy(np.array(picture(*pair))).permute(2, 0, 1) for pair in pairs])
    return Labelled(pictures, [subject for subject, _ in pairs], [style for _, style in pairs])


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judges")
    return folder, trained(toys(), folder, SMALL)


def right(judge, data, pictures):
    read = judge.read(pictures)
    wanted = data.batch(np.arange(len(data)), np.zeros(len(data), np.uint64))
    names = [data.subjects[i] for i in wanted["subject"]], [data.styles[i] for i in wanted["style"]]
    return [np.mean(np.array(a) == np.array(b)) for a, b in zip(read, names, strict=True)]


def test_it_reads_what_it_has_learned_also_shifted_blurred_and_enlarged(kept):
    data, judge = toys(), kept[1]
    assert min(right(judge, data, data.pictures)) > 0.9
    pictures = data.pictures.float()
    shifted = pictures.roll(1, 3).to(torch.uint8)
    half = F.interpolate(F.avg_pool2d(pictures, 2), (24, 24), mode="bilinear").round().to(torch.uint8)
    assert min(right(judge, data, shifted)) > 0.85
    assert min(right(judge, data, half)) > 0.85


def test_it_is_trained_once_for_the_same_pictures_and_settings(kept, monkeypatch):
    folder, judge = kept
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr("limner.evaluation.icon_classifier.train", None)
    again = trained(toys(), folder, SMALL)
    assert all(torch.equal(a, b) for a, b in zip(judge.net.parameters(), again.net.parameters(), strict=True))
    assert sorted(folder.rglob("*")) == before
    monkeypatch.undo()
    other = toys()
    other.pictures[0, 0, 0, 0] += 1
    assert other.digest(SMALL) != toys().digest(SMALL) != toys().digest(JudgeConfig())
    assert Labelled(other.pictures, ["a"] * 20, STYLES * 5).digest(SMALL) != other.digest(SMALL)


def test_it_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    config = JudgeConfig(width=8, steps=6, batch_size=20)
    whole = trained(toys(), tmp_path / "whole", config)

    class Stopped:
        received = True
        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *_: None  # noqa: E731

    with monkeypatch.context() as patch:
        patch.setattr("limner.training.loop.Signals", Stopped)
        with pytest.raises(Interrupted):
            trained(toys(), tmp_path / "parts", config)
    parts = trained(toys(), tmp_path / "parts", config)
    assert all(torch.equal(a, b) for a, b in zip(whole.net.parameters(), parts.net.parameters(), strict=True))


def test_every_picture_is_changed_in_its_own_way_and_stays_a_picture():
    pixels = toys().pictures[:1].expand(16, -1, -1, -1)
    seen = augmented(pixels, torch.Generator().manual_seed(0))
    assert seen.shape == pixels.shape
    assert float(seen.min()) >= 0 and float(seen.max()) <= 1
    assert len({tuple(one.flatten().tolist()) for one in seen}) == 16
    assert torch.equal(seen, augmented(pixels, torch.Generator().manual_seed(0)))
    errors = (seen - pixels / 255).abs().mean((1, 2, 3))
    assert float(errors.min()) > 0.01 and float(errors.max()) < 0.35
