"""Opened models: networks, which predict from a batch of images, and detectors of whole images.

What differs between a checkpoint, a running training and an exported file is a function in a field.

Legend: B images, A predictions of an image, C classes.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tessera.models.build import count_parameters
from tessera.models.detector import DetectionModel, check_imgsz, predict_augmented, summary
from tessera.models.nms import NmsSettings
from tessera.utils.bit_depth import PixelRule
from tessera.utils.checkpoints.weights import EXPORTED, Weights, load_weights, model_of_weights, resolve_weights
from tessera.utils.engine.precision import Precision, half_precision
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.extensions import extension
from tessera.utils.image_size import ImageSize, image_size, round_imgsz
from tessera.utils.machine.accelerator import Accelerator, explain_out_of_memory_loading
from tessera.utils.ranks.world import World
from tessera.utils.thresholds import DEFAULT_CONF, detection_threshold
from tessera.utils.types import Detections

log = logging.getLogger(__name__)

DEFAULT_IOU = 0.45  # as YOLOv5's
MAX_CONCURRENT = 8  # images, each of which needs its own memory


def _one() -> int:
    return 1


def _threads_of_torch() -> int:
    return min(torch.get_num_threads(), MAX_CONCURRENT)


@contextmanager
def single_threaded_pool(count: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of `count` threads, in each of which torch uses one thread; on exit cancel pending work."""
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, name, torch.set_num_threads, (1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)  # new threads start with the number that any thread has set last


@dataclass(kw_only=True, eq=False)
class Model:
    """Description of an opened model."""

    source: str  # name of the file in messages
    names: tuple[str, ...]  # class names by index
    imgsz: ImageSize  # training size, multiples of `stride`; where it is fixed, that of `size_hw`
    stride: int  # the sides of its input are multiples of it
    describe: Callable[[ImageSize], str]  # a line on the model and its runtime at an image size
    imgsz_origin: str = ""  # origin of the training size, such as "was trained at 640"
    size_hw: tuple[int, int] | None = None  # fixed height and width; None = any multiples of the stride
    confidence: float | None = None  # confidence with the best mean F1 in validation; None = unknown
    class_confidences: tuple[float, ...] = ()  # confidence with the best F1 of each class; () = unknown
    threshold: float = DEFAULT_CONF  # confidence threshold for detection
    pixels: PixelRule | None = None  # conversion of images with more than 8 bits in its training
    data: str = ""  # dataset YAML of its training; "" = unknown
    parameters: int | None = None  # number of parameters, BatchNorm folded; None = unknown
    # Computes several images concurrently from now on, one thread each, where that is faster; returns how many.
    enable_concurrency: Callable[[], int] = _one

    @property
    def nc(self) -> int:
        return len(self.names)

    @property
    def fixed_imgsz(self) -> ImageSize:
        """The only possible image size; 0 = any."""
        return image_size(self.size_hw or 0)

    def check_imgsz(self, imgsz: ImageSize) -> ImageSize:
        """Return the supported size nearest to `imgsz`, with a warning if that differs; 0 = its own."""
        if not self.fixed_imgsz:
            return check_imgsz(imgsz or self.imgsz, self.stride)
        if imgsz not in (0, self.fixed_imgsz):
            log.warning(f"--imgsz {imgsz}: {self.source} was exported for another size; using {self.fixed_imgsz}.")
        return self.fixed_imgsz


@dataclass(kw_only=True, eq=False)
class Network(Model):
    """A network: images on the device in, decoded predictions out."""

    accelerator: Accelerator  # computes the network
    # Maps images to decoded predictions, and the raw outputs that a loss takes, None of an exported file. Thread-safe.
    predict: Callable[[Tensor], tuple[Tensor, Any]]
    has_objectness: bool = False  # rows have an objectness between box and classes that scores do not include
    needs_nms: bool = True  # several rows may predict an object
    splits_batches: bool = False  # after `enable_concurrency` it divides a batch among its own threads

    def __call__(self, images: Tensor) -> Tensor:
        """Predict; thread-safe.

        Args:
            images: float32 (B, 3, H, W) RGB in 0 … 1 on `accelerator.device`; sides are multiples of `stride`.

        Returns:
            float32 (B, A, 4 + C), cx, cy, w, h in pixels of the input and class scores; or (B, A, 5 + C) with
            objectness. The device may still compute it.
        """
        return self.predict(images)[0]


class TimedDetections(NamedTuple):
    """Detections of an image, on the host and in its pixels; milliseconds of preprocessing, inference and NMS."""

    detections: Detections
    speed_ms: tuple[float, float, float]


@dataclass(kw_only=True, eq=False)
class ImageDetector(Model):
    """A detector of whole images: an exported file with NMS inside, or a network with letterbox, NMS and tiles."""

    detect: Callable[[NDArray[np.uint8], NmsSettings], TimedDetections]

    @property
    def fixed_imgsz(self) -> ImageSize:
        return self.imgsz

    def __call__(self, image: NDArray[np.uint8], rules: NmsSettings) -> TimedDetections:
        """Detect objects in uint8 (H, W, 3) RGB; thread-safe. Detections are descending by score."""
        return self.detect(image, rules)


def network_nms(rules: NmsSettings, model: Model) -> NmsSettings:
    """Add to the rules whether a network needs NMS and has an objectness."""
    if not isinstance(model, Network):
        return rules
    return replace(rules, iou=rules.iou if model.needs_nms else 1.0, has_objectness=model.has_objectness)


def open_model(
    weights: str,
    world: World,
    *,
    augment: bool = False,
    half: bool = False,
    end2end: bool = False,
    trust_file: bool = False,
) -> Network | ImageDetector:
    """Open the file of `--weights`; all ranks call it together, and rank 0 reads a checkpoint.

    `weights` is a checkpoint, the name of a published one, or an exported file. `augment` is test-time augmentation,
    `half` 16-bit inference, `end2end` the branch without NMS; `trust_file` allows files that are programs.

    Raises:
        UserError: the file is missing or unreadable, or does not support a flag.
    """
    accelerator = world.accelerator
    if is_exported(weights):
        for flag, given in (("--augment", augment), ("--half", half), ("--end2end", end2end)):
            if given:
                raise ConfigError(
                    f"{flag}: {weights} is an exported file, which the flag does not change. Remove the flag, or give "
                    "the checkpoint."
                )
        opened: Network | ImageDetector = extension("runtimes").open_exported(
            weights, accelerator, trust_file=trust_file
        )
        return opened
    loaded = world.run_on_main(lambda: load_weights(resolve_weights(weights)))
    model = model_of_weights(loaded, weights)
    if model.channels != 3:
        raise UserError(f"--weights {weights}: reads images of {model.channels} channels, expected 3: images are RGB.")
    model.head.strip_for_inference(end2end=end2end)
    precision = half_precision(accelerator) if half else None
    return network_of_weights(model, loaded, accelerator, augment=augment, precision=precision)


def is_exported(name: str) -> bool:
    """Return whether `--weights` names an exported file, not a checkpoint."""
    return Path(name).suffix.lower() in EXPORTED


def network_of_weights(
    model: DetectionModel,
    weights: Weights,
    accelerator: Accelerator,
    *,
    augment: bool = False,
    precision: Precision | None = None,
) -> Network:
    """Return the network of a checkpoint from its unfused model; a `precision` of None is float32."""
    precision = precision or Precision(accelerator, torch.float32)
    with explain_out_of_memory_loading(weights.source, accelerator):
        fused = fused_copy(model, accelerator)
    for layer in fused.modules():
        if isinstance(layer, nn.Conv2d):  # once: autocast would in each forward
            layer.to(precision.dtype)
    trained = f"was trained at {weights.imgsz}" if weights.imgsz else "does not say at which size it was trained"
    return replace(
        network_of(fused, round_imgsz(weights.default_imgsz, model.stride), accelerator, precision, augment=augment),
        source=weights.source,
        imgsz_origin=trained,
        data=weights.data,
        confidence=weights.confidence,
        class_confidences=weights.class_confidences,
        threshold=detection_threshold(weights.confidence),
        pixels=weights.pixels,
        enable_concurrency=_threads_of_torch if accelerator.is_host else _one,
    )


def network_of(
    fused: DetectionModel,
    imgsz: ImageSize,
    accelerator: Accelerator,
    precision: Precision | None = None,
    *,
    augment: bool = False,
) -> Network:
    """Return the network of a `fused_copy`, such as of a running training; a `precision` of None is float32."""
    autocast = (precision or Precision(accelerator, torch.float32)).autocast

    def predict(images: Tensor) -> tuple[Tensor, Any]:
        with torch.no_grad(), autocast():
            decoded, raw = (predict_augmented(fused, images), None) if augment else fused(images)
            return decoded, raw

    def describe(imgsz: ImageSize) -> str:
        with autocast():
            return summary(fused, imgsz)

    return Network(
        source="the model of the training",
        names=fused.names,
        imgsz=imgsz,
        stride=fused.stride,
        describe=describe,
        parameters=count_parameters(fused),
        accelerator=accelerator,
        predict=predict,
        has_objectness=fused.head.has_objectness,
        needs_nms=fused.head.needs_nms,
    )


def fused_copy(model: DetectionModel, accelerator: Accelerator) -> DetectionModel:
    """Return a copy in evaluation mode with BatchNorm folded into the convolutions."""
    fused = copy.deepcopy(model).eval().fuse(accelerator.widest)
    return fused.to(accelerator.device).to(memory_format=accelerator.memory_format)
