"""Validate a detector.

    uv run val.py --weights yolov5n.pt --data coco128.yaml
    uv run val.py --weights runs/train/exp/weights/best.pt --verbose --save-json    # on the dataset of its training
    uv run val.py --weights runs/train/exp/weights/best.onnx           # an exported file, in its own runtime
    uv run torchrun --standalone --nproc-per-node 2 val.py --weights yolov5n.pt --data coco.yaml
    uv run val.py --weights runs/train/exp/weights/best.pt --find-errors            # likely label errors

Metrics depend neither on the batch size nor on the number of ranks.

From Python: `tessera.val(weights="yolov5n.pt", data="coco128.yaml")` takes the names of the flags.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tessera.utils.flags.signature import documented
from tessera.utils.flags.val import ValConfig
from tessera.utils.image_size import ImageSize
from tessera.utils.startup import check_command_line

if __name__ == "__main__":
    check_command_line(ValConfig)

from tessera.data.source.index import build_index, index_warnings
from tessera.utils.checkpoints.run_directory import new_run, newest_best_checkpoint
from tessera.utils.checkpoints.weights import own_head
from tessera.utils.errors import UserError
from tessera.utils.evaluation.average_precision import Intervals
from tessera.utils.evaluation.evaluate import DetectionCollector, Settings, evaluate_split
from tessera.utils.evaluation.evaluation_data import check_pixels, evaluation_imgsz, model_classes, read_dataset
from tessera.utils.evaluation.network import DEFAULT_IOU, open_model
from tessera.utils.extensions import extension
from tessera.utils.machine.accelerator import explain_out_of_memory
from tessera.utils.ranks.consistency import data_fingerprint, require_agreement, require_same_command
from tessera.utils.ranks.failures import run_command
from tessera.utils.ranks.launch import open_world
from tessera.utils.ranks.world import World, torch_distributed_zero_first
from tessera.utils.report.console import (
    plain_folder,
    plain_metrics,
    print_lines,
    setup_logging,
    table_header,
    validation_line,
)
from tessera.utils.thresholds import DEFAULT_CONF, Threshold
from tessera.utils.types import Metrics

log = logging.getLogger(__name__)

OUT_OF_MEMORY_REMEDIES = (
    "Give a smaller --batch-size, a smaller --imgsz or --half, or free memory that other processes hold."
)


class Validated(NamedTuple):
    """Metrics of a validation and its run directory."""

    metrics: Metrics  # the same on every rank
    interval: Intervals | None  # of mAP; None on other ranks than 0
    weights: str
    data: str  # path of the dataset YAML
    split: str
    imgsz: ImageSize  # size of the images in pixels
    folder: Path
    background: tuple[int, int, int] | None  # `Errors.on_background`; None on other ranks than 0
    label_errors: dict[str, Any] | None  # plain values of `--find-errors`; None without it
    exit_code: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for `--json`."""
        named = {name: getattr(self, name) for name in ("weights", "data", "split", "imgsz", "label_errors")}
        interval = self.interval and self.interval._asdict()
        counts = zip(("images", "images_with_false_positives", "false_positives"), self.background or (), strict=False)
        found = {"metrics": plain_metrics(self.metrics), "interval": interval, "background": dict(counts)}
        return {**named, **found, **plain_folder(self.folder)}


def validate(config: ValConfig, world: World) -> Validated:
    """Validate `config.weights`; print and write what the flags ask for."""
    require_same_command(config, world)
    if not config.weights:
        config = replace(config, weights=world.run_on_main(newest_best_checkpoint))
    flags = {"augment": config.augment, "half": config.half, "end2end": config.end2end}
    model = open_model(config.weights, world, **flags, trust_file=config.trust_file)
    split = "val" if config.task == "speed" else config.task
    with torch_distributed_zero_first(world.local_rank, world) as verified:
        spec = read_dataset(config.data, config.weights, model.data)
        index = build_index(spec, split, single_cls=config.single_cls, verified=verified)
    for text in index_warnings(index, config.max_det):
        log.warning(text)
    require_agreement(data_fingerprint({split: index}), world)
    class_of = model_classes(model.names, spec, f"--weights {config.weights}", single_cls=config.single_cls)
    check_pixels(model, spec)

    imgsz, conf, iou, threshold = evaluation_imgsz(model, config), config.conf_thres, config.iou_thres, config.threshold
    if not len(index.classes) and threshold is None:
        threshold = Threshold(model.threshold, "the weights")
    if config.task == "speed":
        log.info(
            f"--task speed: detections above confidence {DEFAULT_CONF:g}, as in deployment. P, R and mAP are "
            "lower than those of other tasks: leave out --task speed for them."
        )
        conf, iou, threshold = DEFAULT_CONF, DEFAULT_IOU, Threshold(DEFAULT_CONF, "--task speed")
    log.info(model.describe(imgsz))
    tiled = extension("tiles").image_detector(model, imgsz, config.tile, config.overlap) if config.tile else model
    label_errors = extension("label errors") if config.find_errors else None
    result_files: Any = extension("result files") if config.save_txt or config.save_json else None
    reports = optional("validation report") if world.is_main else None
    plots = optional("plots") if world.is_main else None
    with ExitStack() as stack:
        run = stack.enter_context(new_run(config, world, map(index.path, range(len(index)))))
        work = f"a batch of {config.batch_size} images at {imgsz} px"
        stack.enter_context(explain_out_of_memory(world.accelerator, work, OUT_OF_MEMORY_REMEDIES))
        samples = plots and plots.SampleImageCollector(index, world.size)
        evidence = label_errors.EvidenceCollector(index, class_of) if label_errors else None
        collectors: list[DetectionCollector] = [one.add for one in (samples, evidence) if one is not None]
        if config.save_txt:
            collectors.append(result_files.label_file_writer(run / "labels", index, config.save_conf))

        evaluation = evaluate_split(
            tiled,
            index,
            world,
            imgsz,
            Settings(conf, iou, config.max_det, class_of=class_of, threshold=threshold),
            batch_size=config.batch_size,
            workers=config.workers,
            collectors=collectors,
        )
        if config.save_json:
            target = run / "predictions.json"
            world.run_on_main(
                lambda: result_files.save_coco_results(target, evaluation.matches, result_files.results_ids(index))
            )
        interval = background = found_errors = None
        if world.is_main:
            if samples:
                samples.write(run, evaluation.metrics.confidence)
            if reports is None:
                print_lines(table_header(), validation_line(evaluation.metrics), f"Results in {run}")
            else:
                origin = reports.RunInfo(config, config.weights, imgsz, world.accelerator.name, world.size)
                data = reports.report_validation(evaluation, index, spec, run, origin, verbose=config.verbose)
                reports.report_errors(data)
                interval, background = data.interval, data.errors.on_background()
        if label_errors and evidence:
            of_all = label_errors.Evidence.joined(spec.nc, world.gather(evidence.evidence()))
            found_errors = world.run_on_main(
                lambda: reports.report_label_errors(  # type: ignore[union-attr]
                    of_all, evaluation.metrics.map50, index, spec, run, origin, config
                )
            )
        world.barrier()
        data_path = str(spec.yaml_path)
        return Validated(
            evaluation.metrics, interval, config.weights, data_path, split, imgsz, run, background, found_errors
        )


def optional(part: str) -> Any:
    """Return an extension; None, with a warning, where this installation lacks it."""
    try:
        return extension(part)
    except UserError as error:
        log.warning(f"{error} The validation runs without.")
        return None


def ignored_flags(config: ValConfig, given: Collection[str]) -> list[str]:
    """Return a message for each flag that has no effect; `given` are the fields that were given."""
    messages = []
    if config.save_conf and not config.save_txt:
        messages.append("--save-conf: without effect, no label files are written. Give --save-txt too.")
    if config.end2end and "iou_thres" in given:
        messages.append("--iou-thres: without effect, --end2end runs no NMS.")
    if config.task == "speed" and not {"conf_thres", "iou_thres"}.isdisjoint(given):
        messages.append("--conf-thres and --iou-thres: without effect, --task speed uses those of deployment.")
    return messages


def join(given: dict[str, Any]) -> Validated:
    """Join the job and validate, on every rank."""
    config = ValConfig(**given)
    with open_world(config.device, config.local_rank, threads=config.threads) as world:
        setup_logging(world.rank, world.size)
        own_head(config.head)
        for text in ignored_flags(config, given):
            log.warning(text)
        return validate(config, world)


@documented(ValConfig)
def run(**kwargs: Any) -> Metrics:
    """Validate from Python; takes the names of the flags.

    Raises:
        UserError: a mistake in the flags, the data or the weights.
    """
    return join(ValConfig.named(kwargs)).metrics


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_command(ValConfig, sys.argv[1:] if argv is None else argv, join)


if __name__ == "__main__":
    sys.exit(main())
