"""What a user may get out of a hostile input: a result, or one clean message."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import TypeVar

from tessera.utils.errors import UserError

T = TypeVar("T")

MAX_LINES, MAX_LINE = 6, 400
# Controls, lone surrogates and separators of lines; then what turns the direction of text round.
_RAW_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})
_RAW_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


class Message(str):
    """A UserError's text that is fit to be printed."""


def message_or_result(call: Callable[[], T]) -> T | Message:
    """The result of `call`, or the text of its UserError.

    Raises:
        AssertionError: the text is long, or carries characters that a terminal may obey.
        Exception: whatever else `call` raises, which is a defect of the product.
    """
    try:
        return call()
    except UserError as error:
        return checked(str(error))


def checked(text: str) -> Message:
    """`text`, where it is a few short lines without a control character."""
    lines = text.split("\n")
    assert len(lines) <= MAX_LINES, f"a message of {len(lines)} lines: {text[:500]!r}"
    assert max(map(len, lines)) <= MAX_LINE, f"a line of {max(map(len, lines))} characters: {text[:500]!r}"
    assert not raw_characters(text), f"raw {raw_characters(text)} in {text[:500]!r}"
    return Message(text)


def raw_characters(text: str, allowed: str = "\n") -> str:
    """The characters of `text` that a terminal may obey, or cannot show."""
    suspects = {c for c in text if unicodedata.category(c) in _RAW_CATEGORIES or c in _RAW_DIRECTIONS}
    found = suspects - {*allowed}
    return ascii("".join(sorted(found))) if found else ""
