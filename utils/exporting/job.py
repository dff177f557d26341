"""What is exported, and how: read once, given to every format."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tessera.data.source.annotations.class_matching import SINGLE_CLASS
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.decode import UndecodableImage, read_image
from tessera.data.source.index import build_index
from tessera.models.detector import DetectionModel, usable_imgsz
from tessera.models.layers.blocks import Conv
from tessera.utils.bit_depth import Pixels
from tessera.utils.checkpoints.resolve import resolve_weights
from tessera.utils.checkpoints.weights import Weights, load_weights, model_of_weights
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.exporting.quantized.sensitivity import PICTURES, sensitive_layers
from tessera.utils.files import sha256, user_path
from tessera.utils.flags.export import ExportConfig
from tessera.utils.flags.options import parsed_confidence
from tessera.utils.runtime.evaluation_data import classes_of
from tessera.utils.runtime.model import DEFAULT_CONF
from tessera.utils.runtime.pipeline import fit_picture, network_input
from tessera.utils.types import DatasetIndex

CALIBRATION = 128  # training pictures, spread evenly
VARIANTS = ("raw", "half", "int8", "end2end", "batched")  # flags that not every format can follow

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportJob:
    """A checkpoint that is exported.

    Attributes:
        path: of the checkpoint.
        sha256: of the checkpoint.
        model: raw, in training mode on the CPU; its head keeps what inference needs.
        weights: what else the file says.
        config: the flags.
        imgsz: long side in pixels that pictures are brought to, a multiple of the stride.
        size_hw: the one height and width of the bare network; None = any.
        conf: the confidence that a file recommends in its metadata.
    """

    path: Path
    sha256: str
    model: DetectionModel
    weights: Weights
    config: ExportConfig
    imgsz: int
    size_hw: tuple[int, int] | None
    conf: float

    @classmethod
    def read(cls, config: ExportConfig) -> ExportJob:
        """Read `--weights`, and decide sizes and thresholds.

        Raises:
            UserError: no such file, or none that can be exported; sizes that do not fit the model; no images to
                calibrate on.
        """
        path = resolve_weights(config.weights)
        weights = load_weights(path)
        model = model_of_weights(weights, str(path))
        if model.channels != 3:
            raise UserError(f"--weights {path}: reads images of {model.channels} channels, expected 3: images are RGB.")
        model.head.keep_inference(end2end=config.end2end)
        size_hw = _fixed(config, model)
        asked = config.imgsz[0] if config.imgsz else weights.usual_imgsz
        imgsz = max(size_hw) if size_hw else usable_imgsz(asked, model.stride)
        asked_conf = parsed_confidence(config.conf_thres)
        conf = (weights.confidence or DEFAULT_CONF) if asked_conf is None else asked_conf
        job = cls(path, sha256(path), model, weights, config, imgsz, size_hw, conf)
        if config.int8:
            _ = job.training  # raises before any work where it is not there
        return job

    @property
    def folder(self) -> Path:
        """Where files go."""
        return user_path(self.config.output, "--output") if self.config.output else self.path.parent

    def file(self, suffix: str) -> Path:
        """Where a format with this suffix goes, with what it is a variant of in its name."""
        words = [self.path.stem, *(word for word in VARIANTS if getattr(self.config, word))]
        if self.size_hw:
            words.append("{}x{}".format(*self.size_hw))
        return self.folder / ("-".join(words) + suffix)

    def images(self, split: str) -> tuple[DatasetIndex | None, tuple[int, ...]]:
        """A split of `--data`, or else of the dataset that was trained on, where it is there: it is not downloaded.

        With the class of val for each of the model's, as `classes_of` returns them; a calibration needs none.

        Raises:
            UserError: of `--data` alone: it is not there, has a mistake, or none of the model's classes.
        """
        given, single_cls = self.config.data, self.weights.names == (SINGLE_CLASS,)
        if not (given or self.weights.data):
            return None, ()
        try:
            spec = load_spec(given or self.weights.data, obtain=bool(given))
            index, source = build_index(spec, split, single_cls=single_cls), f"--weights {self.path}"
            return index, classes_of(self.model.names, spec, source, single_cls=single_cls) if split == "val" else ()
        except UserError as error:
            if given:
                raise
            log.warning(f"{error} It is what the weights were trained on; give another with --data.")
            return None, ()

    @cached_property
    def training(self) -> DatasetIndex:
        """The images that a quantisation is calibrated on.

        Raises:
            UserError: they are not there.
        """
        index, _ = self.images("train")
        if index is None:
            kind, where = (UserError, "here") if self.weights.data else (ConfigError, "known")
            raise kind(
                f"--int8: the dataset that {self.path.name} was trained on is not {where}, and quantisation is "
                "calibrated on its pictures. Give its YAML with --data, such as --data coco128.yaml."
            )
        return index

    def calibration_pictures(self, count: int = CALIBRATION) -> Iterator[Pixels]:
        """At most so many training pictures, one after the other, uint8 (H, W, 3) RGB."""
        index = self.training
        chosen = np.unique(np.linspace(0, len(index) - 1, min(count, len(index))).round().astype(int))
        for image in chosen.tolist():
            with suppress(UndecodableImage):  # the check of the data names it
                yield read_image(index.path(image), rule=index.pixels)

    def calibration_images(self, count: int = CALIBRATION) -> Iterator[Tensor]:
        """The same as the bare network takes them: float32 (1, 3, h, w)."""
        for picture in self.calibration_pictures(count):
            canvas, _ = fit_picture(picture, self.imgsz, self.model.stride, self.size_hw)
            yield network_input(canvas, torch.device("cpu")).contiguous()

    @cached_property
    def float_layers(self) -> tuple[int, ...]:
        """Of a file in 8 bits, the layers that stay in float, as the model's YAML counts them."""
        layers = sensitive_layers(self.model, self.calibration_images(PICTURES))
        log.info(f"--int8: layers that stay in float: {', '.join(map(str, layers))}")
        return layers

    @property
    def body_weights(self) -> frozenset[str]:
        """Names, as in the graph, of the weights of all convolutions but the head's last, which give the predictions.

        Those write logits of boxes and of classes, whose ranges have nothing in common, and decoding follows: in 8 bits
        the scores would vanish.
        """
        convolutions = (name for name, module in self.model.named_modules() if isinstance(module, Conv))
        return frozenset(f"model.{name}.conv.weight" for name in convolutions)

    @property
    def quantized_weights(self) -> frozenset[str]:
        """Those of them that are brought to 8 bits.

        Raises:
            UserError: there are none.
        """
        kept = tuple(f"model.model.{layer}." for layer in self.float_layers)
        weights = frozenset(name for name in self.body_weights if not name.startswith(kept))
        if not weights:
            raise UserError(
                f"--int8: {self.weights.source}: 8 bits change the scores too much in every layer, so that none is "
                "left for them. Export without --int8, or train longer."
            )
        return weights


def _fixed(config: ExportConfig, model: DetectionModel) -> tuple[int, int] | None:
    """The height and width that the bare network is fixed to."""
    if not config.raw or not config.imgsz:
        return None
    height, width = config.imgsz * 2 if len(config.imgsz) == 1 else config.imgsz
    if height % model.stride or width % model.stride:
        near = [-(-side // model.stride) * model.stride for side in (height, width)]
        raise ConfigError(
            f"--imgsz {height} {width}: expected multiples of {model.stride}, the stride of {model.name}, such as "
            f"{near[0]} {near[1]}."
        )
    return height, width
