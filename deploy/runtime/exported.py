"""Exported files: their metadata, the models that run them, and checks of their outputs.

A damaged or foreign file may state and compute anything.

Legend: B images, A rows of an image, C classes, n detections.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.models.nms import NmsSettings
from tessera.utils.bit_depth import PixelRule
from tessera.utils.checkpoints.archive import DamagedFile
from tessera.utils.checkpoints.format import MAX_IMGSZ, check_detector
from tessera.utils.errors import UserError
from tessera.utils.evaluation.network import ImageDetector, Network, TimedDetections
from tessera.utils.flags.program import called
from tessera.utils.image_size import ImageSize, image_size, size_hw_of
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.text import first_line, one_line, shown
from tessera.utils.thresholds import DEFAULT_CONF
from tessera.utils.types import Detections

WHOLE, BARE = "tessera-detector 1", "tessera-network 1"  # the key `format`
FORMATS = (WHOLE, BARE)
METADATA = "tessera.json"  # metadata file of archives
_MULTIPLE, _WIDEST_STRIDE, _LARGEST_BATCH = 32, 1024, 4096
_BEYOND = 1.0  # pixels beyond the image that rounding may cause
_ABOVE = 1e-3  # above a score of 1 that rounding may cause


def files_of(path: Path) -> tuple[Path, ...]:
    """Return an exported file and its companions."""
    beside = {".xml": (".bin",), ".param": (".bin", ".json")}.get(path.suffix, ())
    return path, *(path.with_suffix(suffix) for suffix in beside)


def size_of(path: Path) -> int:
    """Return the size in bytes, companions included."""
    return sum(one.stat().st_size for one in files_of(path))


class MissingDevice(UserError):
    """The runtime of a file does not support the requested device."""


@contextmanager
def runtime_errors(runtime: str, path: Path, does: str) -> Iterator[None]:
    """Convert errors of a runtime, and `DamagedFile`, to a UserError about the file; out-of-memory errors pass.

    Each runtime has error classes of its own without a common base. `does`: "load" or "compute".
    """
    try:
        yield
    except UserError:
        raise
    except DamagedFile as error:
        raise UserError(
            f"{path}: damaged, or no sound export: {error}. Use the checkpoint, or export it without --half."
        ) from error
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or Accelerator().is_out_of_memory(error):
            raise
        raise UserError(f"{path}: {runtime} does not {does} it ({first_line(error)}). Export it again.") from error


def parse_metadata(text: str | bytes) -> dict[str, str]:
    """Parse metadata stored as a JSON object; {} where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Description:
    """Metadata of an exported file."""

    path: Path
    names: tuple[str, ...]
    size_hw: tuple[int, int] | None  # fixed size of a bare network
    whole: bool  # a detector with pre- and postprocessing; else the bare network
    end2end: bool  # its rows predict each object once
    fields: Mapping[str, Any]  # of `Model`

    @classmethod
    def read(cls, strings: Mapping[str, str], path: Path, looks_like: str = "") -> Description:
        """Parse metadata; `looks_like` describes the file in messages.

        Raises:
            UserError: the file is another program's or a later version's, or the metadata is damaged.
        """
        kind = strings.get("format", "")
        if not kind.startswith(("tessera-detector ", "tessera-network ")):
            seen = f" ({one_line(looks_like, 150)})" if looks_like else ""
            raise UserError(
                f"{path}: no file of {called('export.py')}: its metadata does not describe inputs and outputs{seen}. "
                "Give an exported file, or the checkpoint."
            )
        if kind not in FORMATS:
            raise UserError(
                f"{path}: found the format {shown(kind)}, expected one of {', '.join(FORMATS)}. A later version wrote "
                "it. Export again from the checkpoint."
            )
        try:
            names = tuple(json.loads(strings["names"]))
            stride = int(strings["stride"])
            size, conf, confs, rule = (
                json.loads(strings.get(key) or "null") for key in ("size_hw", "conf", "conf_per_class", "pixels")
            )
            size_hw = None if size is None else (int(size[0]), int(size[1]))
            imgsz = image_size(size_hw or json.loads(strings["imgsz"]))
            confidence, class_confidences = None if conf is None else float(conf), tuple(map(float, confs or ()))
            pixels = PixelRule.from_plain(rule, "pixels")
            check_detector(names, imgsz, confidence, class_confidences)
            _check_sizes(names, imgsz, stride)
        except (DamagedFile, KeyError, ValueError, TypeError, IndexError, OverflowError, RecursionError) as error:
            text = ("" if isinstance(error, DamagedFile) else f"{type(error).__name__}: ") + first_line(error)
            raise UserError(f"{path}: its metadata is damaged ({text}). Export again.") from error
        fields = {
            "source": path.name,
            "names": names,
            "imgsz": imgsz,
            "stride": stride,
            "imgsz_origin": f"was made for {imgsz}",
            "confidence": confidence,
            "class_confidences": class_confidences,
            "threshold": DEFAULT_CONF if confidence is None else confidence,  # the export may have been given a low one
            "pixels": pixels,
            "data": strings.get("data", ""),
        }
        return cls(path, names, size_hw, kind == WHOLE, strings.get("end2end", "").lower() in ("true", "1"), fields)

    def of_model(self, runtime: str, enable_concurrency: Callable[[], int] | None) -> dict[str, Any]:
        """Return the fields of `Model` that networks and detectors share."""
        own = {"enable_concurrency": enable_concurrency} if enable_concurrency else {}
        return {**self.fields, "describe": lambda imgsz: f"{self.path.name}: {runtime}", **own}


def _check_sizes(names: tuple[str, ...], imgsz: ImageSize, stride: int) -> None:
    """Raise DamagedFile for values that export.py does not write."""
    if not names:
        raise DamagedFile("it names no class")
    if not (0 < stride <= _MULTIPLE and _MULTIPLE % stride == 0) and not _MULTIPLE < stride <= _WIDEST_STRIDE:
        raise DamagedFile(f"its stride is {stride}, expected a divisor of {_MULTIPLE}, or up to {_WIDEST_STRIDE}")
    for side in size_hw_of(imgsz):
        if side % stride or not 0 < side <= MAX_IMGSZ:
            raise DamagedFile(
                f"it takes {side} pixels, expected a multiple of its stride {stride}, at most {MAX_IMGSZ}"
            )


def exported_network(
    description: Description,
    runtime: str,
    accelerator: Accelerator,
    compute: Callable[[NDArray[np.float32]], Any],
    batch: int | None = None,
    enable_concurrency: Callable[[], int] | None = None,
) -> Network:
    """Return the network of a file without NMS.

    Args:
        description: its metadata.
        runtime: name for the log, such as "ONNX Runtime, CPUExecutionProvider".
        accelerator: computes the network.
        compute: maps contiguous float32 (B, 3, H, W) to rows (B, A, 4 + C); thread-safe.
        batch: fixed batch size; None = any.
        enable_concurrency: as of `Model`; afterwards `compute` divides a batch among threads.
    """
    path, size_hw, nc = description.path, description.size_hw, len(description.names)

    def predict(images: Tensor) -> tuple[Tensor, None]:
        if size_hw not in (None, found := tuple(images.shape[-2:])):
            raise UserError(f"{path}: found images of {found} pixels (height, width), expected {size_hw}.")
        if batch is not None and not 0 < batch <= _LARGEST_BATCH:
            raise UserError(f"{path}: found a batch size of {batch}, expected 1 to {_LARGEST_BATCH}. Export it again.")
        array = np.ascontiguousarray(images.detach().to("cpu", torch.float32).numpy())
        parts = [array]
        if batch is not None:  # padded with the last image
            filled = np.concatenate([array, np.repeat(array[-1:], -len(array) % batch, 0)])
            parts = np.split(filled, len(filled) // batch)
        with runtime_errors(runtime, path, "compute"):
            rows = [checked_rows(compute(part), len(part), nc) for part in parts]
        return torch.from_numpy(np.concatenate(rows)[: len(array)]).to(accelerator.device), None

    return Network(
        **description.of_model(runtime, enable_concurrency),
        size_hw=size_hw,
        accelerator=accelerator,
        predict=predict,
        needs_nms=not description.end2end,
        splits_batches=enable_concurrency is not None,
    )


def exported_detector(
    description: Description,
    runtime: str,
    compute: Callable[[dict[str, NDArray[Any]]], Sequence[NDArray[Any]]],
    ranks: Mapping[str, int],
    image_input: str = "image",
    enable_concurrency: Callable[[], int] | None = None,
) -> ImageDetector:
    """Return the detector of a file with NMS inside: image in, boxes in its pixels out; thresholds are inputs.

    Args:
        description, runtime, enable_concurrency: as of `exported_network`.
        compute: maps the inputs to boxes (n, 4), scores (n,) and classes (n,); thread-safe.
        ranks: number of dimensions of each input; a UserError where an input is missing.
        image_input: name of the image input, uint8 (H, W, 3) RGB.
    """
    path, nc = description.path, len(description.names)
    needed = {image_input, "conf", "max_det"}.union(() if description.end2end else ("iou",))
    if missing := needed - ranks.keys():
        raise UserError(
            f"{path}: found the inputs {', '.join(ranks)}, expected {', '.join(sorted(missing))} too. Export again."
        )

    def detect(image: NDArray[np.uint8], rules: NmsSettings) -> TimedDetections:
        started = time.perf_counter()
        if nc > 1 and (rules.agnostic or not rules.multi_label):
            raise UserError(
                f"{path}: its NMS is per class and multi-label, and cannot be class-agnostic. Use the checkpoint, or "
                f"the bare network of {called('export.py')} --raw."
            )
        iou = 1.0 if description.end2end else rules.iou
        # NMS is per class, so that thresholds of classes may follow it.
        max_det = rules.max_candidates if rules.class_confs else rules.max_det
        limits = {"conf": np.float32(rules.conf), "iou": np.float32(iou), "max_det": np.int64(max_det)}
        thresholds = {name: np.full([1] * ranks[name], limits[name]) for name in limits.keys() & ranks.keys()}
        with runtime_errors(runtime, path, "compute"):
            found = compute({image_input: np.ascontiguousarray(image), **thresholds})
            boxes, scores, classes = checked_detections(found, nc, max_det, image.shape[:2])
        if rules.class_confs:
            passing = np.flatnonzero(scores > np.array(rules.class_confs, np.float32)[classes])[: rules.max_det]
            boxes, scores, classes = boxes[passing], scores[passing], classes[passing]
        detections = Detections(torch.from_numpy(boxes), torch.from_numpy(scores), torch.from_numpy(classes))
        return TimedDetections(detections, (0.0, 1000 * (time.perf_counter() - started), 0.0))

    return ImageDetector(**description.of_model(runtime, enable_concurrency), detect=detect)


def checked_rows(found: Any, images: int, classes: int) -> NDArray[np.float32]:
    """Return the rows of a bare network as float32 (B, A, 4 + C); raise DamagedFile for anything else."""
    rows = _numbers("rows", found)
    if rows.ndim != 3 or rows.shape[0] != images or rows.shape[2] != 4 + classes:
        raise DamagedFile(f"it computes rows of the shape {_shape(rows)}, expected ({images}, any, {4 + classes})")
    return rows.astype(np.float32, copy=False)


def checked_detections(
    found: Sequence[Any], classes: int, max_det: int, size_hw: tuple[int, int]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Return boxes (n, 4), scores (n,) and classes (n,) of an exported detector.

    Raises:
        DamagedFile: wrong shapes or types, more than `max_det` detections, boxes outside the image, unknown classes.
    """
    boxes, scores, kinds = (_numbers(*pair) for pair in zip(("boxes", "scores", "classes"), found, strict=True))
    count = scores.size
    if boxes.shape != (count, 4) or scores.ndim != 1 or kinds.shape != (count,):
        shapes = ", ".join(map(_shape, (boxes, scores, kinds)))
        raise DamagedFile(f"it computes boxes, scores and classes of the shapes {shapes}, expected (n, 4), (n,), (n,)")
    if count > max_det:
        raise DamagedFile(f"it computes {count:,} boxes, expected {max_det:,} at most")
    height, width = size_hw
    limits = np.array((width, height, width, height)) + _BEYOND
    if not ((boxes >= -_BEYOND) & (boxes <= limits)).all() or not (boxes[:, :2] <= boxes[:, 2:]).all():
        raise DamagedFile(f"it computes a box outside the image of {width} × {height} pixels")
    if len(odd := kinds[(kinds < 0) | (kinds >= classes) | (kinds != np.floor(kinds))]):
        raise DamagedFile(f"it computes the class {odd[0]:g}, expected 0 to {classes - 1}")
    if not ((scores >= 0) & (scores <= 1 + _ABOVE)).all():
        raise DamagedFile(f"it computes scores from {scores.min():g} to {scores.max():g}, expected 0 to 1")
    return boxes.astype(np.float32, copy=False), scores.astype(np.float32, copy=False), kinds.astype(np.int64)


def _numbers(what: str, found: Any) -> NDArray[Any]:
    values = np.asarray(found)
    if values.dtype.kind not in "fiu":
        raise DamagedFile(f"it computes {what} of {values.dtype}, expected numbers")
    # The extremes are NaN where one number is; this makes no copy.
    if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
        raise DamagedFile(f"it computes {what} with numbers that are not finite (NaN or infinite)")
    return values


def _shape(values: NDArray[Any]) -> str:
    return f"({', '.join(map(str, values.shape))})"
