"""Numbers and lists as messages show them."""

from __future__ import annotations

from collections.abc import Sequence


def gib(size: float) -> str:
    """A number of bytes, such as "1.50 GiB"."""
    return f"{size / 2**30:.2f} GiB"


def first_of(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first `most` items, and how many more there are: "a, b, and 3 more"."""
    more = len(items) - most
    return separator.join([*items[:most], *([f"and {more:,} more"] if more > 0 else [])])
