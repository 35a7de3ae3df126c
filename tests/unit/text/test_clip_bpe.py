"""CLIP's byte-level BPE against a plain implementation, and files of vocabularies."""

import gzip
import json
import unicodedata
from itertools import pairwise

import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from limner.errors import UserError
from limner.text import PAD
from limner.text.bpe import Tokenizer
from limner.text.clip_bpe import CLIPTokenizer
from published_clip import write_merges

START, END = 598, 599  # of the vocabulary of `write_merges`


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return CLIPTokenizer.load(write_merges(tmp_path_factory.mktemp("bpe") / "merges.txt"))


def characters():
    """The printable character of each byte: the byte's own, or one after 255, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def words(text):
    """Contractions, runs of letters, single digits, runs of other characters."""
    found, i = [], 0
    while i < len(text):
        kind = unicodedata.category(text[i])[0]
        for suffix in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"):
            if text.startswith(suffix, i):
                found.append(suffix)
                break
        else:
            end = i + 1
            if text[i].isspace():
                i += 1
                continue
            if kind != "N":
                while end < len(text) and not text[end].isspace():
                    other = unicodedata.category(text[end])[0]
                    if (other == "L") != (kind == "L") or other == "N":
                        break
                    end += 1
            found.append(text[i:end])
        i += len(found[-1])
    return found


def plain(text, merges):
    """Apply the earliest merge to all its places, until none applies."""
    alphabet = characters()
    tokens = [*sorted(alphabet), *(c + "</w>" for c in sorted(alphabet)), *(a + b for a, b in merges)]
    ids = []
    for word in words(text.lower()):
        symbols = [alphabet[byte] for byte in word.encode()]
        symbols[-1] += "</w>"
        while pairs := [p for p in pairwise(symbols) if p in merges]:
            a, b = min(pairs, key=merges.index)
            merged, i = [], 0
            while i < len(symbols):
                both = symbols[i : i + 2] == [a, b]
                merged.append(a + b if both else symbols[i])
                i += 1 + both
            symbols = merged
        ids += [tokens.index(symbol) for symbol in symbols]
    return ids


def test_tokens_equal_the_plain_implementation(tokenizer):
    merges = [tuple(pair) for pair in json.loads(tokenizer.library.to_str())["model"]["merges"]]
    texts = [
        "a photo of a cat",
        "Dog's DOGS, they'll!",
        "naïve café № 42 — «ä»",
        "''s it's !!  \t\n x",
        "猫 of 3½",
    ]
    rng, alphabet = np.random.default_rng(0), list("abcot dg'sl !12é.")
    texts += ["x" + "".join(rng.choice(alphabet, 30)) for _ in range(200)]
    rows = tokenizer.encode(texts, 77)
    for text, row in zip(texts, rows.tolist(), strict=True):
        assert [token for token in row if token != PAD] == [START, *plain(text, merges), END], text


def test_the_alphabet_has_openais_order(tokenizer):
    assert list(tokenizer.vocab)[:256] == sorted(characters()) == sorted(ByteLevel.alphabet())
    assert (tokenizer.vocab["<|startoftext|>"], tokenizer.vocab["<|endoftext|>"]) == (START, END)
    assert tokenizer.vocab_size == 600


def test_html_and_case_are_normalized(tokenizer):
    rows = tokenizer.encode(["A CAT &amp;amp; a dog", "a cat & a dog"], 20)
    assert rows[0].tolist() == rows[1].tolist()


def test_long_captions_are_cut_and_end_with_the_last_token(tokenizer):
    with pytest.warns(UserWarning, match="a caption of 7 tokens was cut to 5: 'cat"):
        rows = tokenizer.encode(["cat dog cat dog cat", "cat"], 5)
    cat = tokenizer.vocab["cat</w>"]
    assert rows[0, 0] == START and rows[0, -1] == END and rows[1].tolist() == [START, cat, END, PAD, PAD]
    with pytest.warns(UserWarning, match="was cut to 1"):
        assert tokenizer.encode(["cat"], 1).tolist() == [[END]]
    with pytest.raises(UserError, match="not valid Unicode"):
        tokenizer.encode(["\ud800"], 5)


def test_files_of_all_kinds_give_one_vocabulary(tokenizer, tmp_path):
    plain_file = write_merges(tmp_path / "merges.txt")
    (tmp_path / "bpe.txt.gz").write_bytes(gzip.compress(plain_file.read_bytes()))
    tokenizer.save(tmp_path / "tokenizer.json")
    published = json.loads((tmp_path / "tokenizer.json").read_text())
    published["model"]["merges"] = [" ".join(pair) for pair in published["model"]["merges"]]
    published["model"]["vocab"] |= {"<|startoftext|>": START, "<|endoftext|>": END}
    (tmp_path / "published.json").write_text(json.dumps(published))
    for name in ("merges.txt", "bpe.txt.gz", "tokenizer.json", "published.json"):
        assert CLIPTokenizer.load(tmp_path / name).vocab == tokenizer.vocab, name


def test_wrong_files_get_one_sentence(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "right.json")
    data = json.loads((tmp_path / "right.json").read_text())
    data["model"]["vocab"]["a"] = 7
    Tokenizer.train(["a cat and a dog"] * 3, 300).save(tmp_path / "limner.json")
    files = {
        "numbers.json": (json.dumps(data), "other numbers"), "list.json": ("[1]", "TypeError"),
        "empty.json": ("{}", "KeyError"), "merge.txt": ("#\nq x y\n", "ValueError"),
        "far.txt": ("#\nabc d\n", "unknown"),
        "twice.txt": ("#\na b\na b\n", "repeats a token"), "damaged.txt.gz": ("x", "cannot be read"),
    }  # fmt: skip
    for name, (text, _) in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"#\na b\n" * 99)[:-9])
    (tmp_path / "bytes.txt").write_bytes(b"#\n\xff \xfe\n")
    more = {"cut.gz": "EOFError", "bytes.txt": "UnicodeDecodeError", "missing.txt": "cannot be read", "limner.json": ""}
    for name, says in {**{name: says for name, (_, says) in files.items()}, **more}.items():
        with pytest.raises(UserError, match=f"{name} is not a tokenizer of CLIP: .*{says}"):
            CLIPTokenizer.load(tmp_path / name)
