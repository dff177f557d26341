"""Numbers, lists and found values as messages show them, and as files of results hold them."""

from __future__ import annotations

import json
import math
import reprlib
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

# Unicode's categories of what moves the cursor or colours, ends a line, or cannot be encoded (bytes of a file name that
# are not UTF-8); and the characters that turn the direction of the text after them (UAX 9). Other characters of format
# are parts of words: emoji and Persian have joiners.
_NEVER_WRITTEN = frozenset({"Cc", "Cs", "Zl", "Zp"})
_TURNS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_PATH_LENGTH = 200
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # full-width forms count too
_NAME_WIDTH, _FIGURE_WIDTH = 22, 11


def gib(size: float) -> str:
    """A number of bytes, such as "1.50 GiB"."""
    return f"{size / 2**30:.2f} GiB"


def first_of(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first `most` items, and how many more there are: "a, b, and 3 more"."""
    more = len(items) - most
    return separator.join([*items[:most], *([f"and {more:,} more"] if more > 0 else [])])


def counted(number: int, noun: str) -> str:
    """A number and its noun: "1 note", "2 notes", "3 boxes", "4 entries", "1,000 batches"."""
    if number != 1:
        is_y = noun.endswith("y") and noun[-2] not in "aeiou"
        noun = f"{noun[:-1]}ies" if is_y else f"{noun}es" if noun.endswith(("x", "s", "tch")) else f"{noun}s"
    return f"{number:,} {noun}"


def table_row(name: str, *figures: object) -> str:
    """A line of a table: a name on the left, which is cut where it is too long, floats to three digits."""
    name = printable(name).replace("\n", "\\n").replace("\t", "\\t")
    if len(name) > _NAME_WIDTH:
        name = name[: _NAME_WIDTH - 3] + "..."
    cells = (f"{figure:.3g}" if isinstance(figure, float) else str(figure) for figure in figures)
    return f"{name:>{_NAME_WIDTH}}" + "".join(f"{cell:>{_FIGURE_WIDTH}}" for cell in cells)


def shown(value: object, most: int = 80) -> str:
    """A found value as messages show it: one line, at most `most` characters, without control characters.

    Text is in quotes, paths are not (they may be longer). The cost does not grow with the value.
    """
    if isinstance(value, PurePath):
        return one_line(str(value), max(most, _PATH_LENGTH))
    return one_line(_Short(most).repr(value), most)


def one_line(text: str, most: int) -> str:
    """Text on one line, control characters as escapes, its middle left out where it is longer than `most`."""
    half = most // 2
    if len(text) > most:
        text = f"{text[:half]} … {text[3 + half - most :]}"
    escaped = printable(text).replace("\n", "\\n").replace("\t", "\\t")
    return escaped if len(escaped) <= most else f"{escaped[: most - 2]} …"


def is_one_line(text: str) -> bool:
    """Whether a person may have written `text` as one line: it holds no control character, line end or surrogate."""
    return text.isprintable() or not any(unicodedata.category(c) in _NEVER_WRITTEN for c in text)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, its kind where it has none, as `one_line` of at most 200 characters.

    No full stop ends it: messages quote it inside a sentence.
    """
    return one_line((str(error).strip() or type(error).__name__).splitlines()[0], 200).rstrip(". ")


def printable(text: str) -> str:
    """Text that a terminal shows as it is: what it would obey, but tabs and line ends, as escapes such as \\x1b."""
    if text.isprintable():
        return text

    def is_obeyed(character: str) -> bool:
        return character in _TURNS or unicodedata.category(character) in _NEVER_WRITTEN

    return "".join(ascii(c)[1:-1] if is_obeyed(c) and c not in "\n\t" else c for c in text)


def strict_json(value: Any) -> str:
    """JSON on one line of ASCII: a number that is not finite becomes null, for which JSON has no other form (RFC 8259).

    Bytes of a file's name that are not UTF-8 become escapes of surrogates, as `os.fsencode` takes them back.
    """
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
    """A cell of a CSV file that no spreadsheet takes for a formula: such a text begins with an apostrophe (OWASP).

    Numbers stay as they are, and so does a lone "-", which is standard input.
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) and value != "-" else value


class _Short(reprlib.Repr):
    """A bounded repr: of long text, lists and numbers both ends, of deep ones the outer levels."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = most
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 8

    def repr_int(self, value: int, level: int) -> str:
        """Python itself refuses to print a number of more than 4,300 digits."""
        if value.bit_length() <= 256:
            return repr(value)
        return f"a number of about {int(value.bit_length() * 0.30103) + 1:,} digits"

    def repr_bytes(self, value: bytes, level: int) -> str:
        """Only what is shown is escaped."""
        return self.repr_instance(value[: self.maxother], level)


def duration(seconds: float) -> str:
    """A time as one says it: 40 s, 6 min, 2 h 10 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60:,} h {minutes % 60} min"
