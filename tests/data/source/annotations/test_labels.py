"""Label files: what is accepted, what is reported and where."""

from __future__ import annotations

import codecs

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.source.annotations.labels import ParsedLabels, _parse_plain, parse_labels, parse_rows

fractions = st.floats(0, 1, allow_nan=False)
boxes = st.tuples(st.integers(0, 79), fractions, fractions, fractions, fractions)


def same(a: ParsedLabels, b: ParsedLabels) -> bool:
    """Equality, polygons included."""
    polygons = len(a.polygons) == len(b.polygons) and all(
        np.array_equal(p, q) for p, q in zip(a.polygons, b.polygons, strict=True)
    )
    return (
        polygons
        and a._replace(polygons=(), problems=(), unknown=(), lines=())
        == b._replace(polygons=(), problems=(), unknown=(), lines=())
        and list(a.lines) == list(b.lines)
        and list(a.problems) == list(b.problems)
        and list(a.unknown) == list(b.unknown)
    )


@settings(deadline=None)
@given(st.lists(boxes, unique=True), st.sampled_from(["\n", "\r\n", "\r", "\n\n"]), st.booleans())
def test_round_trip(rows: list[tuple[float, ...]], end: str, mark: bool) -> None:
    text = end.join(" ".join(map(repr, row)) for row in rows) + end
    objects = parse_labels((codecs.BOM_UTF8 if mark else b"") + text.encode(), 80)
    assert objects.classes == [row[0] for row in rows]
    assert objects.boxes == [number for row in rows for number in row[1:]]
    assert not objects.problems and not objects.unknown and not objects.duplicates and not len(objects.polygons)


tokens = st.one_of(
    st.sampled_from(
        ["0", "1", "2", "1.0", "-0", "-0.0", "+1", "1e-3", "nan", "inf", "1.5", "-1", "0_1", "x", "１", "9" * 400]
    ),
    fractions.map(repr),
)


@settings(deadline=None)
@given(st.lists(st.lists(tokens, max_size=9).map(" ".join), max_size=5).map("\n".join))
def test_short_way_equals_long_way(text: str) -> None:
    raw = text.encode()
    plain = _parse_plain(raw, 2)
    assert plain is None or same(plain, parse_rows(raw, 2))


@settings(deadline=None)
@given(st.lists(boxes, max_size=6), st.integers(1, 80))
def test_short_way_equals_long_way_on_boxes(rows: list[tuple[float, ...]], nc: int) -> None:
    raw = "\n".join(" ".join(map(repr, row)) for row in rows).encode()
    plain = _parse_plain(raw, nc)
    assert plain is None or same(plain, parse_rows(raw, nc))
    assert (plain is not None) == (all(row[0] < nc for row in rows) and len(set(rows)) == len(rows))


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
        ("0 0.5 0.5 0.1 0.1 0.9", "6 fields"),
        ("0 0.5 0.5 0.1 -0.1", "h is -0.1, expected no negative value"),
        ("0 1.2 0.5 0.1 0.1", "x is 1.2, expected at most 1"),
        ("0 0.1 0.1 0.2 1.00001 0.3 0.3", "y2 is 1.00001, expected at most 1"),
        ("-2 0.5 0.5 0.1 0.1", "class is -2, expected an integer from 0 on, or -1 for a region to ignore"),
        ("-0.5 0.5 0.5 0.1 0.1", "class is -0.5, expected an integer"),
        ("1.5 0.5 0.5 0.1 0.1", "class is 1.5, expected an integer"),
        ("0 nan 0.5 0.1 0.1", "x is nan, expected a finite number"),
        ("0 0.5 inf 0.1 0.1", "y is inf, expected a finite number"),
        ("cat 0.5 0.5 0.1 0.1", "'cat' is not a number"),
        ("0 0.5 0.5 0_1 0.1", "'0_1' is not a number"),
        ("0, 0.5, 0.5, 0.1, 0.1", "'0,' is not a number"),
    ],
)
def test_bad_row(row: str, what: str) -> None:
    objects = parse_labels(f"1 0.5 0.5 0.1 0.1\n\n{row}\n".encode(), 2)
    ((line, found),) = objects.problems
    assert line == 3
    assert what in found
    assert objects.classes == [1]


def test_class_as_a_float_is_an_integer() -> None:
    assert parse_labels(b"1.0 0.5 0.5 0.1 0.1", 2).classes == [1]


def test_duplicates_count_once() -> None:
    objects = parse_labels(b"0 0.5 0.5 0.1 0.1\n1 0.5 0.5 0.1 0.1\n0 0.50 0.5 0.1 1e-1\n", 2)
    assert (objects.classes, objects.duplicates) == ([0, 1], 1)


def test_unknown_class_has_its_line() -> None:
    objects = parse_labels(b"0 0.5 0.5 0.1 0.1\n81 0.5 0.5 0.1 0.1\n", 80)
    assert objects.unknown == [(2, "81")]


def test_polygons_and_boxes_mix() -> None:
    objects = parse_labels(b"0 0.1 0.2 0.5 0.2 0.3 0.6\n1 0.5 0.5 0.25 0.25\n", 2)
    np.testing.assert_allclose(objects.boxes, [0.3, 0.4, 0.4, 0.4, 0.5, 0.5, 0.25, 0.25])
    assert [len(polygon) for polygon in objects.polygons] == [3, 0]


def test_utf16_is_named() -> None:
    ((_, what),) = parse_labels("0 0.5 0.5 0.1 0.1".encode("utf-16"), 2).problems
    assert "UTF-16" in what
