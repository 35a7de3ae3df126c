"""The paper's sparse attention in a model without limner: a transformer over 32 x 32 codes and one class.

python examples/sparse_attention.py

Any layer that has queries, keys and values can use it: only the positions that a pattern shows are computed, forward
and backward. What it gives equals softmax attention under the pattern's dense mask, which is checked at the end.
"""

import torch
from torch import Tensor, nn

from limner.attention.attention import attend, attention_mask
from limner.attention.patterns import column, row
from limner.attention.sparse import SparseAttention

GRID, PREFIX, WIDTH, HEADS, CODES = (32, 32), 1, 64, 4, 512


class Layer(nn.Module):
    """Attention along rows or columns, then an MLP."""

    def __init__(self, pattern) -> None:
        super().__init__()
        self.attention = SparseAttention(pattern(GRID), PREFIX)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


torch.manual_seed(0)
classes, codes = nn.Embedding(10, WIDTH), nn.Embedding(CODES, WIDTH)
layers, head = nn.Sequential(Layer(row), Layer(column)), nn.Linear(WIDTH, CODES)
optimizer = torch.optim.AdamW([p for m in (classes, codes, layers, head) for p in m.parameters()], lr=1e-3)
image = torch.arange(GRID[0] * GRID[1]).expand(2, -1) % 7  # [B, S], a picture of stripes
for step in range(5):
    x = torch.cat([classes(torch.tensor([[0], [1]])), codes(image)], 1)  # [B, 1 + S, D]
    loss = nn.functional.cross_entropy(head(layers(x)[:, :-1]).flatten(0, 1), image.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {loss.item():.3f}")

q, k, v = torch.randn(3, 1, HEADS, PREFIX + GRID[0] * GRID[1], WIDTH // HEADS)
for pattern in (row(GRID), column(GRID)):
    sparse, dense = SparseAttention(pattern, PREFIX)(q, k, v), attend(q, k, v, attention_mask(pattern, PREFIX))
    torch.testing.assert_close(sparse, dense, atol=1e-5, rtol=1e-5)
