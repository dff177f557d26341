"""What detect.py writes, each kind of file as an object that takes results and events as they come."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import IO, Any

from utils.evaluation.label_files import save_txt
from utils.inference.pictures import Pixels
from utils.inference.places import as_folder, unwritable, with_ending
from utils.inference.results import Result
from utils.inference.sources.frames import Frame, SourceEvent
from utils.inference.video_writer import VideoWriter
from utils.machine.opencv import cv2
from utils.report.pictures import Style

SCHEMA = "tessera-detections 1"  # of predictions.jsonl, see docs/detect.md
_PICTURES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})  # written as they came; else .jpg
_CSV_COLUMNS = ("Image Name", "Prediction", "Confidence", "Frame", "x1", "y1", "x2", "y2")


class Output:
    """Takes what was found; this one drops it."""

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        """Take the result of a frame.

        Raises:
            UserError: a file cannot be written.
        """

    def event(self, event: SourceEvent) -> None:
        """Take what happened to a source."""

    def close(self) -> None:
        """Finish the files."""


class PictureFiles(Output):
    """Pictures with boxes, and videos: `folder`/place with the source's suffix, .mp4 for videos and streams.

    Args:
        folder: of the run.
        style: how boxes are drawn.
        vid_stride: of the frames.
    """

    def __init__(self, folder: Path, style: Style, vid_stride: int) -> None:
        self._folder, self._style, self._vid_stride = folder, style, vid_stride
        self._fps: dict[str, float | None] = {}
        self._videos: dict[str, VideoWriter] = {}

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        """As Output."""
        width, labels, scores = self._style
        drawn = result.draw(frame.pixels, line_width=width, labels=labels, scores=scores)
        if frame.media == "picture":
            suffix = frame.name.suffix.lower()
            _save(with_ending(self._folder, place, suffix if suffix in _PICTURES else ".jpg"), drawn)
            return
        if frame.source not in self._videos:
            fps = self._fps.get(frame.source)
            path = with_ending(self._folder, place, ".mp4")
            self._videos[frame.source] = VideoWriter(path, fps / self._vid_stride if fps else None)
        self._videos[frame.source].write(drawn, frame.time_s)

    def event(self, event: SourceEvent) -> None:
        """As Output."""
        if event.facts is not None:
            self._fps[event.source] = event.facts.fps
        if event.kind in ("ended", "damaged", "unreadable") and event.source in self._videos:
            self._videos.pop(event.source).close()

    def close(self) -> None:
        """As Output."""
        while self._videos:
            self._videos.popitem()[1].close()


class LabelFiles(Output):
    """`--save-txt`: `folder`/place.txt, for frames place_12.txt; rows as val.py writes them, with ids at their ends."""

    def __init__(self, folder: Path, save_conf: bool) -> None:
        self._folder, self._save_conf = folder, save_conf

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        """As Output."""
        stem = str(place) if frame.frame is None else f"{place}_{frame.frame}"
        try:
            ids = None if result.track_ids is None else result.track_ids.tolist()
            save_txt(self._folder, stem, result.as_detections(), result.size_hw, self._save_conf, ids)
        except OSError as error:
            raise unwritable(self._folder / f"{stem}.txt", error) from error


class CropFiles(Output):
    """`--save-crop`: `folder`/class/place_frame_number.jpg."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        """As Output."""
        moment = "" if frame.frame is None else f"_{frame.frame}"
        for number, (box, crop) in enumerate(zip(result, result.crops(frame.pixels), strict=True)):
            _save(with_ending(self._folder / as_folder(box.name), place, f"{moment}_{number}.jpg"), crop)


class CsvFile(Output):
    """`--save-csv`: a row for each detection.

    Args:
        path: the file.
        track: with a column for ids, empty where there is none.
    """

    def __init__(self, path: Path, track: bool = False) -> None:
        self._track, self._file = track, _open(path)
        self._rows = csv.writer(self._file)
        self._rows.writerow([*_CSV_COLUMNS, "Track"] if track else _CSV_COLUMNS)

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        """As Output."""
        for row in result.to_dict()["detections"]:
            ids = [row.get("track")] if self._track else []
            with _room_for(self._file):
                self._rows.writerow([frame.source, row["name"], row["score"], frame.frame, *row["box_xyxy"], *ids])

    def close(self) -> None:
        """As Output."""
        with _room_for(self._file):
            self._file.close()


class JsonLines(Output):
    """`--save-json`: a line for the run, one for each frame and one for each event, as they come.

    Args:
        path: the file.
        run: what the first line says beside the schema.
    """

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        self._file = _open(path)
        self._write({"schema": SCHEMA, **run})

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        """As Output."""
        self._write(result.to_dict())

    def event(self, event: SourceEvent) -> None:
        """As Output."""
        self._write(event.to_dict())

    def close(self) -> None:
        """As Output."""
        with _room_for(self._file):
            self._file.close()

    def _write(self, values: Mapping[str, Any]) -> None:
        # A path may hold bytes that are no text: json writes them as escapes, so that every line is plain ASCII.
        with _room_for(self._file):
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()  # somebody may read along


def _open(path: Path) -> IO[str]:
    try:
        return path.open("w", encoding="utf-8", errors="surrogateescape", newline="")
    except OSError as error:
        raise unwritable(path, error) from error


@contextmanager
def _room_for(file: IO[str]) -> Iterator[None]:
    """What the system refuses to write is a user's error: the disk is full."""
    try:
        yield
    except OSError as error:
        raise unwritable(Path(file.name), error) from error


def _save(path: Path, pixels: Pixels) -> None:
    options = [cv2.IMWRITE_JPEG_QUALITY, 95] if path.suffix.lower() in (".jpg", ".jpeg") else []
    done, encoded = cv2.imencode(path.suffix, cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), options)
    assert done, (path.suffix, pixels.shape)
    try:
        path.write_bytes(encoded.tobytes())
    except OSError as error:
        raise unwritable(path, error) from error
