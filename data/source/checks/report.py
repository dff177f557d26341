"""What the checks of a dataset found, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.utils.text import first_of


@dataclass
class DatasetCheck:
    """What was found, one line each: "file:line: what".

    Attributes:
        errors: training would stop, or learn something wrong.
        problems: images that are left out, rows that count once, labels that are lost, metrics that mean little.
        notes: worth knowing, such as classes without an object.
        facts: what the dataset holds, wrong or not.
        left_out: images that training would do without.
        images, objects: totals of what can be used.
    """

    errors: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    images: int = 0
    objects: int = 0

    @property
    def safe(self) -> bool:
        """Whether training would run on what is left, and learn what the labels say."""
        return not self.errors

    def lines(self) -> list[str]:
        """Everything, the worst first, and a verdict."""
        verdict = "training is safe" if self.safe else "training would not be safe"
        if self.left_out:
            verdict += f", without {counted(len(self.left_out), 'image')} (left out): {first_of(self.left_out, 5)}"
        return [
            *(f"error: {line}" for line in self.errors),
            *(f"problem: {line}" for line in self.problems),
            *(f"note: {line}" for line in self.notes),
            *self.facts,
            f"{counted(self.images, 'image')} with {counted(self.objects, 'object')} can be used; "
            f"{counted(len(self.errors), 'error')}, {counted(len(self.problems), 'problem')}, "
            f"{counted(len(self.notes), 'note')}: {verdict}",
        ]


def counted(number: int, noun: str) -> str:
    """Such as `1 note`, `2 notes` or `3 boxes`."""
    plural = "es" if noun.endswith(("x", "s")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def share(part: int, whole: int, noun: str) -> str:
    """Such as `3 of 60 boxes (5 %)`."""
    percent = f"{100 * part / whole:.2g}" if whole and part < whole else str(100 * bool(whole))
    return f"{part:,} of {counted(whole, noun)} ({percent} %)"
