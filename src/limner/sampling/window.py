"""Number of tokens that a step of parallel sampling reads, chosen by the guesses that were right so far.

The choice depends on tokens and not on times, so that drawing twice rounds equally.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Window"]

MAX_TOKENS = 256  # of a step with windows: more take longer on a CPU than they save
STEP_TOKENS, BF16_STEP_TOKENS = 30, 120  # of a step, whose computation takes as long as its other work, on a CPU
ACCEPTANCE_RATE = 0.3  # of the running mean of gained tokens


class Window:
    """Running choice of the window for `rows` rows, at most `limit` tokens. `size` is the present choice.

    `step_tokens` is `STEP_TOKENS`, or `BF16_STEP_TOKENS` for weights in bf16.
    """

    def __init__(self, rows: int, limit: int, step_tokens: int = STEP_TOKENS) -> None:
        self.step_tokens = step_tokens
        self.size = max(1, min(limit, MAX_TOKENS // rows))
        self.sizes = [w for w in (1, 2, 4, 8) if w < self.size] + [self.size]
        self._gains = [float(w) for w in self.sizes]  # running means of the tokens that a row gains with each

    def update(self, gained: Sequence[int], window: int, rows: int) -> None:
        """Choose the next window for `rows` rows, given the tokens that unfinished rows gained with the last one."""
        if not gained or len(self.sizes) == 1:
            return
        means = [sum(min(g, w) for g in gained) / len(gained) for w in self.sizes if w <= window]
        # As if a second window followed.
        means.append(means[-1] * (1 + sum(g == window for g in gained) / len(gained)))
        self._gains[: len(means)] = [
            gain + ACCEPTANCE_RATE * (mean - gain) for gain, mean in zip(self._gains, means, strict=False)
        ]
        pace = [gain / (self.step_tokens + rows * w) for gain, w in zip(self._gains, self.sizes, strict=True)]
        self.size = self.sizes[pace.index(max(pace))]
