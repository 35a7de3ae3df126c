"""The window grows with the guesses that are right, and where the work of a step other than its tokens costs more."""

import numpy as np
import pytest
import torch

from limner.sampling.decoder import TokenDecoder
from limner.sampling.window import BF16_STEP_TOKENS, MAX_TOKENS, STEP_TOKENS, Window
from tiny import tiny_pipe


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("seed", range(5))
def test_the_window_is_at_least_as_wide_if_steps_cost_more(rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cheap, costly = Window(rows, 16, STEP_TOKENS), Window(rows, 16, BF16_STEP_TOKENS)
    for _ in range(60):
        window = min(cheap.size, costly.size)  # both see the same gains
        gained = np.minimum(rng.geometric(rng.uniform(0.1, 0.9), rows), window).tolist()
        cheap.update(gained, window, rows)
        costly.update(gained, window, rows)
        assert 1 <= cheap.size <= costly.size <= min(16, MAX_TOKENS // rows)


def test_a_prior_in_bf16_has_more_tokens_in_a_step() -> None:
    prior = tiny_pipe().prior
    assert TokenDecoder(prior).step_tokens == STEP_TOKENS
    assert TokenDecoder(prior.to(torch.bfloat16)).step_tokens == BF16_STEP_TOKENS
