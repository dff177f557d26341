"""The detection model: layers from a YAML, with the head that ends it.

The head and its criterion are a pair: the last layer of the YAML decides how predictions are decoded and which loss
trains them. A head has

- `nc`, `nl`, `stride`: classes, detection levels, pixels a cell;
- in training mode a forward that returns raw outputs, made for its own criterion;
- in evaluation mode a forward that returns (predictions (B, rows, 5 + nc), raw outputs), predictions being
  cx, cy, w, h in pixels, objectness and class probabilities.

Legend: B images, nl levels, na anchors a level, A = Σ na·ny·nx rows, nc classes, no = 5 + nc.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from models.heads.anchor.layers import Detect, Output
from models.layers.blocks import SILU, Conv
from models.parse import IMAGE, PROBE_SIZE, Kind, LayerSpec, build_layers, one_of, read_arguments, read_model
from utils.errors import ConfigError

log = logging.getLogger(__name__)

HEADS: dict[str, type[Detect]] = {"Detect": Detect}
_HEAD_KIND = Kind(Detect, (("nc", one_of("nc")), ("anchors", one_of("anchors"))), joins=True)


class DetectionModel(nn.Module):
    """A detector built from a model YAML.

    Args:
        cfg: path of a YAML, its name in models/ ("yolov5n.yaml"), or a dictionary (`yaml` of another model).
        nc: classes; None = as many as `names`, else as the YAML says.
        names: class names, by index; None = "0", "1", …
        anchors: in place of the YAML's: one row of w, h, w, h … (or of [w, h] pairs) in pixels a level, or a number of
            anchors a level, to be fitted by AutoAnchor.
        ch: channels of the images; None = the YAML's `ch`, else 3.

    Attributes:
        model: the layers; parameter names begin with "model.<index>.".
        name: such as "yolov5n".
        names: class names by index.
        channels: of the images.
        yaml: plain dictionary from which an equal model can be built.

    Raises:
        ConfigError: the description is wrong; with file and line.
    """

    def __init__(
        self,
        cfg: str | Path | Mapping[str, Any],
        nc: int | None = None,
        names: Sequence[str] | Mapping[int, str] | None = None,
        anchors: Sequence[Any] | int | None = None,
        ch: int | None = None,
    ) -> None:
        super().__init__()
        if nc is None and names is not None:
            nc = len(names)
        spec = read_model(cfg, nc, anchors, ch)
        if names is not None and len(names) != spec.nc:
            raise ConfigError(f"{spec.name}: nc is {spec.nc}, but there are {len(names)} class names. They must agree.")
        layers, features = build_layers(spec, HEADS)
        head = _build_head(spec.layers[-1], spec.nc, spec.anchors, features)
        self.model = nn.Sequential(*layers, head)
        self.name = spec.name
        self.channels = spec.channels
        self.names = tuple(str(c if names is None else names[c]) for c in range(spec.nc))
        self.yaml = spec.plain
        self._sources = tuple(layer.sources for layer in spec.layers)
        self._kept = frozenset(s for layer in spec.layers for s in layer.sources if s != layer.index - 1)
        self._joins = tuple(len(layer.sources) > 1 or layer.module in ("Concat", *HEADS) for layer in spec.layers)
        if spec.activation is not None:
            for module in self.modules():
                if isinstance(module, Conv) and module.act is SILU:
                    module.act = spec.activation

    @property
    def head(self) -> Detect:
        """The last layer."""
        return cast(Detect, self.model[-1])

    @property
    def nc(self) -> int:
        """Number of classes."""
        return self.head.nc

    @property
    def stride(self) -> int:
        """The largest stride: sides of the images must be multiples of it."""
        return int(max(self.head.strides))

    def usable_imgsz(self, imgsz: int) -> int:
        """`--imgsz` rounded up to a multiple of the stride, and of 32; with a warning where that changes it."""
        multiple = max(self.stride, 32)
        rounded = -(-imgsz // multiple) * multiple
        if rounded != imgsz:
            log.warning(f"--imgsz {imgsz} is not a multiple of {multiple}: using {rounded}.")
        return rounded

    def forward(self, images: Tensor) -> Output:
        """Predict.

        Args:
            images: float (B, ch, H, W) in 0 … 1, RGB, sides multiples of `stride`.

        Returns:
            What the head returns: raw outputs in training mode, (predictions, raw outputs) in evaluation mode.
        """
        kept: dict[int, Tensor] = {IMAGE: images}
        x: Any = images
        for index, layer in enumerate(self.model):
            inputs = [x if s == index - 1 else kept[s] for s in self._sources[index]]
            x = layer(inputs if self._joins[index] else inputs[0])
            if index in self._kept:
                kept[index] = x
        return cast(Output, x)

    def fuse(self, dtype: torch.dtype = torch.float64) -> DetectionModel:
        """Fold batch normalisation into the convolutions: in place, for evaluation only. Returns the model itself.

        Args:
            dtype: to fold in: the widest that the model's device computes in.
        """
        for module in self.modules():
            if isinstance(module, Conv):
                module.fold_batch_norm(dtype)
        return self

    def layer_parameters(self, layers: Iterable[int]) -> Iterator[tuple[str, nn.Parameter]]:
        """Names (as in the state_dict) and parameters of some layers, by index: what `--freeze` takes.

        Raises:
            ConfigError: there is no such layer.
        """
        for index in layers:
            if not 0 <= index < len(self.model):
                raise ConfigError(f"{self.name}: there is no layer {index}; the layers are 0 to {len(self.model) - 1}.")
            yield from self.model[index].named_parameters(prefix=f"model.{index}")


def _build_head(
    layer: LayerSpec, nc: int, anchors: Sequence[Sequence[float]] | int, features: Sequence[Tensor]
) -> Detect:
    """The detection head for maps like these."""
    read_arguments(layer, _HEAD_KIND)
    if not isinstance(anchors, int) and len(anchors) != len(features):
        raise ConfigError(
            f"{layer.where}: reads {len(features)} layers, but `anchors` has {len(anchors)} rows. One row a layer."
        )
    strides = [PROBE_SIZE / x.shape[2] for x in features]
    for source, stride, x in zip(layer.sources, strides, features, strict=True):
        if x.shape[2] != x.shape[3] or not stride.is_integer():
            raise ConfigError(
                f"{layer.where}: layer {source} makes {x.shape[2]}×{x.shape[3]} cells of {PROBE_SIZE}×{PROBE_SIZE} px, "
                "expected a whole stride. Check strides and padding of the layers before it."
            )
    return HEADS[layer.module](nc, anchors, [x.shape[1] for x in features], strides)
