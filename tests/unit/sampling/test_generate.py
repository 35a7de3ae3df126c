"""Tokens follow the model's distribution, and candidate i is the same in whatever batch."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats

from limner.errors import UserError
from limner.layers.cache import Int8Store, Store
from limner.models.transformer import TransformerConfig
from limner.sampling.cuda_graph import Recorded
from limner.sampling.generate import FREE, Generation, choose, generate, uniforms
from limner.sampling.generation_config import Sampler
from limner.text import PAD

N = 40_000
LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.3, -3.0, 0.0, 1.7, -1.0])


def draw(sampler, logits=LOGITS, n=N, seed=0):
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(seed))
    return choose(sampler, logits.expand(n, -1), uniform)


def frequencies(tokens):
    return torch.bincount(tokens, minlength=len(LOGITS)).numpy()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_tokens_follow_the_softmax(temperature):
    found = frequencies(draw(Sampler(temperature=temperature)))
    expected = (LOGITS.double() / temperature).softmax(0).numpy() * N
    assert stats.chisquare(found, expected).pvalue > 1e-3


def test_top_k_keeps_the_k_likeliest_in_proportion():
    found = frequencies(draw(Sampler(top_k=3)))
    kept = LOGITS.topk(3).indices
    assert set(found.nonzero()[0]) == set(kept.tolist())
    expected = LOGITS[kept].double().softmax(0).numpy() * N
    assert stats.chisquare(found[kept.numpy()], expected).pvalue > 1e-3


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    p, order = LOGITS.softmax(0).sort(descending=True)
    for count in (1, 2, 4):
        between = float(p[:count].sum() - p[count - 1] / 2)  # the count-th token is needed to reach this
        found = frequencies(draw(Sampler(top_p=between)))
        assert set(found.nonzero()[0]) == set(order[:count].tolist())


def test_top_p_acts_on_what_top_k_left():
    # After top_k=2 the likeliest token has a share of p0 / (p0 + p1), which alone reaches the bound.
    p = LOGITS.softmax(0).sort(descending=True).values
    share = float(p[0] / (p[0] + p[1]))
    assert share > float(p[0])
    found = frequencies(draw(Sampler(top_k=2, top_p=(share + float(p[0])) / 2)))
    assert set(found.nonzero()[0]) == {int(LOGITS.argmax())}


@given(
    logits=st.lists(st.floats(-60, 60), min_size=2, max_size=12),
    top_k=st.none() | st.integers(1, 15),
    top_p=st.none() | st.floats(0, 1, exclude_min=True),
    uniform=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=200, deadline=None)
def test_a_token_is_always_one_that_was_kept(logits, top_k, top_p, uniform):
    row = torch.tensor([logits])
    token = int(choose(Sampler(top_k=top_k, top_p=top_p), row, torch.tensor([uniform]))[0])
    assert 0 <= token < len(logits)
    p = row[0].softmax(0)  # logits that differ by less than its rounding are ties
    assert top_k is None or int((p > p[token]).sum()) < top_k
    mass_before = float(p[p > p[token]].sum())
    assert top_p is None or mass_before <= top_p + 1e-5 or top_k is not None


def test_settings_leave_the_logits_alone_and_temperature_zero_is_greedy():
    logits = torch.randn(5, 9)
    before = logits.clone()
    choose(Sampler(temperature=0.7, top_k=3, top_p=0.5), logits, torch.rand(5))
    assert torch.equal(logits, before)
    assert torch.equal(choose(Sampler(temperature=0), logits, torch.rand(5)), logits.argmax(-1))


def test_each_candidate_has_numbers_of_its_own():
    assert torch.equal(uniforms(3, range(8), 10)[5:], uniforms(3, range(5, 8), 10))
    seeds = (0, 1, 2, 3, 2**32, 2**33, 2**32 + 1, 2**63 - 1)
    everything = torch.cat([uniforms(seed, range(50), 10) for seed in seeds])
    assert len(everything.unique(dim=0)) == 50 * len(seeds)


def prior(pattern="paper"):
    torch.manual_seed(1)
    config = TransformerConfig(
        text_vocab=30, image_vocab=16, text_len=5, grid=(3, 5), width=32, depth=5, heads=4, kernel=3, pattern=pattern
    )  # fmt: skip
    model = config.build().eval()
    with torch.no_grad():
        model.head.image.weight *= 30
    return model


@pytest.mark.parametrize("pattern", ["paper", "dense"])
def test_candidates_do_not_depend_on_their_batch(pattern):
    model = prior(pattern)
    text = torch.tensor([[3, 4, 5, PAD, PAD], [7, 8, PAD, PAD, PAD]])
    together = generate(model, text, range(6), Sampler(), seed=9).tokens
    apart = torch.cat([generate(model, text[:1], range(i, i + 2), Sampler(), seed=9).tokens for i in (0, 2, 4)], 1)
    assert torch.equal(together[:1], apart)
    assert not torch.equal(together[0], together[1])  # captions matter
    assert len(together[0].unique(dim=0)) == 6
    assert not torch.equal(together, generate(model, text, range(6), Sampler(), seed=10).tokens)


@pytest.mark.parametrize("pattern", ["paper", "dense"])
def test_drawn_tokens_are_those_that_teacher_forcing_would_choose(pattern):
    """Row, column, conv and dense layers alike: decoding with the cache is the model itself."""
    model, sampler = prior(pattern), Sampler(temperature=0.8, top_k=9)
    text = torch.tensor([[3, 4, 5, PAD, PAD]])
    tokens = generate(model, text, range(4), sampler, seed=2).tokens[0]
    with torch.inference_mode():
        logits = model(text.expand(4, -1), tokens)[1]
    uniform = uniforms(2, range(4), tokens.shape[1])
    expected = torch.stack([choose(sampler, logits[:, s], uniform[:, s]) for s in range(tokens.shape[1])], 1)
    assert torch.equal(tokens, expected)


def likelihoods(model, text, tokens):
    """Log-probabilities of tokens [B, N, S] given their captions, in nats per token, by teacher forcing."""
    with torch.inference_mode():
        found = [model(text[b].expand(len(own), -1), own)[1].log_softmax(-1) for b, own in enumerate(tokens)]
    return torch.stack(found).gather(-1, tokens[..., None]).mean((-2, -1))


@pytest.mark.parametrize("recorded", [False, True])
def test_likelihoods_are_those_that_teacher_forcing_finds(recorded):
    """Whatever the sampler, of given tokens as of drawn ones, beside others and of those that stay alone."""
    model = prior()
    generation = Generation(Recorded(model, lambda run: run) if recorded else model)
    asked = requests()
    rows = [generation.join(**request) for request in asked]
    while generation.rows:
        if rows[0].position == 4:
            rows[0].keep([1, 2])
        if rows[3].position == 3:  # its candidates are still alike
            rows[3].keep([1])
        generation.step()
    for one, request in zip(rows, asked, strict=True):
        expected = likelihoods(model, request["text"], one.tokens)
        torch.testing.assert_close(one.likelihood, expected)
        torch.testing.assert_close(generate(model, **request).likelihood[:, -1], expected[:, -1])
    assert torch.cat([one.likelihood.flatten() for one in rows]).std() > 0.1
    known = torch.randint(0, 16, (2, 15))
    alike = generate(model, TEXT, range(3), Sampler(), given=known)
    torch.testing.assert_close(alike.likelihood, likelihoods(model, TEXT, alike.tokens))


def test_progress_counts_positions():
    seen = []
    generate(prior(), torch.zeros(1, 5, dtype=torch.long), range(1), Sampler(), progress=seen.append)
    assert seen == [1] * 15


TEXT = torch.tensor([[3, 4, 5, PAD, PAD], [7, 8, PAD, PAD, PAD]])


@pytest.mark.parametrize("guidance", [1.0, 2.5])
@pytest.mark.parametrize("pattern", ["paper", "dense"])
def test_given_tokens_stay_and_the_rest_is_what_teacher_forcing_would_choose(pattern, guidance):
    model, sampler = prior(pattern), Sampler(temperature=0.8, guidance=guidance)
    known = torch.randint(0, 16, (2, 15), generator=torch.Generator().manual_seed(0))
    known[0, 7:] = FREE  # primed with a row and two tokens
    known[1, [1, 5, 6, 9, 14]] = FREE  # inpainted
    before = known.clone(), TEXT.clone()
    tokens = generate(model, TEXT, range(3), sampler, seed=4, given=known).tokens
    assert torch.equal(known, before[0]) and torch.equal(TEXT, before[1])
    fixed = (known != FREE)[:, None].expand_as(tokens)
    assert torch.equal(tokens[fixed], known[:, None].expand_as(tokens)[fixed])
    flat, texts = tokens.flatten(0, 1), TEXT.repeat_interleave(3, 0)
    with torch.inference_mode():
        caption, empty = model(texts, flat)[1], model(torch.full_like(texts, PAD), flat)[1]
    logits = caption if guidance == 1 else empty + guidance * (caption - empty)
    uniform = uniforms(4, range(3), 15).repeat(2, 1)
    chosen = torch.stack([choose(sampler, logits[:, s], uniform[:, s]) for s in range(15)], 1)
    assert torch.equal(torch.where(fixed.flatten(0, 1), flat, chosen), flat)
    alone = generate(model, TEXT[:1], range(1, 3), sampler, seed=4, given=known[:1]).tokens
    assert torch.equal(alone, tokens[:1, 1:])


def test_no_guidance_is_guidance_one_and_more_changes_the_drawing():
    model = prior()
    plain = generate(model, TEXT, range(4), Sampler(), seed=1).tokens
    assert torch.equal(plain, generate(model, TEXT, range(4), Sampler(guidance=1), seed=1).tokens)
    assert not torch.equal(plain, generate(model, TEXT, range(4), Sampler(guidance=3), seed=1).tokens)


def test_a_picture_that_is_all_given_comes_back():
    known = torch.arange(15).repeat(2, 1)
    assert torch.equal(
        generate(prior(), TEXT, range(2), Sampler(), given=known).tokens, known[:, None].expand(-1, 2, -1)
    )


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=0), Sampler(top_k=2), Sampler(guidance=2)])
def test_logits_that_are_no_numbers_are_a_sentence(sampler):
    model = prior()
    with torch.no_grad():
        model.head.image.weight[::2] = torch.finfo(torch.float32).max
    with pytest.raises(UserError, match="not finite"):
        generate(model, torch.tensor([[3, 4, PAD, PAD, PAD]]), range(2), sampler)


def test_rows_are_shown_as_they_are_done():
    seen = []
    tokens = generate(
        prior(), TEXT, range(2), Sampler(), watch=lambda found, rows: seen.append((found.clone(), rows))
    ).tokens
    assert [rows for _, rows in seen] == [1, 2, 3]
    for found, rows in seen:
        assert torch.equal(found[..., : rows * 5], tokens[..., : rows * 5])
        assert (found[..., rows * 5 :] == FREE).all()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}])
def test_frequencies_follow_the_softmax(options):
    """Chi-square over 20,000 candidates of the first two tokens, drawn by the whole sampler."""
    torch.manual_seed(3)
    config = TransformerConfig(
        text_vocab=5, image_vocab=8, text_len=2, grid=(1, 2), width=16, depth=3, heads=2, kernel=3
    )
    model, n = config.build().eval(), 20_000
    with torch.no_grad():
        model.head.image.weight *= 20
    text = torch.tensor([[1, 2]])
    drawn = generate(model, text, range(n), Sampler(**options), seed=5).tokens[0]
    every = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    with torch.inference_mode():
        first, second = model(text.expand(64, -1), every)[1].div(options.get("temperature", 1)).softmax(-1).unbind(1)
    p = _kept(first, options).gather(1, every[:, :1]) * _kept(second, options).gather(1, every[:, 1:])
    counts = torch.bincount(drawn[:, 0] * 8 + drawn[:, 1], minlength=64).double()
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
    """Captions, candidates, samplers, seeds and given tokens that have nothing in common."""
    known = torch.randint(0, 16, (2, 15), generator=torch.Generator().manual_seed(0))
    primed, holes = known[:1].clone(), known.clone()
    primed[0, 6:], holes[:, ::2] = FREE, FREE
    return [
        {"text": TEXT[:1], "candidates": range(3), "sampler": Sampler(), "seed": 1},
        {"text": TEXT, "candidates": range(4, 6), "sampler": Sampler(temperature=0.7, top_k=5), "seed": 2},
        {"text": TEXT[1:], "candidates": range(3), "sampler": Sampler(top_p=0.8, guidance=3), "seed": 3},
        {"text": TEXT[:1], "candidates": range(2), "sampler": Sampler(), "seed": 4, "given": primed},
        {"text": TEXT, "candidates": range(2), "sampler": Sampler(guidance=2), "seed": 5, "given": holes},
        {"text": TEXT[:1], "candidates": range(3), "sampler": Sampler(temperature=0), "seed": 6},
    ]


@given(
    joins=st.lists(st.integers(0, 20), min_size=6, max_size=6),
    leaves=st.lists(st.integers(1, 20), min_size=6, max_size=6),
    store=st.sampled_from([Store, Int8Store]), pattern=st.sampled_from(["paper", "dense"]), recorded=st.booleans(),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_rows_that_join_and_leave_draw_what_they_draw_alone(joins, leaves, store, pattern, recorded):
    """Any of them may come and go between any two tokens; from one that has more than one candidate, one may."""
    model, asked = prior(pattern), requests()
    generation = Generation(Recorded(model, lambda run: run) if recorded else model, store)
    rows, steps = {}, 0
    while len(rows) < len(asked) or generation.rows:
        for i, request in enumerate(asked):
            if joins[i] == steps:
                rows[i] = generation.join(**request)
            if i in rows and rows[i] in generation.rows and rows[i].position == leaves[i]:
                if i % 2:
                    generation.leave(rows[i])
                else:
                    rows[i].keep([1])
        generation.step()
        steps += 1
    for i, request in enumerate(asked):
        whole, found = generate(model, **request, store=store).tokens, rows[i].tokens
        if i % 2 == 0 and leaves[i] < 15:
            whole = whole[:, 1:2]
        end = leaves[i] if i % 2 and leaves[i] < 15 else 15
        assert rows[i].position == end
        assert torch.equal(found[..., :end], whole[..., :end])


def test_rows_at_several_positions_take_one_pass_through_the_weights():
    model, seen = prior(), []
    generation = Generation(model)
    for _ in range(3):
        generation.join(TEXT[:1], range(2), Sampler())
        generation.step()
    model.head.image.register_forward_hook(lambda layer, read, made: seen.append(len(made)))
    generation.step()
    assert seen == [6]
