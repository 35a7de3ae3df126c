"""Captured decoding steps equal steps of the model."""

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from limner.attention.kv_store import Int8KVStore, KVStore
from limner.errors import UserError
from limner.models.transformer import TransformerConfig
from limner.sampling import aot_inductor
from limner.sampling.cuda_graph import GraphedDecoder, build_decoder
from limner.sampling.decoder import TokenDecoder
from limner.sampling.generate import UNSET
from limner.sampling.generation_config import Sampler
from limner.sampling.parallel import generate

SMALL = TransformerConfig(text_vocab=20, image_vocab=12, text_len=4, grid=(5, 4), width=32, depth=3, heads=2, kernel=3)


def prior(pattern="paper", seed=0):
    torch.manual_seed(seed)
    model = replace(SMALL, pattern=pattern).build().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


def replay_eagerly(run):
    """Replay by calling the function again, with the fixed memory that a graph would have."""
    return run


@pytest.mark.parametrize("store", [KVStore, Int8KVStore])
@pytest.mark.parametrize("pattern", ["paper", "dense"])
def test_logits_equal_those_of_the_model(pattern, store):
    model = prior(pattern)
    assert {pattern.name for pattern in model.config.patterns} == (
        {"row", "column", "conv"} if pattern == "paper" else {"dense"}
    )
    decoder, graphed = TokenDecoder(model, store), GraphedDecoder(model, replay_eagerly, store=store)
    with torch.inference_mode():
        text = torch.randint(0, 20, (2, 4))
        caches = [x.prefill(text)[0].expand(3) for x in (decoder, graphed)]
        for position in range(19):
            token = torch.randint(0, 12, (6, 1))
            expected, logits = (x.step(cache, token) for x, cache in zip((decoder, graphed), caches, strict=True))
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
            assert [cache.length for cache in caches] == [position + 1] * 2


@pytest.mark.parametrize(("guidance", "primed"), [(1.0, 0), (3.0, 0), (1.0, 8)])
def test_samples_are_the_same(guidance, primed):
    model, text = prior(), torch.randint(0, 20, (2, 4))
    prompt = torch.full((2, 20), UNSET)
    prompt[:, :primed] = torch.randint(0, 12, (2, primed))
    draw = partial(generate, text=text, candidates=range(3), sampler=Sampler(guidance=guidance), prompt_tokens=prompt)
    decoder, graphed = TokenDecoder(model), GraphedDecoder(model, replay_eagerly)
    assert torch.equal(draw(graphed).tokens, draw(decoder).tokens)
    assert torch.equal(draw(graphed, seed=4).tokens, draw(decoder, seed=4).tokens)  # with another cache


def test_each_shape_is_captured_once_and_two_graphs_are_cached():
    model, captured = prior(), []

    def capture(run):
        captured.append(run)
        return run

    decoder, graphed = TokenDecoder(model), GraphedDecoder(model, capture)
    for n in (3, 2, 3, 2, 3):
        text = torch.randint(0, 20, (1, 4))
        samples = [generate(x, text, range(n), Sampler(), seed=n).tokens for x in (decoder, graphed)]
        assert torch.equal(*samples)
    assert len(captured) == 2
    generate(graphed, text, range(1), Sampler())
    generate(graphed, text, range(3), Sampler())
    assert len(captured) == 3
    generate(graphed, text, range(2), Sampler())
    assert len(captured) == 4


def test_alternating_caches_of_one_shape_do_not_mix():
    model = prior()
    decoder, graphed = TokenDecoder(model), GraphedDecoder(model, replay_eagerly)
    with torch.inference_mode():
        caches = [[x.prefill(torch.full((1, 4), i))[0].expand(3) for x in (decoder, graphed)] for i in range(2)]
        for position in range(6):
            for pair in caches[: 1 + position % 2]:
                token = torch.randint(0, 12, (3, 1))
                expected, logits = (x.step(cache, token) for x, cache in zip((decoder, graphed), pair, strict=True))
                torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("shapes_unchecked")
def test_generation_compiles_once():
    model, text, counter = prior(), torch.randint(0, 20, (1, 4)), CompileCounter()
    compiled = GraphedDecoder(model, lambda run: torch.compile(run, backend=counter, fullgraph=True, dynamic=False))
    tokens = generate(compiled, text, range(4), Sampler()).tokens
    assert counter.frame_count == 1
    assert torch.equal(tokens, generate(TokenDecoder(model), text, range(4), Sampler()).tokens)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs a C++ compiler")
@pytest.mark.usefixtures("shapes_unchecked")
def test_compiled_steps_sample_the_same_and_depend_on_the_weights(tmp_path, monkeypatch):
    """Compiled steps are loaded from the disk unless damaged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text, compilations = torch.randint(0, 20, (1, 4)), []

    def counted(*args):
        compilations.append(args)
        return compile_now(*args)

    compile_now = aot_inductor.compile_step
    monkeypatch.setattr(aot_inductor, "compile_step", counted)
    first, second = (prior(seed=seed) for seed in (0, 1))
    for model, n, times in ((first, 4, 1), (first, 4, 1), (second, 1, 2)):
        assert torch.equal(
            generate(build_decoder(model, compile=True), text, range(n), Sampler()).tokens,
            generate(TokenDecoder(model), text, range(n), Sampler()).tokens,
        )
        assert len(compilations) == times
    for file in (tmp_path / "limner" / "steps").glob("*.pt2"):
        file.write_bytes(file.read_bytes()[:-1])
    monkeypatch.setattr(aot_inductor, "compile_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(build_decoder(first, compile=True), text, range(4), Sampler())


@pytest.mark.usefixtures("shapes_unchecked")
def test_the_file_name_depends_on_weights_shapes_and_processor(monkeypatch):
    model, other = prior(), prior()
    memory = TokenDecoder(model).prefill(torch.zeros(1, 4, dtype=torch.long))[0].buffers
    token = torch.zeros(1, 1, dtype=torch.long)
    name = aot_inductor.cache_key(model, memory, token)
    assert name == aot_inductor.cache_key(prior(), memory, token)
    other.head.norm.bias.data[0] += 1
    assert name != aot_inductor.cache_key(other, memory, token)
    assert name != aot_inductor.cache_key(model, [memory[0].repeat(2, 1, 1, 1), *memory[1:]], token)
    assert name != aot_inductor.cache_key(model.bfloat16(), memory, token)
    monkeypatch.setattr(aot_inductor, "processor_features", lambda: "another")
    assert name != aot_inductor.cache_key(prior(), memory, token)


def test_a_cache_folder_that_others_may_write_to_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = aot_inductor.cache_folder()
    assert folder.is_relative_to(tmp_path) and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(UserError, match="other users may write to"):
        aot_inductor.cache_folder()
    folder.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="other users may write to"):
        aot_inductor.cache_folder()
    folder.unlink()
    folder.touch()
    with pytest.raises(UserError, match="cannot be created"):
        aot_inductor.cache_folder()


@pytest.mark.gpu
def test_a_cuda_graph_samples_the_same():
    model, text = prior().cuda(), torch.randint(0, 20, (2, 4), device="cuda")
    for seed in range(2):
        tokens = generate(GraphedDecoder(model), text, range(3), Sampler(), seed=seed).tokens
        assert torch.equal(tokens, generate(TokenDecoder(model), text, range(3), Sampler(), seed=seed).tokens)
