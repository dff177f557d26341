"""Formatting for messages: one line, shortened, without control characters; plurals, durations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tessera.utils.errors import UserError
from tessera.utils.text import duration, escape_control, first_line, one_line, plural, shown, table_row


def nested(depth: int, width: int) -> list[Any]:
    """Lists of one list: written out, width ** depth items."""
    value: list[Any] = ["x"]
    for _ in range(depth):
        value = [value] * width
    return value


ENDLESS: list[Any] = [1]
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("cat", "'cat'"),
        (None, "None"),
        (1.5, "1.5"),
        (["a", 2], "['a', 2]"),
        ({"x": 1}, "{'x': 1}"),
        (b"\x00", r"b'\x00'"),
        (Path("/data/a b.yaml"), "/data/a b.yaml"),
        ("\x1b[31mred\x07", r"'\x1b[31mred\x07'"),
        (Path("a\x1b]0;title\x07\nb"), r"a\x1b]0;title\x07\nb"),
        ("a\u202eb\u200b", r"'a\u202eb\u200b'"),
        (Path("\udcff.jpg"), r"\udcff.jpg"),
        ([10**6000], "[a number of about 6,001 digits]"),
        (ENDLESS, "[1, [1, [1, [...]]]]"),
    ],
)
def test_values_as_shown(value: object, text: str) -> None:
    assert shown(value) == text


LARGE = {
    "text": "x" * 10**6,
    "controls": "\x1b" * 10**6,
    "nested": nested(60, 9),
    "numbers": [10**9999] * 10**6,
    "keys": dict.fromkeys(range(9999), "y" * 99),
    "bytes": b"\x01" * 10**6,
}


@pytest.mark.parametrize("kind", LARGE)
def test_however_large_one_short_line(kind: str) -> None:
    text = shown(LARGE[kind], 60)
    assert len(text) <= 60 and "\n" not in text and text.isprintable()


def test_a_long_path_keeps_both_ends() -> None:
    text = shown(Path("/datasets", *["deep"] * 1000, "cat.jpg"))
    assert len(text) <= 200 and text.startswith("/datasets/") and text.endswith("/cat.jpg")


def test_joiners_and_other_scripts_stay_and_control_characters_do_not() -> None:
    family, persian = "\U0001f468\u200d\U0001f469", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
    for text in (family, persian, "кошка 猫\u3000ネコ\tça\n"):
        assert escape_control(text) == text
    assert family in table_row(family, 1) and one_line("a\nb\tc", 20) == "a\\nb\\tc"
    turning = "\x1b\x7f\x9b\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\udcff"
    assert escape_control(turning) == "".join(ascii(c)[1:-1] for c in turning)
    assert str(UserError("a/\x1b[2J.txt:1: class 3.\n  second line")) == "a/\\x1b[2J.txt:1: class 3.\n  second line"


def test_the_first_line_of_an_error_or_its_kind() -> None:
    assert first_line(ValueError("\n  sizes\x1b differ.  \nand a stack")) == "sizes\\x1b differ"
    assert first_line(EOFError()) == first_line(EOFError(" \n")) == "EOFError"
    assert len(first_line(ValueError("a" * 1000))) == 200
    assert first_line(RuntimeError("NCCL error in: a.cpp:9\nLast error:\n")) == "NCCL error in: a.cpp:9"


def test_times_as_one_says_them() -> None:
    texts = {0.4: "0 s", 89.4: "89 s", 90: "2 min", 3600: "60 min", 5970: "1 h 40 min", 90_000: "25 h 0 min"}
    assert {seconds: duration(seconds) for seconds in texts} == texts


def test_a_number_and_its_noun() -> None:
    assert plural(1, "frame") == "1 frame" and plural(0, "frame") == "0 frames"
    assert plural(1200, "batch") == "1,200 batches"
    for noun, wanted in {
        "box": "boxes",
        "class": "classes",
        "entry": "entries",
        "day": "days",
        "epoch": "epochs",
    }.items():
        assert plural(2, noun) == f"2 {wanted}"
