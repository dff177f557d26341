"""`--check-data --report`: what the checks of a dataset found, as one page that needs nothing but itself."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from tessera.data.source.checks.drift import FAMILIES, LEVEL
from tessera.data.source.checks.pictures import KINDS
from tessera.data.source.checks.report import DatasetCheck, Drift, Remark, SplitCounts
from tessera.utils.errors import UserError
from tessera.utils.files import atomic_write
from tessera.utils.flags.program import started
from tessera.utils.report.albums.thumbnails import Thumbnails
from tessera.utils.report.page.classes import MOST_ROWS
from tessera.utils.report.page.facts import readable
from tessera.utils.report.page.shell import own_file, rendered
from tessera.utils.report.page.svg import bar
from tessera.utils.text import counted
from tessera.utils.types import DatasetSpec

NAME = "data_report.html"
MOST_PAIRS = 60  # with their pictures
MOST_REMARKS = 12  # of a kind, with their pictures
MOST_LINES = 200  # of errors, of problems and of notes
MOST_MOVED = 40  # of a family
_LINE = 600  # characters of a line


class Shown(NamedTuple):
    """A picture of the page: a copy of it, "" without one, where it lies, and what is said of it."""

    uri: str
    name: str
    detail: str


class ClassRow(NamedTuple):
    """A class: images and objects of each split in turn."""

    name: str
    figures: list[int]


class DriftRow(NamedTuple):
    """A family of shares in two splits, and those that differ."""

    family: str
    of: str
    splits: tuple[str, str]
    pictures: tuple[int, int]
    p: str
    distance: float
    moved: list[tuple[str, float, float, Markup, Markup, str]]
    left: int


def write_data_page(check: DatasetCheck, spec: DatasetSpec, folder: Path) -> Path:
    """Write data_report.html into a folder, which is made where it is missing; returns the file.

    Raises:
        UserError: it cannot be written.
    """
    path = folder / NAME
    try:
        with atomic_write(path) as file:
            file.write(data_page(check, spec).encode())
    except OSError as error:
        raise UserError(
            f"--report {folder}: {path.name} cannot be written there ({error.strerror}). Give a folder that can be "
            "written to, or a new one."
        ) from error
    return path


def data_page(check: DatasetCheck, spec: DatasetSpec) -> str:
    """The page: the same text for the same dataset."""
    copies = Thumbnails(spec.pixels)
    between = [twins for twins in check.twins if twins.splits[0] != twins.splits[1]]
    pairs = [
        (f"{twins.splits[0]} and {twins.splits[1]}" if twins in between else twins.splits[0], twins.bits, sides)
        for twins in check.twins[:MOST_PAIRS]
        for sides in [[Shown(copies.of(path), readable(name, 200), "") for path, name in zip(*twins[1:3], strict=True)]]
    ]
    return rendered(
        own_file(__package__, "data.html"),
        title=f"{readable(spec.yaml_path.name)}: dataset report",
        verdict=check.lines()[-1],
        check=check,
        words=in_words(check),
        told=[
            (kind, [readable(line, _LINE) for line in lines[:MOST_LINES]], len(lines)) for kind, lines in _told(check)
        ],
        counts=check.counts,
        classes=_classes(check),
        classes_left=max(len(check.names) - MOST_ROWS, 0),
        drifts=[_drift_row(drift) for drift in check.drifts],
        level=LEVEL,
        pairs=pairs,
        pairs_found=len(check.twins),
        between=len(between),
        remarks=[
            (kind, says, len(own), [_remark(copies, remark) for remark in own[:MOST_REMARKS]])
            for kind, says in KINDS.items()
            if (own := _of_kind(check, kind))
        ],
        command=f"{started('train.py')} --data {readable(str(spec.yaml_path), 200)} --check-data",
    )


def in_words(check: DatasetCheck) -> list[tuple[str, list[str]]]:
    """Questions about the dataset with their answers."""
    usable = f"{'No' if check.errors else 'Yes'}: {check.verdict()}."
    if check.left_out:
        usable += f" {counted(len(check.left_out), 'image')} would be left out."
    drifted = [drift for drift in check.drifts if drift.moved]
    if not check.drifts:
        like = ["There are too few pictures to say, or one split alone."]
    else:
        like = [f"{_capital(drift.family)} of {drift.splits[1]} differ: {_moved(drift)}." for drift in drifted]
        rest = [f"{drift.family} of {drift.splits[1]}" for drift in check.drifts if not drift.moved]
        like += [f"No sign of drift in {', '.join(rest)}: what differs is small, or may be chance."] if rest else []
    between = sum(twins.splits[0] != twins.splits[1] for twins in check.twins)
    within = len(check.twins) - between
    alike = [
        f"{counted(between, 'pair')} of pictures that look the same lie in two splits, {within:,} in one."
        if check.twins
        else "No two pictures look the same without being copies."
    ]
    odd = [f"{len(own):,} {kind}" for kind in KINDS if (own := _of_kind(check, kind))]
    return [
        ("Can it be trained on?", [usable]),
        ("Do the splits resemble each other?", like),
        ("Are pictures in it twice?", alike),
        ("Are there unusual pictures?", [f"{', '.join(odd)}." if odd else "None was found."]),
    ]


def _of_kind(check: DatasetCheck, wanted: str) -> list[Remark]:
    return [remark for remark in check.remarks if wanted == remark.kind]


def _told(check: DatasetCheck) -> list[tuple[str, list[str]]]:
    told = {"Errors": check.errors, "Problems": check.problems, "Notes": check.notes}
    return [(kind, lines) for kind, lines in told.items() if lines]


def _moved(drift: Drift) -> str:
    first = [
        f"{readable(one.name)} {100 * one.shares[0]:.0f} % in {drift.splits[0]}, {100 * one.shares[1]:.0f} % in "
        f"{drift.splits[1]}"
        for one in drift.moved[:3]
    ]
    return "; ".join(first)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _classes(check: DatasetCheck) -> list[ClassRow]:
    columns = [column for own in check.counts for column in _columns(own)]
    rows = zip(check.names, *columns, strict=True) if columns else ()
    return [ClassRow(readable(name), list(figures)) for name, *figures in rows][:MOST_ROWS]


def _columns(own: SplitCounts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return own.class_images, own.class_objects


def _drift_row(drift: Drift) -> DriftRow:
    moved = [
        (
            readable(one.name),
            *one.shares,
            bar([("correct", one.shares[0])]),
            bar([("wrong_class", one.shares[1])]),
            f"{one.p:.3f}",
        )
        for one in drift.moved[:MOST_MOVED]
    ]
    left, p = max(len(drift.moved) - MOST_MOVED, 0), f"{drift.p:.3f}"
    return DriftRow(drift.family, FAMILIES[drift.family], drift.splits, drift.pictures, p, drift.distance, moved, left)


def _remark(copies: Thumbnails, remark: Remark) -> Shown:
    return Shown(copies.of(remark.path), readable(remark.shown, 200), f"{remark.split}; {remark.detail}")
