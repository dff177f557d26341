"""Numbers of labels there and back: what is parsed in the end are the floats of the beginning."""

from __future__ import annotations

import json
from fractions import Fraction

from hypothesis import example, given
from hypothesis import strategies as st

from tessera.data.conversion.numbers import exact, parse_written, share_text
from tessera.data.conversion.objects import Labelled, of_record, record_text
from tessera.data.conversion.voc import fields_of, of_fields
from tessera.data.conversion.yolo import of_row, row_of

SIDES = st.integers(1, 20_000)
SIZES = st.tuples(SIDES, SIDES)
SHARES = st.one_of(st.floats(1e-6, 1), st.decimals(0, 1, places=6).map(float))
PIXELS = st.one_of(st.floats(1e-3, 1e4), st.decimals(0, 10_000, places=2).map(float))
NAMES, NUMBERS = ("cat", "dog"), {"cat": 0, "dog": 1}


def through_json(labelled: Labelled) -> Labelled:
    record = json.loads(record_text(labelled.fields()), parse_float=parse_written)
    found = of_record(record, record["category"])
    assert found is not None
    return found


def through_xml(labelled: Labelled) -> Labelled:
    """Boxes below one pixel are none in VOC."""
    return of_fields(fields_of(labelled)) if min(labelled.box[2:]) >= 1 else labelled


@given(st.lists(SHARES, min_size=4, max_size=4), SIZES)
def test_a_box_of_a_label_file(shares: list[float], size_hw: tuple[int, int]) -> None:
    row = " ".join(["1", *map(repr, shares)])
    labelled = of_row(row, size_hw, NAMES)
    for between in (labelled, through_json(labelled), through_xml(labelled), through_json(through_xml(labelled))):
        assert list(map(float, row_of(between, size_hw, NUMBERS).split())) == [1, *shares]


@given(st.lists(SHARES, min_size=6, max_size=12).filter(lambda shares: len(shares) % 2 == 0), SIZES)
def test_a_polygon_of_a_label_file(shares: list[float], size_hw: tuple[int, int]) -> None:
    labelled = of_row(" ".join(["-1", *map(repr, shares)]), size_hw, NAMES)
    assert list(map(float, row_of(through_json(labelled), size_hw, NUMBERS).split())) == [-1, *shares]


@example([7582.0, 1.0, 0.001, 1.0], (1, 1))  # a share that a float is close to, but not equal to
@given(st.lists(PIXELS, min_size=4, max_size=4), SIZES)
def test_a_box_of_coco_and_of_voc(box: list[float], size_hw: tuple[int, int]) -> None:
    """Where it lies in the image, so that nothing is cut."""
    left, top, width, height = box
    size_hw = max(size_hw[0], int(top + height) + 1), max(size_hw[1], int(left + width) + 1)
    labelled = of_record({"bbox": box}, "cat")
    assert labelled is not None
    row = row_of(labelled, size_hw, NUMBERS)
    for back in (of_row(row, size_hw, NAMES), through_xml(labelled)):
        assert back.fields() == labelled.fields()
        assert json.loads(back.fields()["bbox"]) == box
    corners = {"name": "cat", **{key: repr(value) for key, value in zip(("xmin", "ymin"), box[:2], strict=True)}}
    fields = {**corners, "xmax": repr(left + width), "ymax": repr(top + height), "difficult": "0"}
    for between in (of_fields(fields), through_json(of_fields(fields))):
        assert {key: text if key == "name" else float(text) for key, text in fields_of(between).items()} == {
            key: text if key == "name" else float(text) for key, text in fields.items()
        }


def test_text_of_numbers() -> None:
    texts = {Fraction(48): "48", Fraction(-1, 2): "-0.5", Fraction(1, 3): f"0.{'3' * 30}", exact("1e-999999999"): "0"}
    assert {number: share_text(number) for number in texts} == texts
    assert share_text(exact("0.12345678901234567890123")) == "0.12345678901234567890123"
    assert parse_written("0.10") != 0.1 and exact(parse_written("0.10")) == Fraction(1, 10)
