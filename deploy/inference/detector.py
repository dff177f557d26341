"""Python API of detection: `for result in tessera.Detector("best.pt")(source): …`; prefetching and concurrency."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, count, islice, takewhile
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np

from tessera.data.feed.image_sizes import DEFAULT_OVERLAP
from tessera.data.source.image_header import is_truncated
from tessera.deploy.inference.flags import DetectConfig
from tessera.deploy.inference.input_images import Color, DarkImageWarning, ImageInput, content_of, to_pixels
from tessera.deploy.inference.results import Result
from tessera.deploy.inference.sources.frames import Frame, SourceEvent
from tessera.deploy.inference.sources.sources import BROKEN_OFF, Sources, open_sources
from tessera.deploy.inference.tracking import NO_VIDEO, Tracking, check_trackable
from tessera.deploy.runtime.pipeline import image_detector, image_hw, nms_settings
from tessera.models.nms import NmsSettings
from tessera.utils.bit_depth import Pixels
from tessera.utils.checkpoints.run_directory import newest_best_checkpoint
from tessera.utils.environment import Launch
from tessera.utils.errors import ConfigError, UserError, did_you_mean
from tessera.utils.evaluation.network import DEFAULT_IOU, ImageDetector, Network, open_model, single_threaded_pool
from tessera.utils.machine.accelerator import choose_accelerator
from tessera.utils.ranks.world import World
from tessera.utils.text import first_of, plural, shown
from tessera.utils.thresholds import LOWEST_CONF, class_thresholds

log = logging.getLogger(__name__)

MAX_DET = 1000
Confidence = float | Literal["auto"] | None
Source = ImageInput | int | Iterable[ImageInput | int]
T = TypeVar("T")
R = TypeVar("R")
_READY = 2  # most prefetched items
_END = object()


class Detector:
    """A thread-safe detector. It changes no setting of the process and stores no image.

    Args:
        weights: a checkpoint, an exported file, or an open model; "" = best.pt of the newest run in runs/train.
        trust_file: allow `weights` that are a program (.torchscript), which can run anything.
        imgsz: long side in pixels that images are resized to, or height and width; None = the training size.
        conf_thres: confidence threshold. None = the one with the best mean F1 in validation, or 0.25 if unknown;
            "auto" = the one with the best F1 of each class.
        iou_thres: IoU threshold of NMS.
        max_det: most detections per image.
        classes: indices or names of the classes to detect; None = all.
        agnostic_nms: class-agnostic NMS.
        augment: test-time augmentation.
        half: 16-bit inference, where the device supports it.
        tile: split larger images into tiles of this many pixels, besides the whole image; 0 = off.
        overlap: smallest overlap of neighbouring tiles as a fraction of a tile.
        device: cpu, 0, cuda:1 or mps; "" = a GPU if there is one.

    Attributes:
        names: class names by index.
        imgsz: inference size in pixels, one number or two.
        pipeline: from pixels to detections.
        rules: thresholds and NMS settings.

    Raises:
        UserError: the weights cannot be read.
        ConfigError: a number is out of range, or a class or device does not exist.
    """

    def __init__(
        self,
        weights: str | Path | Network | ImageDetector = "",
        *,
        trust_file: bool = False,
        imgsz: int | Sequence[int] | None = None,
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
        size = DetectConfig(imgsz=imgsz or 0).imgsz  # type: ignore[arg-type]
        _check(conf_thres, iou_thres, max_det)
        if overlap != DEFAULT_OVERLAP and not tile:
            log.warning(f"overlap {overlap:g}: without effect, as images are not split into tiles. Give tile too.")
        if isinstance(weights, (Network, ImageDetector)):
            model = weights
        else:
            world = World(accelerator=choose_accelerator(device, Launch()))
            model = open_model(
                str(weights or newest_best_checkpoint()), world, augment=augment, half=half, trust_file=trust_file
            )
        self.names, self.imgsz = model.names, model.check_imgsz(size)
        conf, class_confs = thresholds(model, conf_thres, class_numbers(classes, model.names))
        self.rules = nms_settings(
            model, conf=conf, iou=iou_thres, max_det=max_det, agnostic=agnostic_nms, class_confs=class_confs
        )
        self.pipeline = image_detector(model, self.imgsz, tile, overlap)
        self._note = DarkImageWarning()
        each = class_thresholds(model.class_confidences, model.threshold) if conf_thres == "auto" else ()
        self._track_thresholds = each or (model.threshold,) * len(model.names)

    def __call__(
        self,
        source: Source,
        *,
        color: Color = "rgb",
        vid_stride: int = 1,
        every_frame: bool = False,
        keep_images: bool = False,
        track: bool = False,
        on_event: Callable[[SourceEvent], None] | None = None,
    ) -> Iterator[Result]:
        """Detect objects; images are read one by one as results are requested.

        Args:
            source: a value of `--source` (path, folder, glob, URL, camera number, "-"), an image as bytes, open file,
                PIL image, NumPy array or tensor, or several of them.
            color: channel order of arrays and tensors.
            vid_stride: use each `vid_stride`-th frame of videos and streams.
            every_frame: use all frames of a stream in order instead of the newest one.
            keep_images: store the images in the results.
            track: give objects of videos and streams ids, which are independent of other calls.
            on_event: receives events of sources, such as an unreadable file; None = log them, and raise an error where
                the only source is unreadable.

        Raises:
            UserError: a source does not exist or cannot be tracked; while iterating, the only source or an image in
                memory is unreadable.
        """
        texts, images = _split_source(source)
        if texts is None:
            if track:
                raise ConfigError(NO_VIDEO)
            return self._detect_images(images, color, keep_images)
        sources = open_sources(texts, read=self.read, vid_stride=vid_stride, every_frame=every_frame)
        if track:
            check_trackable(sources.origins)
        return self._detect_sources(sources, keep_images, self.tracking() if track else None, on_event)

    def tracking(self) -> Tracking:
        """Return a tracker for one thread: `result = tracking(detector.detect(frame))`.

        A detection above the best confidence of the weights starts a track; with a lower `conf_thres`, weaker ones
        continue tracks. With `agnostic_nms` a track may change its class.
        """
        return Tracking(self._track_thresholds, across_classes=self.rules.agnostic)

    def read(self, image: Path | bytes) -> Pixels:
        """Read an image file with the `pixels` rule of the weights."""
        return to_pixels(image, pixels=self.pipeline.pixels, note=self._note)

    def detect(self, frame: Frame, *, keep_image: bool = False, rules: NmsSettings | None = None) -> Result:
        """Detect objects in one frame; `rules` replace those of the detector."""
        found, speed_ms = self.pipeline(frame.pixels, rules or self.rules)
        return Result(
            found.boxes_xyxy.numpy().astype(np.float32),
            found.scores.numpy().astype(np.float32),
            found.classes.numpy().astype(np.int64),
            self.names,
            frame.source,
            image_hw(frame.pixels),
            frame.media,
            frame.frame,
            frame.time_s,
            speed_ms,
            frame.pixels if keep_image else None,
            self.pipeline.pixels,
        )

    def _detect_images(self, images: Iterable[ImageInput], color: Color, keep: bool) -> Iterator[Result]:
        rule = self.pipeline.pixels
        for number, image in enumerate(map(content_of, images)):
            if isinstance(image, (str, Path)):
                frame = Frame(self.read(image := Path(image)), str(image))
            else:
                frame = Frame(to_pixels(image, color=color, pixels=rule, note=self._note), f"image {number}")
            if isinstance(image, (Path, bytes)) and is_truncated(image):
                log.warning(f"{frame.source}: {BROKEN_OFF}")
            yield self.detect(frame, keep_image=keep)

    def _detect_sources(
        self, sources: Sources, keep: bool, tracking: Tracking | None, on_event: Callable[[SourceEvent], None] | None
    ) -> Iterator[Result]:
        with sources:
            for item in sources:
                if isinstance(item, Frame):
                    result = self.detect(item, keep_image=keep)
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
    model: Network | ImageDetector, conf_thres: Confidence, classes: tuple[int, ...] | None
) -> tuple[float, tuple[float, ...]]:
    """Return the confidence threshold and those of each class, () = the same."""
    best = model.threshold
    each: tuple[float, ...] = ()
    if conf_thres == "auto":
        each = class_thresholds(model.class_confidences, best)
        low = [name for name, c in zip(model.names, model.class_confidences, strict=False) if c < LOWEST_CONF]
        if not each:
            log.warning(f"conf_thres auto: {model.source} has no confidence of each class; using {best:g}.")
        elif low:
            log.warning(
                f"conf_thres auto: using {best:.3g} for {plural(len(low), 'class')} whose best F1 is at a "
                f"confidence below {LOWEST_CONF:g}: {first_of(low, 8)}."
            )
    elif conf_thres is not None:
        best = conf_thres
    if classes is not None:
        each = tuple((each or (best,) * len(model.names))[c] if c in classes else 1.0 for c in range(len(model.names)))
    return (min(each), each) if each else (best, ())


def class_numbers(classes: Iterable[int | str] | int | str | None, names: Sequence[str]) -> tuple[int, ...] | None:
    """Return the indices of classes given by index or name; None = none given.

    An exact name wins over one that differs in case. ConfigError for an unknown class.
    """
    if classes is None:
        return None
    given = [classes] if isinstance(classes, (int, str)) else list(classes)
    return tuple(dict.fromkeys(_class_number(item, names) for item in given)) or None


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


def _split_source(source: Source) -> tuple[list[str | int | Path] | None, Iterable[ImageInput]]:
    """Return the values of `--source`; or None and images in memory, with paths among them.

    If an image comes first, the others are requested one by one, so that those of a generator need not fit in memory.
    """
    is_one = isinstance(source, (str, int, Path, bytes, bytearray, memoryview)) or not isinstance(source, Iterable)
    is_one = is_one or hasattr(source, "shape") or hasattr(source, "read")  # arrays and open files are iterable too
    rest: Iterator[Any] = iter([source] if is_one else cast("Iterable[Any]", source))
    first = list(islice(rest, 1))
    if not all(isinstance(item, (str, int, Path)) for item in first):
        return None, chain(first, rest)
    items = [*first, *rest]
    return (items, []) if items and all(isinstance(item, (str, int, Path)) for item in items) else (None, items)


def _check(conf_thres: Confidence, iou_thres: float, max_det: int) -> None:
    if conf_thres not in (None, "auto") and not (isinstance(conf_thres, (int, float)) and 0 <= conf_thres <= 1):
        raise ConfigError(f"conf_thres: found {shown(conf_thres)}, expected a number from 0 to 1, or auto.")
    if not 0 <= iou_thres <= 1:
        raise ConfigError(f"iou_thres: found {iou_thres}, allowed is 0 to 1.")
    if max_det < 1:
        raise ConfigError(f"max_det: found {max_det}, expected at least 1.")


@contextmanager
def prefetch(items: Iterable[T]) -> Iterator[Iterator[T]]:
    """Iterate over `items` in a thread, which ends with the context; their errors are raised in order."""
    with ThreadPoolExecutor(1, "prefetch") as pool:
        try:
            rest = iter(items)
            begun: Iterator[Future[Any]] = (pool.submit(next, rest, _END) for _ in count())
            yield takewhile(lambda item: item is not _END, _results(begun, _READY))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def detect_ahead(items: Iterable[T], detect: Callable[[T], R], threads: int) -> Iterator[Iterator[tuple[T, R]]]:
    """Yield each item with `detect(item)`, in order; errors of both are raised in order.

    `items` are iterated in the caller's thread, and `detect` is called in `threads` others, which end with the context;
    with 1 in the caller's too.
    """
    if threads == 1:
        yield ((item, detect(item)) for item in items)
        return
    with single_threaded_pool(threads, "detection") as pool:
        yield _results(_begun(pool, items, detect), threads)


def _begun(pool: ThreadPoolExecutor, items: Iterable[T], detect: Callable[[T], R]) -> Iterator[Future[tuple[T, R]]]:
    try:
        for item in items:
            yield pool.submit(lambda item: (item, detect(item)), item)
    except Exception as error:  # raised in order
        failed = Future[tuple[T, R]]()
        failed.set_exception(error)
        yield failed


def _results(begun: Iterator[Future[T]], ready: int) -> Iterator[T]:
    """Yield results in order while `ready` more are computed."""
    waiting = deque(islice(begun, ready + 1))
    while waiting:
        result = waiting.popleft().result()
        yield result
        del result  # frees memory while waiting
        waiting.extend(islice(begun, 1))
