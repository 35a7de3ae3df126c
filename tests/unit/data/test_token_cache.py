"""The token cache: encoded once, resumed after an interruption, keyed by all inputs of the tokens."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save

from limner.data.image_encode import image_bytes
from limner.data.open_source import open_source
from limner.data.shard_writer import ShardWriter
from limner.data.token_cache import encode_tokens
from limner.errors import UserError


class Encoder:
    """Tokens are the red values of a 2 x 2 reduction; calls are counted."""

    def __init__(self, stop_after=None):
        self.calls, self.stop_after = 0, stop_after

    def __call__(self, pixels):
        assert pixels.dtype == torch.uint8 and pixels.shape[1:] == (3, 8, 8)
        assert not torch.is_grad_enabled()
        if self.calls == self.stop_after:
            raise KeyboardInterrupt
        self.calls += 1
        return pixels[:, 0, ::4, ::4].reshape(len(pixels), 4).long()


@pytest.fixture
def source(tmp_path):
    with ShardWriter(tmp_path / "data") as writer:
        for n in range(10):
            image = image_bytes(np.full((8, 8, 3), n * 20, np.uint8))
            writer.write(b"broken" if n in (3, 9) else image, [f"number {n}", f"no {n}"])
    return open_source(tmp_path / "data")


def run(source, tmp_path, encoder, key="dvae", size=8, **options):
    return encode_tokens(
        source, encoder, key=key, size=size, cache_dir=tmp_path / "cache",
        batch_size=2, part_size=4, **options,
    )  # fmt: skip


def test_encoded_once(source, tmp_path):
    encoder, calls = Encoder(), []
    cache = run(source, tmp_path, encoder, progress=calls.append)
    good = [n for n in range(10) if n not in (3, 9)]
    assert cache.indices.tolist() == good and len(cache) == 8
    assert cache.tokens.dtype == np.uint16
    assert cache.tokens.tolist() == [[n * 20] * 4 for n in good]
    assert cache.captions == [(f"number {n}", f"no {n}") for n in good]
    assert cache.rejected == {"broken image": 2}
    assert sum(calls) == 10 and min(calls) > 0
    again = run(source, tmp_path, None)  # not called
    assert np.array_equal(again.tokens, cache.tokens) and again.captions == cache.captions
    assert again.rejected == cache.rejected


def test_an_interruption_loses_one_part(source, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path, Encoder(stop_after=3))  # in the second part
    rest = Encoder()
    cache = run(source, tmp_path, rest)
    assert rest.calls == 3  # not the two batches of the first part
    assert len(cache) == 8
    part = next((tmp_path / "cache").rglob("00001.safetensors"))
    part.write_bytes(part.read_bytes()[:50])
    mended = Encoder()
    assert np.array_equal(run(source, tmp_path, mended).tokens, cache.tokens) and mended.calls == 2


def test_the_key_is_all_that_decides(source, tmp_path):
    run(source, tmp_path, Encoder())
    encoder = Encoder()
    run(source, tmp_path, encoder, key="another dvae")
    assert encoder.calls
    sizes = []
    run(source, tmp_path, lambda pixels: sizes.append(pixels.shape[2]) or pixels[:, 0, 0], size=4)
    assert set(sizes) == {4}
    path = source.paths[0]
    path.write_bytes(path.read_bytes())  # rewritten
    encoder = Encoder()
    run(source, tmp_path, encoder)
    assert encoder.calls


def test_large_vocabularies_need_more_bits(source, tmp_path):
    cache = run(source, tmp_path, lambda pixels: pixels[:, 0, :1, 0].long() + 70_000)
    assert cache.tokens.dtype == np.int32 and cache.tokens.min() == 70_000


def test_nothing_good(tmp_path):
    with ShardWriter(tmp_path / "data") as writer:
        writer.write(b"broken", ["a caption"])
    with pytest.raises(UserError, match="broken image: 1"):
        run(open_source(tmp_path / "data"), tmp_path, Encoder())


WRONG = {
    "empty": b"", "null": b"null", "a list": b"[]", "no captions": b'{"rejected": {}}', "deep": b"[" * 100_000,
    "wrong captions": b'{"captions": 3, "rejected": {}}', "null captions": b'{"captions": [null], "rejected": {}}',
    "too few": b'{"captions": [["a"]], "rejected": {}}', "wrong counts": b'{"captions": [], "rejected": 3}',
}  # fmt: skip


def test_a_damaged_part_is_encoded_again(source, tmp_path):
    cache = run(source, tmp_path, Encoder())
    (text,), (tokens,) = ([*(tmp_path / "cache").rglob(f"00000{suffix}")] for suffix in (".json", ".safetensors"))
    arrays = load_file(tokens)
    others = [{"indices": arrays["indices"]}, {"tokens": arrays["tokens"]}, {**arrays, "indices": np.zeros(1)}]
    for path, contents in ((text, WRONG.values()), (tokens, map(save, others))):
        for content in contents:
            path.write_bytes(content)
            encoder = Encoder()
            again = run(source, tmp_path, encoder)
            assert encoder.calls == 2 and again.captions == cache.captions and again.rejected == cache.rejected
            assert np.array_equal(again.tokens, cache.tokens) and np.array_equal(again.indices, cache.indices)
