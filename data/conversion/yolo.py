"""Rows of label files: `class x y w h`, or a class and the points of a polygon, as shares of the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from tessera.data.conversion.numbers import exact, share_text
from tessera.data.conversion.objects import ANY_NAME, Labelled, Size, bounds


def row_of(labelled: Labelled, size_hw: Size, numbers: Mapping[str, int]) -> str:
    """The row of an object. A polygon of several parts is one, part after part, as the reader of COCO has it.

    Regions are rows of class -1, whatever their class. Rows hold shares from 0 to 1: a box is cut to the image where
    it needs to be, points always.

    Args:
        labelled: the object.
        size_hw: height and width of the image in pixels.
        numbers: class name → its number in label files.
    """
    height, width = size_hw
    if labelled.parts:
        points = [number for part in labelled.parts for number in part]
        shares = [_cut(number / (height if at % 2 else width)) for at, number in enumerate(points)]
    else:
        left, top, wide, high = labelled.box
        shares = [(left + wide / 2) / width, (top + high / 2) / height, wide / width, high / height]
        if not all(0 <= share <= 1 for share in shares):
            x1, x2 = (_cut(x / width) for x in (left, left + wide))
            y1, y2 = (_cut(y / height) for y in (top, top + high))
            shares = [(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1]
    number = ANY_NAME if labelled.ignored else str(numbers[labelled.name])
    return " ".join([number, *map(share_text, shares)])


def of_row(row: str, size_hw: Size, names: Sequence[str]) -> Labelled:
    """The object of a row that `parse_labels` reads.

    Args:
        row: the text.
        size_hw: height and width of the image in pixels.
        names: class names by their numbers in label files.
    """
    first, *texts = row.split()
    number, shares, (height, width) = int(float(first)), list(map(exact, texts)), size_hw
    name = ANY_NAME if number < 0 else names[number]
    if len(shares) > 4:
        part = tuple(share * (height if at % 2 else width) for at, share in enumerate(shares))
        return Labelled(name, bounds([part]), name == ANY_NAME, (part,))
    x, y, wide, high = shares
    box = (x - wide / 2) * width, (y - high / 2) * height, wide * width, high * height
    return Labelled(name, box, name == ANY_NAME)


def _cut(share: Fraction) -> Fraction:
    return min(max(share, Fraction()), Fraction(1))
