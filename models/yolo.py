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

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from models.layers import SILU, Conv
from models.parse import IMAGE, PROBE_SIZE, Kind, LayerSpec, build_layers, one_of, read_arguments, read_model
from utils.errors import ConfigError

Output = list[Tensor] | tuple[Tensor, list[Tensor]]


class Detect(nn.Module):
    """Anchor-based head: one 1×1 convolution a level.

    Args:
        nc: classes.
        anchors: one row of width, height, width, height … in pixels a level; or the number of anchors of each level,
            which then start as squares of 4·stride·2^(i/na) pixels, the sizes of RetinaNet (Lin et al. 2017).
        channels: of the maps that the levels read.
        strides: pixels a cell of each level.

    Attributes:
        anchors: buffer (nl, na, 2), width and height in grid units, that is pixels / stride.
        nc, no, nl, na: classes, numbers a row, levels, anchors a level.
        strides: the same as `stride`, as Python numbers.
    """

    anchors: Tensor

    def __init__(
        self,
        nc: int,
        anchors: Sequence[Sequence[float]] | int,
        channels: Sequence[int],
        strides: Sequence[float],
    ) -> None:
        super().__init__()
        if isinstance(anchors, int):
            sides = [[4 * stride * 2 ** (i / anchors) for i in range(anchors)] for stride in strides]
            anchors = [[side for side in row for _ in range(2)] for row in sides]
        assert len(anchors) == len(channels) == len(strides), (anchors, channels, strides)
        self.nc = nc
        self.no = nc + 5
        self.nl = len(channels)
        self.na = len(anchors[0]) // 2
        self.strides = tuple(map(float, strides))
        pixels = torch.tensor(anchors, dtype=torch.float32).view(self.nl, self.na, 2)
        self.register_buffer("anchors", pixels / torch.tensor(self.strides).view(-1, 1, 1))
        self.m = nn.ModuleList(nn.Conv2d(c, self.no * self.na, 1) for c in channels)
        self._start_from_priors()

    @property
    def stride(self) -> Tensor:
        """Pixels a cell of each level, float32 (nl,) on the CPU."""
        return torch.tensor(self.strides, device="cpu")

    @torch.no_grad()
    def _start_from_priors(self) -> None:
        """Raise the biases to the odds of a fresh dataset: 8 objects in a 640 px image, 0.6 / nc a class.

        Otherwise the first steps would be spent on learning that most cells are empty (Lin et al. 2017, section 3.3).
        """
        for conv, stride in zip(self.m, self.strides, strict=True):
            bias = cast(Tensor, cast(nn.Conv2d, conv).bias).view(self.na, self.no)
            bias[:, 4] += math.log(8 / (640 / stride) ** 2)
            bias[:, 5:] += math.log(0.6 / (self.nc - 0.99999))

    def forward(self, features: list[Tensor]) -> Output:
        """Predict from nl maps (B, C, ny, nx).

        Returns:
            In training mode nl raw tensors (B, na, ny, nx, no): views of the convolutions' outputs, logits before any
            decoding. In evaluation mode (decoded, raw), decoded float32 (B, A, no) as `decode` says.
        """
        raw = []
        for conv, x in zip(self.m, features, strict=True):
            y = conv(x)
            b, _, ny, nx = y.shape
            # A view: from channels-last memory the numbers of a row even stay side by side.
            raw.append(y.view(b, self.na, self.no, ny, nx).permute(0, 1, 3, 4, 2))
        return raw if self.training else (self.decode(raw), raw)

    def decode(self, raw: Sequence[Tensor]) -> Tensor:
        """Raw outputs to predictions: xy = (2σ − 0.5 + cell)·stride, wh = (2σ)²·anchor, the rest σ.

        In float32 whatever the model's dtype: float16 has steps of a whole pixel from 1024 on.

        Returns:
            float32 (B, A, no): cx, cy, w, h in pixels, objectness, class probabilities; rows level by level, inside a
            level by anchor, then y, then x.
        """
        return torch.cat([self._decode_level(level, y) for level, y in enumerate(raw)], 1)

    def _decode_level(self, level: int, raw: Tensor) -> Tensor:
        ny, nx = raw.shape[2:4]
        rows = torch.arange(ny, device=raw.device, dtype=torch.float32)
        columns = torch.arange(nx, device=raw.device, dtype=torch.float32)
        cells = torch.stack((columns.expand(ny, nx), rows[:, None].expand(ny, nx)), -1)
        stride = self.strides[level]
        anchors = (self.anchors[level].float() * stride).view(self.na, 1, 1, 2)
        xy, wh, scores = raw.float().sigmoid().split((2, 2, self.nc + 1), -1)
        return torch.cat(((xy * 2 - 0.5 + cells) * stride, (wh * 2).square() * anchors, scores), -1).flatten(1, 3)


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

    def fuse(self) -> DetectionModel:
        """Fold batch normalisation into the convolutions: in place, for evaluation only. Returns the model itself."""
        for module in self.modules():
            if isinstance(module, Conv):
                module.fold_batch_norm()
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
