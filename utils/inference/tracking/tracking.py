"""`--track`: each object's id over the frames of its source."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tessera.utils.errors import ConfigError
from tessera.utils.inference.results import Result
from tessera.utils.inference.sources.frames import SourceEvent
from tessera.utils.inference.sources.origins import Origin
from tessera.utils.inference.tracking.byte_tracks import NO_TRACK, ByteTracks, TrackingPackages

log = logging.getLogger(__name__)

NOTHING_MOVES = (
    "--track: found pictures alone, each a source of its own; expected a video or a stream. Leave --track out."
)
_OVER = frozenset({"ended", "damaged", "unreadable"})
_STILL = frozenset({"picture", "unreadable"})


class Tracking:
    """Gives results their ids; one object for one run over sources, and for one thread.

    Every source is tracked for itself, its ids count from 1. A gap in a stream ends all its tracks: what comes after it
    has new ids.

    Args:
        sure: of each class the least score of a detection that begins a track.
        across_classes: a track may change its class, as where boxes of all classes suppress each other; else each class
            is tracked for itself.

    Raises:
        MissingExtra: a package is not installed.
    """

    def __init__(self, sure: Sequence[float], *, across_classes: bool = False) -> None:
        self._packages, self._sure, self._across_classes = TrackingPackages(), tuple(sure), across_classes
        self._sources: dict[str, _SourceTracks] = {}

    def __call__(self, result: Result) -> Result:
        """The result with its ids; that of a picture, which is a source of its own, as it is.

        Args:
            result: of the next frame of its source.
        """
        if result.media == "picture":
            return result
        if result.source not in self._sources:
            self._sources[result.source] = _SourceTracks(self._packages, self._sure, self._across_classes)
        return self._sources[result.source].add(result)

    def event(self, event: SourceEvent) -> None:
        """Take what happened to a source, between its frames."""
        if event.kind in _OVER:
            self._sources.pop(event.source, None)
        elif event.kind in ("gap", "reconnected") and event.source in self._sources:
            self._sources[event.source].end_all()


class _SourceTracks:
    """The tracks of one source; arguments as of `Tracking`."""

    def __init__(self, packages: TrackingPackages, sure: Sequence[float], across_classes: bool) -> None:
        self._packages, self._sure, self._across_classes = packages, sure, across_classes
        self._ids, self._groups = itertools.count(1), dict[int, ByteTracks]()

    def end_all(self) -> None:
        """Nothing that comes belongs to what was there."""
        self._groups.clear()

    def add(self, result: Result) -> Result:
        """The result with its ids."""
        groups = np.zeros_like(result.classes) if self._across_classes else result.classes
        for group in np.unique(groups).tolist():
            if group not in self._groups:
                sure = min(self._sure) if self._across_classes else self._sure[group]
                self._groups[group] = ByteTracks(self._packages, sure, self._ids)
        ids = np.full(len(result), NO_TRACK, np.int64)
        for group, tracks in self._groups.items():  # those without a detection too: their time goes on
            rows = np.flatnonzero(groups == group)
            ids[rows] = tracks.update(result.boxes_xyxy[rows], result.scores[rows], result.time_s)
        return replace(result, track_ids=ids)


def check_trackable(origins: Sequence[Origin]) -> None:
    """Refuse sources that are pictures alone; warn where pictures are among them.

    Args:
        origins: what will be read.

    Raises:
        ConfigError: no source can be a video or a stream.
    """
    pictures = sum(origin.form == "picture" for origin in origins)
    if all(origin.form in _STILL for origin in origins):
        raise ConfigError(NOTHING_MOVES)
    if pictures:
        log.warning(f"--track: {pictures} of {len(origins)} sources are pictures, whose objects get no ids.")
