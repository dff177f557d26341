"""Detect objects in images, videos and streams.

    uv run detect.py --weights runs/train/exp/weights/best.pt --source images/
    uv run detect.py --weights yolov5n.pt --source street.mp4 --classes car truck --save-json
    uv run detect.py --weights best.onnx --source rtsp://camera/stream --conf-thres auto

Preprocessing and NMS are those of val.py, so that detections are equal at equal thresholds. An unreadable source is
logged, the others are processed, and the exit code is 3.

From Python: `tessera.detect(weights="best.pt", source="images/")` takes the same flags, and
`for result in tessera.Detector("best.pt")("images/")` yields results without writing files.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tessera.deploy.inference.flags import DetectConfig
from tessera.utils.flags.program import called
from tessera.utils.flags.signature import documented
from tessera.utils.image_size import ImageSize
from tessera.utils.startup import check_command_line

if __name__ == "__main__":
    check_command_line(DetectConfig)

import numpy as np
from tqdm import tqdm

from tessera.deploy.inference.detector import Detector, detect_ahead, prefetch
from tessera.deploy.inference.drawing import Style
from tessera.deploy.inference.outputs import (
    AnnotatedFiles,
    AutoLabelFiles,
    BackgroundWriter,
    CropFiles,
    CsvFile,
    JsonLines,
    LabelFiles,
    Output,
    OutputPaths,
    label_classes,
)
from tessera.deploy.inference.result_files import CROPS, LABELS
from tessera.deploy.inference.results import Result
from tessera.deploy.inference.sources.frames import Frame, SourceEvent
from tessera.deploy.inference.sources.source_arguments import Origin
from tessera.deploy.inference.sources.sources import open_sources
from tessera.deploy.inference.tracking import check_trackable
from tessera.utils.checkpoints.run_directory import (
    inside_test,
    new_run,
    newest_best_checkpoint,
    require_outside,
    run_path,
)
from tessera.utils.checkpoints.weights import own_head
from tessera.utils.errors import ConfigError
from tessera.utils.evaluation.network import is_exported
from tessera.utils.files import LOCK, is_address
from tessera.utils.machine.accelerator import explain_out_of_memory
from tessera.utils.ranks.failures import run_command
from tessera.utils.ranks.launch import open_world
from tessera.utils.ranks.world import World
from tessera.utils.report.console import plain_folder, print_lines, setup_logging
from tessera.utils.text import first_of, plural

log = logging.getLogger(__name__)

UNREADABLE = 3  # exit code where sources could not be read
OUT_OF_MEMORY_REMEDIES = "Give a smaller --imgsz or --half, or free memory that other processes hold."


@dataclass(frozen=True)
class DetectionSummary:
    """Result of a run of detect.py.

    Attributes:
        images: number of images and frames.
        detections: number of detections.
        failures: a message for each source that could not be read completely.
        folder: run directory; None if no files were written.
        weights, imgsz: weight file, and image size in pixels.
        per_class: number of detections of each detected class.
    """

    images: int
    detections: int
    failures: tuple[str, ...]
    folder: Path | None
    weights: str
    imgsz: ImageSize
    per_class: dict[str, int]

    @property
    def exit_code(self) -> int:
        return UNREADABLE if self.failures else 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "weights": self.weights,
            "imgsz": self.imgsz,
            "images": self.images,
            "detections": self.detections,
            "classes": self.per_class,
            "unreadable": self.failures,
            **plain_folder(self.folder),
        }


class RunTotals:
    """Counts and times of a run, and failures of its sources."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.images = self._dropped = 0
        self.failures: list[str] = []
        self.per_class = np.zeros(len(names), np.int64)
        self._speed_ms, self._started = np.zeros(3), time.perf_counter()

    def add(self, result: Result, dropped: int) -> None:
        """Count an image and the frames that were dropped before it."""
        self.images += 1
        self._dropped += dropped
        self.per_class += np.bincount(result.classes, minlength=len(self.per_class))
        self._speed_ms += result.speed_ms

    def event(self, event: SourceEvent) -> None:
        """Log an event of a source."""
        if event.is_failure:
            self.fail(event.message)
        elif event.media == "stream":
            log.info(event.message)

    def fail(self, message: str) -> None:
        """Log a failure."""
        self.failures.append(message)
        log.warning(message)

    def lines(self, imgsz: ImageSize) -> list[str]:
        """Return detections per class and speed."""
        order = np.argsort(-self.per_class, kind="stable")
        found = [f"{self.per_class[c]:,} {self._names[c]}" for c in order.tolist() if self.per_class[c]]
        lines = [f"{plural(self.images, 'image')}: {first_of(found, 8) or 'no detections'}"]
        if self.images:
            preprocessing, inference, nms = self._speed_ms / self.images
            rate = self.images / (time.perf_counter() - self._started)
            lines.append(
                f"Speed: {preprocessing:.1f} ms preprocessing, {inference:.1f} ms inference, {nms:.1f} ms NMS per "
                f"image at {imgsz} px; {rate:.1f} images/s including input and output"
            )
        if self._dropped:
            lines.append(
                f"{plural(self._dropped, 'frame')} of streams replaced by newer ones (--every-frame keeps all)"
            )
        return lines


def detect(config: DetectConfig, world: World) -> DetectionSummary:
    """Detect objects in config.source and write the requested files."""
    if world.size > 1:
        raise ConfigError(
            f"{called('detect.py')} runs as one process. Start it without a launcher, once per part of the images."
        )
    if not config.source:
        raise ConfigError("--source: found nothing, expected an image, video, folder, glob, URL or camera.")
    if config.save_conf and not config.save_txt:
        log.warning("--save-conf: without effect, as no label files are written. Add --save-txt.")
    if config.data and not config.auto_label:
        log.warning("--data: without effect, as it needs --auto-label.")
    if not config.weights:
        config = replace(config, weights=newest_best_checkpoint())
    detector = Detector(
        config.weights,
        trust_file=config.trust_file,
        imgsz=config.imgsz or None,
        conf_thres=config.confidence,
        iou_thres=config.iou_thres,
        max_det=config.max_det,
        classes=config.classes or None,
        agnostic_nms=config.agnostic_nms,
        augment=config.augment,
        half=config.half,
        tile=config.tile,
        overlap=config.overlap,
        device=config.device,
    )
    log.info(f"{detector.pipeline.source}: {detector.imgsz} px, {describe_confidence(config, detector)}")
    sources = open_sources(
        config.source, read=detector.read, vid_stride=config.vid_stride, every_frame=config.every_frame
    )
    if config.exist_ok:
        sources.origins = exclude_results(sources.origins, run_path(config))
    if config.track:
        check_trackable(sources.origins)
    of_files = all(origin.form in ("image", "video", "unreadable") for origin in sources.origins)  # not live
    totals, places = RunTotals(detector.names), OutputPaths()
    tracking = detector.tracking() if config.track else None
    named_late = config.exist_ok and any(origin.form == "stdin" for origin in sources.origins)
    with ExitStack() as stack:
        run = stack.enter_context(
            new_run(config, world, (origin.where for origin in sources.origins if origin.is_file))
        )
        written = open_outputs(config, detector, run, totals)
        output = BackgroundWriter(written)
        stack.callback(print_summary, totals, detector.imgsz, run if written else None)  # after Ctrl-C too
        stack.callback(output.close)
        stack.enter_context(
            explain_out_of_memory(world.accelerator, f"an image at {detector.imgsz} px", OUT_OF_MEMORY_REMEDIES)
        )
        items: Iterable[Frame | SourceEvent] = stack.enter_context(sources)
        threads = 1
        if of_files:
            items = stack.enter_context(prefetch(items))
            threads = detector.pipeline.enable_concurrency()
        found = stack.enter_context(
            detect_ahead(items, lambda item: detector.detect(item) if isinstance(item, Frame) else None, threads)
        )
        for item, result in tqdm(found, total=sources.images, unit="image", disable=None, mininterval=0.5):
            if isinstance(item, SourceEvent):
                for take in (totals.event, places.event, output.event, *([tracking.event] if tracking else [])):
                    take(item)
                continue
            assert result is not None
            result = tracking(result) if tracking else result
            totals.add(result, item.dropped)
            if named_late and item.media != "stream" and item.source != "-" and not is_address(item.source):
                require_outside(run, [item.source])
            output.add(result, item, places.of(item))
    folder = run if written and run.is_dir() else None
    counts = Counter[str]()  # two classes may have one name
    for c in np.flatnonzero(totals.per_class).tolist():
        counts[detector.names[c]] += int(totals.per_class[c])
    failures, imgsz = tuple(totals.failures), detector.imgsz
    return DetectionSummary(totals.images, counts.total(), failures, folder, config.weights, imgsz, dict(counts))


def exclude_results(origins: Sequence[Origin], run: Path) -> Sequence[Origin]:
    """Exclude results of an earlier run from folders of sources, unless there is nothing else.

    Results that were given explicitly stay and are refused later.
    """
    is_result = inside_test(run)
    remaining = [
        origin
        for origin in origins
        if not (origin.found_in and is_result(origin.where)) or is_result(f"{origin.found_in}/")
    ]
    if len(remaining) in (0, len(origins)):
        return origins
    log.info(f"{run}: ignoring {plural(len(origins) - len(remaining), 'file')} of the run directory.")
    return remaining


def print_summary(totals: RunTotals, imgsz: ImageSize, folder: Path | None) -> None:
    """Print the summary; an empty run directory is removed afterwards, and not printed."""
    print_lines(*totals.lines(imgsz))
    if folder is not None and any(path.is_file() and path.name != LOCK for path in folder.rglob("*")):
        print_lines(f"Results in {folder}")
    if totals.failures:
        log.warning(f"{plural(len(totals.failures), 'failure')} to read a source or write a video, logged above.")


def open_outputs(config: DetectConfig, detector: Detector, run: Path, totals: RunTotals) -> list[Output]:
    outputs: list[Output] = []
    if not config.nosave:
        style = Style(config.line_thickness, not config.hide_labels, not config.hide_conf)
        outputs.append(AnnotatedFiles(run, style, config.vid_stride, totals.fail))
    if config.auto_label:
        outputs.append(AutoLabelFiles(run / LABELS, config.weights, *label_classes(detector.names, config.data)))
    elif config.save_txt:
        outputs.append(LabelFiles(run / LABELS, config.save_conf))
    if config.save_crop:
        outputs.append(CropFiles(run / CROPS, detector.names))
    if config.save_csv:
        outputs.append(CsvFile(run / "predictions.csv", config.track))
    if config.save_json:
        outputs.append(JsonLines(run / "predictions.jsonl", run_metadata(config, detector)))
    return outputs


def run_metadata(config: DetectConfig, detector: Detector) -> dict[str, Any]:
    """Return the first line of predictions.jsonl."""
    rules = detector.rules
    return {
        "weights": config.weights,
        "names": list(detector.names),
        "imgsz": detector.imgsz,
        "conf": rules.conf,
        "class_confs": list(rules.class_confs) or None,
        "iou": rules.iou,
        "max_det": rules.max_det,
        "agnostic": rules.agnostic,
        "tile": config.tile or None,
        "overlap": config.overlap if config.tile else None,
        "track": config.track,
    }


def describe_confidence(config: DetectConfig, detector: Detector) -> str:
    wanted, model, conf = config.confidence, detector.pipeline, detector.rules.conf
    if wanted == "auto" and model.class_confidences:
        return "confidence threshold of the best F1 of each class"
    if isinstance(wanted, float):
        return f"confidence threshold {conf:g}"
    if is_exported(config.weights):
        reason = "the default of its export"
    elif model.confidence is None:
        reason = "the default, as its best F1 is unknown"
    elif conf == model.confidence:
        reason = "best F1 in validation"
    else:
        reason = f"the default, as its best F1 is at {model.confidence:.3g}, too low to detect with"
    return f"confidence threshold {conf:.3g}, {reason} (--conf-thres)"


def join(given: dict[str, Any]) -> DetectionSummary:
    config = DetectConfig(**given)
    with open_world(config.device, threads=config.threads) as world:
        setup_logging(world.rank, world.size)
        own_head(config.head)
        return detect(config, world)


@documented(DetectConfig)
def run(**kwargs: Any) -> DetectionSummary:
    """Detect from Python; keyword arguments are the flags.

    Raises:
        UserError: a mistake in the flags, the sources or the weights.
    """
    return join(DetectConfig.named(kwargs))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return run_command(DetectConfig, sys.argv[1:] if argv is None else argv, join)


if __name__ == "__main__":
    sys.exit(main())
