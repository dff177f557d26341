"""Object tracking for `--track`, by ByteTrack of the package `trackers` (Apache-2.0)."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.deploy.inference.results import Result
from tessera.deploy.inference.sources.frames import SourceEvent
from tessera.deploy.inference.sources.source_arguments import Origin
from tessera.utils.errors import ConfigError
from tessera.utils.machine.optional_packages import import_extra

log = logging.getLogger(__name__)

NO_VIDEO = "--track: found only images, expected a video or a stream. Remove --track."
_OVER = frozenset({"ended", "damaged", "unreadable"})
_STILL = frozenset({"image", "unreadable"})
_FRAMES_A_SECOND = 30.0  # unit of the motion model; frames have times, so that their rate does not matter
_LOST_FRAMES = 30  # of that unit, after which a track without detections ends
NO_TRACK = -1


class Tracking:
    """A tracker of several sources, for one thread.

    Each source has its own ids from 1. A gap in a stream ends all its tracks. A score of at least `sure` of the class
    starts a track; `across_classes` lets it change its class, as with class-agnostic NMS.
    """

    def __init__(self, sure: Sequence[float], *, across_classes: bool = False) -> None:
        self._packages, self._sure, self._across_classes = tracking_packages(), tuple(sure), across_classes
        self._ids = dict[str, Iterator[int]]()  # of each source
        self._groups = dict[str, dict[int, ByteTracks]]()  # of each source, by class

    def __call__(self, result: Result) -> Result:
        """Return the result of the next frame of its source with track ids; an image's result is unchanged."""
        if result.media == "image":
            return result
        next_ids = self._ids.setdefault(result.source, itertools.count(1))
        groups = self._groups.setdefault(result.source, {})
        classes = np.zeros_like(result.classes) if self._across_classes else result.classes
        for group in np.unique(classes).tolist():
            if group not in groups:
                sure = min(self._sure) if self._across_classes else self._sure[group]
                groups[group] = ByteTracks(self._packages, sure, next_ids)
        ids = np.full(len(result), NO_TRACK, np.int64)
        for group, tracks in groups.items():  # without a detection too, since their time passes
            rows = np.flatnonzero(classes == group)
            ids[rows] = tracks.update(result.boxes_xyxy[rows], result.scores[rows], result.time_s)
        return replace(result, track_ids=ids)

    def event(self, event: SourceEvent) -> None:
        """Handle an event of a source."""
        if event.kind in (*_OVER, "gap", "reconnected"):
            self._groups.pop(event.source, None)
        if event.kind in _OVER:
            self._ids.pop(event.source, None)


def tracking_packages() -> tuple[Any, Any]:
    """Import `trackers` and `supervision`."""
    with warnings.catch_warnings():  # the packages install filters
        return import_extra("trackers", "track", "--track"), import_extra("supervision", "track", "--track")


class ByteTracks:
    """ByteTrack for the boxes of one class, or of all classes together.

    An unmatched detection of at least `sure` starts a track, which gets its id in the second consecutive frame. Weaker
    detections only continue tracks. A track ends one second after its last detection.
    """

    def __init__(self, packages: tuple[Any, Any], sure: float, ids: Iterator[int]) -> None:
        self._next_ids, self._ids = ids, dict[int, int]()  # by the tracker's own ids, of the tracks that live
        trackers, supervision = packages
        self._detections = supervision.Detections
        self._tracker = trackers.ByteTrackTracker(
            lost_track_buffer=_LOST_FRAMES,
            frame_rate=_FRAMES_A_SECOND,
            track_activation_threshold=sure,
            high_conf_det_threshold=sure,
        )
        self._time_s: float | None = None

    def update(
        self, boxes_xyxy: NDArray[np.float32], scores: NDArray[np.float32], time_s: float | None
    ) -> NDArray[np.int64]:
        """Return the track id of each detection, -1 = no confirmed track; call it for empty frames too.

        A time that is None or not later than the last counts as 1/30 s after it.
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
            for row, number in zip(found.data["row"].tolist(), numbers, strict=True):  # in another order
                if number != NO_TRACK:
                    if number not in self._ids:
                        self._ids[number] = next(self._next_ids)
                    ids[row] = self._ids[number]
        living = {track.tracker_id for track in self._tracker.tracks}
        self._ids = {number: own for number, own in self._ids.items() if number in living}
        return ids


def check_trackable(origins: Sequence[Origin]) -> None:
    """Raise a ConfigError where all sources are images; warn where some are."""
    images = sum(origin.form == "image" for origin in origins)
    if all(origin.form in _STILL for origin in origins):
        raise ConfigError(NO_VIDEO)
    if images:
        log.warning(f"--track: {images} of {len(origins)} sources are images, whose objects get no ids.")
