"""Class names of weights, matched to those of a dataset; messages on renamed and reordered classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from tessera.utils.text import first_of, shown

SINGLE_CLASS = "item"  # of --single-cls


def match_classes(known: Sequence[str], wanted: Sequence[str]) -> tuple[int, ...]:
    """Return the index in `known` of each class of `wanted`; -1 for a class that `known` lacks.

    Equal names match first, then names that differ only in case and spaces, if one is left on each side. Class numbers
    ("0", "1") are not names: such classes match by index if both lists are equally long. So does the single class of
    --single-cls.
    """
    numbered = _are_numbers(known) or _are_numbers(wanted)
    if len(known) == len(wanted) and (numbered or [SINGLE_CLASS] in (list(known), list(wanted))):
        return tuple(range(len(wanted)))
    found = [-1] * len(wanted)
    spellings: tuple[Callable[[str], str], ...] = (
        () if numbered else (str, lambda name: "".join(name.casefold().split()))
    )
    for spelled in spellings:
        taken = set(found)
        offered = [(spelled(name), number) for number, name in enumerate(known) if number not in taken]
        unmatched = [(spelled(name), number) for number, name in enumerate(wanted) if found[number] < 0]
        number_of = dict(offered)
        counts = [Counter(name for name, _ in side) for side in (offered, unmatched)]
        for name, number in unmatched:
            if counts[0][name] == counts[1][name] == 1:
                found[number] = number_of[name]
    return tuple(found)


def has_placeholder_names(names: Sequence[str]) -> bool:
    """Return whether the names are only class numbers, or the single class of --single-cls."""
    return _are_numbers(names) or list(names) == [SINGLE_CLASS]


def renamed_classes(before: Sequence[str], now: Sequence[str]) -> str:
    """Return the classes whose names differ at the same index, if they are the majority; else ""."""
    if len(before) != len(now) or has_placeholder_names(before):
        return ""
    pairs = enumerate(zip(before, now, strict=True))
    renamed = [
        f"{number} is {shown(old)} in the checkpoint and {shown(new)} in the data"
        for number, (old, new) in pairs
        if old.strip().casefold() != new.strip().casefold()
    ]
    return first_of(renamed, 3) if 2 * len(renamed) > len(now) else ""


def reordered_classes(before: Sequence[str], now: Sequence[str]) -> str:
    """Return the classes with another index in `now`: "'cat' is 0 in the checkpoint and 1 in the data"."""
    places = {name.strip().casefold(): number for number, name in enumerate(now)}
    moved = [
        f"{shown(name)} is {number} in the checkpoint and {place} in the data"
        for number, name in enumerate(before)
        if (place := places.get(name.strip().casefold(), number)) != number
    ]
    return first_of(moved, 3)


def _are_numbers(names: Sequence[str]) -> bool:
    return list(names) == [str(number) for number in range(len(names))]
