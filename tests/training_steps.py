"""Training steps of small models, for tests of their autograd graphs."""

import torch

from limner.models.contrastive import CLIPConfig
from limner.models.dvae import DVAEConfig
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Fp32
from limner.planner.saved_tensors import OBJECTIVES, TrainingStep
from limner.training.config import TrainConfig

PRIOR = TransformerConfig(text_vocab=50, image_vocab=30, text_len=8, grid=(6, 6), width=64, depth=2, heads=2)
CLIP = CLIPConfig(text_vocab=50, text_len=8, size=16, patch=4, width=16, depth=2, heads=2, embedding=8)
DVAE = DVAEConfig(size=16, width=8, groups=2, blocks=1, vocab=32, code_width=8)


def step(model=PRIOR, precision=None, samples=2, **settings) -> TrainingStep:
    """A step with the default objective, in fp32."""
    training = TrainConfig(steps=1, precision=precision or Fp32(), **settings)
    return TrainingStep(
        model=model, objective=OBJECTIVES[type(model)](), training=training, samples=samples, device=torch.device("cpu")
    )
