"""What is timed is what is drawn and trained; what it is held against is counted one by one."""

import pytest
import torch

from limner.layers.attention import visible
from limner.models.transformer import TransformerConfig
from limner.profiling import throughput
from limner.profiling.cost import Cost
from limner.profiling.throughput import Machine

CPU = torch.device("cpu")
SMALL = TransformerConfig(
    text_vocab=40, image_vocab=30, text_len=5, grid=(6, 4), width=32, depth=4, heads=2, kernel=3
)  # fmt: skip


def test_a_step_of_drawing_is_counted_as_its_pattern_sees():
    flops, read = Cost(config=SMALL).drawing(7)
    matrices = 12 * 4 * 32**2 + 32 * 30
    p = 6
    image = sum(float(visible(pattern, p)[p:, p:].sum()) / 24 for pattern in SMALL.patterns)
    assert flops == pytest.approx(7 * (2 * matrices + 4 * 32 * (image + 4 * p)))
    assert read == pytest.approx(2 * (matrices + 2 * 32 * (7 * image + 4 * p)))
    here = Machine(gemm=1e9, copy=1e8)
    assert throughput.floor(SMALL, 7, here) == pytest.approx(flops / 1e9 + read / 1e8)


def test_drawing_holds_what_the_cache_says_shared_or_copied():
    shared, copied = (throughput.drawing(SMALL, 3, CPU, shared=share) for share in (True, False))
    size = shared.each // sum(pattern.held for pattern in SMALL.patterns)  # bytes of a position, keys and values
    assert size in (2 * 32 * 2, 2 * 32 * 4)
    assert shared.shared == 4 * 6 * size
    assert (copied.each, copied.shared) == (shared.each + shared.shared, 0)
    assert shared.seconds == shared.prefill + 24 * shared.step > 0
    assert shared.pictures == 3 / shared.seconds


def test_a_copied_cache_gives_the_same_logits():
    torch.manual_seed(0)
    model = SMALL.build().eval()
    text, tokens = torch.randint(0, 40, (1, 5)), torch.randint(0, 30, (24, 3))
    with torch.inference_mode():
        cache = model.prefill(text)[0].expand(3)
        copied = throughput._copied(cache, 3)
        for position, token in enumerate(tokens):
            cache.length = copied.length = position
            torch.testing.assert_close(model.step(cache, token), model.step(copied, token))
            cache.length = copied.length = position + 1


def test_training_is_timed_and_useful_arithmetic_is_a_share():
    took = throughput.training(SMALL, 2, CPU)
    share = throughput.useful(SMALL, 2, took, throughput.machine(CPU))
    assert 0 < share < 1
