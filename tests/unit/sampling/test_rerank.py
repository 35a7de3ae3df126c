"""Scores are cosines of caption and picture; the best come first."""

import pytest
import torch

from limner.errors import UserError
from limner.models.contrastive import CLIPConfig
from limner.sampling.rerank import best, scores
from limner.text import PAD


def test_scores_are_cosines_of_each_pair():
    torch.manual_seed(0)
    model = CLIPConfig(
        text_vocab=20, text_len=4, size=16, patch=8, width=16, depth=1, heads=2, embedding=8
    ).build().eval()  # fmt: skip
    text = torch.tensor([[1, 2, PAD, PAD], [3, 4, 5, PAD]])
    pictures = torch.randint(0, 256, (2, 3, 3, 16, 16), dtype=torch.uint8)
    cosines = scores(model, text, pictures)
    assert cosines.shape == (2, 3)
    for b in range(2):
        for n in range(3):
            image, caption = model.encode_image(pictures[b, n][None]), model.encode_text(text[b][None])
            torch.testing.assert_close(cosines[b, n], torch.cosine_similarity(image, caption)[0], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        model.image_out.weight.fill_(torch.finfo(torch.float32).max)
    with pytest.raises(UserError, match="not finite"):
        scores(model, text, pictures)


def test_best_come_first_and_ties_keep_their_order():
    indices = best(torch.tensor([[0.1, 0.5, 0.5, 0.9], [0.0, 0.0, 0.0, 0.0]]), 3)
    assert indices.tolist() == [[3, 1, 2], [0, 1, 2]]
