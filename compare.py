"""Compare two detectors, A and B, on the same images, with confidence intervals and p-values.

    uv run compare.py runs/train/exp runs/train/exp2                          # two runs, on their dataset
    uv run compare.py yolov5n.pt runs/train/exp/weights/best.onnx --data coco128.yaml
    uv run compare.py --a runs/train/old1 runs/train/old2 --b runs/train/new1 runs/train/new2    # seeds of a side
    uv run compare.py old.pt new.pt --data my.yaml --require "map >= -0.01" "ms <= 1"    # for CI: exit code 1 if unmet
    uv run torchrun --standalone --nproc-per-node 2 compare.py old.pt new.pt --data coco.yaml

Differences are B − A. Each run is validated once, as by val.py. docs/compare.md explains the output and compare.json.

From Python: `tessera.compare("old.pt", "new.pt", data="my.yaml").map.difference`.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tessera.analysis.comparison.flags import CompareConfig
from tessera.utils.flags.signature import documented
from tessera.utils.image_size import ImageSize, size_hw_of
from tessera.utils.startup import check_command_line

if __name__ == "__main__":
    check_command_line(CompareConfig)

import numpy as np
import torch

from tessera.analysis.comparison.comparison import (
    Comparison,
    RunMetrics,
    detections_above,
    find_disagreements,
    median_run,
    report_comparison,
    write_disagreements,
)
from tessera.analysis.comparison.differences import differences
from tessera.data.source.index import build_index, index_warnings
from tessera.deploy.runtime.exported import size_of
from tessera.deploy.runtime.pipeline import image_detector
from tessera.models.nms import NmsSettings
from tessera.utils.checkpoints.run_directory import new_run
from tessera.utils.checkpoints.weights import own_head, resolve_run
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.evaluation.evaluate import Evaluation, Settings, evaluate_split
from tessera.utils.evaluation.evaluation_data import check_pixels, evaluation_imgsz, model_classes, read_dataset
from tessera.utils.evaluation.network import DEFAULT_IOU, ImageDetector, Network, open_model
from tessera.utils.files import sha256
from tessera.utils.machine.accelerator import explain_out_of_memory
from tessera.utils.ranks.consistency import data_fingerprint, require_agreement, require_same_command
from tessera.utils.ranks.failures import PeerError, run_command
from tessera.utils.ranks.launch import open_world
from tessera.utils.ranks.world import World, torch_distributed_zero_first
from tessera.utils.report.console import setup_logging
from tessera.utils.text import plural
from tessera.utils.thresholds import DEFAULT_CONF
from tessera.utils.types import DatasetIndex

log = logging.getLogger(__name__)

OUT_OF_MEMORY_REMEDIES = "Give a smaller --batch-size or a smaller --imgsz, or free memory that other processes hold."


class Opened(NamedTuple):
    """A run of a side: its name in messages, its file, SHA-256 and megabytes, and its model."""

    called: str
    file: Path
    sha256: str
    mb: float
    model: Network | ImageDetector


def compare(config: CompareConfig, world: World) -> Comparison:
    """Validate both sides; print and write the differences."""
    require_same_command(config, world)
    opened = [[open_run(side, name, config, world) for name in getattr(config, side)] for side in ("a", "b")]
    everyone = [run for side in opened for run in side]
    with torch_distributed_zero_first(world.local_rank, world) as verified:
        spec = read_dataset(config.data, *trained_on(everyone, config))
        index = build_index(spec, config.task, single_cls=config.single_cls, verified=verified)
    for text in index_warnings(index, config.max_det):
        log.warning(text)
    require_agreement(data_fingerprint({config.task: index}), world)
    class_of = {
        run.called: model_classes(run.model.names, spec, run.called, single_cls=config.single_cls) for run in everyone
    }
    for run in everyone:
        check_pixels(run.model, spec)
    check_comparable(everyone, index)

    with ExitStack() as stack:
        folder = stack.enter_context(new_run(config, world, map(index.path, range(len(index)))))
        a, b = ([evaluate_run(run, index, class_of[run.called], config, world) for run in side] for side in opened)
        rankings = [[evaluation.ranking for _, evaluation in side] for side in (a, b)]
        matches = (a[0][1].matches, b[0][1].matches) if len(a) == len(b) == 1 else None
        medians = [side[median_run([metrics.map for metrics, _ in side])] for side in (a, b)]

        def joined() -> Comparison:
            thresholds = [metrics.threshold for metrics, _ in medians]
            of_a, of_b = (detections_above(evaluation.matches, metrics.threshold) for metrics, evaluation in medians)
            found = Comparison(
                tuple(metrics for metrics, _ in a),
                tuple(metrics for metrics, _ in b),
                str(spec.yaml_path),
                config.task,
                index.names,
                differences(rankings[0], rankings[1], matches),
                find_disagreements(of_a, of_b, index, *thresholds),
                config.requirements,
            )
            write_disagreements(folder, index, found.disagreements, of_a, of_b)
            report_comparison(found, folder, verbose=config.verbose)
            return found

        return world.run_on_main(joined)


def open_run(side: str, name: str, config: CompareConfig, world: World) -> Opened:
    """Open a run of a side."""
    with about(side, name):
        file = world.run_on_main(lambda: resolve_run(name))
        flags = {"augment": config.augment, "half": config.half, "end2end": config.end2end}
        model = open_model(str(file), world, **flags, trust_file=config.trust_file)
    digest, size = world.run_on_main(lambda: (sha256(file), size_of(file)))
    return Opened(f"--{side} {name}", file, digest, size / 1e6, model)


@contextmanager
def about(side: str, name: str) -> Iterator[None]:
    """Make errors about `--weights` name the run of a side."""
    try:
        yield
    except PeerError:
        raise
    except UserError as error:
        kind = ConfigError if isinstance(error, ConfigError) else UserError
        message = str(error).removeprefix("--weights ").removeprefix(f"{name}: ")
        raise kind(f"--{side} {name}: {message}", reporter=error.reporter) from error


def trained_on(runs: Sequence[Opened], config: CompareConfig) -> tuple[str, str]:
    """Return the name of a run and the dataset it was trained on; "" where no run names one.

    Different datasets are a ConfigError, unless `--data` chooses one.
    """
    datasets = {run.model.data: run.called for run in reversed(runs) if run.model.data}
    if len(datasets) > 1 and not config.data:
        each = ", ".join(f"{called} on {data}" for data, called in reversed(datasets.items()))
        raise ConfigError(f"--data: none given, and the runs were trained on different datasets: {each}. Give --data.")
    return next(((called, data) for data, called in datasets.items()), (runs[0].called, ""))


def check_comparable(runs: Sequence[Opened], index: DatasetIndex) -> None:
    """Raise UserError for a dataset without objects; warn of runs that are the same file."""
    if len(index.classes) == 0:
        raise UserError(
            f"--data: no object in the labels of the {plural(len(index), 'image')} of {index.split!r}, so there is "
            "nothing to compare. Choose another split with --task, or check the labels with train.py --check-data."
        )
    for other, run in itertools.combinations(runs, 2):
        if run.sha256 == other.sha256:
            log.warning(f"{other.called} and {run.called} are the same file.")


def evaluate_run(
    run: Opened, index: DatasetIndex, class_of: tuple[int, ...], config: CompareConfig, world: World
) -> tuple[RunMetrics, Evaluation]:
    """Validate a run as val.py does; `class_of` as in Settings."""
    log.info(f"{run.called}:")
    imgsz = evaluation_imgsz(run.model, config)
    log.info(run.model.describe(imgsz))
    work = f"{run.called}: a batch of {config.batch_size} images at {imgsz} px"
    with explain_out_of_memory(world.accelerator, work, OUT_OF_MEMORY_REMEDIES):
        warm_up(run.model, imgsz, config.batch_size)
        model = image_detector(run.model, imgsz, config.tile, config.overlap) if config.tile else run.model
        thresholds = config.conf_thres, config.iou_thres, config.max_det
        settings = Settings(*thresholds, class_of=class_of, threshold=config.threshold)
        evaluation = evaluate_split(
            model, index, world, imgsz, settings, batch_size=config.batch_size, workers=config.workers
        )
    names = "map", "map50", "precision", "recall"
    metrics = RunMetrics(
        file=str(run.file),
        sha256=run.sha256,
        source=run.model.source,
        imgsz=imgsz,
        threshold=config.threshold.confidence if config.threshold else run.model.threshold,
        **{name: getattr(evaluation.metrics, name) for name in names},
        ms=sum(evaluation.metrics.speed_ms),
        mb=run.mb,
        parameters=run.model.parameters,
    )
    return metrics, evaluation


def warm_up(model: Network | ImageDetector, imgsz: ImageSize, batch_size: int) -> None:
    """Predict on an empty image: the first call is much slower, and would count against the first side."""
    if isinstance(model, ImageDetector):
        model(np.zeros((*size_hw_of(imgsz), 3), np.uint8), NmsSettings(DEFAULT_CONF, DEFAULT_IOU, 1))
    else:
        model(torch.zeros(batch_size, 3, *size_hw_of(imgsz), device=model.accelerator.device))


def join(given: dict[str, Any]) -> Comparison:
    """Join the job and compare, on every rank."""
    config = CompareConfig(**given)
    with open_world(config.device, config.local_rank, threads=config.threads) as world:
        setup_logging(world.rank, world.size)
        own_head(config.head)
        return compare(config, world)


@documented(CompareConfig)
def run(*models: str, **kwargs: Any) -> Comparison:
    """Compare from Python: two models, or sides of several as `a=[…], b=[…]`; takes the names of the flags.

    Raises:
        UserError: a mistake in the flags, the data or the weights.
    """
    return join(CompareConfig.named({**kwargs, **({"models": models} if models else {})}))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_command(CompareConfig, sys.argv[1:] if argv is None else argv, join)


if __name__ == "__main__":
    sys.exit(main())
