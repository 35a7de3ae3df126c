"""The autograd graph of a stage's training step, and the bytes that each resblock saves for the backward pass.

The graph depends on shapes alone, so weights and batch are random. What checkpointing and 8-bit inputs free is counted
in the graphs of training with them. An 8-bit layer also saves its weight in 8 bits, where others save the parameter: a
small batch may save more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from limner.autograd.graph import AutogradGraph, prefixes, read_graph
from limner.blocks import resblocks
from limner.models.contrastive import CLIPConfig
from limner.models.dvae import DVAEConfig
from limner.models.patch_dvae import PatchDVAEConfig
from limner.models.transformer import TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.objectives.elbo import RelaxedELB
from limner.objectives.hard_negatives import HardNegativeLoss
from limner.objectives.reconstruction_loss import ReconstructionLoss
from limner.quantization.precisions import SwitchBackM
from limner.training.config import TrainConfig
from limner.training.grad_scaler import scaling
from limner.training.train_module import Batch, Objective
from limner.training.train_state import TrainState

__all__ = ["TrainingStep", "random_batch"]

#: Objectives that train the models of a configuration.
OBJECTIVES = {
    TransformerConfig: Autoregressive, CLIPConfig: HardNegativeLoss,
    DVAEConfig: RelaxedELB, PatchDVAEConfig: ReconstructionLoss,
}  # fmt: skip
REST = "all others"  # nodes outside of resblocks


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A step of training on random data.

    Args:
        model: configuration of the model.
        samples: size of the micro-batch.
        distractors: wrong captions of each picture.
    """

    model: Any
    objective: Objective
    training: TrainConfig
    samples: int
    device: torch.device
    distractors: int = 0

    def state(self, int8_inputs: bool = False) -> TrainState:
        """Return a new state with random weights. `int8_inputs` converts the layers of the blocks to SwitchBackM, and
        leaves the format of other operations."""
        training, model = replace(self.training, ema_decay=None), self.model.build()
        if int8_inputs:
            formats = type(training.precision).__mro__  # SwitchBack is an Auto that converts layers
            training = replace(training, precision=next(kind for kind in formats if not kind.converts)())
            model = SwitchBackM().apply(model)
        return TrainState(model, self.objective, training, self.device)

    def graph(self, int8_inputs: bool = False) -> AutogradGraph:
        """Return the autograd graph of the step's loss."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            run = self.state(int8_inputs)
            scaling(run)  # installs its hooks on the model
            batch = random_batch(self.model, self.samples, self.device, self.distractors)

            def loss() -> Tensor:
                torch.manual_seed(0)
                run.generator.manual_seed(0)
                with run.config.precision.autocast(self.device):
                    return run.trainable(batch, 0, run.generator)[0]

            return read_graph(run.model, loss)

    def saved_bytes(self, graph: AutogradGraph) -> dict[str, tuple[int, int | None, int | None]]:
        """Return, by resblock, the bytes of activations that `graph` saves, and how many of them checkpointing and
        8-bit inputs free; None for a model that has neither."""
        with torch.device("meta"):
            model = self.model.build()
        names = list(resblocks(model))
        before = _by_resblock(graph, names)
        checkpointed = int8 = None
        if hasattr(model, "set_checkpointing"):
            training = replace(self.training, checkpoint_activations=True)
            checkpointed = _by_resblock(replace(self, training=training).graph(), names)
        if isinstance(self.model, TransformerConfig | CLIPConfig):
            int8 = _by_resblock(self.graph(int8_inputs=True), names)
        return {
            name: (
                size,
                None if checkpointed is None else size - checkpointed[name],
                None if int8 is None else size - int8[name],
            )
            for name, size in before.items()
        }


def _by_resblock(graph: AutogradGraph, names: list[str]) -> dict[str, int]:
    sizes = dict.fromkeys([*names, REST], 0)
    for node in graph.nodes:
        sizes[next((name for name in prefixes(node.module) if name in sizes), REST)] += node.nbytes("activation")
    return sizes


def random_batch(model: Any, samples: int, device: torch.device | str = "cpu", distractors: int = 0) -> Batch:
    """Return a batch for the objective of a model's configuration. Captions are unpadded."""

    def integers(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(high, (samples, *shape), dtype=dtype, device=device)

    batch = {}
    if isinstance(model, TransformerConfig | CLIPConfig):
        batch["text"] = integers(model.text_vocab, model.text_len)
    if isinstance(model, TransformerConfig):
        names = ("image", "given") if model.condition_blocks else ("image",)
        return batch | {name: integers(model.image_vocab, prod(model.grid)) for name in names}
    if distractors:
        batch["distractors"] = integers(model.text_vocab, distractors, model.text_len)
    return batch | {"pixels": integers(256, 3, model.size, model.size, dtype=torch.uint8)}
