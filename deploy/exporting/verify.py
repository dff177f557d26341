"""Verification of an export: each file runs on images beside its network and is refused where detections differ."""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.deploy.exporting.difference import (
    EXACT,
    HALF,
    INT8,
    UNSURE_ROUNDS,
    OutputDifference,
    RoundDetections,
    detect_rounds,
    rounds_difference,
)
from tessera.deploy.exporting.job import ExportJob, decoded_images
from tessera.deploy.foreign.synthetic_shapes import render_image
from tessera.deploy.runtime.exported import MissingDevice, size_of
from tessera.deploy.runtime.pipeline import letterbox_image, network_input
from tessera.utils.bit_depth import Pixels
from tessera.utils.errors import UserError
from tessera.utils.evaluation.average_precision import LEVEL, resampled
from tessera.utils.evaluation.average_precision import ROUNDS as BOOTSTRAP_ROUNDS
from tessera.utils.evaluation.evaluate import Evaluation, Settings, evaluate_split
from tessera.utils.evaluation.network import ImageDetector, Network, network_of_weights, open_model
from tessera.utils.image_size import ImageSize, size_hw_of
from tessera.utils.machine.optional_packages import MissingExtra, explain_library_errors, import_extra
from tessera.utils.ranks.world import World
from tessera.utils.seeding import sample_rng
from tessera.utils.text import plural
from tessera.utils.types import DatasetIndex

ASPECTS = (0.4, 0.67, 0.85, 1.0, 1.25, 1.6, 2.4)  # width over height of the crops
WHOLE = 6  # images that are not cropped
_MIN_FRACTION = 0.005  # of all numbers of a file, for a type to be listed
_BATCH = 16
_COLUMNS = ("file", "MB", "ms", "mAP50-95", "lost", "boxes, px", "scores", "matched", "dtypes")


class Verified(NamedTuple):
    """Result of an export: the files, and the table rows of the network and of each file."""

    checkpoint: Path
    files: dict[str, Path]
    rows: list[FileRow]
    exit_code: int = 0

    def as_dict(self) -> dict[str, Any]:
        network, *rows = (row.as_dict() for row in self.rows)
        named = zip(self.files.items(), rows, strict=True)
        files = [{"format": name, "file": str(path), **row} for (name, path), row in named]
        return {"weights": str(self.checkpoint), "network": network, "files": files}


def verify(
    job: ExportJob, files: dict[str, Path], world: World, index: DatasetIndex | None, class_of: tuple[int, ...] = ()
) -> Verified:
    """Run every file beside the network and print the table.

    `files` are by format; `index` and `class_of` of `job.images`, None = synthetic images, without mAP. A UserError
    where the detections of a file differ, or it loses more mAP than `--max-drop`.
    """
    images, origin = sample_images(index, max(size_hw_of(job.imgsz)))
    judge = Verifier(job, images, world, index, Settings(class_of=class_of))
    rows = [judge.network(), *(judge.file(path) for path in files.values())]
    print(f"Compared on {origin}; ms: median per image, from pixels to boxes; px: of {job.imgsz}")
    print("\n".join(table(rows)), flush=True)
    verified = Verified(job.path, files, rows)
    if refused := [f"{row.name}: {row.failures}" for row in rows if row.failures]:
        raise UserError("\n".join(refused) + "\nDo not use the files named here.", details=verified.as_dict())
    return verified


Reference = tuple[Network, RoundDetections, Evaluation | None]  # no evaluation without a dataset


class Verifier:
    """Comparison of files with their network on images, and of their mAP where there is an index."""

    def __init__(
        self, job: ExportJob, images: Sequence[Pixels], world: World, index: DatasetIndex | None, settings: Settings
    ) -> None:
        self._job, self._images, self._world, self._index, self._settings = job, images, world, index, settings
        self._network = network_of_weights(job.model, job.weights, world.accelerator)
        self._references: dict[tuple[int, int] | None, Reference] = {}

    def network(self) -> FileRow:
        """Return the row of the network of `--weights`.

        It must predict finite numbers: NaN exceeds no threshold, so that a NaN network and its file would agree.
        """
        path, (_, found, evaluation) = self._job.path, self._reference(None)
        canvases = (letterbox_image(one, self._job.imgsz, self._network.stride)[0] for one in self._images)
        rows = (self._network(network_input(canvas, self._world.accelerator.device)) for canvas in canvases)
        broken = sum(not bool(torch.isfinite(one).all()) for one in rows)
        acc = None if evaluation is None else accuracy(evaluation, evaluation)
        reason = f"predicts NaN or infinite numbers for {broken} of {len(self._images)} images" if broken else ""
        return FileRow(path.name, size_of(path) / 1e6, "float32", found.milliseconds, acc, failures=reason)

    def file(self, path: Path) -> FileRow:
        """Return the row of an exported file."""
        row = FileRow(path.name, size_of(path) / 1e6, "")
        try:
            with explain_library_errors(str(path), (), ""):
                row = replace(row, dtypes=precision_of(path))
            backend = open_model(str(path), self._world, trust_file=True)  # written just now
            network, expected, reference = self._reference(backend.size_hw)
            found = detect_rounds(backend, self._images, self._imgsz(backend), expected.rounds)
            evaluation = self._evaluate(backend)
        except (MissingExtra, MissingDevice) as error:
            return replace(row, unverified=str(error))
        except UserError as error:  # a damaged file, or invalid output
            return replace(row, failures=str(error))
        allowed = INT8 if "int8" in row.dtypes else HALF if "float16" in row.dtypes else EXACT
        apart = rounds_difference(expected, found, self._images, self._imgsz(network), allowed, network)
        failures, acc, most = [apart.exceeds(allowed)], None, self._job.config.max_drop
        if evaluation is not None and reference is not None:
            acc = accuracy(evaluation, reference)
            if acc.drop > most:
                failures.append(f"loses {acc.drop:.4f} mAP50-95, expected at most {most:g} (--max-drop)")
        nothing = "" if apart.detections else f"neither it nor {self._job.path.name} detects anything on these images"
        return replace(
            row,
            milliseconds=found.milliseconds,
            accuracy=acc,
            difference=apart,
            failures="; ".join(filter(None, failures)),
            unverified=nothing,
        )

    def _reference(self, size_hw: tuple[int, int] | None) -> Reference:
        """Return the network at one input size (None = any), its detections and its evaluation."""
        if size_hw not in self._references:
            network = copy.copy(self._network)
            network.size_hw = size_hw
            found = detect_rounds(network, self._images, self._imgsz(network))
            if not any(len(one) for images in found.detections for one in images):
                found = detect_rounds(network, self._images, self._imgsz(network), UNSURE_ROUNDS)
            self._references[size_hw] = network, found, self._evaluate(network)
        return self._references[size_hw]

    def _evaluate(self, backend: Network | ImageDetector) -> Evaluation | None:
        if self._index is None:
            return None
        return evaluate_split(
            backend, self._index, self._world, self._imgsz(backend), self._settings, batch_size=_BATCH, workers=0
        )

    def _imgsz(self, backend: Network | ImageDetector) -> ImageSize:
        return backend.fixed_imgsz or self._job.imgsz


class Accuracy(NamedTuple):
    """mAP50-95 and its drop below the reference, each with a 95 % bootstrap interval."""

    map: float
    interval: tuple[float, float]
    drop: float
    drop_interval: tuple[float, float]  # of the same images for both: far narrower than those of the two mAPs


def accuracy(found: Evaluation, reference: Evaluation) -> Accuracy:
    """Return the accuracy of a file beside that of its network on the same images."""
    before, after = (
        resampled(each.ranking, sample_rng(0, 0, 0, "bootstrap"), BOOTSTRAP_ROUNDS).maps()[1]
        for each in (reference, found)
    )
    drop = reference.metrics.map - found.metrics.map
    return Accuracy(found.metrics.map, _bounds(after), drop, _bounds(before - after))


def _bounds(samples: NDArray[np.float64]) -> tuple[float, float]:
    known, tail = samples[np.isfinite(samples)], (1 - LEVEL) / 2
    low, high = np.quantile(known, (tail, 1 - tail)).tolist() if len(known) else (np.nan, np.nan)
    return low, high


@dataclass(frozen=True)
class FileRow:
    """One file; None = not evaluated."""

    name: str
    megabytes: float
    dtypes: str  # of its tensors, such as "int8 98%, float32 2%"; "" = unknown
    milliseconds: float | None = None  # median per image, from pixels to boxes
    accuracy: Accuracy | None = None
    difference: OutputDifference | None = None  # from its network
    failures: str = ""  # reasons for refusal; "" = none
    unverified: str = ""  # reason for which it was not verified; "" = verified

    def as_dict(self) -> dict[str, Any]:
        found, apart = self.accuracy, self.difference
        return {
            "name": self.name,
            "mb": self.megabytes,
            "dtypes": self.dtypes,
            "ms": self.milliseconds,
            "status": "refused" if self.failures else "unverified" if self.unverified else "verified",
            "reason": self.failures or self.unverified,
            "map": found and found.map,
            "map_interval": found and found.interval,
            "drop": found and found.drop,
            "drop_interval": found and found.drop_interval,
            "boxes_px": apart and apart.largest[0],
            "scores": apart and apart.largest[1],
            "matched": apart and apart.matched_fraction,
        }


def table(rows: Sequence[FileRow]) -> list[str]:
    """Return the lines of the table."""
    cells = [_COLUMNS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for name, *values, dtypes in cells:
        aligned = (figure.rjust(width) for figure, width in zip(values, widths[1:-1], strict=True))
        lines.append("  ".join((name.ljust(widths[0]), *aligned, dtypes)).rstrip())
    return [*lines, *(f"{row.name}: not verified here: {row.unverified}" for row in rows if row.unverified)]


def _cells(row: FileRow) -> tuple[str, ...]:
    found, apart = row.accuracy, row.difference
    time = "" if row.milliseconds is None else f"{row.milliseconds:.1f}"
    map_text = "" if found is None else _interval(found.map, found.interval)
    lost = "" if found is None or apart is None else _interval(found.drop, found.drop_interval)
    differences = ("", "", "")
    if apart is not None and apart.detections:
        box_px, score = apart.largest
        differences = (f"{box_px:.3g}", f"{score:.2g}", f"{apart.matched_fraction:.1%}")
    return (row.name, f"{row.megabytes:.1f}", time, map_text, lost, *differences, row.dtypes)


def _interval(value: float, bounds: tuple[float, float]) -> str:
    return f"{value:.4f} ({bounds[0]:.4f} to {bounds[1]:.4f})"


def sample_images(index: DatasetIndex | None, size: int) -> tuple[tuple[Pixels, ...], str]:
    """Return images of at least six aspect ratios, uint8 (H, W, 3) RGB, and a description of their origin.

    They are spread evenly over the aspect ratios of `index`; None = synthetic shapes with a long side of `size` pixels.
    """
    found: list[Pixels] = []
    if index is not None:
        by_aspect = np.argsort(index.sizes_hw[:, 1] / index.sizes_hw[:, 0], kind="stable")
        found = [*decoded_images(index, by_aspect, WHOLE)]
    if index is not None and found:
        origin = f"{plural(len(found), 'image')} of {index.split} and {len(ASPECTS)} crops of them"
    else:
        found = [render_image("val", number, size=size)[0] for number in range(WHOLE)]
        origin = "synthetic shapes, as no dataset is available (--data)"
    crops = (_crop(found[number % len(found)], aspect) for number, aspect in enumerate(ASPECTS))
    return (*found, *crops), origin


def _crop(image: Pixels, aspect: float) -> Pixels:
    height, width = image.shape[:2]
    new_h = max(min(height, round(width / aspect)), 1)
    new_w = max(min(width, round(height * aspect)), 1)
    top, left = (height - new_h) // 2, (width - new_w) // 2
    return np.ascontiguousarray(image[top : top + new_h, left : left + new_w])


def precision_of(path: Path) -> str:
    """Return the types of the stored numbers, such as "int8 98%, float32 2%"; "" = unknown."""
    counts: Counter[str] = Counter()
    for name, numbers in _tensors(path):
        counts[name] += numbers
    fractions = {name: count / counts.total() for name, count in counts.most_common()}
    listed = {name: fraction for name, fraction in fractions.items() if fraction >= _MIN_FRACTION}
    return ", ".join(
        f"{name} {fraction:.0%}" if fraction < 1 - _MIN_FRACTION else name for name, fraction in listed.items()
    )


def _tensors(path: Path) -> Iterable[tuple[str, int]]:
    """Return type and size of each tensor."""
    if path.suffix == ".onnx":
        onnx = import_extra("onnx", "export", str(path))
        type_of = onnx.helper.tensor_dtype_to_np_dtype
        return [(str(type_of(one.data_type)), math.prod(one.dims)) for one in onnx.load(path).graph.initializer]
    if path.suffix == ".xml":
        openvino = import_extra("openvino", "openvino", str(path))
        nodes = openvino.Core().read_model(path).get_ops()
        values = [node.output(0) for node in nodes if node.get_type_name() == "Constant"]
        return [(np.dtype(one.get_element_type().to_dtype()).name, math.prod(one.get_shape())) for one in values]
    if path.suffix == ".safetensors":
        found = import_extra("safetensors.torch", "safetensors", str(path)).load_file(path)
    elif path.suffix == ".torchscript":
        with warnings.catch_warnings(action="ignore"):  # that TorchScript is deprecated
            found = torch.jit.load(path, "cpu").state_dict()
    elif path.suffix == ".pt":
        found = torch.load(path, "cpu", weights_only=True)["ema"]
    else:
        found = {}
    tensors = [one for one in found.values() if isinstance(one, Tensor)]
    return [(str(one.dtype).removeprefix("torch."), one.numel()) for one in tensors]
