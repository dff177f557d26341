"""`--track`: each object's id over the frames of its source, by ByteTrack of the Apache-licensed package `trackers`."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.utils.environment import keep_font_list
from tessera.utils.errors import ConfigError
from tessera.utils.inference.results import Result
from tessera.utils.inference.sources.frames import SourceEvent
from tessera.utils.inference.sources.source_arguments import Origin
from tessera.utils.machine.optional_packages import import_extra

log = logging.getLogger(__name__)

NOTHING_MOVES = (
    "--track: found pictures alone, each a source of its own; expected a video or a stream. Leave --track out."
)
_OVER = frozenset({"ended", "damaged", "unreadable"})
_STILL = frozenset({"picture", "unreadable"})
_FRAMES_A_SECOND = 30.0  # the unit of the motion model; times of frames are given, so that any rate will do
_LOST_FRAMES = 30  # of that unit, that a track outlives its last detection
NO_TRACK = -1


class Tracking:
    """Gives results their ids; one object for one run over sources, and for one thread.

    Every source is tracked for itself, its ids count from 1. A gap in a stream ends all its tracks: what comes after it
    has new ids.

    Args:
        sure: of each class the least score of a detection that begins a track.
        across_classes: a track may change its class, as where boxes of all classes suppress each other; else each class
            is tracked for itself.
    """

    def __init__(self, sure: Sequence[float], *, across_classes: bool = False) -> None:
        self._packages, self._sure, self._across_classes = TrackingPackages(), tuple(sure), across_classes
        self._ids = dict[str, Iterator[int]]()  # of each source
        self._groups = dict[str, dict[int, ByteTracks]]()  # of each source, by class

    def __call__(self, result: Result) -> Result:
        """The result of the next frame of its source with its ids; that of a picture as it is."""
        if result.media == "picture":
            return result
        next_ids = self._ids.setdefault(result.source, itertools.count(1))
        groups = self._groups.setdefault(result.source, {})
        classes = np.zeros_like(result.classes) if self._across_classes else result.classes
        for group in np.unique(classes).tolist():
            if group not in groups:
                sure = min(self._sure) if self._across_classes else self._sure[group]
                groups[group] = ByteTracks(self._packages, sure, next_ids)
        ids = np.full(len(result), NO_TRACK, np.int64)
        for group, tracks in groups.items():  # those without a detection too: their time goes on
            rows = np.flatnonzero(classes == group)
            ids[rows] = tracks.update(result.boxes_xyxy[rows], result.scores[rows], result.time_s)
        return replace(result, track_ids=ids)

    def event(self, event: SourceEvent) -> None:
        """Take what happened to a source, between its frames."""
        if event.kind in (*_OVER, "gap", "reconnected"):
            self._groups.pop(event.source, None)
        if event.kind in _OVER:
            self._ids.pop(event.source, None)


class TrackingPackages:
    """`trackers` and `supervision`, imported when the first one is made."""

    def __init__(self) -> None:
        keep_font_list()
        with warnings.catch_warnings():  # both packages, and what they import, put filters of their own first
            self.trackers: Any = import_extra("trackers", "track", "--track")
            self.supervision: Any = import_extra("supervision", "track", "--track")


class ByteTracks:
    """Tracks of boxes of one class, or of all as if they were one, frame after frame.

    A detection that no track awaits begins one where it is sure, and the track has an id from the second frame in a
    row on; one that is less sure can but continue a track. A track ends a second after its last detection.
    """

    def __init__(self, packages: TrackingPackages, sure: float, ids: Iterator[int]) -> None:
        self._next_ids, self._ids = ids, dict[int, int]()  # by the tracker's own ids, of the tracks that live
        self._detections = packages.supervision.Detections
        self._tracker = packages.trackers.ByteTrackTracker(
            lost_track_buffer=_LOST_FRAMES,
            frame_rate=_FRAMES_A_SECOND,
            track_activation_threshold=sure,
            high_conf_det_threshold=sure,
        )
        self._time_s: float | None = None

    def update(
        self, boxes_xyxy: NDArray[np.float32], scores: NDArray[np.float32], time_s: float | None
    ) -> NDArray[np.int64]:
        """The id of each detection's track, -1 where it has none that is confirmed; of a frame without any too.

        A time that is unknown, or not later than the last, counts as a thirtieth of a second after it.
        """
        later = time_s is not None and (self._time_s is None or time_s > self._time_s)
        self._time_s = time_s if later else self._time_s
        rows = np.arange(len(scores))
        given = self._detections(
            xyxy=boxes_xyxy.astype(np.float64), confidence=scores.astype(np.float64), data={"row": rows}
        )
        found = self._tracker.update(given, timestamp=time_s if later else None)
        ids = np.full(len(scores), NO_TRACK, np.int64)
        if len(found):
            numbers = found.tracker_id.tolist()
            for row, number in zip(found.data["row"].tolist(), numbers, strict=True):  # in an order of its own
                if number != NO_TRACK:
                    if number not in self._ids:
                        self._ids[number] = next(self._next_ids)
                    ids[row] = self._ids[number]
        living = {track.tracker_id for track in self._tracker.tracks}
        self._ids = {number: own for number, own in self._ids.items() if number in living}
        return ids


def check_trackable(origins: Sequence[Origin]) -> None:
    """Refuse sources that are pictures alone, with a ConfigError; warn where pictures are among them."""
    pictures = sum(origin.form == "picture" for origin in origins)
    if all(origin.form in _STILL for origin in origins):
        raise ConfigError(NOTHING_MOVES)
    if pictures:
        log.warning(f"--track: {pictures} of {len(origins)} sources are pictures, whose objects get no ids.")
