"""Exported files: their metadata, and backends that run them.

Legend: B images, A rows of an image, C classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.deploy.runtime.output_checks import checked_detections, checked_rows
from tessera.models.nms import NmsSettings
from tessera.utils.bit_depth import PixelRule
from tessera.utils.checkpoints.archive import DamagedFile
from tessera.utils.checkpoints.format import MAX_IMGSZ, check_detector
from tessera.utils.errors import UserError
from tessera.utils.evaluation.backend import Backend, ImageBackend, Model
from tessera.utils.flags.program import called
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.text import first_line, one_line, shown
from tessera.utils.thresholds import DEFAULT_CONF
from tessera.utils.types import Detections

WHOLE, BARE = "tessera-detector 1", "tessera-network 1"  # the key `format`
FORMATS = (WHOLE, BARE)
METADATA = "tessera.json"  # metadata file of archives
_MULTIPLE, _WIDEST_STRIDE, _LARGEST_BATCH = 32, 1024, 4096


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
    """Metadata of an exported file; the other attributes are those of `Model`."""

    path: Path
    names: tuple[str, ...]
    imgsz: int
    stride: int
    size_hw: tuple[int, int] | None
    whole: bool  # a detector with pre- and postprocessing; else the bare network
    end2end: bool  # its rows predict each object once
    data: str
    confidence: float | None
    class_confidences: tuple[float, ...]
    pixels: PixelRule | None

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
            imgsz, stride = int(strings["imgsz"]), int(strings["stride"])
            size, conf, confs, rule = (
                json.loads(strings.get(key) or "null") for key in ("size_hw", "conf", "conf_per_class", "pixels")
            )
            size_hw = None if size is None else (int(size[0]), int(size[1]))
            confidence, class_confidences = None if conf is None else float(conf), tuple(map(float, confs or ()))
            pixels = PixelRule.from_plain(rule, "pixels")
            check_detector(names, imgsz, confidence, class_confidences)
            _check_sizes(names, imgsz, stride, size_hw)
        except (DamagedFile, KeyError, ValueError, TypeError, IndexError, OverflowError, RecursionError) as error:
            text = ("" if isinstance(error, DamagedFile) else f"{type(error).__name__}: ") + first_line(error)
            raise UserError(f"{path}: its metadata is damaged ({text}). Export again.") from error
        whole, end2end = kind == WHOLE, strings.get("end2end", "").lower() in ("true", "1")
        sizes, data = (imgsz, stride, size_hw), strings.get("data", "")
        return cls(path, names, *sizes, whole, end2end, data, confidence, class_confidences, pixels)


def _check_sizes(names: tuple[str, ...], imgsz: int, stride: int, size_hw: tuple[int, int] | None) -> None:
    """Raise DamagedFile for values that export.py does not write."""
    if not names:
        raise DamagedFile("it names no class")
    if not (0 < stride <= _MULTIPLE and _MULTIPLE % stride == 0) and not _MULTIPLE < stride <= _WIDEST_STRIDE:
        raise DamagedFile(f"its stride is {stride}, expected a divisor of {_MULTIPLE}, or up to {_WIDEST_STRIDE}")
    for side in (imgsz, *(size_hw or ())):
        if side % stride or not 0 < side <= MAX_IMGSZ:
            raise DamagedFile(
                f"it takes {side} pixels, expected a multiple of its stride {stride}, at most {MAX_IMGSZ}"
            )


class _Exported(Model):
    """A file of export.py; `runtime` is a name for the log, such as "ONNX Runtime, CPUExecutionProvider"."""

    def __init__(
        self, description: Description, runtime: str, enable_concurrency: Callable[[], int] | None = None
    ) -> None:
        self.description, self.runtime, self._enable_concurrency = description, runtime, enable_concurrency
        self.source, self.names, self.data = description.path.name, description.names, description.data
        self.imgsz, self.stride, self.size_hw = description.imgsz, description.stride, description.size_hw
        self.imgsz_origin = f"was made for {description.imgsz}"
        self.confidence, self.class_confidences = description.confidence, description.class_confidences
        self.pixels = description.pixels

    def enable_concurrency(self) -> int:
        return self._enable_concurrency() if self._enable_concurrency else 1

    @property
    def threshold(self) -> float:
        return DEFAULT_CONF if self.confidence is None else self.confidence  # the export may have been given a low one

    def describe(self, imgsz: int) -> str:
        return f"{self.source}: {self.runtime}"


class ExportedNetwork(_Exported, Backend):
    """An exported bare network: letterboxed images in, rows out.

    Args:
        description, runtime, enable_concurrency: as of `_Exported`.
        accelerator: computes the network.
        predict: maps contiguous float32 (B, 3, H, W) to rows (B, A, 4 + C); thread-safe.
        batch: fixed batch size; None = any.
    """

    def __init__(
        self,
        description: Description,
        runtime: str,
        accelerator: Accelerator,
        predict: Callable[[NDArray[np.float32]], Any],
        batch: int | None = None,
        enable_concurrency: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(description, runtime, enable_concurrency)
        self.accelerator, self.needs_nms = accelerator, not description.end2end
        self.splits_batches = enable_concurrency is not None
        self._predict, self._batch = predict, batch

    def __call__(self, images: Tensor) -> Tensor:
        """As Backend; a UserError where the file takes another size."""
        path, batch, size_hw = self.description.path, self._batch, tuple(images.shape[-2:])
        if self.size_hw not in (None, size_hw):
            raise UserError(f"{path}: found images of {size_hw} pixels (height, width), expected {self.size_hw}.")
        if batch is not None and not 0 < batch <= _LARGEST_BATCH:
            raise UserError(f"{path}: found a batch size of {batch}, expected 1 to {_LARGEST_BATCH}. Export it again.")
        array = np.ascontiguousarray(images.detach().to("cpu", torch.float32).numpy())
        parts = [array]
        if batch is not None:  # padded with the last image
            filled = np.concatenate([array, np.repeat(array[-1:], -len(array) % batch, 0)])
            parts = np.split(filled, len(filled) // batch)
        with runtime_errors(self.runtime, path, "compute"):
            rows = [checked_rows(self._predict(part), len(part), self.nc) for part in parts]
        return torch.from_numpy(np.concatenate(rows)[: len(array)]).to(self.accelerator.device)


class ExportedDetector(_Exported, ImageBackend):
    """An exported detector: image in, boxes in its pixels out; thresholds are inputs.

    Args:
        description, runtime, enable_concurrency: as of `_Exported`.
        run: maps the inputs to boxes (n, 4), scores (n,) and classes (n,); thread-safe.
        ranks: number of dimensions of each input; a UserError where an input is missing.
        image: name of the image input, uint8 (H, W, 3) RGB.
    """

    def __init__(
        self,
        description: Description,
        runtime: str,
        run: Callable[[dict[str, NDArray[Any]]], Sequence[NDArray[Any]]],
        ranks: Mapping[str, int],
        image: str = "image",
        enable_concurrency: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(description, runtime, enable_concurrency)
        self._run, self._ranks, self._image = run, ranks, image
        needed = {image, "conf", "max_det"}.union(() if description.end2end else ("iou",))
        if missing := needed - ranks.keys():
            raise UserError(
                f"{description.path}: found the inputs {', '.join(ranks)}, expected {', '.join(sorted(missing))} too. "
                "Export again."
            )

    def detect(self, image: NDArray[np.uint8], rules: NmsSettings) -> Detections:
        """As ImageBackend; a UserError for rules that the file does not support."""
        if self.nc > 1 and (rules.agnostic or not rules.multi_label):
            raise UserError(
                f"{self.description.path}: its NMS is per class and multi-label, and cannot be class-agnostic. Use the "
                f"checkpoint, or the bare network of {called('export.py')} --raw."
            )
        iou = 1.0 if self.description.end2end else rules.iou
        # NMS is per class, so that thresholds of classes may follow it.
        max_det = rules.max_candidates if rules.class_confs else rules.max_det
        limits = {"conf": np.float32(rules.conf), "iou": np.float32(iou), "max_det": np.int64(max_det)}
        thresholds = {
            name: np.full([1] * self._ranks[name], limits[name]) for name in limits.keys() & self._ranks.keys()
        }
        with runtime_errors(self.runtime, self.description.path, "compute"):
            found = self._run({self._image: np.ascontiguousarray(image), **thresholds})
            boxes, scores, classes = checked_detections(found, self.nc, max_det, image.shape[:2])
        if rules.class_confs:
            passing = np.flatnonzero(scores > np.array(rules.class_confs, np.float32)[classes])[: rules.max_det]
            boxes, scores, classes = boxes[passing], scores[passing], classes[passing]
        return Detections(torch.from_numpy(boxes), torch.from_numpy(scores), torch.from_numpy(classes))
