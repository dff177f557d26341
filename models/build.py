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
from tessera.models.model_yaml import IMAGE, LayerSpec, ModelSpec
from tessera.utils.errors import ConfigError, did_you_mean
from tessera.utils.text import first_line, plural, shown

PROBE_SIZE = 128  # pixels, the largest possible stride
MAX_PARAMETERS = 10**9  # seven times yolov5x6
MAX_OUTPUT_ELEMENTS = 2**24  # of a layer's output for the probe image; 64 MiB


@dataclass(frozen=True)
class LayerType:
    """Meaning of a module name in a model YAML."""

    make: Callable[..., nn.Module]
    arguments: dict[str, read.Reader] = field(default_factory=dict)  # in the YAML's order
    required: int = 0  # number of mandatory arguments
    takes_channels: bool = False  # (c_in, c_out, ...); c_out, the first argument, is scaled by the width multiple
    takes_repeats: bool = False  # after c_out; other layers are chained
    takes_list: bool = False  # of several maps


def _layer(make: Callable[..., nn.Module], *, takes_repeats: bool = False, **arguments: read.Reader) -> LayerType:
    return LayerType(make, {"channels": read.count, **arguments}, 1, takes_channels=True, takes_repeats=takes_repeats)


_PADDING = read.optional(read.margin)
_KERNEL: dict[str, Any] = {"kernel": read.size, "stride": read.size, "padding": _PADDING, "groups": read.count}
_BLOCK: dict[str, Any] = {"shortcut": read.flag, "groups": read.count, "expansion": read.positive}
_CONV = read.class_of(*blocks.CONVS)
_RESIZE = read.one_of("nearest", "nearest-exact", "bilinear", "bicubic")

LAYER_TYPES: dict[str, LayerType] = {
    "Conv": _layer(blocks.Conv, **_KERNEL, dilation=read.count, act=read.flag),
    "DepthwiseSeparableConv": _layer(
        blocks.DepthwiseSeparableConv, kernel=read.size, stride=read.size, groups=read.count
    ),
    "DWConv": _layer(blocks.DWConv, kernel=read.size, stride=read.size, dilation=read.count, act=read.flag),
    "Focus": _layer(blocks.Focus, **_KERNEL, act=read.flag),
    "AConv": _layer(AConv),
    "ADown": _layer(ADown),
    "Bottleneck": _layer(blocks.Bottleneck, **_BLOCK, conv=_CONV),
    "C3": _layer(blocks.C3, **_BLOCK, conv=_CONV, takes_repeats=True),
    "ConvReLU6": _layer(blocks.ConvReLU6, kernel=read.count, stride=read.count),
    "ConvElan": _layer(ConvElan, expansion=read.positive),
    "Elan": _layer(Elan, **_BLOCK, takes_repeats=True),
    "RepElan": _layer(RepElan, expansion=read.positive, takes_repeats=True),
    "InvertedResidual": _layer(
        blocks.InvertedResidual, kernel=read.count, stride=read.count, expansion=read.count, takes_repeats=True
    ),
    "SPP": _layer(blocks.SPP, kernels=read.counts),
    "SPPF": _layer(blocks.SPPF, kernel=read.count),
    "Concat": LayerType(blocks.Concat, {"dim": read.axis}, takes_list=True),
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
        parameters += count_parameters(module)
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
        _require_small(layer, count_parameters(spec.head.from_spec(described)), features[0])
    return spec.head.from_spec(described)


def count_parameters(module: nn.Module) -> int:
    """Count the parameters, including frozen ones."""
    return sum(parameter.numel() for parameter in module.parameters())


def _require_small(layer: LayerSpec, parameters: int, output: Tensor) -> None:
    """Raise ConfigError for a model that no machine trains, such as one with a typo in a multiple."""
    if parameters > MAX_PARAMETERS:
        raise ConfigError(
            f"{layer.where}: the model has {parameters:,} parameters up to here, at most {MAX_PARAMETERS:,} are "
            "allowed. Check the channels and width_multiple."
        )
    if output.numel() > MAX_OUTPUT_ELEMENTS:
        raise ConfigError(
            f"{layer.where}: makes a feature map of (channels, height, width) {tuple(output.shape[1:])} of "
            f"{PROBE_SIZE} px, at most {MAX_OUTPUT_ELEMENTS:,} elements are allowed. Check its arguments."
        )


def _build(layer: LayerSpec, inputs: list[Tensor], width: float, before: int) -> tuple[nn.Module, Tensor]:
    """Build one layer after others of `before` parameters; also return its output for `inputs`, on the meta device."""
    kind = LAYER_TYPES.get(layer.module)
    if kind is None:
        raise ConfigError(
            f"{layer.where}: unknown module; known: {', '.join(LAYER_TYPES)}.{did_you_mean(layer.module, LAYER_TYPES)}"
        )
    if len(inputs) != 1 and not kind.takes_list:
        raise ConfigError(
            f"{layer.where}: reads {plural(len(inputs), 'layer')}, but takes one. Join them with Concat first."
        )
    values = read.read_arguments(layer.where, layer.arguments, tuple(kind.arguments.items()), kind.required)
    try:
        with torch.device("meta"), torch.no_grad():
            tried = _make(kind, layer.repeats, inputs[0].shape[1], values, width).eval()
            output = tried(inputs if kind.takes_list else inputs[0])
            tried.train()  # layers share activations
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:  # the latter two beyond 64 bits
        shapes = ", ".join(f"{tuple(x.shape[1:])} of layer {s}" for x, s in zip(inputs, layer.sources, strict=True))
        raise ConfigError(
            f"{layer.where}: does not fit its input, which is (channels, height, width) {shapes} for images of "
            f"{PROBE_SIZE} px: {first_line(error)}. Check `from`, width_multiple and arguments "
            f"{shown(list(layer.arguments))}."
        ) from error
    _require_small(layer, before + count_parameters(tried), output)
    return _make(kind, layer.repeats, inputs[0].shape[1], values, width), output


def _make(kind: LayerType, repeats: int, c_in: int, values: list[Any], width: float) -> nn.Module:
    """Return one module of a kind, or a sequence of them."""
    if kind.takes_channels:
        c_out, *rest = math.ceil(values[0] * width / 8) * 8, *values[1:]
        if kind.takes_repeats:
            return kind.make(c_in, c_out, repeats, *rest)
        modules = [kind.make(c_out if i else c_in, c_out, *rest) for i in range(repeats)]
    else:
        modules = [kind.make(*values) for _ in range(repeats)]
    return modules[0] if repeats == 1 else nn.Sequential(*modules)
