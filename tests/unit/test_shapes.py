"""The shapes that annotations name are checked in these tests: a wrong one raises."""

import jaxtyping
import pytest
import torch

from limner.attention.attention import attend
from limner.models.dvae import map_pixels
from limner.sampling.rerank import best


def test_wrong_shapes_and_formats_are_reported():
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
    assert attend(q, k, k, torch.ones(3, 5, dtype=torch.bool)).shape == q.shape
    for call in (
        lambda: attend(q, k, q, torch.ones(3, 5, dtype=torch.bool)),
        lambda: attend(q, k, k, torch.ones(3, 4, dtype=torch.bool)),
        lambda: attend(q, k, k, torch.ones(3, 5)),
        lambda: map_pixels(torch.zeros(1, 3, 8, 8)),
        lambda: best(torch.zeros(4), 2),
    ):
        with pytest.raises(jaxtyping.TypeCheckError):
            call()
