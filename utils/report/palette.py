"""Class colours and fonts of images and charts.

Fonts come with matplotlib or are installed on the machine; nothing is downloaded.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from itertools import groupby
from pathlib import Path

import matplotlib
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

# Chosen one after the other, each as far as possible from all before it and from grey in OKLab (Ottosson 2020),
# within lightness 0.48-0.82, so that each shows on a photograph and on white paper.
# fmt: off
_COLOURS = (
    0xE73830, 0x00D700, 0x4808FF, 0x30BFFF, 0xEF00FF, 0xF7B728, 0x007800, 0xFF9FDF,
    0x873897, 0x0068AF, 0x70AF80, 0x9F80FF, 0x976800, 0xFF209F, 0x9700F7, 0xB7708F,
    0xAF0058, 0xFF8F78, 0x008787, 0x00DFCF, 0xB7B7FF, 0xA7CF48, 0x4070FF, 0xC750C7,
)
# fmt: on

# Families with the scripts that DejaVu Sans lacks, in order of preference; used where they are installed.
_WIDE_FAMILIES = (
    *(f"Noto Sans CJK {region}" for region in ("SC", "JP", "KR", "TC")),
    *("Noto Sans SC", "Noto Sans JP", "Source Han Sans SC", "WenQuanYi Zen Hei", "Droid Sans Fallback", "IPAGothic"),
    *("Microsoft YaHei", "PingFang SC", "Hiragino Sans", "Malgun Gothic"),
    *(f"Noto Sans {script}" for script in ("Thai", "Devanagari", "Bengali", "Tamil", "Telugu", "Khmer", "Ethiopic")),
    *("Loma", "Lohit Devanagari", "FreeSans", "Arial Unicode MS"),
)

_NOTO = re.compile(r"NotoSans\w*-Regular\.tt[cf]")  # files of the fonts that a message asks to install
log = logging.getLogger(__name__)


def class_colour(class_id: int) -> tuple[int, int, int]:
    """Return the RGB colour of a class, 0-255; the 24 colours repeat."""
    code = _COLOURS[class_id % len(_COLOURS)]
    return code >> 16, code >> 8 & 255, code & 255


def class_hex(class_id: int) -> str:
    """Return `class_colour` as "#rrggbb"."""
    return f"#{_COLOURS[class_id % len(_COLOURS)]:06x}"


def text_colour(background: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return black or white, whichever contrasts more with an RGB background (WCAG 2.1 relative luminance)."""
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in background)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (0, 0, 0) if (luminance + 0.05) ** 2 > 0.05 * 1.05 else (255, 255, 255)


@cache
def font_families() -> tuple[str, ...]:
    """Return font families for charts, each the fallback of the one before."""
    manager = font_manager.fontManager
    known = {entry.fname for entry in manager.ttflist}
    for file in font_manager.findSystemFonts():  # matplotlib keeps its list of fonts, also when more are installed
        if file not in known and _NOTO.fullmatch(Path(file).name):
            manager.addfont(file)
    installed = {entry.name for entry in manager.ttflist}
    return ("DejaVu Sans", *(family for family in _WIDE_FAMILIES if family in installed))


@cache
def _fonts() -> tuple[tuple[Path, frozenset[int]], ...]:
    """Return file and covered code points of each of `font_families`."""
    files = [Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"]
    files += [Path(font_manager.findfont(family)) for family in font_families()[1:]]
    return tuple((file, frozenset(FT2Font(str(file)).get_charmap())) for file in dict.fromkeys(files))


def font_runs(text: str) -> list[tuple[Path, str]]:
    """Split a text into parts, each with the first font file that has its characters."""

    def file(character: str) -> Path:
        return next((file for file, covered in _fonts() if ord(character) in covered), _fonts()[0][0])

    return [(font, "".join(part)) for font, part in groupby(text, file)]


@cache
def class_text(number: int, name: str) -> str:
    """Return the class name, preceded by the class number if some characters are in no font."""
    shown = drawable(name)
    if shown == " ".join(name.split()):
        return name
    _warn_of_fonts()
    return f"{number} {shown}"


@cache
def _warn_of_fonts() -> None:
    log.warning(
        "No installed font has all characters of the class names: images and charts show ? and the class number. "
        "Install Noto fonts, such as fonts-noto-cjk (Chinese, Japanese, Korean) and fonts-noto-core (other "
        "scripts) of Debian and Ubuntu."
    )


def drawable(text: str, limit: int = 1000) -> str:
    """Return `text` in one line of at most `limit` characters, with "?" for characters that no font has."""
    text = "".join(c if any(ord(c) in known for _, known in _fonts()) else "?" for c in " ".join(text.split()))
    return text if len(text) <= limit else text[: limit - 1] + "…"
