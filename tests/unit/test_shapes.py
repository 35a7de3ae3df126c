"""The shapes that annotations name are checked in these tests: a wrong one is told."""

from pathlib import Path

import jaxtyping
import pytest
import torch

import limner
from limner.layers.attention import attend
from limner.models.dvae import map_pixels
from limner.sampling.rerank import best
from shaped import SHAPED


def test_wrong_shapes_and_formats_are_told():
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


def test_every_module_whose_annotations_name_shapes_is_checked():
    root = Path(limner.__path__[0])
    texts = {path: path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    named = {".".join(path.relative_to(root).with_suffix("").parts) for path in texts if "jaxtyping" in texts[path]}
    assert named and not {name for name in named if name not in SHAPED and name.partition(".")[0] not in SHAPED}
