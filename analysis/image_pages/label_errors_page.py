"""label_errors.html: likely label errors with image crops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tessera.analysis.label_errors.evidence import LabelErrorKind
from tessera.analysis.label_errors.files import EXPLAINED, LIKELY, NAMES, counts, trust_line
from tessera.analysis.label_errors.ranking import LabelError
from tessera.analysis.report.crops import Crop, Subject, render_crops
from tessera.analysis.report.error_gallery import chosen, place_of
from tessera.analysis.report.page_data import RunInfo
from tessera.analysis.report.template import own_file, render_page
from tessera.data.source.scan import ImageLabels
from tessera.utils.text import one_line
from tessera.utils.types import DatasetIndex

PAGE = "label_errors.html"


def label_errors_page(
    name: str,
    suspects: Sequence[LabelError],
    index: DatasetIndex,
    labels: Mapping[int, ImageLabels],
    origin: RunInfo,
    map50: float,
) -> str:
    """Render the page; equal errors give equal text. `map50` is the detector's on these labels."""
    rows = chosen([suspect.kind for suspect in suspects])
    listed = [suspects[row] for row in rows]
    dashed = [
        None if one.kind is LabelErrorKind.WRONG_CLASS else one.suggested_box for one in listed
    ]  # beside the label's
    boxes = [Subject(one.image, one.box, box) for one, box in zip(listed, dashed, strict=True)]
    crops = zip(rows, render_crops(index, boxes), strict=True)
    return render_page(
        own_file(__package__, "label_errors.html"),
        title=f"{name}: label errors",
        suspects=len(suspects),
        sure=sum(suspect.score >= LIKELY for suspect in suspects),
        likely=f"{LIKELY:g}",
        trust=trust_line(map50),
        labels=len(index.classes),
        images=len(index),
        kinds=[(name, every, likely, EXPLAINED[kind]) for kind, name, every, likely in counts(suspects)],
        shown=[_entry(row, suspects[row], index, labels, crop) for row, crop in crops],
        shown_kinds=list(NAMES.values()),
        command=one_line(origin.command, 2000),
    )


def _entry(
    row: int, suspect: LabelError, index: DatasetIndex, labels: Mapping[int, ImageLabels], crop: Crop
) -> dict[str, Any]:
    own, other = ("" if c is None else one_line(index.names[c]) for c in (suspect.labelled, suspect.suggested))
    figures = [f"score {suspect.score:.2f}", f"confidence {suspect.confidence:.2f}"]
    figures += [] if suspect.iou is None else [f"IoU {suspect.iou:.2f}"]
    says = {
        LabelErrorKind.MISSING: f"{other} without a label?",
        LabelErrorKind.SPURIOUS: f"no {own} here?",
        LabelErrorKind.SHIFTED: f"{own} lies beside its label?",
        LabelErrorKind.WRONG_CLASS: f"{own}: rather {other}?",
        LabelErrorKind.DUPLICATE: f"{own} labelled twice?",
    }
    return {
        "number": row + 1,
        "kind": NAMES[suspect.kind],
        "pair": f"{suspect.labelled} {suspect.suggested}",
        "classes": " → ".join(dict.fromkeys(text or "none" for text in (own, other))),
        "says": says[suspect.kind],
        "details": ", ".join(figures),
        "crop": crop,
        **place_of(index, labels, suspect.image, suspect.object),
    }
