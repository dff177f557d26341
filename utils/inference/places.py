"""Where the results of a picture go below the folder of a run: below the path that its source has there."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

from utils.errors import UserError
from utils.inference.sources.frames import Frame
from utils.text import shown

_NOT_IN_NAMES = re.compile(r"[^\w .()+-]+")


class Places:
    """A name for each source, such that no two share one; upper and lower case count as equal.

    The path without its suffix where that is free; else with it ("1.png" beside "1.jpg"), else with a number.
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._running: dict[str, PurePath] = {}  # of videos and streams, which have many frames

    def of(self, frame: Frame) -> PurePath:
        """A path without a suffix, relative to any folder of results."""
        if frame.media == "picture":
            return self._free(frame.name)
        if frame.source not in self._running:
            self._running[frame.source] = self._free(frame.name)
        return self._running[frame.source]

    def _free(self, name: PurePath) -> PurePath:
        stem, number = name.with_suffix("") if name.suffix else name, 1
        place = stem
        while str(place).casefold() in self._taken:
            place = name if number == 1 else stem.with_name(f"{stem.name}-{number}")
            number += 1
        self._taken.add(str(place).casefold())
        return place


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


def as_folder(class_name: str) -> str:
    """A class as the name of a folder."""
    return _NOT_IN_NAMES.sub("_", class_name).strip(" .") or "_"


def unwritable(path: Path, error: OSError) -> UserError:
    """What a user learns of a file that cannot be written."""
    return UserError(
        f"{shown(path)}: cannot be written ({error.strerror}). Make room there, or give another --project."
    )
