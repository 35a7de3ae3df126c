import json
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer as Library

from limner.errors import UserError
from limner.text import bpe
from limner.text.bpe import BYTES, PAD, Tokenizer

TEXT = """a the small large striped outlined red green blue circle square triangle star above
below left right of on gray background two three, and picture: there's naïve 日本"""
WORDS = TEXT.split()


def captions(n: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(4, 20))) for _ in range(n)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(captions(500), vocab_size=350)


def rows(tokens: torch.Tensor) -> list[list[int]]:
    return [[t for t in row if t != PAD] for row in tokens.tolist()]


texts = st.text(min_size=1, max_size=60).filter(lambda s: s.encode(errors="ignore").strip())


@settings(max_examples=200, deadline=None)
@given(text=st.one_of(texts, st.sampled_from(captions(50, seed=1))))
def test_merges_equal_those_of_the_library(tokenizer: Tokenizer, text: str) -> None:
    try:
        (expected,) = rows(tokenizer.encode([text], 512))
    except UserError:  # only white space
        return
    never = 1e-15  # dropout without effect: results of `merge_word` through the word cache
    rng = np.random.default_rng(0)
    assert rows(tokenizer.encode([text], 512, dropout=never, rng=rng)) == [expected]


@settings(max_examples=100, deadline=None)
@given(text=texts, dropout=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_any_text_decodes_to_its_normalized_form(tokenizer: Tokenizer, text: str, dropout: float) -> None:
    normalized = tokenizer.library.normalizer.normalize_str(text)
    if normalized:
        tokens = tokenizer.encode([text], 512, dropout, np.random.default_rng(0))
        expected = tokenizer.encode([normalized], 512, dropout, np.random.default_rng(0))
        assert tokenizer.decode(tokens[0]) == tokenizer.decode(tokens[0].tolist()) == normalized
        assert torch.equal(tokens, expected)


def test_lowercase_unicode_form_and_white_space_do_not_matter(tokenizer: Tokenizer) -> None:
    plain, upper, spaced = "a red naïve circle", "A RED NAÏVE CIRCLE", " a\tred\n naïve  circle "
    tokens = tokenizer.encode([plain, upper, spaced, "a red nai\u0308ve circle"], 40)
    assert all(torch.equal(row, tokens[0]) for row in tokens)


def test_dropout_has_the_distribution_of_the_library(tokenizer: Tokenizer) -> None:
    word, p, n = "triangle background", 0.3, 20_000
    rng = np.random.default_rng(0)
    ours = Counter(map(tuple, rows(tokenizer.encode([word] * n, 32, p, rng))))
    library = Library.from_str(tokenizer.library.to_str())
    library.model.dropout = p
    theirs = Counter(tuple(library.encode(word).ids) for _ in range(n))
    distance = sum(abs(ours[k] - theirs[k]) for k in ours | theirs) / (2 * n)
    # Two samples of one distribution over k outcomes differ by sum(sqrt(p_k / (pi n))).
    expected = sum(((ours[k] + theirs[k]) / (2 * n) / np.pi / n) ** 0.5 for k in ours | theirs)
    assert len(ours) > 50 and distance < 1.3 * expected


def test_dropout_one_gives_bytes(tokenizer: Tokenizer) -> None:
    (ids,) = rows(tokenizer.encode(["a red circle"], 40, 1.0, np.random.default_rng(0)))
    assert len(ids) == len(" a red circle")


def test_dropout_depends_on_its_rng_alone(tokenizer: Tokenizer) -> None:
    texts = captions(40, seed=2)

    def encode(seeds: range, texts: list[str]) -> torch.Tensor:
        return tokenizer.encode(texts, 128, 0.1, [np.random.default_rng(s) for s in seeds])

    whole = encode(range(40), texts)
    assert torch.equal(whole, encode(range(40), texts))
    assert torch.equal(whole[20:], encode(range(20, 40), texts[20:]))  # not on other captions
    shared = tokenizer.encode(texts, 128, 0.1, np.random.default_rng(3))
    assert torch.equal(shared, tokenizer.encode(texts, 128, 0.1, np.random.default_rng(3)))
    assert not torch.equal(shared, tokenizer.encode(texts, 128, 0.1, np.random.default_rng(4)))
    with pytest.raises(ValueError, match="rng"):
        tokenizer.encode(texts, 128, 0.1)


def test_too_long_is_cut_with_a_warning(tokenizer: Tokenizer) -> None:
    text = " ".join(WORDS)
    whole = tokenizer.encode([text], 256)[0]
    with pytest.warns(UserWarning, match="cut to 7"):
        cut = tokenizer.encode([text, "a circle"], 7)
    assert torch.equal(cut[0], whole[:7])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer.encode(["a circle"], 7)


@pytest.mark.parametrize("empty", ["", " \n\t "])
def test_empty_is_a_user_error(tokenizer: Tokenizer, empty: str) -> None:
    with pytest.raises(UserError, match="caption 2 of 2 is empty"):
        tokenizer.encode(["a circle", empty], 8)


def test_broken_unicode_is_a_user_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="not valid Unicode"):
        tokenizer.encode(["a \udcff circle"], 8)


def test_no_captions_are_no_rows(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode([], 8).shape == (0, 8)


def test_training_is_repeatable_and_bounded(tokenizer: Tokenizer) -> None:
    repeated = Tokenizer.train(captions(500), vocab_size=350)
    assert (repeated.vocab, repeated.merges) == (tokenizer.vocab, tokenizer.merges) and tokenizer.vocab_size == 350
    small = Tokenizer.train(["a red circle"] * 3)
    assert len(BYTES) < small.vocab_size < 300
    assert small.vocab != tokenizer.vocab
    with pytest.raises(UserError, match="256"):
        Tokenizer.train(captions(5), vocab_size=100)


def test_the_library_reads_the_file_without_dropout(tokenizer: Tokenizer, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    tokenizer.encode(["a circle"], 8, 0.5, np.random.default_rng(0))
    tokenizer.save(path)
    assert json.loads(path.read_text())["model"]["dropout"] is None
    loaded, texts = Tokenizer.load(path), captions(20, seed=5)
    assert (loaded.vocab, loaded.merges) == (tokenizer.vocab, tokenizer.merges)
    assert torch.equal(loaded.encode(texts, 99), tokenizer.encode(texts, 99))
    library = Library.from_file(str(path))
    assert [library.encode(t).ids for t in texts] == rows(tokenizer.encode(texts, 99))


def _break(**changes):
    def apply(data: dict) -> dict:
        for path, value in changes.items():
            *parents, last = path.split("__")
            inner = data
            for parent in parents:
                inner = inner[parent]
            inner[last] = value
        return data

    return apply


@pytest.mark.parametrize(
    "breaking",
    [
        lambda data: [],
        lambda data: {},
        _break(model=None),
        _break(model__type="WordPiece"),
        _break(model__vocab={"a": 0}),
        _break(model__vocab=[1, 2]),
        _break(model__vocab__a="0"),
        _break(model__vocab__extra=10**12),
        _break(model__merges=[["q", "zz"]]),
        _break(model__merges=[["q"]]),
        _break(model__merges=[[1, 2]]),
        _break(model__merges=7),
        _break(normalizer=None),
        _break(pre_tokenizer={"type": "Whitespace"}),
        _break(added_tokens=[{"id": 0, "content": "x"}]),
    ],
)
def test_any_other_file_is_a_user_error(tokenizer, tmp_path, breaking) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(breaking(json.loads(tokenizer.library.to_str()))))
    with pytest.raises(UserError, match=r"tokenizer\.json is not a limner tokenizer"):
        Tokenizer.load(path)


def test_words_without_skipped_merges_come_from_the_cache(tokenizer: Tokenizer, monkeypatch) -> None:
    texts, merged = captions(400, seed=6), []
    tokenizer.encode(texts, 256, 0.05, np.random.default_rng(0))  # fill the cache
    monkeypatch.setattr(bpe, "merge_word", lambda *a, work=bpe.merge_word: merged.append(a) or work(*a))
    tokenizer.encode(texts, 256, 0.05, np.random.default_rng(0))
    words = sum(len(t.split()) for t in texts)
    assert 0 < len(merged) < words / 3
    assert all(len(arguments) == 3 for arguments in merged)  # each call skips a merge


def test_a_very_long_word_takes_linear_heap_operations(tokenizer: Tokenizer, monkeypatch) -> None:
    """The number of heap insertions is a small multiple of the number of symbols."""
    pushed = []
    monkeypatch.setattr(bpe.heapq, "heappush", lambda *a, push=bpe.heapq.heappush: pushed.append(1) or push(*a))
    with pytest.warns(UserWarning, match="cut"):
        tokenizer.encode(["circle" * 5000], 256, 0.1, np.random.default_rng(0))
    assert len(pushed) < 5 * len("circle" * 5000)
