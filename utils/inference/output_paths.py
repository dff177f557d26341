"""Where the results of a run go below its folder: each has a name that no other result of the run can have.

A source gets a place, the path that it has in the folder that was given, without its suffix. Its files are that place
with an ending: a suffix, for frames "_" and their number before it, for detections one number more. So two files can
only share a name where two places are equal, where a picture is called like a frame (a_12.jpg beside a.mp4), or where a
folder is called like a file. `Places` lets none of these happen; upper and lower case, and the forms of an accent that
file systems may take for one another, count as equal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from tessera.utils.errors import UserError
from tessera.utils.evaluation.label_files import MOST_BYTES, name_key, numbered, usable_place
from tessera.utils.files import short_name
from tessera.utils.inference.sources.frames import Frame, SourceEvent
from tessera.utils.text import shown

_NOT_IN_NAMES = re.compile(r"[^\w .()+-]+")
_LIKE_A_FRAME = re.compile(r"_(?:0|[1-9][0-9]*)\Z")


class Places:
    """A place for each source.

    The path without its suffix where that is free; else with it ("1.png" beside "1.jpg"), else with a number. A name
    that leaves no room for an ending is shortened, and ends in a digest.
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._moving: set[str] = set()  # of them those of videos and streams, which number their frames
        self._like_frames: set[str] = set()  # what videos may not be called: pictures are called like their frames
        self._numbers: dict[PurePath, int] = {}  # the next one to try
        self._running: dict[str, PurePath] = {}

    def of(self, frame: Frame) -> PurePath:
        """A path without a suffix, relative to any folder of results."""
        if frame.media == "picture":
            return self._free(frame.name, moving=False)
        if frame.source not in self._running:
            self._running[frame.source] = self._free(frame.name, moving=True)
        return self._running[frame.source]

    def event(self, event: SourceEvent) -> None:
        """A video that is over gives its place up to nobody: one that is named again gets a place of its own."""
        if event.kind in ("ended", "damaged", "unreadable"):
            self._running.pop(event.source, None)

    def _free(self, name: PurePath, *, moving: bool) -> PurePath:
        for place in self._candidates(name):
            key = name_key(place)
            like_frame = _LIKE_A_FRAME.sub("", key)
            if key in self._taken or (key in self._like_frames if moving else like_frame in self._moving):
                continue
            self._taken.add(key)
            if moving:
                self._moving.add(key)
            elif like_frame != key:
                self._like_frames.add(like_frame)
            return place
        raise AssertionError("the candidates never end")

    def _candidates(self, name: PurePath) -> Iterator[PurePath]:
        whole = usable_place(name)
        stem = usable_place(name.with_name(os.path.splitext(name.name)[0]))  # noqa: PTH122 - "..jpg" has no suffix
        yield stem
        yield whole
        while True:
            number = self._numbers[stem] = self._numbers.get(stem, 1) + 1
            yield stem.with_name(f"{stem.name}-{number}")


def class_folders(names: Sequence[str]) -> dict[str, str]:
    """A folder for each class name; no two names share one."""
    taken: set[str] = set()
    plain = {name: short_name(_NOT_IN_NAMES.sub("_", name).strip(" .") or "_", MOST_BYTES) for name in names}
    return {name: numbered(folder, taken) for name, folder in plain.items()}


def with_ending(folder: Path, place: PurePath, ending: str) -> Path:
    """`folder`/`place` with an ending such as ".txt", in a folder that exists.

    Raises:
        UserError: the folder cannot be made.
    """
    path = folder / place.with_name(f"{place.name}{ending}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path.parent, error) from error
    return path


def unwritable(path: Path, error: OSError) -> UserError:
    """What a user learns of a file that cannot be written."""
    return UserError(
        f"{shown(path)}: cannot be written ({error.strerror}). Make room there, or give another --project."
    )
