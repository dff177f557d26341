"""label_errors.html: names are shown and not obeyed, its size is bounded, and everyone can use it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from tessera.data.source.scan import ImageLabels
from tessera.utils.flags.val import ValConfig
from tessera.utils.label_errors.evidence import Suspicion
from tessera.utils.label_errors.ranking import Suspect
from tessera.utils.report.image_pages.label_errors_page import suspects_page
from tessera.utils.report.page.error_gallery import MOST, chosen
from tessera.utils.report.page.page_data import Origin
from tessera.utils.types import DatasetIndex
from tests.data.made_index import make_index, write_images
from tests.utils.report.test_page import HOSTILE

ORIGIN = Origin(ValConfig(find_errors=True), "best.pt", 640, "cpu")


def made_suspects(folder: Path, count: int) -> tuple[list[Suspect], DatasetIndex, dict[int, ImageLabels]]:
    """Suspects of all kinds in a few pictures, whose classes have hostile names."""
    sizes = [(120, 160)] * 6
    index = dataclasses.replace(
        make_index(sizes, paths=write_images(folder / "images", sizes), classes=[[0, 1]] * 6),
        names=tuple(HOSTILE),
    )
    rng, found = np.random.default_rng(0), []
    for number in range(count):
        kind, goes = Suspicion(number % 5), number % 5 in (Suspicion.SPURIOUS, Suspicion.DUPLICATE)
        corner = rng.integers(0, 60, 2)
        box = tuple(float(side) for side in (*corner, *(corner + rng.integers(20, 60, 2))))
        own = None if kind is Suspicion.MISSING else box
        score = 1 - number / max(count, 1)
        labelled, suggested = None if own is None else 0, None if goes else 1
        suggested_box = None if goes else box
        where = kind, number % 6, 0 if own else -1, -1
        found.append(Suspect(score, *where, labelled, suggested, 0.5, 0.4, own, suggested_box))  # type: ignore[arg-type]
    return found, index, {0: ImageLabels("<b>labels.txt", (7, 9))}


def test_names_are_shown_and_not_obeyed_and_the_page_is_the_same_each_time(tmp_path: Path) -> None:
    suspects, index, labels = made_suspects(tmp_path, 20)
    page = suspects_page("<i>run", suspects, index, labels, ORIGIN)
    assert page == suspects_page("<i>run", suspects, index, labels, ORIGIN)
    assert page.count("<script") == 1 and "<b>" not in page and "<i>" not in page
    assert "&lt;b&gt;labels.txt:7" in page and "--find-errors" in page
    assert page.count("data:image/jpeg") == 20


def test_no_suspect_and_many(tmp_path: Path) -> None:
    _, index, labels = made_suspects(tmp_path, 0)
    assert "No label is suspected." in suspects_page("run", [], index, labels, ORIGIN)
    many, index, labels = made_suspects(tmp_path, 5000)
    page = suspects_page("run", many, index, labels, ORIGIN)
    assert page.count("<li data-kind") == MOST and len(page.encode()) < 5_000_000


def test_the_first_of_each_kind_are_shown() -> None:
    kinds = [0] * 1000 + [1, 2, 3, 4] * 1000
    shown = [kinds[row] for row in chosen(kinds)]
    assert min(shown.count(kind) for kind in range(5)) >= 15 and len(shown) == MOST
