"""Summary of samples that the commands of `limner data` print."""

from __future__ import annotations

from limner.errors import escape_control


def print_counts(source: object, kept: int, rejected: dict[str, int], splits: dict[str, int] | None = None) -> None:
    """Print the numbers of samples kept, rejected by reason, and in each split."""
    from limner.data.prepare import Counts
    from limner.data.sample import describe_unread

    print(f"{escape_control(source)}\n{Counts(kept, {escape_control(reason): n for reason, n in rejected.items()})}")
    if splits:
        counts = [f"{name} {count:,}" for name, count in sorted(splits.items())]
        more = f" and {len(counts) - 20:,} more" if len(counts) > 20 else ""
        print(escape_control(f"by split: {', '.join(counts[:20])}{more}"))
        if warning := describe_unread({name: count for name, count in splits.items() if name != "no split"}):
            print(escape_control(warning))
