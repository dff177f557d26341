"""data_report.html and label_errors.html: size, bytes, and that the names of users are text in them."""

from __future__ import annotations

import dataclasses
import html
import itertools
import shutil
from pathlib import Path

import cv2
import pytest

from tessera.analysis.checks import results
from tessera.analysis.checks.run_checks import check_dataset
from tessera.analysis.error_analysis import ImageLabels
from tessera.analysis.label_errors import LabelError, LabelErrorKind
from tessera.analysis.report.data_page import NAME, data_page
from tessera.analysis.report.page import MOST, chosen
from tessera.analysis.report.page_data import RunInfo
from tessera.analysis.report.validation_report import label_errors_page
from tessera.commands import train
from tessera.data.source.dataset_yaml import load_spec
from tessera.deploy.foreign.synthetic_shapes import render_image
from tessera.utils.errors import UserError
from tessera.utils.flags.val import ValConfig
from tessera.utils.types import DatasetIndex, DatasetSpec
from tests.analysis.made_page import HOSTILE, assert_safe
from tests.data.made_index import make_index, write_images
from tests.data.make import write_dataset, write_image

BOX = "0 0.5 0.5 0.5 0.5\n"


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    """Pets with a near-duplicate and a dark image."""
    root = tmp_path / "pets"
    made = write_dataset(root, {f"{split}/{number}": BOX for split in ("train", "val") for number in range(4)})
    drawn = render_image("train", 0, size=320)[0]
    cv2.imwrite(str(root / "images/train/0.jpg"), drawn)
    cv2.imwrite(str(root / "images/val/0.jpg"), drawn, [cv2.IMWRITE_JPEG_QUALITY, 70])
    cv2.imwrite(str(root / "images/val/1.jpg"), cv2.imread(str(root / "images/val/1.jpg")) // 20)
    return made


def report(yaml: Path, folder: Path) -> str:
    train.run(data=str(yaml), check_data=True, report=str(folder))
    return (folder / NAME).read_text()


def test_the_page_is_written_and_no_file_of_the_user_is_touched(
    yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def state() -> dict[Path, tuple[int, bytes]]:
        files = [path for path in (tmp_path / "pets").rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = state()
    text = report(yaml, tmp_path / "page")
    said = capsys.readouterr().out
    assert state() == before and f"Report: {tmp_path / 'page' / NAME}" in said
    assert text == report(yaml, tmp_path / "page")
    assert assert_safe(text, scripts=1).count("img") == 3
    for line in check_dataset(load_spec(yaml)).problems:
        assert html.escape(line) in text and line in said
    assert "very dark" in text and "train and val" in text


def test_what_is_wrong_is_written_too(yaml: Path, tmp_path: Path) -> None:
    (tmp_path / "pets/labels/train/0.txt").write_text("7 0.5 0.5 0.1 0.1\n")
    with pytest.raises(UserError, match="has 1 error, listed above"):
        report(yaml, tmp_path / "page")
    assert "labels/train/0.txt:1: class 7" in (tmp_path / "page" / NAME).read_text()


def made_check(folder: Path, images: int, names: list[str]) -> results.DatasetCheck:
    """Findings without number, of hostile names."""
    paths = [str(write_image(folder / f"{number}.png", (300, 300), number)) for number in range(images)]
    many = [f"{name} {number}" for number in range(2000 // len(names)) for name in names]
    zeros, between, shown = (0,) * len(many), ("train", "val"), (names[0], names[1])
    changed = tuple(results.ChangedFraction(name, (0.1, 0.9), 0.01) for name in many)
    return results.DatasetCheck(
        errors=[f"{name} {'x' * 5000}" for name in many],
        problems=list(many),
        notes=list(many),
        names=tuple(many),
        counts=[results.SplitCounts(split, 9, 0, 9, zeros, zeros) for split in between],
        near_duplicates=[results.NearDuplicates(between, pair, shown, 3) for pair in itertools.pairwise(paths)],
        drifts=[results.Drift("classes", between, (9, 9), 0.01, 0.5, changed)],
        unusual_images=[results.UnusualImage("tiny", "train", path, names[2], "side 9") for path in paths],
    )


def test_any_number_of_findings_stays_below_five_megabytes_and_names_are_text(tmp_path: Path) -> None:
    spec = DatasetSpec(HOSTILE[0], tmp_path / HOSTILE[0].replace("/", ""), tmp_path, {}, ())
    text = data_page(made_check(tmp_path / "images", 160, HOSTILE), spec)
    assert_safe(text, scripts=1)
    assert "more not shown" in text and html.escape(HOSTILE[0]) in text


def test_an_image_that_is_gone_is_listed_without_a_copy(tmp_path: Path) -> None:
    check = made_check(tmp_path / "images", 2, ["a", "b", "c"])
    shutil.rmtree(tmp_path / "images")
    text = data_page(check, DatasetSpec("a", tmp_path / "a.yaml", tmp_path, {}, ()))
    assert "<img" not in text and text.count("No image: its file") == 4


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
