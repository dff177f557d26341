"""Model construction: the layer types of model YAMLs; each layer is tried on the meta device, then built."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tessera.models.heads.head import Head, HeadSpec
from tessera.models.layers import blocks
from tessera.models.layers import yaml_arguments as read
from tessera.models.layers.elan import AConv, ADown, ConvElan, Elan, RepElan
from tessera.models.layers.ghost import C3Ghost, GhostBottleneck, GhostConv
from tessera.models.layers.inverted_residual import ConvReLU6, InvertedResidual
from tessera.models.layers.transformer import C3TR
from tessera.models.model_yaml import IMAGE, LayerSpec, ModelSpec
from tessera.utils.errors import ConfigError, did_you_mean
from tessera.utils.text import one_line, plural, shown

PROBE_SIZE = 128  # pixels, the largest possible stride
MAX_PARAMETERS = 10**9  # seven times yolov5x6
MAX_CELLS = 2**24  # numbers in a layer's output for the probe image; 64 MiB


@dataclass(frozen=True)
class LayerType:
    """Meaning of a module name in a model YAML."""

    make: Callable[..., nn.Module]
    arguments: dict[str, read.Reader] = field(default_factory=dict)  # in the YAML's order
    required: int = 0  # number of mandatory arguments
    channelled: bool = False  # takes (c_in, c_out, ...); c_out, the first argument, is scaled by the width multiple
    deep: bool = False  # takes the repeats itself, after c_out; others are chained
    joins: bool = False  # takes a list of several maps


def _channelled(make: Callable[..., nn.Module], *, deep: bool = False, **arguments: read.Reader) -> LayerType:
    return LayerType(make, {"channels": read.count, **arguments}, required=1, channelled=True, deep=deep)


_PADDING = read.optional(read.margin)
_KERNEL: dict[str, Any] = {"kernel": read.size, "stride": read.size, "padding": _PADDING, "groups": read.count}
_BLOCK: dict[str, Any] = {"shortcut": read.flag, "groups": read.count, "expansion": read.positive}
_CONV = read.class_of(*blocks.CONVS)
_RESIZE = read.one_of("nearest", "nearest-exact", "bilinear", "bicubic")

LAYER_TYPES: dict[str, LayerType] = {
    "Conv": _channelled(blocks.Conv, **_KERNEL, dilation=read.count, act=read.flag),
    "DepthwiseSeparableConv": _channelled(
        blocks.DepthwiseSeparableConv, kernel=read.size, stride=read.size, groups=read.count
    ),
    "DWConv": _channelled(blocks.DWConv, kernel=read.size, stride=read.size, dilation=read.count, act=read.flag),
    "Focus": _channelled(blocks.Focus, **_KERNEL, act=read.flag),
    "AConv": _channelled(AConv),
    "ADown": _channelled(ADown),
    "Bottleneck": _channelled(blocks.Bottleneck, **_BLOCK, conv=_CONV),
    "C3": _channelled(blocks.C3, **_BLOCK, conv=_CONV, deep=True),
    "C3Ghost": _channelled(C3Ghost, **_BLOCK, deep=True),
    "C3TR": _channelled(C3TR, **_BLOCK, deep=True),
    "ConvReLU6": _channelled(ConvReLU6, kernel=read.count, stride=read.count),
    "ConvElan": _channelled(ConvElan, expansion=read.positive),
    "Elan": _channelled(Elan, **_BLOCK, deep=True),
    "RepElan": _channelled(RepElan, expansion=read.positive, deep=True),
    "GhostBottleneck": _channelled(GhostBottleneck, kernel=read.size, stride=read.count),
    "GhostConv": _channelled(GhostConv, kernel=read.size, stride=read.size, groups=read.count, act=read.flag),
    "InvertedResidual": _channelled(
        InvertedResidual, kernel=read.count, stride=read.count, expansion=read.count, deep=True
    ),
    "SPP": _channelled(blocks.SPP, kernels=read.counts),
    "SPPF": _channelled(blocks.SPPF, kernel=read.count),
    "Concat": LayerType(blocks.Concat, {"dim": read.axis}, joins=True),
    "nn.Upsample": LayerType(
        blocks.Upsample,
        {"size": read.optional(read.size), "scale_factor": read.optional(read.positive), "mode": _RESIZE},
    ),
    "nn.MaxPool2d": LayerType(
        nn.MaxPool2d, {"kernel": read.size, "stride": read.optional(read.size), "padding": read.margin}, required=1
    ),
    "nn.ZeroPad2d": LayerType(nn.ZeroPad2d, {"padding": read.padding4}, required=1),
    "nn.Identity": LayerType(nn.Identity),
}


def build_layers(spec: ModelSpec) -> tuple[list[nn.Module], Head, int]:
    """Build all layers, the head last; also return the largest stride of any feature map.

    Each layer is first built and run on the meta device, with a small image and without memory. This yields channels
    and strides, and detects mismatched maps and oversized layers at their line of the YAML.
    """
    maps = {IMAGE: torch.empty(1, spec.channels, PROBE_SIZE, PROBE_SIZE, device="meta")}
    layers: list[nn.Module] = []
    parameters = 0
    *others, last = spec.layers
    for layer in others:
        module, maps[layer.index] = _build(layer, [maps[s] for s in layer.sources], spec.width, parameters)
        parameters += _size(module)
        layers.append(module)
    head = _build_head(spec, last, [maps[s] for s in last.sources])
    return layers, head, max(map(_stride, maps.values()))


def _stride(x: Tensor) -> int:
    """Return the pixels per cell of a map of the probe image; 1 if that is not an integer, as for a padded map."""
    strides = (PROBE_SIZE / side for side in x.shape[2:])
    return max((int(stride) for stride in strides if stride.is_integer()), default=1)


def _build_head(spec: ModelSpec, layer: LayerSpec, features: list[Tensor]) -> Head:
    strides = [PROBE_SIZE / x.shape[2] for x in features]
    for source, stride, x in zip(layer.sources, strides, features, strict=True):
        if x.shape[2] != x.shape[3] or not stride.is_integer():
            raise ConfigError(
                f"{layer.where}: layer {source} makes {x.shape[2]}×{x.shape[3]} cells of {PROBE_SIZE}×{PROBE_SIZE} px, "
                "expected an integer stride. Check strides and padding of the preceding layers."
            )
    channels = tuple(x.shape[1] for x in features)
    described = HeadSpec(spec.nc, layer.arguments, spec.head_keys, channels, tuple(strides), layer.where)
    with torch.device("meta"):
        _require_small(layer, _size(spec.head.from_spec(described)), features[0])
    return spec.head.from_spec(described)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _require_small(layer: LayerSpec, parameters: int, output: Tensor) -> None:
    """Raise ConfigError for a model that no machine trains, such as one with a typo in a multiple."""
    if parameters > MAX_PARAMETERS:
        raise ConfigError(
            f"{layer.where}: the model has {parameters:,} parameters up to here, at most {MAX_PARAMETERS:,} are "
            "allowed. Check the channels and width_multiple."
        )
    if output.numel() > MAX_CELLS:
        raise ConfigError(
            f"{layer.where}: makes a map of (channels, height, width) {tuple(output.shape[1:])} of {PROBE_SIZE} px, at "
            f"most {MAX_CELLS:,} numbers are allowed. Check its arguments."
        )


def _build(layer: LayerSpec, inputs: list[Tensor], width: float, before: int) -> tuple[nn.Module, Tensor]:
    """Build one layer after others of `before` parameters; also return its output for `inputs`, on the meta device."""
    kind = LAYER_TYPES.get(layer.module)
    if kind is None:
        raise ConfigError(
            f"{layer.where}: unknown module; known: {', '.join(LAYER_TYPES)}.{did_you_mean(layer.module, LAYER_TYPES)}"
        )
    if len(inputs) != 1 and not kind.joins:
        raise ConfigError(
            f"{layer.where}: reads {plural(len(inputs), 'layer')}, but takes one. Join them with Concat first."
        )
    values = read.read_arguments(layer.where, layer.arguments, tuple(kind.arguments.items()), kind.required)
    try:
        with torch.device("meta"), torch.no_grad():
            tried = _make(kind, layer.repeats, inputs[0].shape[1], values, width).eval()
            output = tried(inputs if kind.joins else inputs[0])
            tried.train()  # layers share activations
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:  # the latter two beyond 64 bits
        shapes = ", ".join(f"{tuple(x.shape[1:])} of layer {s}" for x, s in zip(inputs, layer.sources, strict=True))
        raise ConfigError(
            f"{layer.where}: does not fit its input, which is (channels, height, width) {shapes} for images of "
            f"{PROBE_SIZE} px: {one_line(str(error), 200)}. Check `from` and the arguments "
            f"{shown(list(layer.arguments))}."
        ) from error
    _require_small(layer, before + _size(tried), output)
    return _make(kind, layer.repeats, inputs[0].shape[1], values, width), output


def _make(kind: LayerType, repeats: int, c_in: int, values: list[Any], width: float) -> nn.Module:
    """Return one module of a kind, or a sequence of them."""
    if kind.channelled:
        c_out, *rest = math.ceil(values[0] * width / 8) * 8, *values[1:]
        if kind.deep:
            return kind.make(c_in, c_out, repeats, *rest)
        modules = [kind.make(c_out if i else c_in, c_out, *rest) for i in range(repeats)]
    else:
        modules = [kind.make(*values) for _ in range(repeats)]
    return modules[0] if repeats == 1 else nn.Sequential(*modules)
