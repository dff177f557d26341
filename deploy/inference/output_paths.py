"""Unique output paths of the results in a run directory.

A source gets a stem, its path inside the given folder without the suffix. Files are named stem_frame_crop.suffix.
`OutputPaths` prevents equal stems, an image named like a frame (a_12.jpg beside a.mp4) and a folder named like a file.
Names that differ in case or in the Unicode form of accents count as equal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from tessera.deploy.inference.sources.frames import Frame, SourceEvent
from tessera.utils.errors import UserError
from tessera.utils.evaluation.result_files import MOST_BYTES, name_key, output_path, unique_name
from tessera.utils.files import short_name
from tessera.utils.text import shown

_NOT_IN_NAMES = re.compile(r"[^\w .()+-]+")
_LIKE_A_FRAME = re.compile(r"_(?:0|[1-9][0-9]*)\Z")


class OutputPaths:
    """A unique output stem for each source.

    It is the path without its suffix if that is free, else with it ("1.png" beside "1.jpg"), else with a number. A name
    that is too long for an ending is shortened and ends in a digest.
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._moving: set[str] = set()  # those of videos and streams
        self._like_frames: set[str] = set()  # stems whose frames would be named like an image
        self._numbers: dict[PurePath, int] = {}  # next number to try
        self._running: dict[str, PurePath] = {}

    def of(self, frame: Frame) -> PurePath:
        """Return the stem of a frame, relative to an output folder."""
        if frame.media == "image":
            return self._free(frame.name, moving=False)
        if frame.source not in self._running:
            self._running[frame.source] = self._free(frame.name, moving=True)
        return self._running[frame.source]

    def event(self, event: SourceEvent) -> None:
        """Forget a video that is over: if it is given again, it gets another stem."""
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
        whole = output_path(name)
        stem = output_path(name.with_name(os.path.splitext(name.name)[0]))  # noqa: PTH122 - "..jpg" has no suffix
        yield stem
        yield whole
        while True:
            number = self._numbers[stem] = self._numbers.get(stem, 1) + 1
            yield stem.with_name(f"{stem.name}-{number}")


def class_folders(names: Sequence[str]) -> dict[str, str]:
    """Return a unique folder for each class name."""
    taken: set[str] = set()
    plain = {name: short_name(_NOT_IN_NAMES.sub("_", name).strip(" .") or "_", MOST_BYTES) for name in names}
    return {name: unique_name(folder, taken) for name, folder in plain.items()}


def with_ending(folder: Path, place: PurePath, ending: str) -> Path:
    """Return `folder`/`place` with an ending such as ".txt" after creating the parent folder."""
    path = folder / place.with_name(f"{place.name}{ending}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path.parent, error) from error
    return path


def unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{shown(path)}: cannot be written ({error.strerror}). Free space there, or give another --project."
    )
