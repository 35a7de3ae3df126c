"""Summary of samples that the commands of `limner data` print."""

from __future__ import annotations

from limner.errors import printable


def tell(where: object, kept: int, rejected: dict[str, int], splits: dict[str, int] | None = None) -> None:
    """Print the numbers of samples kept, rejected by reason, and in each split."""
    from limner.data.prepare import Counts
    from limner.data.sample import describe_unread

    print(f"{printable(where)}\n{Counts(kept, {printable(reason): n for reason, n in rejected.items()})}")
    if splits:
        listed = [f"{name} {count:,}" for name, count in sorted(splits.items())]
        more = f" and {len(listed) - 20:,} more" if len(listed) > 20 else ""
        print(printable(f"by split: {', '.join(listed[:20])}{more}"))
        if lost := describe_unread({name: count for name, count in splits.items() if name != "no split"}):
            print(printable(lost))
