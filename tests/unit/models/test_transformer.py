"""The prior: causal, padding-aware, and the same whether decoded in one pass or with a cache."""

import pytest
import torch

from limner.attention import sparse
from limner.attention.patterns import PATTERNS
from limner.blocks import resblocks
from limner.models.transformer import TransformerConfig
from limner.planner.memory_tracker import MemoryTracker
from limner.sampling.decoder import TokenDecoder
from limner.text import PAD
from more_patterns import alternate, dilated


def small(**overrides):
    torch.manual_seed(0)
    values = {
        "text_vocab": 30, "image_vocab": 20, "text_len": 5, "grid": (3, 4), "width": 32, "depth": 5, "heads": 4,
        "kernel": 3,
    } | overrides  # fmt: skip
    return TransformerConfig(**values).build().eval()


def batch(model, rows=3):
    c = model.config
    text = torch.randint(0, c.text_vocab, (rows, c.text_len))
    text[0, 2:] = PAD
    text[-1, 1:] = PAD
    return text, torch.randint(0, c.image_vocab, (rows, c.grid[0] * c.grid[1]))


@pytest.mark.parametrize("short", [0, 1000])
@pytest.mark.parametrize("pattern", ["paper", *PATTERNS])
def test_cached_logits_equal_teacher_forced_ones(pattern, short, monkeypatch):
    monkeypatch.setattr(sparse, "DENSE_MAX_POSITIONS", short)  # sparse attention, or a dense mask
    model = small(pattern=pattern)
    text, image = batch(model)
    with torch.inference_mode():
        _, expected = model(text, image)
        cache, logits = TokenDecoder(model).prefill(text)
        found = [logits]
        for position in range(image.shape[1] - 1):
            found.append(TokenDecoder(model).step(cache, image[:, position, None]))
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("short", [0, 1000])
def test_in_float64_cached_logits_are_as_near_as_float64_is(short, monkeypatch):
    monkeypatch.setattr(sparse, "DENSE_MAX_POSITIONS", short)
    model = small().double()
    text, image = batch(model)
    with torch.inference_mode():
        by_text, expected = model(text, image)
        cache, logits = TokenDecoder(model).prefill(text)
        found = torch.cat([logits, *(TokenDecoder(model).step(cache, token[:, None]) for token in image.T[:-1])], 1)
    assert by_text.dtype == found.dtype == torch.float64
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("short", [0, 1000])
def test_models_train_and_draw_with_new_patterns(short, monkeypatch):
    monkeypatch.setattr(sparse, "DENSE_MAX_POSITIONS", short)
    for name, make in {"row": dilated, "column": alternate}.items():
        monkeypatch.setitem(PATTERNS, name, make)
    model = small(grid=(6, 4))
    assert [pattern.name for pattern in model.config.patterns] == ["dilated", "alternate", "dilated", "dilated", "conv"]
    text, image = batch(model)
    with torch.inference_mode():
        expected = model(text, image)[1]
        cache, logits = TokenDecoder(model).prefill(text)
        found = [logits, *(TokenDecoder(model).step(cache, token[:, None]) for token in image.T[:-1])]
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-4, rtol=1e-4)


def test_layer_scale_and_qk_norm_train_and_decode_equally():
    model, text, image = small(layer_scale=True, qk_norm=True), *batch(small())
    with torch.inference_mode():
        first = model(text, image)[1]
    for block in model.blocks:
        assert torch.equal(block.mlp.scale.gain, torch.zeros(32))
        for resblock in (block.attention, block.mlp):
            resblock.scale.gain.data.fill_(0.5)
        attention = block.attention.branch
        attention.q_norm.weight.data.uniform_(0.5, 2)
    with torch.inference_mode():
        expected = model(text, image)[1]
        cache, logits = TokenDecoder(model).prefill(text)
        found = [logits, *(TokenDecoder(model).step(cache, token[:, None]) for token in image.T[:-1])]
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(first, expected)  # at first each block was the identity
    attention.qkv.weight.data[:64] *= 100  # queries and keys, whose length is normalized away; no bias
    attention.qkv.bias.data.zero_()
    with torch.inference_mode():
        torch.testing.assert_close(model(text, image)[1], expected, atol=1e-3, rtol=1e-3)


def test_logits_do_not_depend_on_later_tokens():
    model = small(pattern="dense")
    text, image = batch(model)
    changed = image.clone()
    changed[:, 7] = (changed[:, 7] + 1) % model.config.image_vocab
    with torch.inference_mode():
        a, b = model(text, image)[1], model(text, changed)[1]
    torch.testing.assert_close(a[:, :8], b[:, :8])  # position 7 is predicted before it is seen
    assert not torch.allclose(a[:, 8], b[:, 8])


def test_blocks_run_in_parts_are_the_whole():
    model = small()
    x = torch.randn(2, 6 + 12, 32)
    whole = model.run(x)
    for k in range(6):
        assert torch.equal(model.run(model.run(x, 0, k), k, 5), whole)
    text, image = batch(model)
    x = model.run(torch.cat([model.embed.prefix(text), model.embed.tokens(image)], 1))
    assert torch.equal(model.head.image(model.head.norm(x[:, 5:-1])), model(text, image)[1])


def test_a_gradient_can_be_scaled_where_it_enters_and_leaves_a_resblock():
    """Figure 4 from outside: the branch's parameters see gradients 2^7 times as large, and nothing else does."""
    model = small()
    text, image = batch(model)

    def gradients():
        model.zero_grad()
        model(text, image)[1].square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def scaled(x, by):
        y = x.view_as(x)
        y.register_hook(lambda gradient: gradient * by)
        return y

    plain, path = gradients(), "blocks.2.attention."
    resblock = model.blocks[2].attention
    hooks = [
        resblock.branch.register_forward_hook(lambda _, inputs, output: scaled(output, 2.0**7)),
        resblock.norm.register_forward_pre_hook(lambda _, inputs: scaled(inputs[0], 2.0**-7)),
    ]
    found = gradients()
    inside = {name for name in plain if name.startswith(path)}
    assert len(inside) == len(list(resblock.parameters())) == 6
    for name, gradient in plain.items():
        assert torch.equal(found[name], gradient * 2.0**7 if name in inside else gradient), name
    for hook in hooks:
        hook.remove()
    assert all(torch.equal(gradient, plain[name]) for name, gradient in gradients().items())


def test_every_padding_position_has_a_token_of_its_own():
    model = small()
    text = torch.full((1, 5), PAD)
    x = model.embed.prefix(text)[0, :5]
    assert torch.equal(x, model.embed.padding.weight)
    assert len({tuple(row.tolist()) for row in x}) == 5


def test_image_embedding_is_token_plus_row_plus_column():
    model = small()
    x = model.embed.tokens(torch.tensor([[9]]), begin=6)[0, 0]  # row 1, column 2 of a 3 x 4 grid
    expected = model.embed.image.weight[9] + model.embed.row.weight[1] + model.embed.column.weight[2]
    torch.testing.assert_close(x, expected)


def test_checkpointed_activations_give_the_same_gradients():
    model = small().train()
    text, image = batch(model)
    grads = []
    for on in (False, True):
        model.set_checkpointing(on)
        model.zero_grad()
        model(text, image)[1].square().mean().backward()
        grads.append([p.grad.clone() for p in model.blocks.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_the_backward_pass_recomputes_one_resblock_after_the_other():
    model, events = small().train(), []
    model.set_checkpointing(True)
    for name, resblock in resblocks(model).items():
        resblock.branch.register_forward_pre_hook(lambda *_, name=name: events.append(("forward", name)))
        resblock.norm.weight.register_hook(lambda _, name=name: events.append(("backward", name)))
    loss = model(*batch(model))[1].square().mean()
    events.clear()
    loss.backward()
    assert events == [(which, name) for name in reversed(resblocks(model)) for which in ("forward", "backward")]


def test_checkpointing_saves_the_inputs_of_resblocks_and_the_peak_has_one_resblock():
    config = TransformerConfig(text_vocab=8, image_vocab=8, text_len=3, grid=(8, 8), width=64, depth=4, heads=2)
    model = config.build().train()
    saved, peak, values = {}, {}, (4 + 64) * 64 * 4  # bytes of x
    with MemoryTracker() as tracker:
        x = torch.zeros(1, 4 + 64, 64, requires_grad=True)
        model.run(x).sum().backward()  # the tracker counts weights and gradients once they are used
        for on in (False, True):
            model.set_checkpointing(on)
            before = tracker.refresh()
            y = model.run(x).sum()
            saved[on] = tracker.refresh() - before
            tracker.reset()
            y.backward()
            peak[on] = tracker.peak - before
    assert saved[True] == (2 * config.depth - 1) * values  # all inputs but x
    assert saved[False] > 8 * config.depth * 2 * values
    # The MLP's activations and their gradients, each 9 values or less. A layer of two resblocks would have 25.
    assert peak[True] - saved[True] < 18 * values


def test_the_papers_size_has_12_billion_effective_parameters():
    with torch.device("meta"):
        block = TransformerConfig(depth=1, grid=(2, 2), text_len=2).build().blocks[0]
    matrices = sum(p.numel() for p in block.parameters() if p.dim() == 2)
    assert matrices == 12 * 3968**2
    assert round(64 * matrices / 1e9, 2) == 12.09
