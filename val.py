"""Measure a detector: every rank, every image once.

    uv run val.py --weights yolov5n.pt --data coco128.yaml
    uv run val.py --weights runs/train/exp/weights/best.pt --data shapes.yaml --verbose --save-json
    uv run torchrun --standalone --nproc-per-node 2 val.py --weights yolov5n.pt --data coco.yaml

Results do not depend on the batch size nor on the number of ranks: an image's shape is its own, images are shared out
without padding, and the matches of all ranks are put in the order of the images before a figure is computed.

From Python: `val.run(weights="yolov5n.pt", data="coco128.yaml")` takes the names of the flags.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data.feed.images import open_images
from data.feed.loader import ValLoader, build_val_loader
from data.source.index import build_index
from data.source.spec import load_spec
from models.detector import DetectionModel
from models.heads.anchor.loss import DetectionLoss, LossMeter
from models.summary import summary
from models.suppression import non_max_suppression, undo_letterbox
from models.tta import predict_augmented
from utils.checkpoints.folder import open_run
from utils.checkpoints.weights import load_weights, resolve_weights
from utils.config import ValConfig
from utils.engine.precision import Precision, half_precision
from utils.errors import UserError
from utils.evaluation.average_precision import Accumulator, Curves, MatchState, merge, summarize
from utils.evaluation.bootstrap import bootstrap_interval
from utils.evaluation.confusion import ConfusionMatrix
from utils.evaluation.matching import match_image
from utils.ranks.world import World, open_world, run_rank, torch_distributed_zero_first
from utils.report.charts import plot_validation
from utils.report.console import setup_logging, tolerate
from utils.report.results import class_table, interval_line, speed_line, table_header, table_lines, validation_line
from utils.report.sinks import CocoSink, PictureSink, Sink, TxtSink
from utils.seeding import sample_rng
from utils.types import DatasetIndex, DatasetSpec, Detections, Metrics

log = logging.getLogger(__name__)

SPEED_CONF, SPEED_IOU = 0.25, 0.45  # what a deployed detector uses, for --task speed


@dataclass(frozen=True)
class Evaluation:
    """Everything a validation found, the same on every rank.

    Attributes:
        metrics, curves: the figures, and what their plots draw.
        confusion: int64 (nc + 1, nc + 1), rows predicted, columns true, background last.
        matches: of all images, for the bootstrap.
    """

    metrics: Metrics
    curves: Curves
    confusion: NDArray[np.int64]
    matches: MatchState


@torch.no_grad()
def evaluate(
    model: DetectionModel,
    loader: ValLoader,
    index: DatasetIndex,
    world: World,
    *,
    conf: float = 0.001,
    iou: float = 0.6,
    max_det: int = 300,
    criterion: DetectionLoss | None = None,
    precision: Precision | None = None,
    augment: bool = False,
    sinks: Sequence[Sink] = (),
) -> Evaluation:
    """Measure `model` on this rank's share of the images, and join the shares of all ranks.

    Args:
        model: the raw model, in evaluation mode, on world.device; with one class all detections count as class 0.
        loader: this rank's share of `index`.
        index: the whole split, whose labels count.
        world: all ranks call this together.
        conf, iou, max_det: of non-maximum suppression.
        criterion: for the validation losses; None = NaN.
        precision: to compute in; None = float32.
        augment: test-time augmentation (no losses then).
        sinks: see the detections as they come.
    """
    precision = precision or Precision(world.device, torch.float32)
    clock = Stopwatch(world.device)
    matches, confusion = Accumulator(), ConfusionMatrix(len(index.names))
    meter = LossMeter(criterion) if criterion is not None and not augment else None

    for batch in loader:
        clock.begin()
        images = batch.images_on(world.device)
        clock.lap("preparation")
        with precision.autocast():
            decoded, raw = (predict_augmented(model, images), []) if augment else model(images)
        clock.lap("inference")
        one_class = len(index.names) == 1  # then labels of one box are duplicates
        found = non_max_suppression(decoded, conf, iou, max_det=max_det, multi_label=not one_class, agnostic=one_class)
        clock.lap("nms")
        if meter is not None:
            size_hw = (images.shape[2], images.shape[3])
            meter.update(raw, meter.criterion.assign(batch.targets, len(batch), size_hw).to(world.device))
        in_batch = [_on_host(detections, one_class) for detections in found]
        in_original = [
            undo_letterbox(detections, placement, (int(height), int(width)))
            for detections, placement, (height, width) in zip(in_batch, batch.placements, batch.sizes_hw, strict=True)
        ]
        for image, detections in zip(batch.indices.tolist(), in_original, strict=True):
            classes, boxes_xyxy = index.labels(image)
            matches.add(image, match_image(detections, boxes_xyxy, classes))
            confusion.add(detections, boxes_xyxy, classes)
        for sink in sinks:
            sink.add(batch, in_batch, in_original)

    shares = world.all_gather((matches.state(), confusion.matrix, meter and meter.total(), clock.seconds))
    states, matrices, totals, seconds = zip(*shares, strict=True)
    state = merge(states)
    metrics, curves = summarize(state, len(index.names))
    images_seen = max(metrics.images, 1)
    preparation, inference, nms = (1000 * sum(s[stage] for s in seconds) / images_seen for stage in Stopwatch.STAGES)
    if meter is not None:
        metrics = dataclasses.replace(metrics, losses=meter.losses(totals))
    metrics = dataclasses.replace(metrics, speed_ms=(preparation, inference, nms))
    return Evaluation(metrics, curves, sum(matrices), state)


def fused_copy(model: DetectionModel, device: torch.device) -> DetectionModel:
    """A copy for evaluation, with BatchNorm folded into the convolutions."""
    fused = copy.deepcopy(model).eval().fuse()
    return fused.to(device).to(memory_format=torch.channels_last)


class Stopwatch:
    """Seconds spent in each stage, with the device's queue emptied at each reading."""

    STAGES = ("preparation", "inference", "nms")

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(self.STAGES, 0.0)
        self._device = device
        self._last = 0.0

    def begin(self) -> None:
        """Start the first stage of a batch."""
        self._last = self._now()

    def lap(self, stage: str) -> None:
        """Book the time since the last reading on `stage`."""
        now = self._now()
        self.seconds[stage] += now - self._last
        self._last = now

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _on_host(detections: Detections, one_class: bool) -> Detections:
    classes = detections.classes.cpu()
    return Detections(
        detections.boxes_xyxy.cpu(), detections.scores.cpu(), torch.zeros_like(classes) if one_class else classes
    )


def validate(config: ValConfig, world: World) -> Metrics:
    """The command: measure config.weights on config.data, print and write what was asked for."""
    setup_logging(world.rank, world.size)
    weights = world.from_main(lambda: load_weights(resolve_weights(config.weights)))
    model = DetectionModel(weights.model_yaml, names=weights.names or None)
    try:
        model.load_state_dict(weights.state_dict)
    except RuntimeError as error:
        raise UserError(
            f"--weights {config.weights}: the weights do not fit the architecture that the file names: "
            f"{str(error).splitlines()[1].strip()[:200]} … Use another file, or train from it with --cfg, which takes "
            "what fits."
        ) from error
    split = "val" if config.task == "speed" else config.task
    with torch_distributed_zero_first(world.local_rank):
        spec = load_spec(config.data)
        index = build_index(spec, split, single_cls=config.single_cls)
    check_classes(model, spec, config)

    imgsz = round_up(config.imgsz, max(model.stride, 32))
    store = open_images(index, imgsz, "none", "area", world)
    run = open_run(config.project, config.name, config.exist_ok, world)
    speed_task = config.task == "speed"
    conf, iou = (SPEED_CONF, SPEED_IOU) if speed_task else (config.conf_thres, config.iou_thres)
    coco = CocoSink(index) if config.save_json else None
    txt = TxtSink(run / "labels", index, config.save_conf) if config.save_txt else None
    pictures = PictureSink(run, index) if world.is_main else None
    sinks: list[Sink] = [sink for sink in (txt, coco, pictures) if sink is not None]

    model = fused_copy(model, world.device)
    log.info(summary(model, imgsz))
    with build_val_loader(
        index,
        store,
        imgsz=imgsz,
        stride=model.stride,
        batch_size=config.batch_size,
        world=world,
        workers=config.workers,
        pin_memory=world.device.type == "cuda",
    ) as loader:
        found = evaluate(
            model,
            loader,
            index,
            world,
            conf=conf,
            iou=iou,
            max_det=config.max_det,
            precision=half_precision(world.device) if config.half else None,
            augment=config.augment,
            sinks=sinks,
        )
    if coco is not None:
        coco.write(run / "predictions.json", world)
    if world.is_main:
        report(found, index, run, imgsz=imgsz, verbose=config.verbose)
    world.barrier()
    return found.metrics


def report(found: Evaluation, index: DatasetIndex, run: Path, *, imgsz: int, verbose: bool, plots: bool = True) -> None:
    """Print the figures and draw the plots of a validation; on rank 0."""
    table = table_lines(class_table(found.metrics, index.names)) if verbose else [validation_line(found.metrics)]
    interval = bootstrap_interval(found.matches, sample_rng(0, 0, 0, "bootstrap"))
    print("\n".join((table_header(), *table)))
    print(interval_line(found.metrics, *interval.map))
    print(speed_line(found.metrics.speed_ms, (1, 3, imgsz, imgsz)), flush=True)
    if plots:
        with tolerate("plots of the validation"):
            plot_validation(run, found.curves, found.confusion, index.names)
    print(f"Results in {run}", flush=True)


def check_classes(model: DetectionModel, spec: DatasetSpec, config: ValConfig) -> None:
    """Refuse a model that knows another number of classes than the dataset names.

    Raises:
        UserError: names both.
    """
    if model.head.nc != spec.nc and not config.single_cls:
        raise UserError(
            f"--weights {config.weights} knows {model.head.nc} classes, but {spec.yaml_path} names {spec.nc}. "
            f"Give the YAML that the weights were trained with, or --single-cls to ignore classes."
        )


def round_up(imgsz: int, multiple: int) -> int:
    """Size rounded up to a multiple of the stride, with a warning where that changes it."""
    rounded = -(-imgsz // multiple) * multiple
    if rounded != imgsz:
        log.warning(f"--imgsz {imgsz} is not a multiple of {multiple}: using {rounded}.")
    return rounded


def run(**kwargs: Any) -> Metrics:
    """Measure from Python; takes the names of the flags.

    Raises:
        UserError: a mistake in the flags, the data or the weights.
    """
    config = ValConfig(**ValConfig.named(kwargs))
    with open_world(config.device, config.local_rank) as world:
        return validate(config, world)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    code, _ = run_rank(lambda: run(**ValConfig.from_args(arguments)))
    return code


if __name__ == "__main__":
    sys.exit(main())
