"""The seeds of evaluations.

Captions that a choice was made on do not measure it. A bundle or a setting is chosen by scores on seeds below
1,000; published scores are on seeds from `PUBLISHED` on, and no choice is made on those.
Different seeds draw their captions and drawings from numbers of their own.
"""

PUBLISHED = 1_000  # the first of the seeds that figures are published on


def drawing_seed(seed: int, i: int) -> int:
    """What caption i of an evaluation is drawn with: `limner draw --seed` gives the same. No two (seed, i) with
    i below a million share it, for seeds below 9 million million."""
    return (seed * 1_000_000 + i) % 2**63
