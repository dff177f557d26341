"""Detection from Python: `for result in tessera.Detector("best.pt")(source): …`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from tessera.data.feed.tile_grid import DEFAULT_OVERLAP
from tessera.data.source.image_header import breaks_off
from tessera.models.nms import Suppression
from tessera.utils.bit_depth import Pixels
from tessera.utils.environment import Launch
from tessera.utils.errors import ConfigError, UserError, did_you_mean
from tessera.utils.inference.input_images import Color, DarkNote, Picture, to_pixels
from tessera.utils.inference.results import Result
from tessera.utils.inference.sources.frames import Frame, SourceEvent
from tessera.utils.inference.sources.sources import BROKEN_OFF, Sources, open_sources
from tessera.utils.inference.tracking import NOTHING_MOVES, Tracking, check_trackable
from tessera.utils.machine.choose_device import choose_accelerator
from tessera.utils.ranks.world import World
from tessera.utils.runtime.model import DEFAULT_CONF, DEFAULT_IOU, Backend, PictureBackend
from tessera.utils.runtime.open_model import open_model
from tessera.utils.runtime.pipeline import Pipeline, picture_size, suppression_of
from tessera.utils.text import first_of, shown

log = logging.getLogger(__name__)

MAX_DET = 1000
Confidence = float | Literal["auto"] | None
Source = Picture | int | Iterable[Picture | int]


class Detector:
    """A detector; several threads may share it. It changes no setting of the process and keeps no picture.

    Args:
        weights: a checkpoint, ours or another program's; a file of export.py; or a model that is open already.
        trust_file: run `weights` where it is a program, a .torchscript or .pt2 file, which can do anything.
        imgsz: the long side of a picture becomes this many pixels; None = what the weights were trained at.
        conf_thres: scores must exceed it. None = where the mean F1 of the weights' validation is best, 0.25 where they
            do not say; "auto" = where the F1 of each class is best.
        iou_thres: a box goes where it overlaps a better one by more than this.
        max_det: most detections a picture.
        classes: numbers or names of those to find; None = all.
        agnostic_nms: boxes of different classes compete too.
        augment: test-time augmentation.
        half: 16 bits, where the device has them.
        tile: larger pictures are taken in tiles of so many pixels, and as a whole; 0 = as a whole alone.
        overlap: least share of a tile that the next one overlaps.
        device: cpu, 0, cuda:1 or mps; "" = a GPU where there is one.

    Attributes:
        names: class names by index.
        imgsz: the size in pixels that is used.
        pipeline: from pixels to detections.
        rules: which predictions become detections.

    Raises:
        UserError: the weights cannot be read.
        ConfigError: a number out of range, no such class, no such device.
    """

    def __init__(
        self,
        weights: str | Path | Backend | PictureBackend = "yolov5n.pt",
        *,
        trust_file: bool = False,
        imgsz: int | None = None,
        conf_thres: Confidence = None,
        iou_thres: float = DEFAULT_IOU,
        max_det: int = MAX_DET,
        classes: Iterable[int | str] | int | str | None = None,
        agnostic_nms: bool = False,
        augment: bool = False,
        half: bool = False,
        tile: int = 0,
        overlap: float = DEFAULT_OVERLAP,
        device: str = "",
    ) -> None:
        _check(imgsz, conf_thres, iou_thres, max_det)
        if overlap != DEFAULT_OVERLAP and not tile:
            log.warning(f"overlap {overlap:g}: without effect, as the pictures are not cut into tiles. Give tile too.")
        if isinstance(weights, (Backend, PictureBackend)):
            model = weights
        else:
            world = World(accelerator=choose_accelerator(device, Launch()))
            model = open_model(str(weights), world, augment=augment, half=half, trust_file=trust_file)
        self.names, self.imgsz = model.names, model.usable_imgsz(imgsz or 0)
        conf, class_confs = thresholds(model, conf_thres, class_numbers(classes, model.names))
        self.rules = suppression_of(
            model, conf=conf, iou=iou_thres, max_det=max_det, agnostic=agnostic_nms, class_confs=class_confs
        )
        self.pipeline = Pipeline(model, self.imgsz, tile, overlap)
        self._note = DarkNote()
        each = model.class_confidences if conf_thres == "auto" else ()
        self._sure = each or (model.confidence or DEFAULT_CONF,) * len(model.names)

    def __call__(
        self,
        source: Source,
        *,
        color: Color = "rgb",
        vid_stride: int = 1,
        every_frame: bool = False,
        keep_pictures: bool = False,
        track: bool = False,
        on_event: Callable[[SourceEvent], None] | None = None,
    ) -> Iterator[Result]:
        """Find objects; pictures are read one after the other, as the results are asked for.

        Args:
            source: what `--source` takes (a path, a folder, a glob, an address, a camera's number, "-"), or a picture:
                bytes, a PIL image, a NumPy array, a tensor; or several of them.
            color: the order of the channels of arrays and tensors.
            vid_stride: of videos and streams, each `vid_stride`-th frame.
            every_frame: of streams, all frames in order instead of the newest one.
            keep_pictures: the results hold the pictures.
            track: objects of videos and streams get ids; this iteration has its own.
            on_event: is told what happens to sources, such as a file that cannot be read; None = a warning in the log,
                and an error where that was the only source.

        Raises:
            UserError: no such source; nothing that can be tracked, or no package for it; while iterating, the only
                source cannot be read, or a picture in memory is none.
        """
        texts, pictures = _parted(source)
        if texts is None:
            if track:
                raise ConfigError(NOTHING_MOVES)
            return self._of_pictures(pictures, color, keep_pictures)
        sources = open_sources(texts, read=self.read, vid_stride=vid_stride, every_frame=every_frame)
        if track:
            check_trackable(sources.origins)
        return self._of_sources(sources, keep_pictures, self.tracking() if track else None, on_event)

    def tracking(self) -> Tracking:
        """What gives the results of frames their ids, for one thread: `result = tracking(detector.detect(frame))`.

        A detection begins a track where it exceeds the confidence that is best for these weights: with a lower
        `conf_thres`, weaker ones continue tracks. With `agnostic_nms` a track may change its class.
        """
        return Tracking(self._sure, across_classes=self.rules.agnostic)

    def read(self, picture: Path | bytes) -> Pixels:
        """The door for files, with the rule of the weights."""
        return to_pixels(picture, pixels=self.pipeline.backend.pixels, note=self._note)

    def detect(self, frame: Frame, *, keep_picture: bool = False, rules: Suppression | None = None) -> Result:
        """Find objects on one frame, by other rules than the detector's own where some are given."""
        found, speed_ms = self.pipeline(frame.pixels, rules or self.rules)
        return Result(
            found.boxes_xyxy.numpy().astype(np.float32),
            found.scores.numpy().astype(np.float32),
            found.classes.numpy().astype(np.int64),
            self.names,
            frame.source,
            picture_size(frame.pixels),
            frame.media,
            frame.frame,
            frame.time_s,
            speed_ms,
            frame.pixels if keep_picture else None,
            self.pipeline.backend.pixels,
        )

    def _of_pictures(self, pictures: Iterable[Picture], color: Color, keep: bool) -> Iterator[Result]:
        rule = self.pipeline.backend.pixels
        for number, picture in enumerate(pictures):
            if isinstance(picture, (str, Path)):
                frame = Frame(self.read(picture := Path(picture)), str(picture))
            else:
                frame = Frame(to_pixels(picture, color=color, pixels=rule, note=self._note), f"picture {number}")
            if isinstance(picture, (Path, bytes)) and breaks_off(picture):
                log.warning(f"{frame.source}: {BROKEN_OFF}")
            yield self.detect(frame, keep_picture=keep)

    def _of_sources(
        self,
        sources: Sources,
        keep: bool,
        tracking: Tracking | None,
        on_event: Callable[[SourceEvent], None] | None,
    ) -> Iterator[Result]:
        with sources:
            for item in sources:
                if isinstance(item, Frame):
                    result = self.detect(item, keep_picture=keep)
                    yield tracking(result) if tracking else result
                    continue
                if tracking:
                    tracking.event(item)
                if on_event is not None:
                    on_event(item)
                elif item.kind in ("unreadable",) and len(sources.origins) == 1:
                    raise UserError(item.message)
                else:
                    log.log(logging.WARNING if item.is_failure else logging.INFO, item.message)


def thresholds(
    model: Backend | PictureBackend, conf_thres: Confidence, classes: tuple[int, ...] | None
) -> tuple[float, tuple[float, ...]]:
    """What scores must exceed, all of them and those of each class, () where that is the same; as of `Detector`."""
    best = model.confidence or DEFAULT_CONF
    each: tuple[float, ...] = ()
    if conf_thres == "auto":
        each = model.class_confidences
        if not each:
            log.warning(
                f"conf_thres auto: {model.source} does not say which confidence suits each class; using {best:g}."
            )
    elif conf_thres is not None:
        best = conf_thres
    if classes is not None:
        each = tuple((each or (best,) * len(model.names))[c] if c in classes else 1.0 for c in range(len(model.names)))
    return (min(each), each) if each else (best, ())


def class_numbers(classes: Iterable[int | str] | int | str | None, names: Sequence[str]) -> tuple[int, ...] | None:
    """Numbers of the classes that a user named, by number or by name; None where none is named.

    Upper and lower case are alike where no name has that very form. A ConfigError where there is no such class.
    """
    if classes is None:
        return None
    asked = [classes] if isinstance(classes, (int, str)) else list(classes)
    return tuple(dict.fromkeys(_class_number(item, names) for item in asked)) or None


def _class_number(item: int | str, names: Sequence[str]) -> int:
    alike = {name.casefold(): number for number, name in reversed(list(enumerate(names)))}
    if isinstance(item, str) and item in names:
        return list(names).index(item)
    if isinstance(item, str) and item.casefold() in alike:
        return alike[item.casefold()]
    try:
        number = int(item)
    except ValueError:
        number = -1
        hint = did_you_mean(str(item), names)
    else:
        hint = ""
    if not 0 <= number < len(names) or isinstance(item, bool):
        raise ConfigError(
            f"--classes: there is no class {shown(item)}.{hint} Expected numbers from 0 to {len(names) - 1}, or names: "
            f"{first_of(list(names), 8)}."
        )
    return number


def _parted(source: Source) -> tuple[list[str | int | Path] | None, Iterable[Picture]]:
    """Texts of `--source`; or None, and pictures in memory, among which there may be paths.

    Where a picture comes first, the others are asked for one by one: a generator's need not fit into memory.
    """
    is_one = isinstance(source, (str, int, Path, bytes, bytearray, memoryview)) or not isinstance(source, Iterable)
    # Arrays and tensors are iterable too.
    rest: Iterator[Any] = iter([source] if is_one or hasattr(source, "shape") else cast("Iterable[Any]", source))
    first = list(islice(rest, 1))
    if not all(isinstance(item, (str, int, Path)) for item in first):
        return None, chain(first, rest)
    items = [*first, *rest]
    return (items, []) if items and all(isinstance(item, (str, int, Path)) for item in items) else (None, items)


def _check(imgsz: int | None, conf_thres: Confidence, iou_thres: float, max_det: int) -> None:
    if imgsz is not None and not 32 <= imgsz <= 8192:
        raise ConfigError(f"imgsz: found {imgsz}, allowed is 32 to 8192.")
    if conf_thres not in (None, "auto") and not (isinstance(conf_thres, (int, float)) and 0 <= conf_thres <= 1):
        raise ConfigError(f"conf_thres: found {shown(conf_thres)}, expected a number from 0 to 1, or auto.")
    if not 0 <= iou_thres <= 1:
        raise ConfigError(f"iou_thres: found {iou_thres}, allowed is 0 to 1.")
    if max_det < 1:
        raise ConfigError(f"max_det: found {max_det}, expected at least 1.")
