"""Output writers of detect.py: images, videos, labels, crops, CSV, JSON, auto-labels, in a background thread.

A source gets a stem, its path inside the given folder without the suffix. Files are named stem_frame_crop.suffix.
`OutputPaths` prevents equal stems, an image named like a frame (a_12.jpg beside a.mp4) and a folder named like a file.
Names that differ in case or in the Unicode form of accents count as equal.
"""

from __future__ import annotations

import csv
import io
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from tessera.data.labels.classes import match_classes
from tessera.data.labels.label_files import AUTO_LABELS, AUTO_LABELS_SCHEMA, MOST_AUTO_LABELS
from tessera.data.source.dataset_yaml import load_label_names
from tessera.deploy.inference.drawing import Style
from tessera.deploy.inference.result_files import MOST_BYTES, name_key, output_path, save_txt, unique_name
from tessera.deploy.inference.results import Result
from tessera.deploy.inference.sources.frames import Frame, SourceEvent
from tessera.deploy.inference.video_writer import NoCodecError, VideoWriter, unwritable
from tessera.utils.bit_depth import Pixels
from tessera.utils.errors import UserError
from tessera.utils.files import open_plain, sha256, short_name, write_whole
from tessera.utils.flags.program import program_version
from tessera.utils.machine.opencv import cv2
from tessera.utils.text import escape_control, first_of, harmless_cell, strict_json

log = logging.getLogger(__name__)

SCHEMA = "tessera-detections 1"  # of predictions.jsonl, see docs/detect.md
_IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})  # other formats become .jpg
_LONGEST_SIDES = {".jpg": 65_500, ".jpeg": 65_500, ".webp": 16_383}  # limits of formats or their libraries in pixels
_WAITING = 3  # most queued results, with their images
_CSV_COLUMNS = ("Image Name", "Prediction", "Confidence", "Frame", "x1", "y1", "x2", "y2")
_NOT_IN_NAMES = re.compile(r"[^\w .()+-]+")
_LIKE_A_FRAME = re.compile(r"_(?:0|[1-9][0-9]*)\Z")


class Output:
    """A writer of results; this one ignores them."""

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        """Write the result of a frame; a UserError where a file cannot be written."""

    def event(self, event: SourceEvent) -> None:
        """Write an event of a source."""

    def close(self) -> None:
        """Finish the files."""


class BackgroundWriter(Output):
    """Outputs that write in a background thread, in order.

    An error of an output is raised once, by one of the next calls; nothing is written after it.
    """

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._outputs, self._waiting = outputs, deque[Future[None]]()
        self._pool = ThreadPoolExecutor(1, "writing")
        self._is_whole = True

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        self._submit(lambda output: output.add(result, frame, place))

    def event(self, event: SourceEvent) -> None:
        self._submit(lambda output: output.event(event))

    def close(self) -> None:
        with ExitStack() as stack:
            for output in self._outputs:
                stack.callback(output.close)
            stack.callback(self._pool.shutdown)
            while self._waiting:
                self._waiting.popleft().result()

    def _submit(self, act: Callable[[Output], None]) -> None:
        self._waiting.append(self._pool.submit(self._run, act))
        if len(self._waiting) > _WAITING:
            wait([self._waiting[0]])  # after Ctrl-C here the rest is written, and `close` raises its error
            self._waiting.popleft().result()

    def _run(self, act: Callable[[Output], None]) -> None:
        if self._is_whole:
            self._is_whole = False  # stays so where an output raises
            for output in self._outputs:
                act(output)
            self._is_whole = True


class AnnotatedFiles(Output):
    """Annotated images and videos: `folder`/place with the source's suffix, .mp4 for videos and streams.

    `fail` receives a message for each video that cannot be written.
    """

    def __init__(self, folder: Path, style: Style, vid_stride: int, fail: Callable[[str], None]) -> None:
        self._folder, self._style, self._vid_stride, self._fail = folder, style, vid_stride, fail
        self._fps: dict[str, float | None] = {}
        self._videos: dict[str, VideoWriter | None] = {}  # None = no codec

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        width, labels, scores = self._style
        drawn = result.draw(frame.pixels, line_width=width, labels=labels, scores=scores)
        if frame.media == "image":
            suffix = frame.name.suffix.lower()
            _write_image(self._folder, place, suffix if suffix in _IMAGE_SUFFIXES else ".jpg", drawn)
            return
        if frame.source not in self._videos:
            fps = self._fps.get(frame.source)
            path = with_ending(self._folder, place, ".mp4")
            self._videos[frame.source] = VideoWriter(path, fps / self._vid_stride if fps else None)
        writer = self._videos[frame.source]
        try:
            if writer is not None:
                writer.write(drawn, frame.time_s)
        except NoCodecError as error:
            self._videos[frame.source] = None
            self._fail(str(error))

    def event(self, event: SourceEvent) -> None:
        if event.facts is not None:
            self._fps[event.source] = event.facts.fps
        if event.kind in ("ended", "damaged", "unreadable"):
            writer = self._videos.pop(event.source, None)
            if writer is not None:
                writer.close()

    def close(self) -> None:
        with ExitStack() as stack:  # all of them, even if one raises
            for writer in self._videos.values():
                if writer is not None:
                    stack.callback(writer.close)
            self._videos = {}


class LabelFiles(Output):
    """`--save-txt`: `folder`/place.txt, for frames place_12.txt; rows as val.py's, with track ids at the end."""

    def __init__(self, folder: Path, save_conf: bool) -> None:
        self._folder, self._save_conf = folder, save_conf

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        self.write(result, frame, place)

    def write(self, result: Result, frame: Frame, place: PurePath) -> Path:
        stem = str(place) if frame.frame is None else f"{place}_{frame.frame}"
        try:
            ids = None if result.track_ids is None else result.track_ids.tolist()
            return save_txt(self._folder, stem, result.as_detections(), result.size_hw, self._save_conf, ids)
        except OSError as error:
            raise unwritable(self._folder / f"{stem}.txt", error) from error


class CropFiles(Output):
    """`--save-crop`: `folder`/class/place_frame_number.jpg."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder, self._classes = folder, class_folders(names)

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        of_frame = "" if frame.frame is None else f"_{frame.frame}"
        for number, (box, crop) in enumerate(zip(result, result.crops(frame.pixels), strict=True)):
            name = place.with_name(f"{place.name}{of_frame}_{number}")
            _write_image(self._folder / self._classes[box.name], name, ".jpg", crop)


class LineFile(Output):
    """A new UTF-8 file of whole lines, each flushed immediately for readers; invalid bytes of names are escaped.

    Raises:
        UserError: of each method, where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.unlink(missing_ok=True)  # a link may lead to a user's file, and a pipe may have no reader
            self._file = path.open("xb", buffering=0)
        except OSError as error:
            raise unwritable(path, error) from error

    def append(self, lines: str) -> None:
        """Append lines, all or none of them."""
        rest = memoryview(lines.encode(errors="backslashreplace"))
        begun = self._file.tell()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(begun)
                if not begun and self._path.is_file():
                    self._path.unlink()
            raise unwritable(self._path, error) from error

    def close(self) -> None:
        self._file.close()


class CsvFile(LineFile):
    """`--save-csv`: a row per detection; texts that a spreadsheet would run as a formula begin with '."""

    def __init__(self, path: Path, track: bool = False) -> None:
        super().__init__(path)
        self._track = track
        self._write([[*_CSV_COLUMNS, "Track"] if track else _CSV_COLUMNS])

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        rows = []
        for row in result.to_dict()["detections"]:
            ids = [row.get("track")] if self._track else []
            texts = map(harmless_cell, (frame.source, row["name"]))
            rows.append([*texts, row["score"], frame.frame, *row["box_xyxy"], *ids])
        self._write(rows)

    def _write(self, rows: Iterable[Iterable[object]]) -> None:
        text = io.StringIO(newline="")
        csv.writer(text).writerows(rows)
        self.append(text.getvalue())


class JsonLines(LineFile):
    """`--save-json`: a line for the run, each frame and each event."""

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        super().__init__(path)
        self._write({"schema": SCHEMA, **run, **program_version()})

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        self._write(result.to_dict())

    def event(self, event: SourceEvent) -> None:
        self._write(event.to_dict())

    def _write(self, values: Mapping[str, Any]) -> None:
        self.append(strict_json(values) + "\n")


class AutoLabelFiles(LineFile):
    """`--auto-label`: label files, and a list that marks them as automatic; an existing list is continued.

    `names` and `class_of` are those of `label_classes`.
    """

    def __init__(self, folder: Path, weights: str, names: Sequence[str], class_of: Sequence[int] = ()) -> None:
        self._folder, path = folder, folder / AUTO_LABELS
        self._names, self._class_of = tuple(names), np.array(class_of, np.int64)
        self._labels = LabelFiles(folder, save_conf=False)
        folder.mkdir(parents=True, exist_ok=True)
        earlier = ""
        if path.is_file() and not path.is_symlink():
            try:
                with open_plain(path, MOST_AUTO_LABELS) as file:
                    earlier = file.read().decode(errors="replace")
            except OSError as error:
                raise unwritable(path, error) from error
        super().__init__(path)
        run = {"schema": AUTO_LABELS_SCHEMA, "weights": weights, "names": list(names), **program_version()}
        self.append(earlier + strict_json(run) + "\n")

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        if len(self._class_of):
            classes = self._class_of[result.classes]
            stays = classes >= 0
            boxes_xyxy, scores = result.boxes_xyxy[stays], result.scores[stays]
            result = replace(result, boxes_xyxy=boxes_xyxy, scores=scores, classes=classes[stays], names=self._names)
        path = self._labels.write(result, frame, place)
        rounded = [round(score, 4) for score in result.scores.tolist()]
        entry = {"labels": path.relative_to(self._folder).as_posix(), "sha256": sha256(path), "scores": rounded}
        self.append(strict_json(entry) + "\n")


def label_classes(names: Sequence[str], data: str) -> tuple[Sequence[str], tuple[int, ...]]:
    """Return the class names of auto-labels, and the index of each class of the model among them.

    They are those of the dataset `data`, matched by name, -1 = missing; without `data`, the model's own and ().
    A UserError where the dataset is invalid or has none of the classes.
    """
    if not data:
        return names, ()
    wanted = load_label_names(data)
    class_of = match_classes(wanted, names)
    left_out = [name for name, number in zip(names, class_of, strict=True) if number < 0]
    if len(left_out) == len(names):
        raise UserError(
            f"--data {data}: none of its {len(wanted)} classes matches one of the model's {len(names)} by name. Give "
            "the dataset to be labelled."
        )
    if left_out:
        log.info(f"--auto-label: ignoring classes that are not in {data}: {escape_control(first_of(left_out, 5))}.")
    return wanted, class_of


def _write_image(folder: Path, place: PurePath, suffix: str, pixels: Pixels) -> None:
    """Write an image in the format of `suffix`, or as PNG where it is too large for that."""
    options = [cv2.IMWRITE_JPEG_QUALITY, 95] if suffix in (".jpg", ".jpeg") else []
    if max(pixels.shape) > _LONGEST_SIDES.get(suffix, 1 << 31):
        suffix = ".png"
    done, encoded = cv2.imencode(suffix, cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), options)
    assert done, (suffix, pixels.shape)
    path = with_ending(folder, place, suffix)
    try:
        write_whole(path, encoded.tobytes())
    except OSError as error:
        raise unwritable(path, error) from error


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
