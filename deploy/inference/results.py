"""Detection results of one image or frame.

Legend: n detections.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.deploy.inference.drawing import Annotations, Style, draw_annotations
from tessera.deploy.inference.input_images import ImageInput, to_pixels
from tessera.deploy.inference.sources.frames import Media
from tessera.utils.bit_depth import PixelRule, Pixels
from tessera.utils.errors import UserError
from tessera.utils.text import escape_control
from tessera.utils.types import Detections


class Box(NamedTuple):
    """One detection: corners in pixels of the image, confidence, class index and name, track id."""

    x1: float
    y1: float
    x2: float
    y2: float
    score: float
    class_id: int
    name: str
    track: int | None = None


@dataclass(frozen=True, eq=False)
class Result:
    """Detections of one image as read-only arrays; iterating yields a `Box` each.

    Attributes:
        boxes_xyxy: float32 (n, 4) in pixels of the upright image, inside it.
        scores: float32 (n,), descending.
        classes: int64 (n,), indices into `names`.
        source, media, frame, time_s: as in Frame.
        size_hw: height and width of the image.
        speed_ms: milliseconds of preprocessing, inference and NMS.
        pixels: the image, uint8 (H, W, 3) RGB, with `keep_images`.
        rule: conversion of more than 8 bits.
        track_ids: int64 (n,), from 1 in each source; -1 = no confirmed track. None = not tracked.
    """

    boxes_xyxy: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[np.int64]
    names: tuple[str, ...]
    source: str
    size_hw: tuple[int, int]
    media: Media = "image"
    frame: int | None = None
    time_s: float | None = None
    speed_ms: tuple[float, float, float] = (0.0, 0.0, 0.0)
    pixels: Pixels | None = None
    rule: PixelRule | None = None
    track_ids: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        for array in (self.boxes_xyxy, self.scores, self.classes):
            array.flags.writeable = False
        if self.track_ids is not None:
            self.track_ids.flags.writeable = False

    def __len__(self) -> int:
        return len(self.scores)

    def __iter__(self) -> Iterator[Box]:
        rows = zip(self.boxes_xyxy.tolist(), self.scores.tolist(), self.classes.tolist(), self._tracks(), strict=True)
        for (x1, y1, x2, y2), score, class_id, track in rows:
            yield Box(x1, y1, x2, y2, score, class_id, self.names[class_id], track)

    def __repr__(self) -> str:
        return f"Result({self.summary()})"

    def summary(self) -> str:
        """Return a line with the source and the detections of each class."""
        place = self.source if self.frame is None else f"{self.source} frame {self.frame}"
        counts = np.bincount(self.classes, minlength=len(self.names)) if len(self) else np.zeros(0, np.int64)
        found = ", ".join(f"{counts[c]} {self.names[c]}" for c in np.flatnonzero(counts).tolist())
        return escape_control(f"{place}: {found or 'nothing'}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON (docs/detect.md); numbers have all digits of float32."""
        height, width = self.size_hw
        boxes = self.boxes_xyxy.astype(str).astype(np.float64).tolist()
        scores = self.scores.astype(str).astype(np.float64).tolist()
        detections: list[dict[str, Any]] = [
            {"class": class_id, "name": self.names[class_id], "score": score, "box_xyxy": box}
            for class_id, score, box in zip(self.classes.tolist(), scores, boxes, strict=True)
        ]
        if self.track_ids is not None:
            for detection, track in zip(detections, self._tracks(), strict=True):
                detection["track"] = track
        return {
            "source": self.source,
            "frame": self.frame,
            "time_s": None if self.time_s is None else round(self.time_s, 6),
            "height": height,
            "width": width,
            "detections": detections,
        }

    def as_detections(self) -> Detections:
        return Detections(*(torch.tensor(array) for array in (self.boxes_xyxy, self.scores, self.classes)))

    def draw(
        self, image: ImageInput | None = None, *, line_width: int = 0, labels: bool = True, scores: bool = True
    ) -> Pixels:
        """Return a copy of the image, uint8 (H, W, 3) RGB, with boxes, names, confidences and track ids.

        Args:
            image: image to draw on; None = the stored one, or else the file.
            line_width: in pixels; 0 = by the size of the image.
            labels, scores: draw names, and confidences with them.
        """
        marks = Annotations(self.boxes_xyxy, self.classes, self.scores, self.track_ids)
        return draw_annotations(self._image(image), marks, self.names, Style(line_width, labels, scores))

    def crops(self, image: ImageInput | None = None) -> list[Pixels]:
        """Return crops of the boxes, uint8 (h, w, 3) RGB, at least one pixel; `image` as of `draw`."""
        pixels = self._image(image)
        low = np.minimum(np.floor(self.boxes_xyxy[:, :2]).astype(int), np.array(self.size_hw[::-1]) - 1)
        high = np.maximum(np.ceil(self.boxes_xyxy[:, 2:]).astype(int), low + 1)
        corners = np.concatenate((low, high), 1).tolist()
        return [pixels[top:bottom, left:right].copy() for left, top, right, bottom in corners]

    def _tracks(self) -> list[int | None]:
        if self.track_ids is None:
            return [None] * len(self)
        return [None if track < 0 else track for track in self.track_ids.tolist()]

    def _image(self, given: ImageInput | None) -> Pixels:
        if given is not None:
            pixels = to_pixels(given, pixels=self.rule)
        elif self.pixels is not None:
            pixels = self.pixels
        elif self.media == "image" and Path(self.source).is_file():
            pixels = to_pixels(Path(self.source), pixels=self.rule)
        else:
            raise UserError(
                f"{self.source}: the image was not stored. Give it here, or call detector(source, keep_images=True)."
            )
        if pixels.shape[:2] != self.size_hw:
            found, expected = (f"{shape[1]} x {shape[0]}" for shape in (pixels.shape, self.size_hw))
            raise UserError(
                f"{self.source}: found an image of {found} pixels, expected {expected} as in the detection."
            )
        return pixels
