"""Optimizers, schedules and weight averages. The optimizers are `torch.optim.Optimizer`s for any model:

from limner.optim import StableAdamW

optimizer = StableAdamW(model.parameters(), lr=1e-3)
"""

from limner.optim.adamw import AdamW16, Beta2WarmupAdamW
from limner.optim.lion import Lion
from limner.optim.muon import Muon
from limner.optim.stable_adamw import StableAdamW

__all__ = ["AdamW16", "Beta2WarmupAdamW", "Lion", "Muon", "StableAdamW"]
