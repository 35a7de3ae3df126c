"""Data sets: seeds decide everything, bad samples are replaced and counted."""

import pickle
import zlib

import numpy as np
import pytest
import torch

from limner.data.augment import augment_none
from limner.data.datasets import CaptionEncoding, ImageCaptionDataset, TokenDataset
from limner.data.hard_negative_captions import Distractors
from limner.data.image_encode import image_bytes
from limner.data.sample import Rejected, Sample, Source
from limner.data.stream import Stream
from limner.errors import UserError
from limner.numerics.seeding import splitmix64


class Words:
    """One token per word: a hash of it, or of its first half where dropout strikes."""

    def encode(self, captions, length, dropout=0.0, rng=None):
        out = torch.full((len(captions), length), -1)
        for row, caption in enumerate(captions):
            assert caption
            generator = rng[row] if dropout else None
            for column, word in enumerate(caption.split()[:length]):
                if dropout and generator.random() < dropout:
                    word = word[: len(word) // 2]
                out[row, column] = zlib.crc32(word.encode()) % 1000
        return out


def words(length=6, **options):
    return CaptionEncoding(tokenizer=Words(), length=length, **options)


class Memory(Source):
    """Pictures in memory; some are bad."""

    def __init__(self, n, bad=()):
        rng = np.random.default_rng(0)
        self.pixels = [rng.integers(0, 256, (20 + i % 5, 23, 3), dtype=np.uint8) for i in range(n)]
        self.bad = dict(bad)

    def __len__(self):
        return len(self.pixels)

    def read(self, index, picture):
        if index in self.bad:
            raise Rejected(self.bad[index])
        captions = (f"picture number {index}", f"number {index} in another phrasing")
        return Sample(image_bytes(self.pixels[index]), captions)

    def read_meta(self, index):
        return {}

    def fingerprint(self):
        return "memory"


def batch(dataset, indices):
    return dataset.batch(np.array(indices), splitmix64(7, np.array(indices)))


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("augment", ["dvae", "prior", "none"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_sample_does_not_depend_on_its_surroundings(augment, dropout):
    def make(threads):
        return ImageCaptionDataset(
            Memory(9), 16, augment, words(bpe_dropout=dropout, caption_dropout=0.3), threads=threads
        )

    whole = batch(make(1), range(9))
    assert whole["pixels"].shape == (9, 3, 16, 16) and whole["pixels"].dtype == torch.uint8
    assert whole["text"].shape == (9, 6) and whole["text"].dtype == torch.int64
    assert equal(whole, batch(make(4), range(9)))
    assert equal(whole, batch(pickle.loads(pickle.dumps(make(3))), range(9)))
    dataset = make(2)
    for index in reversed(range(9)):
        single = batch(dataset, [index])
        assert equal(single, {key: value[index : index + 1] for key, value in whole.items()})


def test_seeds_choose_crop_phrasing_and_dropout():
    dataset = ImageCaptionDataset(Memory(1), 16, "dvae", words(caption_dropout=0.25))
    out = dataset.batch(np.zeros(200, int), splitmix64(0, np.arange(200)))
    assert len({row.numpy().tobytes() for row in out["pixels"]}) > 50
    texts = [tuple(row.tolist()) for row in out["text"]]
    assert len(set(texts)) == 3  # two phrasings, or nothing
    assert 0.15 < texts.count((-1,) * 6) / 200 < 0.35


def test_none_matches_the_picture():
    source = Memory(3)
    pixels = batch(ImageCaptionDataset(source, 12), [0, 1, 2])["pixels"]
    for index in range(3):
        expected = augment_none(source.pixels[index], 12)
        assert np.array_equal(pixels[index].permute(1, 2, 0).numpy(), expected)


def test_pictures_that_are_kept_are_the_same_and_are_decoded_once():
    source = Memory(6, {2: "broken image"})
    read = []
    plain = ImageCaptionDataset(source, 8, text=words())
    kept = ImageCaptionDataset(source, 8, text=words(), cache_bytes=6 * 3 * 64)
    original = Memory.__getitem__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "__getitem__", lambda self, i: (read.append(i), original(self, i))[1])
        for indices in ([0, 2, 5], [5, 0, 1, 2], [2, 3]):
            assert equal(batch(kept, indices), batch(plain, indices))
        assert read
        read.clear()
        batch(kept, [0, 1, 2, 3, 5])
    assert read == []
    assert kept.rejected == plain.rejected == {"broken image": 1}
    too_many = ImageCaptionDataset(source, 8, cache_bytes=6 * 3 * 64 - 1)
    assert equal(batch(too_many, [0, 1]), batch(ImageCaptionDataset(source, 8), [0, 1]))


def test_distractors_are_other_captions_and_padding_where_there_is_none():
    source = Memory(8)
    captions = [c for i in range(8) for c in source[i].captions] * 3
    images = ImageCaptionDataset(source, 8, text=words(distractors=Distractors(captions, count=3)))
    found = batch(images, [0, 1])
    assert found["distractors"].shape == (2, 3, 6)
    for text, wrong in zip(found["text"], found["distractors"], strict=True):
        assert ((wrong != text).sum(1) == 1).all()  # the number
    lonely = ImageCaptionDataset(source, 8, text=words(distractors=Distractors([], count=2)))
    assert (batch(lonely, [0, 1])["distractors"] == -1).all()


def test_bad_samples_are_replaced_by_the_next_good_one_and_counted_once():
    source = Memory(8, {2: "broken image", 3: "missing caption", 7: "broken image"})
    dataset = ImageCaptionDataset(source, 16, "prior", words(), threads=3)
    for _ in range(2):
        out = batch(dataset, range(8))
        assert dataset.rejected == {"broken image": 2, "missing caption": 1}
        assert out["index"].tolist() == [0, 1, 4, 4, 4, 5, 6, 0]
    numbers = Words().encode([str(n) for n in range(8)], 1)[:, 0].tolist()
    for row, index in enumerate([0, 1, 4, 4, 4, 5, 6, 0]):
        assert numbers[index] in out["text"][row].tolist()


def test_a_source_without_one_good_sample():
    source = Memory(3, {0: "broken image", 1: "broken image", 2: "empty caption"})
    with pytest.raises(UserError, match="broken image: 2, empty caption: 1"):
        batch(ImageCaptionDataset(source, 16), [1])
    with pytest.raises(UserError, match="empty"):
        ImageCaptionDataset(Memory(0), 16)


def test_tokens():
    tokens = np.arange(40, dtype=np.uint16).reshape(10, 4) + 60000
    captions = [(f"row {n}", f"the row {n}") for n in range(10)]
    plain = TokenDataset(tokens, captions, words(4))
    indices, seeds = np.arange(10)[::-1].copy(), splitmix64(1, np.arange(10))
    out = plain.batch(indices, seeds)
    assert torch.equal(out["image"], torch.from_numpy(tokens[indices].astype(np.int64)))
    assert out["text"].dtype == torch.int64
    for row, index in enumerate(indices):
        choices = Words().encode(captions[index], 4)
        assert any(torch.equal(out["text"][row], choice) for choice in choices)
    assert equal(out, plain.batch(indices, seeds))
    dropped = TokenDataset(tokens, captions, words(4, bpe_dropout=0.5))
    assert not equal(out, dropped.batch(indices, seeds))
    assert equal(dropped.batch(indices, seeds), dropped.batch(indices, seeds))
    empty = TokenDataset(tokens, captions, words(4, caption_dropout=1.0)).batch(indices, seeds)
    assert (empty["text"] == -1).all()
    with pytest.raises(ValueError, match="10 rows"):
        TokenDataset(tokens, captions[:3], words())


def test_streams_over_data_sets_divide():
    dataset = ImageCaptionDataset(Memory(7), 16, "prior", words(bpe_dropout=0.2, caption_dropout=0.2))
    whole, left, right = (Stream(dataset, 4) for _ in range(3))
    left.shard(0, 2)
    right.shard(1, 2)
    for _ in range(4):
        parts = next(left), next(right)
        joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        assert equal(next(whole), joined)
