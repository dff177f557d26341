"""ByteTrack of the Apache-licensed package `trackers` for one class, or for all as if they were one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.utils.environment import keep_font_list
from tessera.utils.machine.extras import import_extra

_FRAMES_A_SECOND = 30.0  # the unit of the motion model; times of frames are given, so that any rate will do
_LOST_FRAMES = 30  # of that unit, that a track outlives its last detection
NO_TRACK = -1


class TrackingPackages:
    """`trackers` and `supervision`, imported when the first one is made.

    Raises:
        MissingExtra: one is not installed, or does not load.
    """

    def __init__(self) -> None:
        keep_font_list()
        with warnings.catch_warnings():  # both packages, and what they import, put filters of their own first
            self.trackers: Any = import_extra("trackers", "track", "--track")
            self.supervision: Any = import_extra("supervision", "track", "--track")


class ByteTracks:
    """Tracks of boxes, frame after frame.

    A detection that no track awaits begins one where it is sure, and the track has an id from the second frame in a
    row on; one that is less sure can but continue a track. A track ends a second after its last detection.

    Args:
        packages: what computes.
        sure: least score of a detection that begins a track.
        ids: for the tracks, in the order in which they are confirmed.
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
        """Take the detections of the next frame, also where there are none.

        Args:
            boxes_xyxy: (n, 4), pixels.
            scores: (n,).
            time_s: of the frame; None where it is not known. One that is not later than the last counts as unknown: the
                frame comes a thirtieth of a second after it.

        Returns:
            int64 (n,), the id of each detection's track; -1 where it has none that is confirmed.
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
