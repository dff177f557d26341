"""`label_errors.jsonl` and the console table of label errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tessera.analysis.label_errors.evidence import LabelErrorKind
from tessera.analysis.label_errors.ranking import LabelError
from tessera.data.source.scan import ImageLabels
from tessera.utils.files import atomic_write
from tessera.utils.text import plural, strict_json
from tessera.utils.types import DatasetIndex

FILE = "label_errors.jsonl"
LIKELY = 0.5  # score of the errors that the table counts separately
WEAK = 0.5  # mAP50 of a detector whose suspicions are few and doubtful
NAMES = {kind: kind.name.lower().replace("_", " ") for kind in LabelErrorKind}
EXPLAINED = {
    LabelErrorKind.MISSING: "a detection where nothing is labelled",
    LabelErrorKind.SPURIOUS: "a label where nothing is detected",
    LabelErrorKind.SHIFTED: "the object is detected beside its label",
    LabelErrorKind.WRONG_CLASS: "an object of another class is detected there",
    LabelErrorKind.DUPLICATE: "two labels of one object",
}


def write_label_errors(
    target: Path, suspects: Sequence[LabelError], index: DatasetIndex, labels: Mapping[int, ImageLabels]
) -> None:
    """Write one JSON line per label error, atomically."""
    with atomic_write(target) as file:
        for suspect in suspects:
            file.write(f"{strict_json(_row(suspect, index, labels.get(suspect.image)))}\n".encode())


def _row(suspect: LabelError, index: DatasetIndex, labels: ImageLabels | None) -> dict[str, object]:
    line, own = labels.place(suspect.object) if labels else (None, None)
    other_line, other = labels.place(suspect.other) if labels else (None, None)

    def name(class_id: int | None) -> str | None:
        return None if class_id is None else index.names[class_id]

    def rounded(box: tuple[float, ...] | None) -> list[float] | None:
        return None if box is None else [round(side, 2) for side in box]

    return {
        "score": suspect.score,
        "kind": NAMES[suspect.kind],
        "image": str(index.path(suspect.image)),
        "label": labels.file if labels else None,
        "line": line,
        "id": own,
        "other_line": other_line,
        "other_id": other,
        "class": name(suspect.labelled),
        "suggested_class": name(suspect.suggested),
        "confidence": round(suspect.confidence, 4),
        "iou": None if suspect.iou is None else round(suspect.iou, 4),
        "box": rounded(suspect.box),
        "suggested_box": rounded(suspect.suggested_box),
    }


def counts(suspects: Sequence[LabelError]) -> list[tuple[LabelErrorKind, str, int, int]]:
    """Return for each kind its name, the number of errors, and the number with a score of at least `LIKELY`."""
    found = []
    for kind in LabelErrorKind:
        scores = [suspect.score for suspect in suspects if suspect.kind is kind]
        found.append((kind, NAMES[kind], len(scores), sum(score >= LIKELY for score in scores)))
    return found


def label_error_table(
    suspects: Sequence[LabelError], map50: float, labels: int, images: int, unknown: int = 0
) -> list[str]:
    """Return console lines: the number of errors of each kind, and of those with a score of at least `LIKELY`.

    `map50` is the detector's on these labels; `unknown` counts labels of classes that the weights do not know.
    """
    among = f"among {plural(labels, 'label')} of {plural(images, 'image')}"
    if unknown:
        among += f" (left out: {plural(unknown, 'label')} of classes that the weights do not know)"
    if not suspects:
        return [f"Label errors: none suspected {among}."]
    rows = counts(suspects)
    lines = [
        f"Label errors: {plural(len(suspects), 'suspect')} {among}, {sum(likely for *_, likely in rows):,} with a "
        f"score of {LIKELY:g} or more:",
        f"{'kind':>22}{'suspects':>11}{f'from {LIKELY:g}':>11}",
    ]
    lines += [f"{name:>22}{every:>11,}{likely:>11,}   {EXPLAINED[kind]}" for kind, name, every, likely in rows]
    return [*lines, trust_line(map50)]


def trust_line(map50: float) -> str:
    """Return how far a detector with this mAP50 on the labels is trusted."""
    doubt = " Such a detector is often wrong itself: train it further before you trust the list." * (map50 < WEAK)
    return f"Scores of all kinds but duplicate are multiplied by mAP50 on these labels, {map50:.3f}.{doubt}"
