"""Formatting of values for messages, tables and JSON: units, plurals, escapes, shortening."""

from __future__ import annotations

import json
import math
import reprlib
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

# Unicode categories of control characters, surrogates (file names that are not UTF-8) and line ends; and characters
# that change the direction of text (UAX 9). Other format characters are parts of words, such as joiners of emoji.
_CONTROL = frozenset({"Cc", "Cs", "Zl", "Zp"})
_DIRECTION = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_PATH_LENGTH = 200
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # full-width forms count too
_NAME_WIDTH, _VALUE_WIDTH = 22, 11


def gib(size: float) -> str:
    """Return a number of bytes such as "1.50 GiB"."""
    return f"{size / 2**30:.2f} GiB"


def first_of(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return the first `most` items and the number of others: "a, b, and 3 more"."""
    more = len(items) - most
    return separator.join([*items[:most], *([f"and {more:,} more"] if more > 0 else [])])


def plural(number: int, noun: str) -> str:
    """Return a number and its noun: "1 note", "2 notes", "3 boxes", "4 entries", "1,000 batches"."""
    if number != 1:
        is_y = noun.endswith("y") and noun[-2] not in "aeiou"
        noun = f"{noun[:-1]}ies" if is_y else f"{noun}es" if noun.endswith(("x", "s", "tch")) else f"{noun}s"
    return f"{number:,} {noun}"


def table_row(name: str, *values: object) -> str:
    """Return a line of a table: the name, cut to its column, and values, floats with three digits."""
    name = escape_control(name).replace("\n", "\\n").replace("\t", "\\t")
    if len(name) > _NAME_WIDTH:
        name = name[: _NAME_WIDTH - 3] + "..."
    cells = (f"{value:.3g}" if isinstance(value, float) else str(value) for value in values)
    return f"{name:>{_NAME_WIDTH}}" + "".join(f"{cell:>{_VALUE_WIDTH}}" for cell in cells)


def row(label: str, text: str) -> str:
    """Return a line of the aligned summary at a run's start."""
    return f"{label + ':':<10}{text}"


def shown(value: object, most: int = 80) -> str:
    """Return a value for a message: one line of at most `most` characters, without control characters.

    Strings are quoted; paths are not, and may have 200 characters. The cost does not grow with the value.
    """
    if isinstance(value, PurePath):
        return one_line(str(value), max(most, _PATH_LENGTH))
    return one_line(_Short(most).repr(value), most)


def one_line(text: str, most: int = 60) -> str:
    """Return text on one line with escaped control characters, and its middle cut if it is longer than `most`."""
    half = most // 2
    if len(text) > most:
        text = f"{text[:half]} … {text[3 + half - most :]}"
    escaped = escape_control(text).replace("\n", "\\n").replace("\t", "\\t")
    return escaped if len(escaped) <= most else f"{escaped[: most - 2]} …"


def is_one_line(text: str) -> bool:
    """Return whether `text` has no control character, line end or surrogate."""
    return text.isprintable() or not any(unicodedata.category(c) in _CONTROL for c in text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type, in at most 200 characters, without a full stop."""
    before, _, reason = str(error).rpartition("Last error:")  # NCCL gives it at the end
    return one_line((reason.strip() or before.strip() or type(error).__name__).splitlines()[0], 200).rstrip(". ")


def escape_control(text: str) -> str:
    """Return text with control characters, except tabs and line ends, as escapes such as \\x1b."""
    if text.isprintable():
        return text
    control = {c for c in text if c in _DIRECTION or unicodedata.category(c) in _CONTROL} - {"\n", "\t"}
    return "".join(ascii(c)[1:-1] if c in control else c for c in text)


def strict_json(value: Any) -> str:
    """Return JSON on one line of ASCII, with null for numbers that are not finite (RFC 8259)."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def harmless_cell(value: object) -> object:
    """Return a CSV cell that no spreadsheet runs as a formula: such text gets an apostrophe (OWASP); "-" does not."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) and value != "-" else value


class _Short(reprlib.Repr):
    """Shortened repr of text, lists, numbers and nested values."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = most
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 8

    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() <= 256:  # Python prints no int of more than 4,300 digits
            return repr(value)
        return f"a number of about {int(value.bit_length() * 0.30103) + 1:,} digits"

    def repr_bytes(self, value: bytes, level: int) -> str:
        return self.repr_instance(value[: self.maxother], level)


def duration(seconds: float) -> str:
    """Return a duration such as 40 s, 6 min, 2 h 10 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60:,} h {minutes % 60} min"
