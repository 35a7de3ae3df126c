"""Captions find training pictures of their subject, pipelines follow one, and a damaged file is one sentence."""

import io
import lzma

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from limner.errors import UserError
from limner.numerics.precision import Fp32
from limner.pipeline import TextToImage
from limner.priming import follow
from limner.retrieval import EXAMPLES, Examples
from limner.runs.prune_codebook import prune
from limner.sampling.generation_config import UNSET, Sampler
from limner.sampling.inference import InferenceConfig
from limner.text import PAD
from tiny import WORDS, examples, tiny_pipe


def pictures(*subjects):
    """One picture for each subject, whose tokens are its number."""
    return Examples(np.repeat(np.arange(len(subjects), dtype=np.uint16)[:, None], 4, 1), subjects, [""] * len(subjects))


@pytest.mark.parametrize(
    ("caption", "rows"),
    [
        ("an arrow, thin", [0, 3]),
        ("an Arrow-Left, thin", [1]),  # the longest subject
        ("left of an arrow", [0, 3]),
        ("arrows, thin", []),  # another word
        ("", []),
        ("Arrow, café", [0, 3]),  # before the comma
        ("thin, an arrow", [0, 3]),
        ("café on an arrow", [2, 0, 3]),
        ("cafÉ", [2]),
    ],
)
def test_a_caption_finds_the_pictures_of_its_subject(caption, rows):
    found = pictures("arrow", "arrow left", "café", "Arrow", "").about(caption)
    assert found.dtype == np.int64
    assert found.tolist() == rows


@given(st.lists(st.sampled_from(["a", "a b", "b c", "c", "d e a"])), st.lists(st.sampled_from("abcde"), max_size=6))
def test_the_subjects_found_are_the_longest_that_the_words_contain(subjects, words):
    caption = " ".join(words)
    contained = [subject for subject in subjects if f" {subject} " in f" {caption} "]
    longest = max((subject.count(" ") for subject in contained), default=0)
    found = [subjects[row] for row in pictures(*subjects).about(caption)]
    assert sorted(found) == sorted(subject for subject in contained if subject.count(" ") == longest)


#: Tokens of two positions by subject and style. "soft" is nearest to "thin", by the two subjects that both have.
STYLES = {
    ("sun", "bold"): (9, 9),
    ("sun", "thin"): (1, 2),
    ("moon", "thin"): (3, 4),
    ("moon", "soft round"): (3, 5),
    ("moon", "bold"): (9, 8),
    ("star", "soft round"): (6, 7),
    ("star", "thin"): (6, 7),
    ("star", "bold"): (6, 8),
    ("sea", "alone"): (1, 1),
}


@pytest.mark.parametrize(
    ("caption", "found"),
    [
        ("sun, soft round", [("sun", "thin")]),
        ("Soft-Round icon of a sun", [("sun", "thin")]),
        ("sun, bold", [("sun", "bold")]),  # which training has
        ("moon, bold", [("moon", "bold")]),
        ("sun, soft", [("sun", "bold"), ("sun", "thin")]),  # an unknown style
        ("sun, alone", [("sun", "bold"), ("sun", "thin")]),  # no subject is in this style and in another
        ("sea, thin", [("sea", "alone")]),
        ("thin", []),
    ],
)
def test_a_caption_with_a_style_finds_the_picture_of_the_most_similar_style(caption, found):
    examples = Examples(np.array([*STYLES.values()], np.uint16), *zip(*STYLES, strict=True))
    rows = examples.about(caption)
    assert [(examples.subjects[row], examples.styles[row]) for row in rows] == found
    assert [examples.name(row) for row in rows] == [", ".join(key) for key in found]


def test_many_pictures_of_a_subject_are_thinned_out_evenly():
    found = pictures(*["a"] * 1_000).about("a")
    assert len(found) == 64
    assert (found[0], found[-1]) == (0, 999)


def test_renumbered_pictures_have_the_codes_that_are_kept():
    tokens = np.array([[3, 5], [5, 9], [4, 3]], np.uint16)
    kept = Examples(tokens, ["a", "b", "c"], ["thin", "bold", "thin"]).renumbered(np.array([3, 5, 9]))
    assert kept.tokens.tolist() == [[0, 1], [1, 2]]
    assert (kept.subjects, kept.styles) == (["a", "b"], ["thin", "bold"])


def test_pictures_of_captions_are_joined_and_selected():
    tokens = np.array([[3, 5], [5, 9]], np.int64)
    learned = Examples.from_captions(tokens, ["Cat,  my  Set", "a dog"])
    assert (learned.subjects, learned.styles) == (["cat", "a dog"], ["my set", ""])
    both = pictures("arrow").select(np.array([0, 0])).joined(Examples.from_captions(np.zeros((1, 4)), ["cat, my set"]))
    assert both.tokens.dtype == np.uint16
    assert (both.subjects, both.styles) == (["arrow", "arrow", "cat"], ["", "", "my set"])
    assert both.about("a cat, my set").tolist() == [2]


def test_a_drawing_follows_the_picture_that_the_contrastive_model_scores_highest():
    pipe = tiny_pipe(condition_blocks=1)
    pipe.examples, pipe.inference_config = examples(pipe), InferenceConfig(precision=Fp32())
    drawn = pipe.candidates([WORDS[0]], 4, seed=1)
    rows = pipe.examples.about(WORDS[0])
    tokens = torch.from_numpy(pipe.examples.tokens[rows].astype(np.int64))
    text = pipe.tokenizer.encode([WORDS[0]], pipe.contrastive.config.text_len)
    with torch.no_grad():
        shown = pipe.contrastive.encode_image(pipe.dvae.decode_tokens(tokens))
        best = (shown @ pipe.contrastive.encode_text(text)[0]).argmax()
    assert drawn.settings[0]["follows"] == pipe.examples.name(rows[best])
    assert pipe(WORDS[0], candidates=1)[0].settings["follows"] == pipe.examples.name(rows[best])
    pipe.examples = None
    prompt = torch.from_numpy(follow(tokens[best].numpy()))[None]
    assert torch.equal(drawn.tokens, pipe.candidates([WORDS[0]], 4, seed=1, prompt_tokens=prompt).tokens)
    assert not torch.equal(drawn.tokens, pipe.candidates([WORDS[0]], 4, seed=1).tokens)


def test_other_captions_and_given_pictures_are_drawn_as_without_examples():
    pipe = tiny_pipe(condition_blocks=1)
    image = pipe("two crosses", candidates=1)[0].image
    given = {"two crosses": None, WORDS[0]: pipe.prime(image, 3), WORDS[1]: pipe.like(image)}
    plain = [pipe.candidates([caption], 2, prompt_tokens=tokens).tokens for caption, tokens in given.items()]
    pipe.examples = examples(pipe)
    for (caption, tokens), expected in zip(given.items(), plain, strict=True):
        drawn = pipe.candidates([caption], 2, prompt_tokens=tokens)
        assert torch.equal(drawn.tokens, expected)
        assert drawn.settings[0]["follows"] is None


def test_prompt_tokens_that_are_all_unset_ask_for_the_caption_alone():
    pipe = tiny_pipe(condition_blocks=1)
    pipe.examples = examples(pipe)
    request = pipe.request(WORDS[0], 2, seed=1, sampler=Sampler(), prompt_tokens=torch.full((36,), UNSET))
    assert request.prompt_tokens is None
    assert (request.text[-36:] == PAD).all()


def test_bundles_keep_examples_also_with_fewer_codes(tmp_path):
    pipe = tiny_pipe(condition_blocks=1)
    pipe.examples = Examples(examples(pipe).tokens, ["circle", "red cross", "star"] * 2, ["", "bold"] * 3)
    pipe.save_pretrained(tmp_path / "bundle")
    saved = TextToImage.from_pretrained(tmp_path / "bundle")
    np.testing.assert_array_equal(saved.examples.tokens, pipe.examples.tokens)
    assert saved.examples.subjects == pipe.examples.subjects
    assert saved.examples.styles == pipe.examples.styles == ["", "bold"] * 3
    assert "training pictures in the bundle: 6" in (tmp_path / "bundle/README.md").read_text()
    codes = np.unique(pipe.examples.tokens[:3])
    pruned = prune(pipe, torch.from_numpy(codes.astype(np.int64)))
    np.testing.assert_array_equal(codes[pruned.examples.tokens[:3]], pipe.examples.tokens[:3])


def arrays(*values):
    buffer = io.BytesIO()
    for value in values:
        np.save(buffer, value)
    return lzma.compress(buffer.getvalue())


TOKENS, TEXT = np.zeros((2, 36), np.uint16), np.frombuffer(b"a\nb", np.uint8)
HUGE = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + (
    b"{'descr': '<u2', 'fortran_order': False, 'shape': (1000000000000, 36)}".ljust(117) + b"\n"
)  # fmt: skip


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is damaged"),
        (b"no xz", "is damaged"),
        (arrays(TOKENS, TEXT, TEXT)[:-20], "incomplete"),
        (lzma.compress(HUGE), "is damaged"),
        (arrays(TOKENS, TEXT), "is damaged"),
        (arrays(np.array([{}], object), TEXT, TEXT), "is damaged"),  # a pickle
        (arrays(TOKENS, np.array([255], np.uint8), TEXT), "is damaged"),
        (arrays(TOKENS[:1], TEXT, TEXT), "does not fit"),
        (arrays(TOKENS, TEXT, TEXT[:1]), "does not fit"),
        (arrays(TOKENS[:, 1:], TEXT, TEXT), "does not fit"),
        (arrays(TOKENS + 32, TEXT, TEXT), "does not fit"),
        (arrays(TOKENS.astype(np.int32) - 1, TEXT, TEXT), "does not fit"),
        (arrays(TOKENS.astype(np.float32), TEXT, TEXT), "does not fit"),
    ],
)
def test_a_damaged_file_is_one_sentence(data, message, tmp_path):
    (tmp_path / EXAMPLES).write_bytes(data)
    with pytest.raises(UserError, match=message) as raised:
        Examples.find(tmp_path, 36, 32)
    assert "\n" not in str(raised.value)


def test_a_file_of_more_than_256_mib_is_not_read(tmp_path):
    (tmp_path / EXAMPLES).write_bytes(lzma.compress(bytes(2**28 + 1), preset=0))
    with pytest.raises(UserError, match="more than 256 MiB"):
        Examples.find(tmp_path, 36, 32)
