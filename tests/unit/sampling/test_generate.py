"""Tokens follow the model's distribution, and candidate i does not depend on its batch."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st
from scipy import stats

import limner
from limner.attention.kv_store import Int8KVStore, KVStore
from limner.errors import UserError
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Fp32
from limner.sampling.cuda_graph import GraphedDecoder
from limner.sampling.decoder import TokenDecoder
from limner.sampling.generate import UNSET, candidate_noise, reference_tokens, sample_token
from limner.sampling.generation import TokenRequest
from limner.sampling.generation_config import Sampler
from limner.sampling.parallel import Batch, generate
from limner.text import PAD

N = 40_000
LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.3, -3.0, 0.0, 1.7, -1.0])


def sample(sampler, logits=LOGITS, n=N, seed=0):
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(seed))
    return sample_token(sampler, logits.expand(n, -1), uniform)


def frequencies(tokens):
    return torch.bincount(tokens, minlength=len(LOGITS)).numpy()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_tokens_follow_the_softmax(temperature):
    counts = frequencies(sample(Sampler(temperature=temperature)))
    expected = (LOGITS.double() / temperature).softmax(0).numpy() * N
    assert stats.chisquare(counts, expected).pvalue > 1e-3


def test_top_k_keeps_the_k_likeliest_in_proportion():
    counts = frequencies(sample(Sampler(top_k=3)))
    kept = LOGITS.topk(3).indices
    assert set(counts.nonzero()[0]) == set(kept.tolist())
    expected = LOGITS[kept].double().softmax(0).numpy() * N
    assert stats.chisquare(counts[kept.numpy()], expected).pvalue > 1e-3


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    p, order = LOGITS.softmax(0).sort(descending=True)
    for count in (1, 2, 4):
        between = float(p[:count].sum() - p[count - 1] / 2)  # the count-th token is needed to reach this
        counts = frequencies(sample(Sampler(top_p=between)))
        assert set(counts.nonzero()[0]) == set(order[:count].tolist())


def test_top_p_acts_on_what_top_k_left():
    # After top_k=2 the likeliest token has a share of p0 / (p0 + p1), which alone reaches the bound.
    p = LOGITS.softmax(0).sort(descending=True).values
    share = float(p[0] / (p[0] + p[1]))
    assert share > float(p[0])
    counts = frequencies(sample(Sampler(top_k=2, top_p=(share + float(p[0])) / 2)))
    assert set(counts.nonzero()[0]) == {int(LOGITS.argmax())}


@given(
    logits=st.lists(st.floats(-60, 60), min_size=2, max_size=12),
    top_k=st.none() | st.integers(1, 15),
    top_p=st.none() | st.floats(0, 1, exclude_min=True),
    uniform=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=200, deadline=None)
def test_a_token_is_among_the_kept_ones(logits, top_k, top_p, uniform):
    row = torch.tensor([logits])
    token = int(sample_token(Sampler(top_k=top_k, top_p=top_p), row, torch.tensor([uniform]))[0])
    assert 0 <= token < len(logits)
    p = row[0].softmax(0)  # ties where logits differ by less than rounding
    assert top_k is None or int((p > p[token]).sum()) < top_k
    mass_before = float(p[p > p[token]].sum())
    assert top_p is None or mass_before <= top_p + 1e-5 or top_k is not None


def test_logits_are_not_changed_and_temperature_zero_is_greedy():
    logits = torch.randn(5, 9)
    before = logits.clone()
    sample_token(Sampler(temperature=0.7, top_k=3, top_p=0.5), logits, torch.rand(5))
    assert torch.equal(logits, before)
    assert torch.equal(sample_token(Sampler(temperature=0), logits, torch.rand(5)), logits.argmax(-1))


def test_each_candidate_has_different_numbers():
    assert torch.equal(candidate_noise(3, range(8), 10)[5:], candidate_noise(3, range(5, 8), 10))
    seeds = (0, 1, 2, 3, 2**32, 2**33, 2**32 + 1, 2**63 - 1)
    rows = torch.cat([candidate_noise(seed, range(50), 10) for seed in seeds])
    assert len(rows.unique(dim=0)) == 50 * len(seeds)


def decoder_of(model, window, store=KVStore):
    decoder = TokenDecoder(model, store)
    decoder.max_window = window
    return decoder


def prior(pattern="paper", condition_blocks=0):
    torch.manual_seed(1)
    config = TransformerConfig(
        text_vocab=30, image_vocab=16, text_len=5, grid=(3, 5), width=32, depth=5, heads=4, kernel=3, pattern=pattern,
        condition_blocks=condition_blocks,
    )  # fmt: skip
    model = config.build().eval()
    with torch.no_grad():
        model.head.image.weight *= 30
        if condition_blocks:
            model.embed.condition.out.weight *= 10
    return model


def with_pictures(requests):
    """The requests, of which every second one has a given picture."""
    pictures = torch.randint(0, 16, (len(requests), 15), generator=torch.Generator().manual_seed(1))
    pictures[1::2] = PAD
    return [replace(r, text=torch.cat([r.text, picture])) for r, picture in zip(requests, pictures, strict=True)]


@pytest.mark.parametrize("window", [1, 4])
def test_a_given_picture_decides_what_is_drawn(window):
    model = prior(condition_blocks=2)
    texts = torch.stack(
        [r.text for r in with_pictures([TokenRequest(text=TEXT[0], candidates=range(1), sampler=Sampler())] * 2)]
    )
    drawn = generate(decoder_of(model, window), texts, range(3), Sampler(), seed=4).tokens
    uniform = candidate_noise(4, range(3), 15)
    for text, tokens in zip(texts, drawn, strict=True):
        expected = reference_tokens(model, text.expand(3, -1), Sampler(), uniform, torch.full((3, 15), UNSET))
        assert torch.equal(tokens, expected)
    assert not torch.equal(*drawn)
    without = generate(decoder_of(model, window), TEXT[:1], range(3), Sampler(), seed=4).tokens
    assert torch.equal(without[0], drawn[1])


@pytest.mark.parametrize("pattern", ["paper", "dense"])
def test_candidates_do_not_depend_on_their_batch(pattern):
    model = prior(pattern)
    text = torch.tensor([[3, 4, 5, PAD, PAD], [7, 8, PAD, PAD, PAD]])
    decoder = TokenDecoder(model)
    batched = generate(decoder, text, range(6), Sampler(), seed=9).tokens
    separate = torch.cat([generate(decoder, text[:1], range(i, i + 2), Sampler(), seed=9).tokens for i in (0, 2, 4)], 1)
    assert torch.equal(batched[:1], separate)
    assert not torch.equal(batched[0], batched[1])  # captions matter
    assert len(batched[0].unique(dim=0)) == 6
    assert not torch.equal(batched, generate(TokenDecoder(model), text, range(6), Sampler(), seed=10).tokens)


@pytest.mark.parametrize("window", [1, 2, 7, 30])
@pytest.mark.parametrize("sampler", [Sampler(temperature=0.8, top_k=9), Sampler(temperature=0), Sampler(top_p=0.7)])
@pytest.mark.parametrize("pattern", ["paper", "dense"])
def test_tokens_equal_those_of_the_reference(pattern, sampler, window):
    """Decoding with the cache equals the model for row, column, conv and dense layers."""
    model = prior(pattern)
    text = torch.tensor([[3, 4, 5, PAD, PAD]])
    tokens = generate(decoder_of(model, window), text, range(4), sampler, seed=2).tokens[0]
    uniform, unset = candidate_noise(2, range(4), tokens.shape[1]), torch.full_like(tokens, UNSET)
    assert torch.equal(tokens, reference_tokens(model, text.expand(4, -1), sampler, uniform, unset))


def log_likelihoods(model, text, tokens):
    """Log-probabilities of tokens [B, N, S] given their captions, in nats per token, by teacher forcing."""
    with torch.inference_mode():
        p = [model(text[b].expand(len(rows), -1), rows)[1].log_softmax(-1) for b, rows in enumerate(tokens)]
    return torch.stack(p).gather(-1, tokens[..., None]).mean((-2, -1))


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("graphed", [False, True])
def test_log_likelihoods_equal_those_of_teacher_forcing(graphed, window):
    """For all samplers, prompt tokens and sampled ones, requests together and the last one alone."""
    model = prior()
    decoder = GraphedDecoder(model, lambda run: run) if graphed else TokenDecoder(model)
    decoder.max_window = window
    batch, all_requests = Batch(decoder), requests()
    generations = [batch.add([request])[0] for request in all_requests]
    while batch.generations:
        batch.step()
    for generation, request in zip(generations, all_requests, strict=True):
        expected = log_likelihoods(model, request.text[None], generation.tokens[None])[0]
        torch.testing.assert_close(generation.log_likelihood, expected)
        torch.testing.assert_close(alone(decoder_of(model, window), request).log_likelihood[0], expected)
    assert torch.cat([generation.log_likelihood for generation in generations]).std() > 0.1
    known = torch.randint(0, 16, (2, 15))
    prompted = generate(decoder_of(model, window), TEXT, range(3), Sampler(), prompt_tokens=known)
    torch.testing.assert_close(prompted.log_likelihood, log_likelihoods(model, TEXT, prompted.tokens))


@pytest.mark.parametrize("window", [1, 4])
def test_progress_counts_positions(window):
    seen, text = [], torch.zeros(1, 5, dtype=torch.long)
    generate(decoder_of(prior(), window), text, range(1), Sampler(), progress=seen.append)
    assert sum(seen) == 15
    assert seen == [1] * 15 if window == 1 else max(seen) > 1


@pytest.mark.parametrize(("name", "most"), [("scenes", 40), ("icons", 130)])
def test_bundled_models_sample_the_same_in_a_fraction_of_the_passes(name, most):
    """Sampling token by token takes 144 passes for scenes, 256 for icons."""
    pipe, passes = limner.load(name, precision=Fp32()), []
    text = pipe.tokenizer.encode(["a red heart"], pipe.prior.config.text_len)
    decoder = TokenDecoder(pipe.prior)
    expected = generate(decoder_of(pipe.prior, 1), text, range(2), pipe.defaults.sampler, seed=3)
    pipe.prior.head.image.register_forward_hook(lambda *_: passes.append(1))
    group = generate(decoder, text, range(2), pipe.defaults.sampler, seed=3)
    assert torch.equal(group.tokens, expected.tokens) and len(passes) < most
    torch.testing.assert_close(group.log_likelihood, expected.log_likelihood)


def test_given_tokens_cost_a_fraction_of_the_passes():
    """Windows jump over fixed positions between the positions to sample."""
    model, passes = prior(), []
    known = torch.randint(0, 16, (1, 15))
    known[0, [3, 9]] = UNSET
    model.head.image.register_forward_hook(lambda *_: passes.append(1))
    generate(decoder_of(model, 4), TEXT[:1], range(1), Sampler(), prompt_tokens=known)
    assert len(passes) < 8


TEXT = torch.tensor([[3, 4, 5, PAD, PAD], [7, 8, PAD, PAD, PAD]])


@pytest.mark.parametrize("window", [1, 6])
@pytest.mark.parametrize("guidance", [1.0, 2.5])
@pytest.mark.parametrize("pattern", ["paper", "dense"])
def test_prompt_tokens_stay_and_the_others_equal_those_of_the_reference(pattern, guidance, window):
    model, sampler = prior(pattern), Sampler(temperature=0.8, guidance=guidance)
    known = torch.randint(0, 16, (2, 15), generator=torch.Generator().manual_seed(0))
    known[0, 7:] = UNSET  # primed with a row and two tokens
    known[1, [1, 5, 6, 9, 14]] = UNSET  # inpainted
    before = known.clone(), TEXT.clone()
    generate_prompted = partial(generate, decoder_of(model, window), sampler=sampler, seed=4)
    tokens = generate_prompted(TEXT, range(3), prompt_tokens=known).tokens
    assert torch.equal(known, before[0]) and torch.equal(TEXT, before[1])
    fixed = (known != UNSET)[:, None].expand_as(tokens)
    assert torch.equal(tokens[fixed], known[:, None].expand_as(tokens)[fixed])
    uniform = candidate_noise(4, range(3), 15).repeat(2, 1)
    texts, prompts = (x.repeat_interleave(3, 0) for x in (TEXT, known))
    expected = reference_tokens(model, texts, sampler, uniform, prompts)
    assert torch.equal(tokens.flatten(0, 1), expected)
    alone = generate_prompted(TEXT[:1], range(1, 3), prompt_tokens=known[:1]).tokens
    assert torch.equal(alone, tokens[:1, 1:])


def test_guidance_one_is_off_and_more_changes_the_samples():
    model = prior()
    plain = generate(TokenDecoder(model), TEXT, range(4), Sampler(), seed=1).tokens
    assert torch.equal(plain, generate(TokenDecoder(model), TEXT, range(4), Sampler(guidance=1), seed=1).tokens)
    assert not torch.equal(plain, generate(TokenDecoder(model), TEXT, range(4), Sampler(guidance=3), seed=1).tokens)


@pytest.mark.parametrize("window", [1, 4])
def test_a_complete_prompt_is_returned(window):
    known = torch.arange(15).repeat(2, 1)
    tokens = generate(decoder_of(prior(), window), TEXT, range(2), Sampler(), prompt_tokens=known).tokens
    assert torch.equal(tokens, known[:, None].expand(-1, 2, -1))


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=0), Sampler(top_k=2), Sampler(guidance=2)])
def test_logits_that_are_not_finite_are_a_user_error(sampler):
    model = prior()
    with torch.no_grad():
        model.head.image.weight[::2] = torch.finfo(torch.float32).max
    with pytest.raises(UserError, match="not finite"):
        generate(TokenDecoder(model), torch.tensor([[3, 4, PAD, PAD, PAD]]), range(2), sampler)


@pytest.mark.parametrize("window", [1, 4])
def test_tokens_of_unfinished_requests_are_final_or_unset(window):
    request = TokenRequest(text=TEXT[0], candidates=range(2), sampler=Sampler())
    batch = Batch(decoder_of(prior(), window))
    (generation,) = batch.add([request])
    shown = [generation.tokens]
    while not generation.finished:
        batch.step()
        shown.append(generation.tokens)
        assert (shown[-1][:, : generation.position] != UNSET).all()
    for tokens in shown:
        assert (tokens[tokens != generation.tokens] == UNSET).all()
    assert window > 1 or [int((tokens != UNSET).sum()) for tokens in shown] == list(range(2, 31, 2))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}])
def test_frequencies_follow_the_softmax(options):
    """Chi-square test of the first two tokens of 20,000 candidates."""
    torch.manual_seed(3)
    config = TransformerConfig(
        text_vocab=5, image_vocab=8, text_len=2, grid=(1, 2), width=16, depth=3, heads=2, kernel=3
    )
    model, n = config.build().eval(), 20_000
    with torch.no_grad():
        model.head.image.weight *= 20
    text = torch.tensor([[1, 2]])
    samples = generate(TokenDecoder(model), text, range(n), Sampler(**options), seed=5).tokens[0]
    every = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    with torch.inference_mode():
        first, second = model(text.expand(64, -1), every)[1].div(options.get("temperature", 1)).softmax(-1).unbind(1)
    p = _kept(first, options).gather(1, every[:, :1]) * _kept(second, options).gather(1, every[:, 1:])
    counts = torch.bincount(samples[:, 0] * 8 + samples[:, 1], minlength=64).double()
    expected = p.flatten().double() * n
    assert counts[expected == 0].sum() == 0
    common = expected > 5
    statistic = ((counts - expected)[common].square() / expected[common]).sum() + (
        (counts[~common].sum() - expected[~common].sum()).square() / expected[~common].sum().clamp_min(1)
    )
    assert stats.chi2.sf(float(statistic), int(common.sum())) > 1e-4


def _kept(p, options):
    """The distribution after top-k or top-p, by its definition."""
    order = p.sort(dim=-1, descending=True, stable=True).indices
    rank = order.argsort(-1)
    ahead = (p.gather(-1, order).cumsum(-1) - p.gather(-1, order)).gather(-1, rank)
    keep = (rank < options.get("top_k", 99)) & (ahead < options.get("top_p", 2.0))
    kept = torch.where(keep, p, torch.zeros(()))
    return kept / kept.sum(-1, keepdim=True)


def requests():
    """Arguments of groups with different captions, candidates, samplers, seeds and prompts."""
    known = torch.randint(0, 16, (2, 15), generator=torch.Generator().manual_seed(0))
    primed, holes = known[0].clone(), known[0].clone()
    primed[6:], holes[::2] = UNSET, UNSET
    return [
        TokenRequest(text=TEXT[0], candidates=range(3), sampler=Sampler(), seed=1),
        TokenRequest(text=TEXT[1], candidates=range(4, 6), sampler=Sampler(temperature=0.7, top_k=5), seed=2),
        TokenRequest(text=TEXT[1], candidates=range(3), sampler=Sampler(top_p=0.8, guidance=3), seed=3),
        TokenRequest(text=TEXT[0], candidates=range(2), sampler=Sampler(), seed=4, prompt_tokens=primed),
        TokenRequest(text=TEXT[0], candidates=range(2), sampler=Sampler(guidance=2), seed=5, prompt_tokens=holes),
        TokenRequest(text=TEXT[0], candidates=range(5), sampler=Sampler(temperature=0), seed=6),
    ]


def alone(decoder, request):
    """Return what `generate` samples for one request."""
    prompt = None if request.prompt_tokens is None else request.prompt_tokens[None]
    settings = {"seed": request.seed, "prompt_tokens": prompt}
    return generate(decoder, request.text[None], request.candidates, request.sampler, **settings)


@given(
    joins=st.lists(st.integers(0, 20), min_size=6, max_size=6),
    leaves=st.lists(st.integers(1, 20), min_size=6, max_size=6),
    store=st.sampled_from([KVStore, Int8KVStore]), pattern=st.sampled_from(["paper", "dense"]), graphed=st.booleans(),
    window=st.sampled_from([1, 2, 5, 30]), expected=st.integers(1, 300), pictures=st.booleans(),
)  # fmt: skip
@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_requests_that_join_and_leave_sample_what_they_sample_alone(
    joins, leaves, store, pattern, graphed, window, expected, pictures
):
    """Requests join between any two steps, some together, and some leave. Half may have a given picture."""
    model, all_requests = prior(pattern, 2 * pictures), with_pictures(requests()) if pictures else requests()
    decoder = GraphedDecoder(model, lambda run: run, store=store) if graphed else TokenDecoder(model, store)
    decoder.max_window = window
    batch, generations, left, steps = Batch(decoder, expected), {}, {}, 0
    while len(generations) < len(all_requests) or batch.generations:
        joining = [i for i in range(len(all_requests)) if joins[i] == steps]
        if joining:
            added = batch.add([all_requests[i] for i in joining])
            generations |= dict(zip(joining, added, strict=True))
        for i in range(1, len(all_requests), 2):
            if generations.get(i) in batch.generations and generations[i].position >= leaves[i]:
                left[i] = generations[i].position
                batch.remove(generations[i])
        batch.step()
        steps += 1
    for i, request in enumerate(all_requests):
        end = left.get(i, 15)
        assert generations[i].position == end
        tokens = alone(decoder_of(model, 1, store), request).tokens[0]
        assert torch.equal(generations[i].tokens[:, :end], tokens[:, :end])
    assert batch.size == 0


def test_requests_at_several_positions_share_one_pass_through_the_weights():
    model, seen = prior(), []
    batch = Batch(TokenDecoder(model))
    for _ in range(3):
        batch.add([TokenRequest(text=TEXT[0], candidates=range(2), sampler=Sampler())])
        batch.step()
    model.head.image.register_forward_hook(lambda layer, inputs, output: seen.append(len(output)))
    batch.step()
    assert seen == [6]


def test_equal_captions_are_stored_once():
    batch = Batch(TokenDecoder(prior()))
    captions = [TEXT[0], TEXT[1], TEXT[0]]
    batch.add([TokenRequest(text=text, candidates=range(2), sampler=Sampler(guidance=2)) for text in captions])
    assert batch._cache and len(batch._cache.layers[0].prefix_keys) == 3  # two captions and the empty one
    assert batch.size == 12


def test_requests_that_join_take_the_rows_of_finished_ones_and_read_new_texts_only():
    model, read = prior(), []
    decoder = TokenDecoder(model)
    prefill = decoder.prefill
    decoder.prefill = lambda text, window=1: read.extend(text.tolist()) or prefill(text, window)
    batch, waiting = Batch(decoder, 4), [
        TokenRequest(text=TEXT[seed % 2], candidates=range(1), sampler=Sampler(guidance=1 + seed % 3), seed=seed)
        for seed in range(16)
    ]  # fmt: skip
    generations, rows = batch.add(waiting[:4]), []
    while batch.generations:
        batch.step()
        joining = min(4 - len(batch.generations), 16 - len(generations))
        if joining and batch.generations:
            generations += batch.add(waiting[len(generations) :][:joining])
        rows.append(batch._cache.rows if batch._cache else 0)
    assert len(generations) == 16 and max(rows) <= 8  # with guidance, a request has two rows
    assert len(read) < 16
    for generation in generations:
        expected = alone(decoder_of(model, 1), generation.request).tokens[0]
        assert torch.equal(generation.tokens, expected)


@pytest.mark.parametrize(("popular", "table"), [(1, 12), (3, 22), (8, 24), (12, 12)])
def test_a_text_of_many_rows_does_not_widen_the_table_of_the_others(popular, table):
    """Twelve requests join in order, of which some have one caption and each other its own."""
    model, generations = prior(), []
    batch = Batch(TokenDecoder(model))
    for i in range(12):
        text = TEXT[0] if i < popular else torch.tensor([9 + i, 1, 1, PAD, PAD])
        generations += batch.add([TokenRequest(text=text, candidates=range(1), sampler=Sampler(), seed=i)])
    cache = batch._cache
    assert cache and len(cache.texts) == len(set(cache.texts)) == 13 - popular
    entries = cache.texts if cache.places is None or cache.places.captions is None else cache.places.captions
    assert len(entries) * (cache.places.n if cache.places else 12 // len(entries)) <= table
    while batch.generations:
        batch.step()
    for generation in generations:
        assert torch.equal(generation.tokens, alone(decoder_of(model, 1), generation.request).tokens[0])
