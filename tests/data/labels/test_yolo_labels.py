"""YOLO label files: valid rows, invalid rows and clipping."""

from __future__ import annotations

import codecs

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.labels.yolo_labels import parse_labels

fractions = st.floats(0, 1, allow_nan=False)
boxes = st.tuples(st.integers(0, 79), fractions, fractions, fractions, fractions)


@settings(deadline=None)
@given(st.lists(boxes, unique=True), st.sampled_from(["\n", "\r\n", "\r", "\n\n"]), st.booleans())
def test_round_trip(rows: list[tuple[float, ...]], end: str, mark: bool) -> None:
    text = end.join(" ".join(map(repr, row)) for row in rows) + end
    objects = parse_labels((codecs.BOM_UTF8 if mark else b"") + text.encode(), 80)
    assert objects.classes == [row[0] for row in rows]
    assert objects.boxes == [number for row in rows for number in row[1:]]
    assert not objects.problems and not objects.unknown and not objects.duplicates and not len(objects.polygons)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read(raw: bytes) -> None:
    objects = parse_labels(raw, 80)
    assert len(objects.boxes) == 4 * len(objects.classes)
    assert all(0 <= number <= 1 for number in objects.boxes)
    assert all(0 <= number < 80 for number in objects.classes)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("0 0.5 0.5 0.1", "4 fields, expected 5 (class x y w h)"),
        ("0 0.5 0.5 0.1 -0.1", "h is -0.1, expected no negative value"),
        ("0 1.2 0.5 0.1 0.1", "x is 1.2, expected at most 1"),
        ("0 0.1 0.1 0.2 1.0101 0.3 0.3", "y2 is 1.0101, expected at most 1"),
        ("0 -0.011 0.5 0.1 0.1", "x is -0.011, expected no negative value"),
        ("0 .5 .5 .1 .1 .5 .5 2 .4 .4 1 .6 .6 0", "14 fields, as a pose has them (class x y w h, then keypoints)"),
        ("0 .5 .5 .1 .1 .5 .5 2.0 .4 .4 1.0", "`kpt_shape: [2, 3]` into the data YAML to train on its box"),
        ("0 .5 .5 .1 .1 .3 .3 1 .4 .4 0 .6 .6 1 .7 .7 0", "`kpt_shape: [4, 3]`"),
        ("-2 0.5 0.5 0.1 0.1", "class is -2, expected an integer from 0 on, or -1 for a region to ignore"),
        ("1.5 0.5 0.5 0.1 0.1", "class is 1.5, expected an integer"),
        ("0 nan 0.5 0.1 0.1", "x is nan, expected a finite number"),
        ("cat 0.5 0.5 0.1 0.1", "'cat' is not a number"),
        ("0 0.5 0.5 0_1 0.1", "'0_1' is not a number"),
        ("0,0.5,0.5,0.1,0.1", "the fields are separated by commas, expected spaces"),
        ("0, 0.5, 0.5, 0.1, 0.1", "the fields are separated by commas, expected spaces"),
        ("0 0.5,0.5 0.1,0.1", "the fields are separated by commas, expected spaces"),
        ("0;0,5;0,5;0,1;0,1", "the fields are separated by semicolons, expected spaces"),
        ("0; 0.5; 0.5; 0.1; 0.1", "the fields are separated by semicolons, expected spaces"),
        ("0 0,5 0,5 0,1 0,1", "'0,5' has a decimal comma, expected a point"),
        ("0 0.5 0.5 0.1 0.1 0.87", "6 fields, expected 5 (class x y w h): the sixth may be a confidence"),
    ],
)
def test_bad_row(row: str, what: str) -> None:
    objects = parse_labels(f"1 0.5 0.5 0.1 0.1\n\n{row}\n".encode(), 2)
    ((line, found),) = objects.problems
    assert line == 3
    assert what in found
    assert objects.classes == [1]


def test_duplicates_count_once() -> None:
    objects = parse_labels(b"0 0.5 0.5 0.1 0.1\n1.0 0.5 0.5 0.1 0.1\n0 0.50 0.5 0.1 1e-1\n", 2)
    assert (objects.classes, objects.duplicates) == ([0, 1], 1)


def test_polygons_and_boxes_mix() -> None:
    objects = parse_labels(b"0 0.1 0.2 0.5 0.2 0.3 0.6\n1 0.5 0.5 0.25 0.25\n", 2)
    np.testing.assert_allclose(objects.boxes, [0.3, 0.4, 0.4, 0.4, 0.5, 0.5, 0.25, 0.25])
    assert [len(polygon) for polygon in objects.polygons] == [3, 0]


def test_utf16_is_named() -> None:
    ((_, what),) = parse_labels("0 0.5 0.5 0.1 0.1".encode("utf-16"), 2).problems
    assert "UTF-16" in what


@pytest.mark.parametrize(
    "row, box",
    [
        ("0 1.0000001 0.5 0.1 0.2", (0.97500005, 0.5, 0.0499999, 0.2)),
        ("0 0.5 0.5 1.01 1", (0.5, 0.5, 1, 1)),
        ("0 0.5 -0.0021 0.1 0.2", (0.5, 0.04895, 0.1, 0.0979)),
        ("0 0.4 -0.001 1.002 0.4 0.5 0.8", (0.7, 0.4, 0.6, 0.8)),
    ],
)
def test_a_little_beyond_the_image_is_cut_to_it(row: str, box: tuple[float, ...]) -> None:
    objects = parse_labels(f"1 0.5 0.5 0.1 0.1\n{row}\n".encode(), 2)
    ((line, note),) = objects.notes
    assert line == 2 and note.endswith(" beyond the image: clipped")
    assert not objects.problems and not objects.remarks
    assert objects.classes == [1, 0] and objects.boxes[4:] == pytest.approx(box, abs=1e-9)
    assert all(polygon.min() >= 0 and polygon.max() <= 1 for polygon in objects.polygons if len(polygon))


def test_what_is_left_without_an_area_is_rejected_and_the_others_stay() -> None:
    objects = parse_labels(b"1 0.5 0.5 0.1 0.1\n0 1.005 0.5 0.01 0.1\n", 2)
    assert objects.classes == [1] and not objects.problems
    assert objects.remarks == [(2, "0.005 beyond the image: nothing of it is inside; object skipped")]


@pytest.mark.parametrize("label, costs_the_image", [(0, True), (-1, False)])
def test_an_image_whose_only_object_lies_outside_is_no_background(label: int, costs_the_image: bool) -> None:
    """A region to ignore costs nothing."""
    objects = parse_labels(f"{label} 1.005 0.5 0.01 0.1\n".encode(), 2)
    assert not objects.classes and not objects.ignored.classes
    assert [bool(objects.problems), bool(objects.remarks)] == [costs_the_image, not costs_the_image]


@pytest.mark.parametrize("rest", ["0.6 0.3 0.6 0.2 0.6 0.2", "9 -3 2 0 0 0", "a b c d e f"])
def test_the_box_of_a_pose_by_kpt_shape(rest: str) -> None:
    objects = parse_labels(f"0 0.3125 0.375 0.5 0.5 {rest}\n1 0.5 0.5 0.1 0.1\n".encode(), 2, (), 6)
    assert objects.classes == [0, 1] and objects.boxes == [0.3125, 0.375, 0.5, 0.5, 0.5, 0.5, 0.1, 0.1]
    assert not objects.polygons
    ((_, what),) = parse_labels(b"0 0.1 0.2 0.5 0.2 0.3 0.6\n", 2, (), 6).problems
    assert what == "7 fields, expected 5 (class x y w h), or 11 with the keypoints of kpt_shape"


def test_polygons_at_the_border_are_no_poses() -> None:
    """Eight points around the image, the most that touch the edge, and a closed one of five."""
    around = b"0 0 0 .5 0 1 0 1 .5 1 1 .5 1 0 1 0 .5"
    assert len(parse_labels(around + b"\n0 0 0 1 0 1 1 0 1 0 0\n", 2).polygons) == 2
