"""`label_errors.html`: the labels that are likely wrong, with their pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tessera.data.source.scan import ImageLabels
from tessera.utils.files import atomic_write
from tessera.utils.report.page.crops import NO_CROP, Crop, Mark, Subject, crops_of
from tessera.utils.report.page.facts import Origin, readable
from tessera.utils.report.page.shell import own_file, rendered
from tessera.utils.suspects.evidence import Suspicion
from tessera.utils.suspects.files import EXPLAINED, LIKELY, NAMES
from tessera.utils.suspects.ranking import Suspect
from tessera.utils.types import DatasetIndex

PAGE = "label_errors.html"
FIRST = 60  # suspects that are shown for their score alone
OF_A_KIND = 15  # that are shown at least, where there are so many
MOST = 140


class Shown(NamedTuple):
    """A suspect of the page.

    Attributes:
        number: its place among all, from 1.
        kind: its name.
        pair: class of the label and suggested class, by indices, -1 of none.
        classes: that in words.
        image: name of the file.
        says: what it is, in a sentence.
        details: figures.
        label: the file of the label with its line.
        uri, width, height, marks: of its crop.
    """

    number: int
    kind: str
    pair: str
    classes: str
    image: str
    says: str
    details: str
    label: str
    uri: str
    width: int
    height: int
    marks: list[Mark]


def write_suspects_page(
    run: Path, suspects: Sequence[Suspect], index: DatasetIndex, labels: Mapping[int, ImageLabels], origin: Origin
) -> None:
    """Write the page into the run's folder, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    with atomic_write(run / PAGE) as file:
        file.write(suspects_page(run.name, suspects, index, labels, origin).encode())


def suspects_page(
    name: str, suspects: Sequence[Suspect], index: DatasetIndex, labels: Mapping[int, ImageLabels], origin: Origin
) -> str:
    """The page: the same text for the same suspects."""
    rows = chosen(suspects)
    subjects = [Subject(suspects[row].image, suspects[row].box, _dashed(suspects[row])) for row in rows]
    crops = dict(crops_of(index, subjects))
    shown = [
        _shown(row, suspects[row], index, labels.get(suspects[row].image), crops.get(place, NO_CROP))
        for place, row in enumerate(rows)
    ]
    kinds = [[suspect.score for suspect in suspects if suspect.kind is kind] for kind in Suspicion]
    content: dict[str, Any] = {
        "title": f"{name}: label errors",
        "suspects": len(suspects),
        "sure": sum(suspect.score >= LIKELY for suspect in suspects),
        "likely": f"{LIKELY:g}",
        "labels": len(index.classes),
        "images": len(index),
        "kinds": [
            (NAMES[kind], len(scores), sum(score >= LIKELY for score in scores), EXPLAINED[kind])
            for kind, scores in zip(Suspicion, kinds, strict=True)
        ],
        "shown": shown,
        "shown_kinds": [NAMES[kind] for kind in Suspicion if NAMES[kind] in {one.kind for one in shown}],
        "command": readable(origin.command, 2000),
    }
    return rendered(own_file(__package__, "suspects.html"), **content)


def chosen(suspects: Sequence[Suspect]) -> list[int]:
    """Which are shown, by score: the first of all and of each kind, then the next ones."""
    of_kinds = [[row for row, suspect in enumerate(suspects) if suspect.kind is kind] for kind in Suspicion]
    first = [*range(min(FIRST, len(suspects))), *(row for rows in of_kinds for row in rows[:OF_A_KIND])]
    return sorted(list(dict.fromkeys([*first, *range(min(MOST, len(suspects)))]))[:MOST])


def _dashed(suspect: Suspect) -> tuple[float, float, float, float] | None:
    """The box that is drawn beside the label's."""
    return None if suspect.kind is Suspicion.WRONG_CLASS else suspect.suggested_box


def _shown(row: int, suspect: Suspect, index: DatasetIndex, labels: ImageLabels | None, crop: Crop) -> Shown:
    own, other = ("" if c is None else readable(index.names[c]) for c in (suspect.labelled, suspect.suggested))
    place = ""
    if labels is not None:
        line, identity = labels.place(suspect.object)
        place = readable(labels.file, 200)
        place += f":{line}" if line is not None else f", id {readable(str(identity))}" if identity is not None else ""
    figures = [f"score {suspect.score:.2f}", f"confidence {suspect.confidence:.2f}"]
    figures += [] if suspect.iou is None else [f"IoU {suspect.iou:.2f}"]
    pair = [-1 if c is None else c for c in (suspect.labelled, suspect.suggested)]
    return Shown(
        row + 1,
        NAMES[suspect.kind],
        f"{pair[0]} {pair[1]}",
        " → ".join(dict.fromkeys(text or "none" for text in (own, other))),
        readable(index.path(suspect.image).name, 100),
        {
            Suspicion.MISSING: f"{other} without a label?",
            Suspicion.SPURIOUS: f"no {own} here?",
            Suspicion.SHIFTED: f"{own} lies beside its label?",
            Suspicion.WRONG_CLASS: f"{own}: rather {other}?",
            Suspicion.DUPLICATE: f"{own} labelled twice?",
        }[suspect.kind],
        ", ".join(figures),
        place,
        *crop,
    )
