"""Eight-bit linear layers, StableAdamW with 16-bit moments and a report of spikes, in a model without limner.

python examples/low_precision.py

The model is a small transformer of torch's own layers that learns to count in threes. Its linear layers become
SwitchBack layers in one line; what their products were computed with is printed at the end.
"""

import numpy as np
import torch
from torch import nn

from limner.metrics.spikes import match_spikes
from limner.optim import StableAdamW
from limner.quantization import SwitchBackLinear
from limner.quantization.convert import convert

WIDTH, CODES, LENGTH = 64, 100, 32


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


torch.manual_seed(0)
codes, blocks, head = nn.Embedding(CODES, WIDTH), nn.Sequential(Block(), Block()), nn.Linear(WIDTH, CODES)
convert(blocks, SwitchBackLinear.from_linear)  # of the blocks alone, as in the paper
optimizer = StableAdamW(
    [
        {"params": blocks.parameters(), "quantize_state": True},  # moments in 1-6-9 and 0-6-10
        {"params": [*codes.parameters(), *head.parameters()]},  # embeddings and outputs keep theirs in fp32
    ],
    lr=1e-2,
)
losses, rms = [], []
for _ in range(40):
    sequence = (torch.randint(CODES, (16, 1)) + 3 * torch.arange(LENGTH)) % CODES
    loss = nn.functional.cross_entropy(head(blocks(codes(sequence[:, :-1]))).flatten(0, 1), sequence[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    rms.append(optimizer.rms([("embedding", codes.weight)])["embedding"])
found = match_spikes(np.array(losses), np.array(rms))
print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at the end")
print(f"{len(found.loss)} loss spikes, {len(found.following)} after a spike of the embedding's RMS")
state = optimizer.state[blocks[0].up.weight]
print(f"moments of a block's matrix: {state['exp_avg'].dtype} and {state['exp_avg_sq'].dtype}")
for (product, kernel, _), count in sorted(blocks[0].up.counter.counts.items()):
    print(f"{product}: {kernel}, {count} times")
