"""What is exported, and how: read once, given to every format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.models.detector import DetectionModel
from tessera.utils.checkpoints.format import load_any_checkpoint
from tessera.utils.checkpoints.resolve import resolve_weights
from tessera.utils.checkpoints.weights import Weights, load_weights, model_of_weights
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.files import user_path
from tessera.utils.flags.export import ExportConfig
from tessera.utils.runtime.model import DEFAULT_CONF


@dataclass(frozen=True)
class Defaults:
    """Thresholds that a file names in its metadata, for who has no others in mind."""

    conf: float
    iou: float
    max_det: int


@dataclass(frozen=True)
class Subject:
    """A checkpoint that is exported.

    Attributes:
        path: of the checkpoint.
        folder: where files go.
        model: raw, in training mode on the CPU; its head keeps what inference needs.
        weights: what else the file says.
        measured: its `metrics` and `thresholds`, each None where the file has none.
        config: the flags.
        imgsz: long side in pixels that pictures are brought to, a multiple of the stride.
        size_hw: the one height and width of the bare network; None = any.
        defaults: thresholds.
    """

    path: Path
    folder: Path
    model: DetectionModel
    weights: Weights
    measured: Mapping[str, Any]
    config: ExportConfig
    imgsz: int
    size_hw: tuple[int, int] | None
    defaults: Defaults

    @classmethod
    def read(cls, config: ExportConfig) -> Subject:
        """Read `--weights`, and decide sizes and thresholds.

        Raises:
            UserError: no such file, or none that can be exported; sizes that do not fit the model.
        """
        given = Path(config.weights)
        if given.suffix not in ("", ".pt", ".pth"):
            raise UserError(
                f"--weights {config.weights}: found a {given.suffix} file, expected the .pt that it was exported from, "
                "such as runs/train/exp/weights/best.pt."
            )
        path = resolve_weights(config.weights)
        weights = load_weights(path)
        model = model_of_weights(weights, config.weights)
        if model.channels != 3:
            raise UserError(
                f"--weights {config.weights}: reads images of {model.channels} channels, expected 3: exports are for "
                "RGB."
            )
        model.head.keep_inference(end2end=config.end2end)
        measured: dict[str, Any] = {"metrics": None, "thresholds": None}
        if not weights.family:
            state = load_any_checkpoint(path)
            measured = {key: state[key] for key in measured}
        size_hw = _fixed(config, model)
        asked = config.imgsz[0] if config.imgsz else weights.usual_imgsz
        imgsz = max(size_hw) if size_hw else model.usable_imgsz(asked)
        best = (measured["thresholds"] or {}).get("confidence")
        conf = float(config.conf_thres) if config.conf_thres else best or DEFAULT_CONF
        return cls(
            path,
            user_path(config.output, "--output") if config.output else path.parent,
            model,
            weights,
            measured,
            config,
            imgsz,
            size_hw,
            Defaults(conf, config.iou_thres, config.max_det),
        )

    def file(self, suffix: str, *, raw: bool | None = None) -> Path:
        """Where a format with this suffix goes, with what it is a variant of in its name.

        Args:
            suffix: such as ".onnx".
            raw: whether it is the bare network; None = as the flags say.
        """
        variants = {"raw": self.config.raw if raw is None else raw, "half": self.config.half, "int8": self.config.int8}
        variants |= {"end2end": self.config.end2end, "batched": self.config.batched}
        words = [self.path.stem, *(word for word, asked in variants.items() if asked)]
        if self.size_hw is not None:
            words.append("{}x{}".format(*self.size_hw))
        return self.folder / ("-".join(words) + suffix)


def _fixed(config: ExportConfig, model: DetectionModel) -> tuple[int, int] | None:
    """The height and width that the bare network is fixed to.

    Raises:
        ConfigError: no multiples of the stride.
    """
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
