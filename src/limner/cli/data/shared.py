"""Summary of samples that the commands of `limner data` print."""

from __future__ import annotations

from limner.errors import escape_control
from limner.tasks.iconify import IconSet


def has_usable_license(icon_set: IconSet, all_licenses: bool) -> bool:
    """Return True if the license of a set is permissive or all are asked for; otherwise print that it is skipped."""
    if usable := icon_set.permissive or all_licenses:
        return usable
    skipped = f"skipped {icon_set.title}, whose license is {icon_set.license}: --all-licenses includes it"
    print(escape_control(skipped))
    return False


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
