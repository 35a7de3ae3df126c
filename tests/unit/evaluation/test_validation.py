"""Held-out metrics are means over samples for any batch size."""

import pytest
import torch

from limner.evaluation.validation import held_out_metrics


class Numbers:
    def __len__(self):
        return 5

    def batch(self, indices, seeds):
        return {"number": torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0])[indices]}


def mean(model, batch, step, generator):
    return batch["number"].mean(), {"number": batch["number"].mean()}


@pytest.mark.parametrize("batch_size", [1, 2, 4, 5, 9])
def test_batches_are_weighted_by_their_sizes(batch_size):
    evaluate = held_out_metrics(mean, Numbers(), batch_size, torch.device("cpu"))
    assert evaluate(torch.nn.Identity(), 0) == pytest.approx({"number": 4.0})
