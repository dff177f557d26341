"""Detection model: layers from a YAML, ending in a head; its size, and test-time augmentation.

The last layer of the YAML selects the head, which defines decoding and loss (models/heads/head.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.models.build import build_layers, count_parameters
from tessera.models.heads.head import Head
from tessera.models.layers.blocks import SILU, Conv
from tessera.models.layers.elan import RepConv
from tessera.models.model_yaml import IMAGE, read_model
from tessera.utils.errors import ConfigError
from tessera.utils.image_size import ImageSize, round_imgsz, size_hw_of
from tessera.utils.types import FILL

log = logging.getLogger(__name__)

# Views of test-time augmentation: (scale, whether flipped left to right), as of YOLOv5's --augment
VIEWS = ((1.0, False), (0.83, True), (0.67, False))
_COUNTED = (nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.SyncBatchNorm)  # layers whose multiply-adds are counted


class DetectionModel(nn.Module):
    """A detector built from a model YAML.

    Args:
        cfg: path of a YAML, its name in models/ ("yolov5n.yaml"), or a dictionary (`yaml` of another model).
        nc: number of classes; None = number of `names`, else the YAML's.
        names: class names, by index; None = "0", "1", …
        anchors: replacement of the YAML's, for a head with anchors: one row of w, h, w, h … (or of [w, h] pairs) in
            pixels per level, or a number of anchors per level for AutoAnchor. A YAML that has this number keeps its
            own.
        head: type of the last layer, in place of the YAML's.

    Attributes:
        stride: the largest of all maps; sides of images must be multiples of it. The head may use finer maps only.

    Raises:
        ConfigError: the description is invalid; with file and line.
    """

    def __init__(
        self,
        cfg: str | Path | Mapping[str, Any],
        nc: int | None = None,
        names: Sequence[str] | Mapping[int, str] | None = None,
        anchors: Sequence[Any] | int | None = None,
        head: type[Head] | None = None,
    ) -> None:
        super().__init__()
        if nc is None and names is not None:
            nc = len(names)
        spec = read_model(cfg, {"nc": nc}, head)
        if anchors is not None:
            own = spec.head_keys.get("anchors")
            if (len(own[0]) // 2 if isinstance(own, list) else own) not in (None, anchors):
                spec = read_model(cfg, {"nc": nc, "anchors": anchors}, head)
        if names is not None and len(names) != spec.nc:
            raise ConfigError(f"{spec.name}: nc is {spec.nc}, but there are {len(names)} class names. They must agree.")
        layers, last, self.stride = build_layers(spec)
        self.model = nn.Sequential(*layers, last)  # parameter names begin with "model.<index>."
        self.name = spec.name  # such as "yolov5n"
        self.channels = spec.channels  # of the images
        self.names = tuple(str(c if names is None else names[c]) for c in range(spec.nc))
        self.yaml = spec.plain  # an equal model can be built from it
        self._sources = tuple(layer.sources for layer in spec.layers)
        self._saved = frozenset(s for layer in spec.layers for s in layer.sources if s != layer.index - 1)
        joins = [len(layer.sources) > 1 or layer.module == "Concat" for layer in spec.layers[:-1]]
        self._joins = (*joins, True)  # whether a layer takes a list of maps, as heads do
        if spec.activation is not None:
            for module in self.modules():
                if isinstance(module, (Conv, RepConv)) and module.act is SILU:
                    module.act = spec.activation

    @property
    def head(self) -> Head:
        """The last layer."""
        return cast(Head, self.model[-1])

    @property
    def nc(self) -> int:
        """Number of classes."""
        return self.head.nc

    def forward(self, images: Tensor) -> Any:
        """Predict from float (B, ch, H, W) RGB in 0 … 1, with sides that are multiples of `stride`.

        Returns the head's output: raw outputs in training mode, (predictions, raw outputs) in evaluation mode.
        """
        saved: dict[int, Tensor] = {IMAGE: images}
        x: Any = images
        for index, layer in enumerate(self.model):
            inputs = [x if s == index - 1 else saved[s] for s in self._sources[index]]
            x = layer(inputs if self._joins[index] else inputs[0])
            if index in self._saved:
                saved[index] = x
        return x

    def fuse(self, dtype: torch.dtype = torch.float64) -> DetectionModel:
        """Fold normalisations and parallel branches into the convolutions, in place, for inference; return the model.

        `dtype` of the computation is the widest of the model's device.
        """
        for module in self.modules():
            if isinstance(module, (Conv, RepConv)):
                module.fold_batch_norm(dtype)
        return self

    def freeze_bn_statistics(self, layers: int) -> None:
        """Freeze the normalisation statistics of the first `layers` layers in training."""
        for layer in self.model[:layers]:
            for module in layer.modules():
                if isinstance(module, Conv):
                    module.frozen_statistics = True

    def layer_parameters(self, layers: Iterable[int]) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names (as in the state_dict) and parameters of some layers, by index, for `--freeze`."""
        for index in layers:
            yield from self.model[index].named_parameters(prefix=f"model.{index}")


def check_imgsz(imgsz: ImageSize, stride: int) -> ImageSize:
    """Return `imgsz` rounded by `round_imgsz`, and warn if that changes it."""
    rounded = round_imgsz(imgsz, stride)
    if rounded != imgsz:
        log.warning(f"--imgsz {imgsz} is not a multiple of {max(stride, 32)}: using {rounded}.")
    return rounded


def count_gflops(model: DetectionModel, imgsz: ImageSize = 640) -> float:
    """Return the GFLOPs for one image: twice the multiply-adds of convolutions, linear and norm layers.

    Activations, pools, decoding and attention products are not counted. The counts are taken on an image of one cell of
    the largest stride, and scaled by the area. The model keeps its mode.
    """
    multiply_adds = 0

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal multiply_adds
        # Each output takes as many multiply-adds as one output channel has weights; one in a normalisation.
        multiply_adds += output.numel() * cast(Tensor, module.weight)[0].numel()

    parameter = next(model.parameters())
    image = torch.zeros(1, model.channels, model.stride, model.stride, dtype=parameter.dtype, device=parameter.device)
    modes = {module: module.training for module in model.modules()}
    hooks = [module.register_forward_hook(add) for module in modes if isinstance(module, _COUNTED)]
    model.eval()
    try:
        with torch.no_grad():
            model(image)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
    return 2 * multiply_adds * math.prod(size_hw_of(imgsz)) / model.stride**2 / 1e9


def summary(model: DetectionModel, imgsz: ImageSize = 640) -> str:
    """Return a line such as "yolov5n: 214 layers, 1,872,157 parameters, 4.5 GFLOPs", for images of `imgsz` pixels."""
    layers = sum(not isinstance(module, nn.Identity) for module in model.modules())
    gflops = count_gflops(model, imgsz)
    return (
        f"{model.name}: {layers} layers, {count_parameters(model):,} parameters, "
        f"{gflops:.{1 if gflops >= 1 else 2}f} GFLOPs"
    )


@torch.no_grad()
def predict_augmented(model: DetectionModel, images: Tensor) -> Tensor:
    """Predict on the images, on flipped ones at 0.83 and on ones at 0.67 of their size, in pixels of the original.

    `images` are float (B, ch, H, W) in 0 … 1, sides multiples of the model's stride. The result is float32 (B, rows,
    columns) like the model's predictions, view after view, ready for NMS. The first view omits the level of the largest
    stride, the last view that of the smallest: these add little to the other views, and cost NMS a quarter more
    candidates.
    """
    assert not model.training
    predictions = []
    for view, (scale, mirrored) in enumerate(VIEWS):
        image, (ratio_x, ratio_y) = _resize(images.flip(-1) if mirrored else images, scale, model.stride)
        decoded, _ = model(image)
        rows = model.head.rows_per_level(image.shape[-2:])
        if len(rows) > 1 and view == 0:
            decoded = decoded[:, : -rows[-1]]
        elif len(rows) > 1 and view == len(VIEWS) - 1:
            decoded = decoded[:, rows[0] :]
        x, y, w, h, scores = decoded.split((1, 1, 1, 1, decoded.shape[-1] - 4), -1)
        # Python numbers: a tensor would be copied to the device, and synchronise.
        x, y, w, h = x / ratio_x, y / ratio_y, w / ratio_x, h / ratio_y
        if mirrored:
            x = images.shape[-1] - x
        predictions.append(torch.cat((x, y, w, h, scores), -1))
    return torch.cat(predictions, 1)


def _resize(images: Tensor, scale: float, stride: int) -> tuple[Tensor, tuple[float, float]]:
    """Scale images, pad them right and bottom to multiples of the stride; also return the scales of x and y."""
    if scale == 1:
        return images, (1.0, 1.0)
    height, width = images.shape[-2:]
    new_height, new_width = round(height * scale), round(width * scale)
    resized = F.interpolate(images, (new_height, new_width), mode="bilinear", align_corners=False)
    padded = F.pad(resized, (0, -new_width % stride, 0, -new_height % stride), value=FILL / 255)
    return padded, (new_width / width, new_height / height)
