"""The stream: one order for one seed, however it is divided, prefetched or interrupted."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from limner.data.stream import Stream, permutation
from limner.errors import UserError


class Numbers:
    """Each sample shows its index and its seed."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def batch(self, indices, seeds):
        assert indices.dtype == np.int64 and seeds.dtype == np.uint64
        return {"element": torch.from_numpy(indices), "seed": torch.from_numpy(seeds.view(np.int64))}


def take(stream, count):
    batches = [next(stream) for _ in range(count)]
    assert all(torch.equal(batch["index"], batch["element"]) for batch in batches)
    return batches


def divided(stream, rank, world):
    stream.shard(rank, world)
    return stream


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x[key], y[key]) for x, y in zip(a, b, strict=True) for key in x)


@given(
    n=st.integers(1, 50),
    share=st.integers(1, 9),
    world=st.integers(1, 5),
    seed=st.integers(-(2**63), 2**63 - 1),
)
@settings(max_examples=40, deadline=None)
def test_ranks_only_divide_the_order(n, share, world, seed):
    whole = take(Stream(Numbers(n), share * world, seed), 6)
    ranks = [take(divided(Stream(Numbers(n), share * world, seed), rank, world), 6) for rank in range(world)]
    joined = [{key: torch.cat([rank[step][key] for rank in ranks]) for key in whole[step]} for step in range(6)]
    assert equal(whole, joined)


@given(n=st.integers(1, 40), batch=st.integers(1, 30), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_every_epoch_is_a_permutation_across_batch_borders(n, batch, seed):
    batches = take(Stream(Numbers(n), batch, seed), -(-3 * n // batch))
    order = torch.cat([b["index"] for b in batches])[: 3 * n].reshape(3, n)
    assert torch.equal(order.sort(1).values, torch.arange(n).expand(3, n))
    assert len(set(torch.cat([b["seed"] for b in batches]).tolist())) == len(batches) * batch


def test_the_order_does_not_depend_on_the_batch_size():
    small = torch.cat([b["seed"] for b in take(Stream(Numbers(7), 3, 5), 4)])
    large = torch.cat([b["seed"] for b in take(Stream(Numbers(7), 6, 5), 2)])
    assert torch.equal(small, large)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_resuming_continues_where_it_stopped(prefetch):
    expected = take(Stream(Numbers(11), 4, 1), 12)
    first = Stream(Numbers(11), 4, 1, prefetch=prefetch)
    assert equal(take(first, 5), expected[:5])
    assert first.state_dict() == {"position": 20, "samples": 11}  # consumed, not prefetched
    second = Stream(Numbers(11), 4, 1, prefetch=prefetch)
    next(second)
    second.load_state_dict(first.state_dict())
    assert equal(take(second, 7), expected[5:])
    first.load_state_dict({"position": 0})
    assert equal(take(first, 12), expected)
    first.close()
    second.close()


def test_changed_data_gives_a_warning():
    with pytest.warns(UserWarning, match="has 12 samples, but had 11"):
        Stream(Numbers(12), 4, 1).load_state_dict(Stream(Numbers(11), 4, 1).state_dict())


def test_the_order_is_pinned():
    """A checkpoint of an older version must resume with the same data."""
    assert permutation(10, 0, 0).tolist() == [4, 8, 0, 1, 7, 6, 2, 5, 3, 9]
    assert not np.array_equal(permutation(10, 0, 0), permutation(10, 0, 1))
    assert not np.array_equal(permutation(10, 0, 0), permutation(10, 1, 0))


def test_an_error_in_the_thread_reaches_the_caller():
    class Broken(Numbers):
        def batch(self, indices, seeds):
            raise UserError("not one sample is good")

    with pytest.raises(UserError, match="not one"):
        next(Stream(Broken(3), 2, prefetch=2))


def test_mistakes():
    with pytest.raises(UserError, match="empty"):
        Stream(Numbers(0), 4)
    with pytest.raises(UserError, match="multiple of 3"):
        Stream(Numbers(9), 4).shard(0, 3)
