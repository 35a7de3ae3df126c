"""The classifier reads subject and style in spite of pixel noise, and is trained once."""

import signal
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from limner.evaluation.icon_classifier import IconClassifierConfig, LabeledIcons, augment, train_classifier
from limner.training.loop import Interrupted
from toy_icons import STYLES, SUBJECTS, picture

SMALL = IconClassifierConfig(width=8, steps=80, batch_size=20, lr=1e-2)


def toys() -> LabeledIcons:
    pairs = [(subject, style) for subject in SUBJECTS for style in STYLES]
    pictures = torch.stack([torch.from_numpy(np.array(picture(*pair))).permute(2, 0, 1) for pair in pairs])
    return LabeledIcons(pictures, [subject for subject, _ in pairs], [style for _, style in pairs])


@pytest.fixture(scope="module")
def classifier_in_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifiers")
    return folder, train_classifier(toys(), folder, SMALL)


def accuracies(classifier, data, pictures):
    labels = classifier.classify(pictures)
    targets = data.batch(np.arange(len(data)), np.zeros(len(data), np.uint64))
    names = [data.subjects[i] for i in targets["subject"]], [data.styles[i] for i in targets["style"]]
    return [np.mean(np.array(a) == np.array(b)) for a, b in zip(labels, names, strict=True)]


def test_the_classifier_reads_shifted_and_blurred_training_pictures(classifier_in_folder):
    data, classifier = toys(), classifier_in_folder[1]
    assert min(accuracies(classifier, data, data.pictures)) > 0.9
    pictures = data.pictures.float()
    shifted = pictures.roll(1, 3).to(torch.uint8)
    half = F.interpolate(F.avg_pool2d(pictures, 2), (24, 24), mode="bilinear").round().to(torch.uint8)
    assert min(accuracies(classifier, data, shifted)) > 0.85
    assert min(accuracies(classifier, data, half)) > 0.85


def test_a_classifier_is_trained_once_for_the_same_pictures_and_settings(classifier_in_folder, monkeypatch):
    folder, classifier = classifier_in_folder
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr("limner.evaluation.icon_classifier.train", None)
    again = train_classifier(toys(), folder, SMALL)
    assert all(torch.equal(a, b) for a, b in zip(classifier.net.parameters(), again.net.parameters(), strict=True))
    assert sorted(folder.rglob("*")) == before
    monkeypatch.undo()
    other = toys()
    other.pictures[0, 0, 0, 0] += 1
    assert other.digest(SMALL) != toys().digest(SMALL) != toys().digest(IconClassifierConfig())
    assert LabeledIcons(other.pictures, ["a"] * 20, STYLES * 5).digest(SMALL) != other.digest(SMALL)


def test_interrupted_training_resumes(tmp_path, monkeypatch):
    config = IconClassifierConfig(width=8, steps=6, batch_size=20)
    whole = train_classifier(toys(), tmp_path / "whole", config)

    with monkeypatch.context() as patch:
        patch.setattr("limner.training.loop.stop_signals", lambda: nullcontext([signal.SIGTERM]))
        with pytest.raises(Interrupted):
            train_classifier(toys(), tmp_path / "parts", config)
    parts = train_classifier(toys(), tmp_path / "parts", config)
    assert all(torch.equal(a, b) for a, b in zip(whole.net.parameters(), parts.net.parameters(), strict=True))


def test_augmentation_is_independent_per_picture_and_bounded():
    pixels = toys().pictures[:1].expand(16, -1, -1, -1)
    varied = augment(pixels, torch.Generator().manual_seed(0))
    assert varied.shape == pixels.shape
    assert float(varied.min()) >= 0 and float(varied.max()) <= 1
    assert len({tuple(image.flatten().tolist()) for image in varied}) == 16
    assert torch.equal(varied, augment(pixels, torch.Generator().manual_seed(0)))
    errors = (varied - pixels / 255).abs().mean((1, 2, 3))
    assert float(errors.min()) > 0.01 and float(errors.max()) < 0.35
    noisy = augment(pixels, torch.Generator().manual_seed(0), varied=False)
    assert float((noisy - pixels / 255).abs().mean()) < 0.05  # strokes stay where they are
    assert len({tuple(image.flatten().tolist()) for image in noisy}) == 16
