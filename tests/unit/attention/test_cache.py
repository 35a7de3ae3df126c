"""Decoding from a cache equals attending to the whole, and holds no more than the pattern can see."""

from functools import partial

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch.overrides import TorchFunctionMode

from limner.attention.attention import Attention, attend, attention_mask
from limner.attention.cache import KVCache, LayerKVCache
from limner.attention.kv_store import Int8KVStore, KVStore
from limner.attention.patterns import PATTERNS
from limner.models.transformer import TransformerConfig
from limner.sampling.decoder import TokenDecoder
from more_patterns import ALL


@settings(max_examples=60, deadline=None)
@given(
    make=st.sampled_from(list(ALL.values())), grid=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    prefix=st.integers(1, 5), recorded=st.booleans(),
    kernel=st.sampled_from([1, 3, 5]), candidates=st.integers(1, 3), before=st.integers(0, 4),
    window=st.integers(1, 4),
)  # fmt: skip
def test_step_by_step_equals_the_whole(make, grid, prefix, recorded, kernel, candidates, before, window):
    torch.manual_seed(0)
    size = grid[0] * grid[1]
    before = min(before, size)  # image positions that all candidates of a caption share
    pattern = make(grid, kernel)
    layer, mask = Attention(32, 4), attention_mask(pattern, prefix)
    text, shared = torch.randn(2, prefix, 32), torch.randn(2, before, 32)
    own = torch.randn(2 * candidates, size - before, 32)
    whole = layer(
        torch.cat([*(x.repeat_interleave(candidates, 0) for x in (text, shared)), own], 1), partial(attend, mask=mask)
    )
    stored = []

    def read(q, k, v):
        stored.extend([k, v])
        return attend(q, k, v, torch.ones(prefix, prefix, dtype=torch.bool).tril())

    outputs = [layer(text, read).repeat_interleave(candidates, 0)]
    cache = LayerKVCache.from_prefix(pattern, *stored, window=window)
    for t in range(size):
        if t == before:
            (cache,) = KVCache([cache]).expand(candidates).layers
        x = shared[:, t : t + 1] if t < before else own[:, t - before : t - before + 1]
        y = layer(x, partial(cache.append, torch.tensor([t]) if recorded else t))
        outputs.append(y if t >= before else y.repeat_interleave(candidates, 0))
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=1e-5, rtol=1e-5)
    assert cache.prefix_keys.shape == (2, 4, prefix, 8)


@settings(max_examples=60, deadline=None)
@given(
    make=st.sampled_from(list(ALL.values())), grid=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    window=st.integers(1, 5), each_row=st.booleans(), data=st.data(),
)  # fmt: skip
def test_the_bias_of_slots_takes_no_remainder_of_a_negative_number(make, grid, window, each_row, data):
    """ExecuTorch's remainder has the sign of the dividend, so the steps are the same only without negative ones."""

    class Remainders(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (torch.remainder, torch.Tensor.remainder, torch.Tensor.__mod__):
                dividends.append(args[0])
            return func(*args, **(kwargs or {}))

    dividends: list[torch.Tensor] = []
    cache = LayerKVCache.from_prefix(make(grid, 3), *torch.zeros(2, 1, 1, 1, 1), window=window)
    n = len(cache.gap_bias)
    steps = data.draw(st.lists(st.integers(0, grid[0] * grid[1] - 1), min_size=3, max_size=3))
    step, slots = torch.tensor(steps)[:, None, None], n
    if not each_row:
        step, slots = steps[0], data.draw(st.integers(1, n))
    with Remainders():
        bias = cache._bias(step, slots)
    assert dividends and all(bool((x >= 0).all()) for x in dividends)
    back = torch.as_tensor(step - torch.arange(slots))
    back = back - back.div(n, rounding_mode="floor") * n
    expected = torch.where(back > step, -torch.inf, cache.gap_bias[back])
    assert torch.equal(bias, expected)


def test_a_candidate_costs_no_text():
    layers = [
        LayerKVCache.from_prefix(PATTERNS[kind]((4, 4), 3), torch.zeros(1, 2, 100, 8), torch.zeros(1, 2, 100, 8))
        for kind in ("row", "column")
    ]
    cache = KVCache(layers).expand(5)
    assert cache.bytes_per_candidate == 2 * 4 * 2 * 8 * (5 + 16)
    assert [x.keys.parts[0].shape for x in cache.layers] == [(1, 5, 2, 5, 8), (4, 5, 2, 4, 8)]


def test_an_8_bit_cache_takes_half_of_bf16s_memory_and_gives_nearly_the_same_logits():
    torch.manual_seed(0)
    config = TransformerConfig(
        text_vocab=20, image_vocab=12, text_len=4, grid=(6, 6), width=128, depth=4, heads=2, kernel=3
    )
    model, text = config.build().eval(), torch.randint(0, 20, (2, 4))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.05)
    with torch.inference_mode():
        caches = [TokenDecoder(model, store).prefill(text)[0].expand(3) for store in (KVStore, Int8KVStore)]
        for _ in range(36):
            token = torch.randint(0, 12, (6, 1))
            whole, small = (TokenDecoder(model).step(cache, token) for cache in caches)
            torch.testing.assert_close(small, whole, atol=0.02 * whole.std().item(), rtol=0)
        model = model.bfloat16()
        half, small = (TokenDecoder(model, x).prefill(text)[0].bytes_per_candidate for x in (KVStore, Int8KVStore))
    assert small / half == pytest.approx((64 + 2) / 128)


@settings(max_examples=80, deadline=None)
@given(
    make=st.sampled_from(list(ALL.values())), grid=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    prefix=st.integers(1, 5), window=st.integers(1, 14), data=st.data(),
)  # fmt: skip
def test_windows_with_rejected_positions_equal_the_whole(make, grid, prefix, window, data):
    """Rows continue from different positions, and the positions that they drop held other states."""
    torch.manual_seed(0)
    size, rows = grid[0] * grid[1], 4
    window = min(window, size)
    q, k, v = torch.randn(3, rows, 2, prefix + size, 8)
    k[:, :, :prefix], v[:, :, :prefix] = (x[::2, :, :prefix].repeat_interleave(2, 0) for x in (k, v))
    pattern = make(grid, 3)
    whole = attend(q, k, v, attention_mask(pattern, prefix))[:, :, prefix:]
    cache = LayerKVCache.from_prefix(pattern, k[::2, :, :prefix], v[::2, :, :prefix], window=window)
    (cache,) = KVCache([cache]).expand(2).layers
    assert len(cache.gap_bias) <= pattern.ring_size() + (window - 1) // pattern.num_lanes
    q, k, v = (x[:, :, prefix:] for x in (q, k, v))
    begin, i = torch.zeros(rows, 1, dtype=torch.long), torch.arange(window)
    done = False
    while not done:
        done = bool((begin == size - window).all())
        accepted = torch.tensor(data.draw(st.lists(st.integers(1, window), min_size=rows, max_size=rows)))[:, None]
        at = (begin + i)[:, None, :, None].expand(-1, 2, -1, 8)
        true_q, true_k, true_v = (x.gather(2, at) for x in (q, k, v))
        wrong = (i >= accepted)[:, None, :, None]
        output = cache.append(begin, *(torch.where(wrong, torch.randn_like(x), x) for x in (true_q, true_k, true_v)))
        right = ~wrong.expand_as(output)
        torch.testing.assert_close(output[right], whole.gather(2, at)[right], atol=1e-5, rtol=1e-5)
        begin = (begin + accepted).clamp(max=size - window)


@pytest.mark.parametrize("store", [KVStore, Int8KVStore])
@pytest.mark.parametrize("pattern", ["paper", "dense"])
def test_windows_give_the_logits_of_single_steps(pattern, store):
    """Rows are at different positions, and each pass but the last accepts a part of its tokens."""
    torch.manual_seed(0)
    config = TransformerConfig(
        text_vocab=20, image_vocab=12, text_len=4, grid=(5, 3), width=32, depth=6, heads=2, kernel=3, pattern=pattern
    )
    model, text, tokens = config.build().eval(), torch.randint(0, 20, (2, 4)), torch.randint(0, 12, (4, 15))
    with torch.inference_mode():
        decoder = TokenDecoder(model, store)
        single, window = (decoder.prefill(text, w)[0].expand(2) for w in (1, 4))
        expected = torch.cat([decoder.step(single, tokens[:, i : i + 1]) for i in range(15)], 1)
        begin = torch.zeros(4, 1, dtype=torch.long)
        for accepted in torch.randint(1, 5, (30, 4, 1)):
            i = torch.arange(4)
            inputs = torch.where(i < accepted, tokens.gather(1, begin + i), torch.randint(0, 12, (4, 4)))
            window.length = begin
            logits = decoder.step(window, inputs)
            assert torch.equal(window.length, begin + 4)
            right = (i < accepted).expand(-1, 4)
            at = (begin + i)[..., None].expand(-1, -1, 12)
            torch.testing.assert_close(logits[right], expected.gather(1, at)[right], atol=1e-5, rtol=1e-5)
            begin = (begin + accepted).clamp(max=11)
        assert bool((begin == 11).all())


def row_of(text: int, position: int, content: float) -> KVCache:
    """A cache of one row of a text, whose slots hold a number."""
    prefix = torch.randn(2, 1, 2, 3, 4, generator=torch.Generator().manual_seed(text))
    layers = [LayerKVCache.from_prefix(PATTERNS[kind]((3, 3), 3), *prefix, window=2) for kind in ("row", "column")]
    for x in layers[0].buffers[2:] + layers[1].buffers[2:]:
        x.fill_(content)
    return KVCache(layers, torch.tensor([[position]]), texts=[text])


@given(
    joins=st.lists(
        st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 4)), min_size=1, max_size=8
    ),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
@example(joins=[([0, 0, 1, 2], 0), ([1], 1)], seed=0)  # leaves a text without rows
def test_rows_in_place_of_others_attend_as_alone(joins, seed):
    """Each join brings rows of some texts and replaces some rows."""
    generator, rows, cache = torch.Generator().manual_seed(seed), list[KVCache](), None
    for texts, replaced in joins:
        positions = torch.randint(8, (len(texts),), generator=generator).tolist()
        new = [
            row_of(text, position, len(rows) + i)
            for i, (text, position) in enumerate(zip(texts, positions, strict=True))
        ]
        joining = new[0].copy()
        for row in new[1:]:
            joining.put(row, ())
        count = min(replaced, len(rows), len(new))
        slots = torch.randperm(len(rows), generator=generator)[:count].tolist()
        if cache is None:
            cache = joining
        else:
            cache.put(joining, slots)
        for slot, row in zip(slots, new, strict=False):
            rows[slot] = row
        rows += new[count:]
        assert cache.rows == len(rows) and cache.length.flatten().tolist() == [int(row.length) for row in rows]
        assert len(cache.texts) == len(cache.layers[0].prefix_keys)
    q = torch.randn(3, len(rows), 2, 1, 4, generator=generator)
    for i, layer in enumerate(cache.copy().attention_fns()):
        expected = [row.copy().attention_fns()[i](*q[:, j : j + 1]) for j, row in enumerate(rows)]
        torch.testing.assert_close(layer(*q), torch.cat(expected))
