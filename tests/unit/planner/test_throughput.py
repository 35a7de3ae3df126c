"""Measured times are consistent, and lower bounds match counts of the pattern."""

import pytest
import torch

from limner.attention.attention import attention_mask
from limner.models.transformer import TransformerConfig
from limner.planner import throughput
from limner.planner.cost import decode_step
from limner.planner.throughput import DeviceRates
from limner.sampling.decoder import TokenDecoder

CPU = torch.device("cpu")
SMALL = TransformerConfig(
    text_vocab=40, image_vocab=30, text_len=5, grid=(6, 4), width=32, depth=4, heads=2, kernel=3
)  # fmt: skip


def test_a_sampling_step_counts_the_pattern():
    flops, bytes_read = decode_step(SMALL, 7)
    matrices = 12 * 4 * 32**2 + 32 * 30
    p = 6
    image = sum(float(attention_mask(pattern, p)[p:, p:].sum()) / 24 for pattern in SMALL.patterns)
    assert flops == pytest.approx(7 * (2 * matrices + 4 * 32 * (image + 4 * p)))
    assert bytes_read == pytest.approx(2 * (matrices + 2 * 32 * (7 * image + 4 * p)))
    rates = DeviceRates(gemm=1e9, copy=1e8)
    assert throughput.min_step_seconds(SMALL, 7, rates) == pytest.approx(flops / 1e9 + bytes_read / 1e8)


def test_cache_bytes_with_a_shared_and_a_copied_prefix():
    shared, copied = (throughput.time_generation(SMALL, 3, CPU, shared=share) for share in (True, False))
    size = shared.cache_bytes // sum(
        pattern.cache_slots() for pattern in SMALL.patterns
    )  # bytes per position, keys and values
    assert size in (2 * 32 * 2, 2 * 32 * 4)
    assert shared.shared_bytes == 4 * 6 * size
    assert (copied.cache_bytes, copied.shared_bytes) == (shared.cache_bytes + shared.shared_bytes, 0)
    assert shared.seconds == shared.prefill + 24 * shared.step > 0
    assert shared.pictures_per_second == 3 / shared.seconds


def test_a_copied_cache_gives_the_same_logits():
    torch.manual_seed(0)
    model = SMALL.build().eval()
    text, tokens = torch.randint(0, 40, (1, 5)), torch.randint(0, 30, (24, 3))
    with torch.inference_mode():
        cache = TokenDecoder(model).prefill(text)[0].expand(3)
        copied = throughput.repeat_prefix(cache, 3)
        for position, token in enumerate(tokens):
            cache.length = copied.length = position
            torch.testing.assert_close(
                TokenDecoder(model).step(cache, token[:, None]), TokenDecoder(model).step(copied, token[:, None])
            )
            cache.length = copied.length = position + 1


def test_utilization_of_training_is_a_share():
    seconds = throughput.time_training(SMALL, 2, CPU)
    share = throughput.utilization(SMALL, 2, seconds, throughput.measure_rates(CPU))
    assert 0 < share < 1
