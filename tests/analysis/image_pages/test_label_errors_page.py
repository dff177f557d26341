"""label_errors.html: names are shown and not obeyed, its size is bounded, and everyone can use it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tessera.analysis.label_errors import LabelError, LabelErrorKind
from tessera.analysis.report.page import MOST, chosen
from tessera.analysis.report.page_data import RunInfo
from tessera.analysis.report.validation_report import label_errors_page
from tessera.data.source.scan import ImageLabels
from tessera.utils.flags.val import ValConfig
from tessera.utils.types import DatasetIndex
from tests.analysis.made_page import HOSTILE, assert_safe
from tests.data.made_index import make_index, write_images

ORIGIN = RunInfo(ValConfig(find_errors=True), "best.pt", 640, "cpu")


def made_label_errors(folder: Path, count: int) -> tuple[list[LabelError], DatasetIndex, dict[int, ImageLabels]]:
    """Suspects of all kinds in a few images, whose classes have hostile names."""
    sizes = [(120, 160)] * 6
    index = dataclasses.replace(
        make_index(sizes, paths=write_images(folder / "images", sizes), classes=[[0, 1]] * 6), names=tuple(HOSTILE)
    )
    found = []
    for number in range(count):
        kind, x = LabelErrorKind(number % 5), float(number % 60)
        box = (x, x / 2, x + 40, x + 50)
        labelled, own = (None, None) if kind is LabelErrorKind.MISSING else (0, box)
        goes = kind in (LabelErrorKind.SPURIOUS, LabelErrorKind.DUPLICATE)
        where = kind, number % 6, 0 if own else -1, -1
        suggested, suggested_box = (None, None) if goes else (1, box)
        found.append(LabelError(1 - number / count, *where, labelled, suggested, 0.5, 0.4, own, suggested_box))
    return found, index, {0: ImageLabels("<b>labels.txt", (7, 9))}


def test_names_are_shown_and_not_obeyed_and_the_page_is_the_same_each_time(tmp_path: Path) -> None:
    suspects, index, labels = made_label_errors(tmp_path, 20)
    page = label_errors_page("<i>run", suspects, index, labels, ORIGIN, 0.9)
    assert page == label_errors_page("<i>run", suspects, index, labels, ORIGIN, 0.9)
    assert_safe(page, scripts=1)
    assert "<b>" not in page and "<i>" not in page
    assert "&lt;b&gt;labels.txt:7" in page and "--find-errors" in page
    assert page.count("data:image/jpeg") == 20


def test_no_suspect_and_many(tmp_path: Path) -> None:
    _, index, labels = made_label_errors(tmp_path, 0)
    assert "No label is suspected." in label_errors_page("run", [], index, labels, ORIGIN, 0.9)
    many, index, labels = made_label_errors(tmp_path, 5000)
    page = label_errors_page("run", many, index, labels, ORIGIN, 0.9)
    assert assert_safe(page, scripts=1).count("li") >= MOST == page.count("<li data-kind")


def test_the_first_of_each_kind_are_shown() -> None:
    kinds = [0] * 1000 + [1, 2, 3, 4] * 1000
    shown = [kinds[row] for row in chosen(kinds)]
    assert min(shown.count(kind) for kind in range(5)) >= 15 and len(shown) == MOST
