"""Numbers of labels as exact fractions and as text, so that a label that is converted and back parses to equal floats.

Text files give decimals, and shares of an image become pixels and back by its whole width or height. Pixels of shares
are finite decimals, and are written in full. Shares of pixels may have no end: 30 decimals leave an error of less than
1e-24 pixels in any image, which no number that a float was printed as is as close to another one by chance.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

_DECIMALS = 30
_LEAST = -400  # power of ten below the smallest float
_NOISE = Fraction(1, 10**24)  # what rounding to so many decimals makes of a pixel, in images of up to 10^5 pixels
Written = float | Decimal


def parse_written(text: str) -> Written:
    """A number of a JSON file with all its digits: a float where that prints as it was written."""
    value = float(text)
    return value if repr(value) == text else Decimal(text)


def exact(value: str | int | Written) -> Fraction:
    """The number that was written, a finite one; what a float cannot tell from 0 is 0."""
    number = Decimal(repr(value) if isinstance(value, float) else value)
    return Fraction(number) if number.adjusted() > _LEAST else Fraction()


def pixel_text(value: Fraction) -> str:
    """Text of a number of pixels, which may have been a share in between: what it was before that."""
    near = (number for number in (Fraction(round(value)), exact(float(value))) if abs(number - value) < _NOISE)
    return share_text(next(near, value))


def share_text(value: Fraction) -> str:
    """The shortest text that stands for a number, of 30 decimals where it has no end before."""
    if value.denominator == 1:
        return str(value)
    if exact(float(value)) == value:
        return repr(float(value))
    digits = f"{abs(round(value * 10**_DECIMALS)):0{_DECIMALS + 1}d}"
    text = f"{digits[:-_DECIMALS]}.{digits[-_DECIMALS:]}".rstrip("0")
    return f"-{text}" if value < 0 else text
