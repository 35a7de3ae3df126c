"""Steps that are recorded once do what steps do that are computed one by one."""

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from limner.errors import UserError
from limner.layers.cache import Int8Store, Store
from limner.models.transformer import TransformerConfig
from limner.sampling import aot_inductor as kept
from limner.sampling.cuda_graph import Recorded, decoder
from limner.sampling.generate import FREE, generate
from limner.sampling.generation_config import Sampler

SMALL = TransformerConfig(text_vocab=20, image_vocab=12, text_len=4, grid=(5, 4), width=32, depth=3, heads=2, kernel=3)


def prior(pattern="paper", seed=0):
    torch.manual_seed(seed)
    model = replace(SMALL, pattern=pattern).build().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


def memory_alone(run):
    """Called again, nothing of Python's between the calls: as a graph would be replayed."""
    return run


@pytest.mark.parametrize("store", [Store, Int8Store])
@pytest.mark.parametrize("pattern", ["paper", "dense"])
def test_logits_are_those_of_single_steps(pattern, store):
    model = prior(pattern)
    assert {pattern.name for pattern in model.config.patterns} == (
        {"row", "column", "conv"} if pattern == "paper" else {"dense"}
    )
    recorded = Recorded(model, memory_alone)
    with torch.inference_mode():
        text = torch.randint(0, 20, (2, 4))
        caches = [x.prefill(text, store)[0].expand(3) for x in (model, recorded)]
        for position in range(19):
            token = torch.randint(0, 12, (6,))
            expected, found = (x.step(cache, token) for x, cache in zip((model, recorded), caches, strict=True))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            assert [cache.length for cache in caches] == [position + 1] * 2


@pytest.mark.parametrize(("guidance", "primed"), [(1.0, 0), (3.0, 0), (1.0, 8)])
def test_drawings_are_the_same(guidance, primed):
    model, text = prior(), torch.randint(0, 20, (2, 4))
    given = torch.full((2, 20), FREE)
    given[:, :primed] = torch.randint(0, 12, (2, primed))
    draw = partial(generate, text=text, candidates=range(3), sampler=Sampler(guidance=guidance), given=given)
    recorded = Recorded(model, memory_alone)
    assert torch.equal(draw(recorded).tokens, draw(model).tokens)
    assert torch.equal(draw(recorded, seed=4).tokens, draw(model, seed=4).tokens)  # another picture, another cache


def test_a_shape_is_recorded_once_and_two_are_kept():
    model, recordings = prior(), []

    def record(run):
        recordings.append(run)
        return run

    recorded = Recorded(model, record)
    for n in (3, 2, 3, 2, 3):
        text = torch.randint(0, 20, (1, 4))
        drawn = [generate(x, text, range(n), Sampler(), seed=n).tokens for x in (model, recorded)]
        assert torch.equal(*drawn)
    assert len(recordings) == 2
    generate(recorded, text, range(1), Sampler())
    generate(recorded, text, range(3), Sampler())
    assert len(recordings) == 3
    generate(recorded, text, range(2), Sampler())
    assert len(recordings) == 4


def test_caches_of_one_shape_that_take_turns_keep_apart():
    model = prior()
    recorded = Recorded(model, memory_alone)
    with torch.inference_mode():
        caches = [[x.prefill(torch.full((1, 4), i), Store)[0].expand(3) for x in (model, recorded)] for i in range(2)]
        for position in range(6):
            for pair in caches[: 1 + position % 2]:
                token = torch.randint(0, 12, (3,))
                expected, found = (x.step(cache, token) for x, cache in zip((model, recorded), pair, strict=True))
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_picture_needs_one_compilation():
    model, text, counter = prior(), torch.randint(0, 20, (1, 4)), CompileCounter()
    compiled = Recorded(model, lambda run: torch.compile(run, backend=counter, fullgraph=True, dynamic=False))
    drawn = generate(compiled, text, range(4), Sampler()).tokens
    assert counter.frame_count == 1
    assert torch.equal(drawn, generate(model, text, range(4), Sampler()).tokens)


@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs a C++ compiler")
@pytest.mark.usefixtures("shapes_unchecked")
def test_compiled_for_real_it_draws_the_same_and_other_weights_are_other_drawings(tmp_path, monkeypatch):
    """And what is on the disk is taken from there, unless it is damaged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text, made = torch.randint(0, 20, (1, 4)), []

    def counted(*args):
        made.append(args)
        return compile_now(*args)

    compile_now = kept._compile
    monkeypatch.setattr(kept, "_compile", counted)
    first, second = (prior(seed=seed) for seed in (0, 1))
    for model, n, times in ((first, 4, 1), (first, 4, 1), (second, 1, 2)):
        assert torch.equal(
            generate(decoder(model, compile=True), text, range(n), Sampler()).tokens,
            generate(model, text, range(n), Sampler()).tokens,
        )
        assert len(made) == times
    for file in (tmp_path / "limner" / "steps").glob("*.pt2"):
        file.write_bytes(file.read_bytes()[:-1])
    monkeypatch.setattr(kept, "_compile", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(decoder(first, compile=True), text, range(4), Sampler())


@pytest.mark.usefixtures("shapes_unchecked")
def test_compiled_steps_are_known_by_all_that_they_were_made_from(monkeypatch):
    model, other = prior(), prior()
    memory = model.prefill(torch.zeros(1, 4, dtype=torch.long))[0].memory
    name = kept._name(model, memory)
    assert name == kept._name(prior(), memory)
    other.head.norm.bias.data[0] += 1
    assert name != kept._name(other, memory)
    assert name != kept._name(model, [memory[0].repeat(2, 1, 1, 1), *memory[1:]])
    assert name != kept._name(model.bfloat16(), memory)
    monkeypatch.setattr(kept, "_processor", lambda: "another")
    assert name != kept._name(prior(), memory)


def test_code_that_others_may_write_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = kept._folder()
    assert folder.is_relative_to(tmp_path) and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(UserError, match="others may write to it"):
        kept._folder()
    folder.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="others may write to it"):
        kept._folder()
    folder.unlink()
    folder.touch()
    with pytest.raises(UserError, match="cannot be made"):
        kept._folder()


@pytest.mark.gpu
def test_a_graph_draws_what_single_steps_draw():
    model, text = prior().cuda(), torch.randint(0, 20, (2, 4), device="cuda")
    for seed in range(2):
        drawn = generate(Recorded(model), text, range(3), Sampler(), seed=seed).tokens
        assert torch.equal(drawn, generate(model, text, range(3), Sampler(), seed=seed).tokens)
