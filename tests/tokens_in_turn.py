"""A small prior, and tokens that it learns within some tens of steps."""

import torch

from limner.models.transformer import TransformerConfig

PRIOR = TransformerConfig(
    text_vocab=11, image_vocab=13, text_len=4, grid=(3, 3), width=32, depth=2, heads=2, pattern="dense"
)


class Tokens:
    """A cycle of four batches, of captions without meaning and pictures of one token."""

    def __init__(self):
        self.at = 0

    def __next__(self):
        generator = torch.Generator().manual_seed(self.at % 4)
        self.at += 1
        return {"text": torch.randint(11, (8, 4), generator=generator), "image": torch.full((8, 9), 3)}

    def shard(self, rank, world):
        pass

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]
