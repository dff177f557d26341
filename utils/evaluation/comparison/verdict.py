"""What the differences say, in words."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.utils.evaluation.comparison.differences import Difference, Differences
from tessera.utils.evaluation.comparison.significance import LEVEL, images_needed
from tessera.utils.text import counted, first_of

MATTERS = 0.01  # of mAP50-95: a smaller difference is none in practice
_NAMED = 5  # classes


def verdict(found: Differences, names: Sequence[str]) -> str:
    """Whether B is better than A, and where that cannot be told, what it would take.

    Args:
        found: the differences.
        names: class names by index.
    """
    return f"{_overall(found)} {_of_classes(found, names)}"


def _overall(found: Differences) -> str:
    overall = found.map
    if not any(one.ap.difference or one.ap.high - one.ap.low for one in found.classes):
        return "A and B measure the same in every class."
    said = f"mAP50-95 {described(overall)}"
    if overall.p < LEVEL and overall.low > 0:
        return f"B is better than A: {said}."
    if overall.p < LEVEL and overall.high < 0:
        return f"B is worse than A: {said}."
    if max(abs(overall.low), abs(overall.high)) <= MATTERS:
        return f"No difference of {MATTERS:g} or more: {said}."
    return f"Cannot be told apart: {said}. {_what_it_takes(found)}"


def described(one: Difference) -> str:
    """The difference, its interval and its p-value: "+0.021 (95 % interval +0.012 to +0.030, p 0.004)"."""
    return f"{one.difference:+.3f} (95 % interval {one.low:+.3f} to {one.high:+.3f}, {p_value(one.p)})"


def p_value(p: float) -> str:
    """Such as "p 0.03"."""
    return "p < 0.001" if p < 0.001 else f"p {p:.2g}"


def _what_it_takes(found: Differences) -> str:
    sizes = [(MATTERS, f"a difference of {MATTERS:g}"), (abs(found.map.difference), "one as large as measured")]
    takes = []
    for size, named in sizes:
        needed = images_needed(size, found.images, found.image_variance, found.seed_variance) if size else None
        if needed is not None and needed > found.images:
            takes.append(f"about {_rounded(needed):,} images to see {named}")
    few = f"{found.images:,} images are too few" if takes else "The trainings of a side differ by too much"
    if (
        found.seed_variance > 0
        and images_needed(MATTERS, found.images, found.image_variance, found.seed_variance) is None
    ):
        takes.append(f"more trainings a side to see {sizes[0][1]}, however many the images")
    return f"{few}: it takes {', and '.join(takes)} (in four of five cases)." if takes else "It is near the edge."


def _rounded(count: int) -> int:
    """Two digits of a number."""
    return int(float(f"{count:.1e}"))


def _of_classes(found: Differences, names: Sequence[str]) -> str:
    beyond = sorted((one for one in found.classes if one.p_holm < LEVEL), key=lambda one: -abs(one.ap.difference))
    parts = []
    for word, sign in (("better", 1), ("worse", -1)):
        listed = [f"{names[one.class_id]} {one.ap.difference:+.3f}" for one in beyond if one.ap.difference * sign > 0]
        if listed:
            parts.append(f"{word} {first_of(listed, _NAMED)}")
    of = f"{counted(len(found.classes), 'class')}, Holm's correction"
    return f"Classes beyond chance: {'; '.join(parts) or 'none'} ({of})."
