"""Seeds of random generators, mixed from a seed and the numbers of what is drawn.

Generators on the CPU read only the lower 32 bits of a seed, so all bits are mixed into them.
"""

import numpy as np

_GOLDEN = 2_654_435_769  # 2^32 divided by the golden ratio: consecutive multiples are far apart modulo 2^32


def splitmix64(*values: int | np.ndarray) -> np.ndarray:
    """Hash integers, or broadcast arrays of them, to uint64 by chained splitmix64.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for value in values:
            state = state + np.asarray(value).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return np.asarray(state)


def fold_in(seed: int, rank: int = 0, step: int = 0) -> int:
    """Return the seed of a rank for random numbers drawn from a step on. Rank 0 at step 0 has the seed of a single
    process, if that fits into 32 bits."""
    return int(splitmix64(seed, rank, step)) >> 1 if rank or step or seed >= 2**32 else seed


def named_seed(seed: int, name: str) -> int:
    """Return a seed that differs between names."""
    return int(splitmix64(seed, *name.encode())) >> 1


def rounding_seed(count: int, index: int) -> int:
    """Return the seed for rounding the tensor at `index` in its step `count`. Seeds of a tensor repeat after 2^32
    steps; those of two tensors coincide only at steps far apart."""
    return (count * _GOLDEN + index) % 2**32


def candidate_seed(seed: int, candidate: int) -> int:
    """Return the seed of a candidate's random numbers."""
    return (seed * 1_000_003 + (seed >> 32) * _GOLDEN + candidate) % 2**32
