"""What docs/sources.md says of suffixes, times and kinds is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from tessera.utils.inference.sources.frames import Kind
from tessera.utils.inference.sources.source_arguments import PICTURE_SUFFIXES, VIDEO_SUFFIXES
from tessera.utils.inference.sources.stream import MOST_WAITING, TIMEOUTS
from tessera.utils.inference.sources.urls import MOST_PICTURE_BYTES, MOST_VIDEO_BYTES

PAGE = (Path(__file__).parents[4] / "docs" / "sources.md").read_text()


def test_suffixes() -> None:
    for what, suffixes in (("an image", PICTURE_SUFFIXES), ("a video", VIDEO_SUFFIXES)):
        (row,) = re.findall(rf"\| {what}: ([\w ]+)", PAGE)
        assert set(row.split()) == {suffix[1:] for suffix in suffixes} - {"heic", "heif"}


def test_times_and_limits() -> None:
    assert (MOST_PICTURE_BYTES, MOST_VIDEO_BYTES) == (1 << 30, 32 << 30)
    assert (TIMEOUTS.stall_s, TIMEOUTS.read_s, TIMEOUTS.open_s, TIMEOUTS.give_up_s) == (2, 5, 10, 600)
    assert (TIMEOUTS.tries, TIMEOUTS.pause_s, TIMEOUTS.longest_pause_s, MOST_WAITING) == (3, 0.5, 15, 8)


def test_events() -> None:
    kinds = re.findall(r"^\| `(\w+)` \|", PAGE.partition("| event | when |")[2], flags=re.MULTILINE)
    assert set(kinds) == set(get_args(Kind)) - {"damaged"}
