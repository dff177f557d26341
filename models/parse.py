"""A model YAML, read and checked, becomes layers. It is parsed, never evaluated.

`nc, depth_multiple, width_multiple, anchors, backbone, head`, each layer `[from, repeats, module, arguments]`. Every
mistake is a ConfigError that names the file and the line.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from models.layers.blocks import (
    C3,
    SPP,
    SPPF,
    Bottleneck,
    Concat,
    Conv,
    DWConv,
    Focus,
    SiLU,
)
from utils.errors import ConfigError, did_you_mean
from utils.yaml_file import YamlMapping, read_yaml

MODELS_DIR = Path(__file__).resolve().parent
IMAGE = -1  # the source that stands for the images themselves
PROBE_SIZE = 128  # pixels: the largest stride that shapes can be worked out for

_REQUIRED = ("nc", "anchors", "backbone", "head")
_OPTIONAL = ("depth_multiple", "width_multiple", "ch", "activation", "name", "inplace")
_WORDS = {"None": None, "True": True, "False": False}  # Python's spelling, which YAML reads as strings
_ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {
    "SiLU": SiLU,
    "ReLU": nn.ReLU,
    "ReLU6": nn.ReLU6,
    "LeakyReLU": nn.LeakyReLU,
    "ELU": nn.ELU,
    "GELU": nn.GELU,
    "Hardswish": nn.Hardswish,
    "Mish": nn.Mish,
    "Identity": nn.Identity,
}
_ACTIVATIONS_WITH_SLOPE = ("LeakyReLU", "ELU")


@dataclass(frozen=True)
class LayerSpec:
    """One row of the YAML.

    Attributes:
        index: its number over backbone and head.
        sources: indices of the layers that it reads, IMAGE for the images.
        repeats: after the depth multiple.
        module: name of a KINDS entry or of a head.
        arguments: plain values, as written.
        where: "yolov5n.yaml:17: layer 3 (Conv)", for messages.
    """

    index: int
    sources: tuple[int, ...]
    repeats: int
    module: str
    arguments: tuple[Any, ...]
    where: str


@dataclass(frozen=True)
class ModelSpec:
    """A model YAML after all checks that need no torch.

    Attributes:
        name: such as "yolov5n".
        nc: classes.
        anchors: (nl, 2·na) width, height, width, height … in pixels, or the number of anchors of each level.
        channels: of the images.
        width: factor on channels.
        activation: what stands in for SiLU, or None.
        layers: backbone and head, the detection head last.
        plain: the same as a plain dictionary that can be read again, with nc and anchors as they are here.
    """

    name: str
    nc: int
    anchors: tuple[tuple[float, ...], ...] | int
    channels: int
    width: float
    activation: nn.Module | None
    layers: tuple[LayerSpec, ...]
    plain: dict[str, Any]


def find_model_yaml(cfg: str | Path) -> Path:
    """Path of a model YAML given as a path, or as a name in models/ with or without its suffix.

    Raises:
        ConfigError: there is none; the message lists the places that were tried and the closest name.
    """
    path = Path(cfg).expanduser()
    tried = [path, MODELS_DIR / path.name]
    if path.suffix not in (".yaml", ".yml"):
        tried.append(MODELS_DIR / f"{path.name}.yaml")
    for candidate in tried:
        if candidate.is_file():
            return candidate
    known = sorted(file.name for file in MODELS_DIR.glob("*.yaml"))
    raise ConfigError(
        f"model YAML '{cfg}': not found, tried {', '.join(map(str, tried))}. "
        f"Give a path or one of {', '.join(known)}.{did_you_mean(path.name, known)}"
    )


def read_model(
    cfg: str | Path | Mapping[str, Any],
    nc: int | None = None,
    anchors: Sequence[Any] | int | None = None,
    channels: int | None = None,
) -> ModelSpec:
    """Read and check a model description.

    Args:
        cfg: a path, a name in models/, or the description itself, such as `ModelSpec.plain`.
        nc, anchors, channels: replace the description's own where not None.

    Raises:
        ConfigError: with file and line.
    """
    if isinstance(cfg, Mapping):
        plain = copy.deepcopy(dict(cfg))
        source = YamlMapping(str(plain.get("name", "model description")), plain)
    else:
        path = find_model_yaml(cfg)
        source = read_yaml(path, "keys such as nc, anchors, backbone and head")
        plain = source.values
        plain.setdefault("name", path.stem)
    for key in plain:
        if key not in _REQUIRED + _OPTIONAL:
            known = _REQUIRED + _OPTIONAL
            raise ConfigError(
                f"{source.at(str(key))}: unknown key '{key}', expected one of {', '.join(known)}."
                f"{did_you_mean(str(key), known)}"
            )
    for key, override in (("nc", nc), ("anchors", anchors), ("ch", channels)):
        if override is not None:
            plain[key] = override
    for key in _REQUIRED:
        if key not in plain:
            raise ConfigError(f"{source.name}: the key '{key}' is missing. Add it; models/yolov5n.yaml is an example.")

    plain["nc"] = _checked(source.at("nc"), "nc", plain["nc"], count)
    plain["ch"] = _checked(source.at("ch"), "ch", plain.get("ch", 3), count)
    plain["anchors"] = _checked(source.at("anchors"), "anchors", plain["anchors"], _anchor_rows)
    for key in ("depth_multiple", "width_multiple"):
        plain[key] = _checked(source.at(key), key, plain.get(key, 1.0), positive)
    activation = plain.get("activation")
    return ModelSpec(
        name=str(plain.get("name", "model")),
        nc=plain["nc"],
        anchors=plain["anchors"] if isinstance(plain["anchors"], int) else tuple(map(tuple, plain["anchors"])),
        channels=plain["ch"],
        width=plain["width_multiple"],
        activation=None
        if activation is None
        else _checked(source.at("activation"), "activation", activation, _activation),
        layers=tuple(_layers(plain, source)),
        plain=plain,
    )


def _layers(plain: Mapping[str, Any], source: YamlMapping) -> list[LayerSpec]:
    """All rows of backbone and head, with absolute sources and scaled repeats."""
    for key in ("backbone", "head"):
        if not isinstance(plain[key], list) or not plain[key]:
            raise ConfigError(f"{source.at(key)}: {key} must be a list of [from, repeats, module, arguments].")
    rows = [(key, row, fields) for key in ("backbone", "head") for row, fields in enumerate(plain[key])]
    specs = []
    for index, (key, row, fields) in enumerate(rows):
        place = source.at(key, row)
        if not isinstance(fields, list) or len(fields) != 4 or not isinstance(fields[3], list):
            raise ConfigError(f"{place}: layer {index} is {fields}, expected [from, repeats, module, [arguments]].")
        sources, repeats, module, arguments = fields
        where = f"{place}: layer {index} ({module})"
        repeats = _checked(where, "repeats", repeats, count)
        if repeats > 1:
            repeats = max(round(repeats * plain["depth_multiple"]), 1)
        specs.append(
            LayerSpec(
                index=index,
                sources=tuple(
                    _absolute(where, index, s) for s in (sources if isinstance(sources, list) else [sources])
                ),
                repeats=repeats,
                module=str(module),
                arguments=tuple(_WORDS.get(a, a) if isinstance(a, str) else a for a in arguments),
                where=where,
            )
        )
    return specs


def _absolute(where: str, index: int, source: object) -> int:
    """The layer that one entry of `from` means, seen from layer `index`."""
    if _is_whole(source):
        absolute = source if source >= 0 else index + source
        if 0 <= absolute < index or (source == -1 and index == 0):
            return absolute
    allowed = "-1, the images" if index == 0 else f"0 to {index - 1}, or -1 to -{index}"
    raise ConfigError(f"{where}: `from` is {source}, expected an earlier layer: {allowed}.")


def _checked(where: str, name: str, value: object, read: Reader) -> Any:
    """Value as `read` returns it; a ConfigError that says what was expected where `read` refuses it."""
    try:
        return read(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {name} is {value!r}, expected {error}.") from error


# Readers return the value of one argument, or raise ValueError with what would have been right.
Reader = Callable[[Any], Any]


def _is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an integer; YAML's true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def count(value: object) -> int:
    """A whole number from 1."""
    if _is_whole(value) and value >= 1:
        return value
    raise ValueError("a whole number of at least 1")


def positive(value: object) -> float:
    """A finite number above 0."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise ValueError("a number above 0")


def flag(value: object) -> bool:
    """True or false."""
    if isinstance(value, bool):
        return value
    raise ValueError("true or false")


def size(value: object) -> int | tuple[int, int]:
    """Pixels from 1: a side, or [height, width]."""
    return _size_from(1, value)


def margin(value: object) -> int | tuple[int, int]:
    """Pixels from 0: a side, or [height, width]."""
    return _size_from(0, value)


def _size_from(least: int, value: object) -> int | tuple[int, int]:
    if _is_whole(value) and value >= least:
        return value
    if isinstance(value, list) and len(value) == 2 and all(_is_whole(side) and side >= least for side in value):
        return value[0], value[1]
    raise ValueError(f"a whole number of at least {least}, or [height, width]")


def optional(read: Reader) -> Reader:
    """The same reader, to which null is a value too."""
    return lambda value: None if value is None else read(value)


def one_of(*choices: str) -> Reader:
    """One of some words."""

    def read(value: object) -> object:
        if value in choices:
            return value
        raise ValueError("one of " + ", ".join(choices))

    return read


def list_of(read: Reader) -> Reader:
    """A list, each entry of which `read` accepts."""

    def read_all(value: object) -> list[Any]:
        if isinstance(value, list) and value:
            try:
                return [read(entry) for entry in value]
            except ValueError as error:
                raise ValueError(f"a list, each entry {error}") from error
        raise ValueError("a list")

    return read_all


def _axis(value: object) -> int:
    """A dimension of a (B, C, H, W) map."""
    if _is_whole(value) and -3 <= value <= 3 and value != 0:
        return value
    raise ValueError("a dimension of (B, C, H, W), 1 for channels")


def _padding4(value: object) -> tuple[int, ...]:
    """Left, right, top, bottom in pixels, or one number for all."""
    sides = value if isinstance(value, list) else [value] * 4
    if len(sides) == 4 and all(map(_is_whole, sides)):
        return tuple(sides)
    raise ValueError("[left, right, top, bottom] in pixels")


def _anchor_rows(value: object) -> list[list[float]] | int:
    """Anchors in pixels, a row of w, h, w, h … (or of [w, h] pairs) a level, all of one length; or a number of them."""
    if isinstance(value, int):
        return count(value)
    expected = "one row of width, height, width, height … a detection level, all of one length, or a number of anchors"
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(expected)
    rows: list[list[float]] = []
    for row in value:
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise ValueError(expected)
        flat = itertools.chain.from_iterable(side if isinstance(side, Sequence) else (side,) for side in row)
        rows.append([positive(side) for side in flat])
    if len({len(row) for row in rows}) != 1 or len(rows[0]) % 2 or not rows[0]:
        raise ValueError(expected)
    return rows


def _activation(value: object) -> nn.Module:
    """An activation written as a call, such as "nn.LeakyReLU(0.1)": the name looked up, the number read."""
    match = re.fullmatch(r"(?:torch\.)?nn\.(\w+)\(\s*(?:inplace=True|(\d*\.?\d+))?\s*\)", str(value).strip())
    if match is None or match[1] not in _ACTIVATIONS or (match[2] and match[1] not in _ACTIVATIONS_WITH_SLOPE):
        names = ", ".join(f"nn.{name}()" for name in _ACTIVATIONS)
        raise ValueError(f"one of {names}; {' and '.join(_ACTIVATIONS_WITH_SLOPE)} take a number")
    make = _ACTIVATIONS[match[1]]
    return make(float(match[2])) if match[2] else make()


@dataclass(frozen=True)
class Kind:
    """What a module's name in a YAML means.

    Attributes:
        make: the class.
        arguments: name and reader of each argument, in the YAML's order.
        required: how many of them must be given.
        channelled: `make` takes (c_in, c_out, ...), and c_out, the first argument, is scaled by the width multiple.
        deep: `make` takes the repeats itself, behind c_out; others are chained.
        joins: takes a list of several maps.
    """

    make: Callable[..., nn.Module]
    arguments: tuple[tuple[str, Reader], ...] = ()
    required: int = 0
    channelled: bool = False
    deep: bool = False
    joins: bool = False


def _channelled(make: Callable[..., nn.Module], *arguments: tuple[str, Reader], deep: bool = False) -> Kind:
    return Kind(make, (("channels", count), *arguments), required=1, channelled=True, deep=deep)


_KERNEL = (("kernel", size), ("stride", size), ("padding", optional(margin)), ("groups", count))
_BLOCK = (("shortcut", flag), ("groups", count), ("expansion", positive))
_RESIZE = one_of("nearest", "nearest-exact", "bilinear", "bicubic")

KINDS: dict[str, Kind] = {
    "Conv": _channelled(Conv, *_KERNEL, ("dilation", count), ("act", flag)),
    "DWConv": _channelled(DWConv, ("kernel", size), ("stride", size), ("dilation", count), ("act", flag)),
    "Focus": _channelled(Focus, *_KERNEL, ("act", flag)),
    "Bottleneck": _channelled(Bottleneck, *_BLOCK),
    "C3": _channelled(C3, *_BLOCK, deep=True),
    "SPP": _channelled(SPP, ("kernels", list_of(count))),
    "SPPF": _channelled(SPPF, ("kernel", count)),
    "Concat": Kind(Concat, (("dim", _axis),), joins=True),
    "nn.Upsample": Kind(
        nn.Upsample, (("size", optional(size)), ("scale_factor", optional(positive)), ("mode", _RESIZE))
    ),
    "nn.MaxPool2d": Kind(nn.MaxPool2d, (("kernel", size), ("stride", optional(size)), ("padding", margin)), required=1),
    "nn.ZeroPad2d": Kind(nn.ZeroPad2d, (("padding", _padding4),), required=1),
    "nn.Identity": Kind(nn.Identity),
}


def build_layers(spec: ModelSpec, heads: Collection[str]) -> tuple[list[nn.Module], list[Tensor]]:
    """Make every layer but the last, which is the detection head.

    Each new layer runs once, on a small image. That tells the channels that the next one reads and the strides, and
    finds maps that do not fit together on the line that joins them.

    Args:
        spec: what `read_model` returned.
        heads: names of the modules that may stand last, and only there.

    Returns:
        The layers, and the maps (1, C, H, W) that the head reads from an image of PROBE_SIZE pixels.
    """
    *body, head = spec.layers
    if head.module not in heads:
        raise ConfigError(f"{head.where}: the last layer must be a detection head: {', '.join(heads)}.")
    maps = {IMAGE: torch.zeros(1, spec.channels, PROBE_SIZE, PROBE_SIZE)}
    layers: list[nn.Module] = []
    for layer in body:
        if layer.module in heads:
            raise ConfigError(f"{layer.where}: a detection head must be the last layer.")
        module, maps[layer.index] = _build(layer, [maps[s] for s in layer.sources], spec.width)
        layers.append(module)
    return layers, [maps[s] for s in head.sources]


def _build(layer: LayerSpec, inputs: list[Tensor], width: float) -> tuple[nn.Module, Tensor]:
    """One layer, and the map that it makes of `inputs`."""
    kind = KINDS.get(layer.module)
    if kind is None:
        raise ConfigError(
            f"{layer.where}: unknown module; known are {', '.join(KINDS)}.{did_you_mean(layer.module, KINDS)}"
        )
    if len(inputs) != 1 and not kind.joins:
        raise ConfigError(f"{layer.where}: reads {len(inputs)} layers, but takes one. Join them with Concat before.")
    values = read_arguments(layer, kind)
    try:
        module = _make(kind, layer.repeats, inputs[0].shape[1], values, width)
        module.eval()  # leaves the statistics of batch normalisation alone
        with torch.no_grad():
            output = module(inputs if kind.joins else inputs[0])
        module.train()
    except (ValueError, RuntimeError) as error:
        shapes = ", ".join(f"{tuple(x.shape[1:])} of layer {s}" for x, s in zip(inputs, layer.sources, strict=True))
        raise ConfigError(
            f"{layer.where}: does not fit its input, which is (channels, height, width) {shapes} for images of "
            f"{PROBE_SIZE} px: {error}. Check `from` and the arguments {list(layer.arguments)}."
        ) from error
    return module, output


def read_arguments(layer: LayerSpec, kind: Kind) -> list[Any]:
    """Check the arguments of a row against its kind and return their values."""
    names = [name for name, _ in kind.arguments]
    found = len(layer.arguments)
    if not kind.required <= found <= len(names):
        least = "" if kind.required == len(names) else f"{kind.required} to "
        raise ConfigError(
            f"{layer.where}: has {found} arguments {list(layer.arguments)}, expected {least}{len(names)}: "
            f"[{', '.join(names)}]."
        )
    return [
        _checked(layer.where, f"argument '{name}'", value, read)
        for value, (name, read) in zip(layer.arguments, kind.arguments, strict=False)
    ]


def _make(kind: Kind, repeats: int, c_in: int, values: list[Any], width: float) -> nn.Module:
    """Instance of a kind, or a chain of them."""
    if not kind.channelled:
        return _chain([kind.make(*values) for _ in range(repeats)])
    c_out, *rest = math.ceil(values[0] * width / 8) * 8, *values[1:]
    if kind.deep:
        return kind.make(c_in, c_out, repeats, *rest)
    return _chain([kind.make(c_out if i else c_in, c_out, *rest) for i in range(repeats)])


def _chain(modules: list[nn.Module]) -> nn.Module:
    return modules[0] if len(modules) == 1 else nn.Sequential(*modules)
