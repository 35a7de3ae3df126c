"""Seeds: equal to those of earlier checkpoints and pictures, and different wherever they must differ."""

import numpy as np
import torch

from limner.numerics.seeding import candidate_seed, fold_in, named_seed, rounding_seed, splitmix64


def test_seeds_stay_what_they_are() -> None:
    assert [fold_in(7), fold_in(7, 1), fold_in(7, 0, 5), fold_in(2**40)] == [
        7,
        9071713175802274614,
        8920699814461685338,
        5793234931870241388,
    ]
    assert named_seed(3, "blocks.0.weight") == 1127944945290053353
    assert (rounding_seed(5, 2), candidate_seed(2**33 + 1, 4)) == (387276959, 1014904249)


def test_seeds_of_ranks_differ_and_the_first_has_that_of_one_process() -> None:
    assert fold_in(7, 0) == 7
    seeds = {fold_in(seed, rank) for seed in (0, 7, 2**63 - 1) for rank in range(4)}
    assert len(seeds) == 12 and all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_with_equal_lower_32_bits_give_different_numbers() -> None:
    first, second = (torch.rand(8, generator=torch.Generator().manual_seed(fold_in(seed))) for seed in (7, 7 + 2**32))
    assert not torch.equal(first, second)


def test_hash_is_well_mixed():
    bits = np.unpackbits(splitmix64(3, np.arange(4096)).view(np.uint8)).reshape(4096, 64)
    assert np.abs(bits.mean(0) - 0.5).max() < 0.05
    flips = np.unpackbits((splitmix64(3, np.arange(4096)) ^ splitmix64(2, np.arange(4096))).view(np.uint8))
    assert abs(flips.mean() - 0.5) < 0.01
