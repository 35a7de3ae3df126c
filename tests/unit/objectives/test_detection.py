"""Matching and loss of detectors."""

import torch

from limner.models.boxes import decode_boxes, encode_boxes
from limner.models.detector import Predictions
from limner.objectives.detection import MultiBoxLoss, match

DEFAULT = torch.tensor([[0.0, 0, 10, 10], [10, 0, 20, 10], [20, 0, 30, 10], [0, 0, 30, 10], [40, 40, 50, 50]])


def test_each_true_box_gets_its_best_default_box():
    boxes = torch.tensor([[[0.0, 0, 10, 9], [21, 4, 26, 8], [0, 0, 0, 0]]])  # the second overlaps none by a half
    matches = match(DEFAULT, boxes, torch.tensor([[True, True, False]]), 0.5)
    assert matches.tolist() == [[0, -1, 1, -1, -1]]
    assert match(DEFAULT, boxes, torch.zeros(1, 3, dtype=torch.bool), 0.5).tolist() == [[-1] * 5]


def test_offsets_decode_to_the_box():
    boxes = torch.tensor([[1.0, 2, 12, 7], [18, 3, 60, 90], [20, 1, 28, 10], [1, 1, 2, 2], [0, 0, 99, 99]])
    offsets = encode_boxes(boxes, DEFAULT)
    torch.testing.assert_close(decode_boxes(offsets, DEFAULT), boxes)
    # The center is 1.5 of 10 pixels to the right, the width 1.1 times as large.
    assert torch.allclose(offsets[0, ::2], torch.tensor([10 * 0.15, 5 * torch.tensor(1.1).log()]))


def predictions(logits, attributes=()):
    return Predictions(DEFAULT, torch.zeros(1, 5, 4), logits, attributes)


def test_only_the_hardest_negatives_count():
    logits = torch.zeros(1, 5, 2)
    logits[0, :, 0] = torch.tensor([0.0, -1, -2, -3, -4])  # the last box is the worst background
    batch = {"boxes": DEFAULT[None, :1], "labels": torch.tensor([[1]])}
    errors = -logits[0].log_softmax(-1)
    for negatives, hard in ((2, [3, 4]), (3, [2, 3, 4]), (100, [1, 2, 3, 4])):
        losses = MultiBoxLoss(negatives=negatives).losses(predictions(logits), batch)
        torch.testing.assert_close(losses["classes"], errors[0, 1] + errors[hard, 0].sum())
        assert losses["boxes"] == 0  # the default box is the true box


def test_pictures_without_objects_do_not_train():
    logits = torch.randn(1, 5, 2, requires_grad=True)
    batch = {"boxes": torch.zeros(1, 1, 4), "labels": torch.zeros(1, 1, dtype=torch.int64)}
    losses = MultiBoxLoss().losses(predictions(logits), batch)
    sum(losses.values()).backward()
    assert losses["classes"] == 0 and torch.equal(logits.grad, torch.zeros_like(logits))


def test_attributes_are_learned_on_matched_boxes():
    values = (torch.randn(1, 5, 3), torch.randn(1, 5, 8))
    batch = {"boxes": DEFAULT[None, 2:3], "labels": torch.tensor([[1]]), "attributes": torch.tensor([[[2, 7]]])}
    losses = MultiBoxLoss().losses(predictions(torch.zeros(1, 5, 2), values), batch)
    expected = -values[0][0, 2].log_softmax(0)[2] - values[1][0, 2].log_softmax(0)[7]
    torch.testing.assert_close(losses["attributes"], expected)
