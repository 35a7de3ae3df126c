"""Related pictures: they agree in metadata, are chosen by the sample's seed, and captions refer to them."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from limner.data.datasets import CaptionEncoding
from limner.data.related import Related, RelatedTokenDataset
from limner.errors import UserError
from limner.text import PAD
from numbered_tokens import Numbers

KEYS = ("subject", "set")


def dataset(rows, share=1.0, pictures=None, **text):
    """Sample i shows a picture whose tokens all are i; its caption is 1, or with a picture 2."""
    metadata = [{"subject": a, "set": b, "same": ["2"]} for a, b in rows]
    known = metadata if pictures is None else [{"subject": a, "set": b} for a, b in pictures]
    tokens = np.repeat(np.arange(len(known))[:, None], 4, 1)
    related = Related(tokens, known, KEYS, share)
    own = np.repeat(np.arange(len(rows))[:, None], 4, 1)
    captions = [("1",)] * len(rows)
    return RelatedTokenDataset(own, captions, encoding(**text), metadata, related, pictures is None)


ROWS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy")), min_size=1, max_size=12)


@settings(max_examples=50, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 2**32))
def test_a_related_picture_is_another_one_of_the_same_subject(rows, seed):
    rows += [("d", "x"), ("d", "y")]  # so that two agree
    data, indices = dataset(rows), np.arange(len(rows))
    seeds = np.arange(seed, seed + len(rows))
    batch = data.batch(indices, seeds)
    assert torch.equal(batch["image"], torch.from_numpy(np.repeat(indices[:, None], 4, 1)))
    for i, picture in enumerate(batch["given"].tolist()):
        others = [j for j, (subject, _) in enumerate(rows) if subject == rows[i][0] and j != i]
        assert len(set(picture)) == 1 and (picture[0] in others if others else picture[0] == PAD)
    for i in range(len(rows)):  # a sample does not depend on its batch
        alone = data.batch(indices[i : i + 1], seeds[i : i + 1])
        assert all(torch.equal(alone[key][0], batch[key][i]) for key in batch)


def test_more_keys_prefer_closer_pictures():
    rows = [("a", "x"), ("a", "x"), *[("a", "y")] * 8]
    n = 4_000
    given = dataset(rows).batch(np.zeros(n, int), np.arange(n))["given"][:, 0]
    counts = Counter(given.tolist())
    assert abs(counts[1] / n - (1 / 2 + 1 / 2 / 9)) < 0.03  # of the same set, or one of nine
    assert set(counts) == set(range(1, 10))


def test_captions_refer_to_the_picture_only_if_there_is_one():
    n = 2_000
    data = dataset([("a", "x"), ("a", "x")], share=0.6)
    batch = data.batch(np.zeros(n, int), np.arange(n))
    has, same = batch["given"][:, 0] != PAD, batch["text"][:, 0] == 2
    assert not (same & ~has).any()
    assert abs(float(has.float().mean()) - 0.6) < 0.04 and abs(float(same[has].float().mean()) - 0.5) < 0.05


def test_held_out_samples_follow_training_pictures():
    data = dataset([("a", "x"), ("c", "x")], pictures=[("b", "x"), ("a", "y"), ("a", "x")])
    given = torch.cat([data.batch(np.array([0, 1]), np.array([s, s]))["given"] for s in range(50)])[:, 0]
    assert set(given[::2].tolist()) == {1, 2} and set(given[1::2].tolist()) == {PAD}


def test_metadata_without_pictures_that_agree_raise():
    with pytest.raises(UserError, match="no two pictures agree in the metadata subject and set"):
        dataset([("a", "x"), ("b", "x")])


def test_damaged_metadata_give_no_picture_and_no_caption():
    damaged = [{"subject": "a"}, {"set": "x", "same": 4}, {"subject": "a", "set": "x", "same": [3, "", "x" * 5_000]}]
    metadata = [*damaged, {"subject": "b", "set": "x"}, {"subject": "b", "set": "y"}]
    related = Related(np.zeros((5, 4), int), metadata, KEYS, 1.0)
    data = RelatedTokenDataset(np.zeros((5, 4), int), [("1",)] * 5, encoding(), metadata, related, True)
    assert not any(data.same) and not any(len(g) > 1 for groups in data.groups[:3] for g in groups)
    given = data.batch(np.arange(5), np.arange(5))["given"]
    assert (given[:3] == PAD).all() and not given[3:].any()


def encoding(**text):
    return CaptionEncoding(tokenizer=Numbers(), length=3, **text)
