"""Sampling with numpy gives the tokens of torch, for the same logits and the same random numbers."""

import numpy as np
import pytest
import torch

from limner.errors import UserError
from limner.runtime.sampling import UNSET, candidate_noise, generate, sample_token
from limner.sampling import generate as with_torch
from limner.sampling.decoder import TokenDecoder
from limner.sampling.generation_config import Sampler
from limner.text import PAD
from tiny import WORDS, tiny_pipe

SAMPLERS = [
    Sampler(), Sampler(temperature=0), Sampler(temperature=0.3), Sampler(top_k=5), Sampler(top_p=0.6),
    Sampler(temperature=0.8, top_k=7, top_p=0.9),
]  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2**31 + 5, 2**32 - 1, 2**63 - 1])
def test_noise_is_that_of_torch(seed):
    expected = with_torch.candidate_noise(seed, range(3, 7), 150)
    noise = candidate_noise(seed, range(3, 7), 150)
    assert noise.dtype == np.float32
    np.testing.assert_array_equal(noise, expected.numpy())


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_tokens_are_those_of_torch(sampler):
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(4_000, 37)) * rng.choice([0.1, 1, 6], (4_000, 1))).astype(np.float32)
    uniform = rng.random(4_000, np.float32)
    uniform[:4] = 0, 1 - 2**-24, 2**-24, 0.5
    expected = with_torch.sample_token(sampler, torch.from_numpy(logits), torch.from_numpy(uniform))
    np.testing.assert_array_equal(sample_token(sampler, logits, uniform), expected.numpy())


class TorchPrior:
    """torch's decoder as the prior that `generate` reads."""

    max_window = 6

    def __init__(self, model, text):
        self.decoder, self.text = TokenDecoder(model), text

    def start(self, rows):
        cache, logits = self.decoder.prefill(self.text, self.max_window)
        self.cache = cache.expand(rows)
        return logits[0, 0].numpy()

    def step(self, tokens, position):
        self.cache.length = torch.from_numpy(position)
        return self.decoder.step(self.cache, torch.from_numpy(tokens)).numpy()

    def select(self, rows):
        self.cache = self.cache.select(torch.from_numpy(rows))


@pytest.mark.parametrize("sampler", [*SAMPLERS, Sampler(guidance=2.5)], ids=str)
@pytest.mark.parametrize("prompt", ["none", "rows", "scattered"])
@torch.inference_mode()
def test_drawings_are_those_of_the_reference(sampler, prompt):
    pipe = tiny_pipe(3)
    text = pipe.tokenizer.encode([WORDS[0]], pipe.prior.config.text_len)
    noise, rng = candidate_noise(7, range(5), 36), np.random.default_rng(1)
    given = rng.integers(0, 32, 36)
    given[{"none": slice(None), "rows": slice(13, None)}.get(prompt, rng.random(36) < 0.5)] = UNSET
    empty = TorchPrior(pipe.prior, torch.full_like(text, PAD)) if sampler.guidance else None
    tokens, score = generate(TorchPrior(pipe.prior, text), empty, sampler, noise, given, 6)
    for row, uniform in zip(tokens, noise, strict=True):
        expected = with_torch.reference_tokens(
            pipe.prior, text, sampler, torch.from_numpy(uniform)[None], torch.from_numpy(given)[None]
        )
        np.testing.assert_array_equal(row, expected[0].numpy())
    logits = pipe.prior(text.expand(5, -1), torch.from_numpy(tokens))[1]
    loss = torch.nn.functional.cross_entropy(logits.mT, torch.from_numpy(tokens), reduction="none").mean(1)
    np.testing.assert_allclose(score, -loss.numpy(), rtol=1e-4)


def test_logits_that_are_not_finite_are_one_sentence():
    class Broken(TorchPrior):
        def step(self, tokens, position):
            return super().step(tokens, position) * np.nan

    pipe = tiny_pipe()
    text = pipe.tokenizer.encode([WORDS[0]], pipe.prior.config.text_len)
    with torch.inference_mode(), pytest.raises(UserError, match="not finite"):
        generate(Broken(pipe.prior, text), None, Sampler(), candidate_noise(0, range(1), 36), np.full(36, UNSET), 6)
