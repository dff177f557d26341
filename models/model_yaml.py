"""Model YAML parsing and validation; nothing is evaluated.

The keys are `nc, depth_multiple, width_multiple, backbone, head` and those of the detection head, such as `anchors`.
Each layer is `[from, repeats, module, arguments]`. Every error is a ConfigError that names the file and the line.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tessera.models.heads.anchor import Detect
from tessera.models.heads.free import DetectFree, DetectYOLOv9
from tessera.models.heads.head import Head
from tessera.models.heads.yolox import DetectYOLOX
from tessera.models.layers.blocks import SiLU
from tessera.models.layers.yaml_arguments import Reader, checked, count, is_whole, optional, positive
from tessera.utils.errors import ConfigError, did_you_mean
from tessera.utils.files import user_path
from tessera.utils.text import one_line, shown
from tessera.utils.yaml_file import YamlMapping, read_yaml

MODELS_DIR = Path(__file__).resolve().parent
IMAGE = -1  # source index of the images
MAX_LAYERS, MAX_REPEATS = 1000, 1000

HEADS: dict[str, type[Head]] = {  # by their name in a model YAML; `register_head` adds the user's own
    "Detect": Detect,
    "DetectFree": DetectFree,
    "DetectYOLOX": DetectYOLOX,
    "DetectYOLOv9": DetectYOLOv9,
}
_REQUIRED = ("nc", "backbone", "head")
_OPTIONAL = ("depth_multiple", "width_multiple", "ch", "activation", "name", "inplace")
_READERS: dict[str, Reader] = {"nc": count, "ch": count, "depth_multiple": positive, "width_multiple": positive}
_DEFAULTS = {"ch": 3, "depth_multiple": 1.0, "width_multiple": 1.0}
_WORDS = {"None": None, "True": True, "False": False}  # Python's spelling, strings in YAML
_ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {"SiLU": SiLU} | {
    name: getattr(nn, name) for name in ("ReLU", "ReLU6", "LeakyReLU", "ELU", "GELU", "Hardswish", "Mish", "Identity")
}
_ACTIVATIONS_WITH_SLOPE = ("LeakyReLU", "ELU")


@dataclass(frozen=True)
class LayerSpec:
    """One row of the YAML."""

    index: int  # over backbone and head
    sources: tuple[int, ...]  # indices of its input layers, IMAGE for the images
    repeats: int  # after the depth multiple
    module: str  # name of a kind of layer or of a head
    arguments: tuple[Any, ...]  # plain values, as written
    where: str  # "yolov5n.yaml:17: layer 3 (Conv)", for messages


@dataclass(frozen=True)
class ModelSpec:
    """A validated model YAML."""

    name: str  # such as "yolov5n"
    nc: int
    head: type[Head]  # of the last layer
    head_keys: Mapping[str, Any]  # the head's own keys (`Head.yaml_keys`), as their readers return them
    channels: int  # of the images
    width: float  # factor on channels
    activation: nn.Module | None  # replacement of SiLU
    layers: tuple[LayerSpec, ...]  # backbone and head, the detection head last
    plain: dict[str, Any]  # the same as a dictionary, with nc and the head's keys as read


def find_model_yaml(cfg: str | Path) -> Path:
    """Return the path of a model YAML, given as a path or as a name in models/ with or without suffix."""
    path = user_path(cfg, "--cfg")
    tried = [path, MODELS_DIR / path.name]
    if path.suffix not in (".yaml", ".yml"):
        tried.append(MODELS_DIR / f"{path.name}.yaml")
    for candidate in tried:
        if os.path.isfile(candidate):  # noqa: PTH113 - pathlib's own raises where a folder may not be read
            return candidate
    known = sorted(file.name for file in MODELS_DIR.glob("*.yaml"))
    raise ConfigError(
        f"model YAML {shown(str(cfg))}: not found, tried {one_line(', '.join(map(str, tried)), 240)}. "
        f"Give a path or one of {', '.join(known)}.{did_you_mean(path.name, known)}"
    )


def register_head(head: type[Head]) -> type[Head]:
    """Register a head of the user's own under its name, so that models and checkpoints that end in it load; return it.

    Raises:
        ConfigError: no subclass of Head, or the name of another one.
    """
    if not (isinstance(head, type) and issubclass(head, Head)):
        raise ConfigError(f"--head: found {shown(str(head))}, expected a subclass of tessera.models.heads.head.Head.")
    if HEADS.setdefault(head.__name__, head) is not head:
        raise ConfigError(f"--head: {head.__module__}.{head.__name__} has the name of another head. Rename it.")
    return head


def read_model(
    cfg: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None, head: type[Head] | None = None
) -> ModelSpec:
    """Read and validate a model description: a path, a name in models/, or a dictionary such as `ModelSpec.plain`.

    `overrides` replace values by key; those that are None are ignored. `head` replaces the type of the last row, whose
    arguments it reads.
    """
    if isinstance(cfg, Mapping):
        plain = copy.deepcopy(dict(cfg))
        source = YamlMapping(str(plain.get("name", "model description")), plain)
    else:
        path = find_model_yaml(cfg)
        source = read_yaml(path, "keys such as nc, backbone and head")
        plain = source.values
        plain.setdefault("name", path.stem)
    plain.update({key: value for key, value in (overrides or {}).items() if value is not None})

    last = _last_row(plain)
    if head is not None and last:
        last[2] = register_head(head).__name__
    named = HEADS.get(last[2]) if last else None
    every = {key for head in HEADS.values() for key in head.yaml_keys}
    head_readers = named.yaml_keys if named else {}
    _check_keys(source, plain, (*_REQUIRED, *head_readers), _OPTIONAL if named else (*_OPTIONAL, *every))
    for key, read in {**_READERS, **head_readers}.items():
        plain[key] = checked(source.at(key), key, plain.get(key, _DEFAULTS.get(key)), read)
    activation = checked(source.at("activation"), "activation", plain.get("activation"), optional(_activation))
    layers = _layers(plain, source)
    return ModelSpec(
        name=str(plain.get("name", "model")),
        nc=plain["nc"],
        head=_head(layers),
        head_keys={key: plain[key] for key in head_readers},
        channels=plain["ch"],
        width=plain["width_multiple"],
        activation=activation,
        layers=layers,
        plain=plain,
    )


def _last_row(plain: Mapping[str, Any]) -> list[Any]:
    """Return the last row of `head`; [] if it is none, or its module no text."""
    rows = plain.get("head")
    last = rows[-1] if isinstance(rows, list) and rows else None
    return last if isinstance(last, list) and len(last) > 2 and isinstance(last[2], str) else []


def _check_keys(
    source: YamlMapping, plain: Mapping[str, Any], required: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    """Raise ConfigError for unknown and missing keys."""
    known = required + optional
    for key in plain:
        if key not in known:
            raise ConfigError(
                f"{source.at(str(key))}: unknown key {shown(key)}, expected one of {', '.join(known)}."
                f"{did_you_mean(str(key), known)}"
            )
    for key in required:
        if key not in plain:
            raise ConfigError(f"{source.name}: the key '{key}' is missing. Add it, as in models/yolov5n.yaml.")


def _head(layers: tuple[LayerSpec, ...]) -> type[Head]:
    """Return the head of the last layer, after checking that it is the only one."""
    *others, last = layers
    name = one_line(last.module, 40)
    if last.module not in HEADS:
        raise ConfigError(
            f"{last.where}: the last layer must be a detection head: {', '.join(HEADS)}. One of your own is given with "
            f"--head module:{name}, or registered in Python with tessera.models.model_yaml.register_head({name})."
        )
    for layer in others:
        if layer.module in HEADS:
            raise ConfigError(f"{layer.where}: a detection head must be the last layer.")
    return HEADS[last.module]


def _layers(plain: Mapping[str, Any], source: YamlMapping) -> tuple[LayerSpec, ...]:
    """Return all rows of backbone and head, with absolute sources and scaled repeats."""
    for key in ("backbone", "head"):
        if not isinstance(plain[key], list) or not plain[key]:
            raise ConfigError(f"{source.at(key)}: {key} must be a list of [from, repeats, module, arguments].")
    if len(plain["backbone"]) + len(plain["head"]) > MAX_LAYERS:
        raise ConfigError(f"{source.name}: backbone and head have more than {MAX_LAYERS:,} layers.")
    rows = [(key, row, fields) for key in ("backbone", "head") for row, fields in enumerate(plain[key])]
    specs = []
    for index, (key, row, fields) in enumerate(rows):
        position = source.at(key, row)
        if not isinstance(fields, list) or [type(field) for field in fields[2:]] != [str, list]:
            raise ConfigError(
                f"{position}: layer {index} is {shown(fields)}, expected [from, repeats, module, [arguments]]."
            )
        sources, repeats, module, arguments = fields
        where = f"{position}: layer {index} ({one_line(module, 40)})"
        if sources == []:
            raise ConfigError(f"{where}: `from` is [], expected at least one layer to read.")
        repeats = checked(where, "repeats", repeats, count)
        if repeats > 1:
            scaled = repeats * plain["depth_multiple"]
            if scaled > MAX_REPEATS:
                raise ConfigError(
                    f"{where}: {scaled:g} repeats after depth_multiple, at most {MAX_REPEATS} are allowed."
                )
            repeats = max(round(scaled), 1)
        read = tuple(_absolute(where, index, s) for s in (sources if isinstance(sources, list) else [sources]))
        values = tuple(_WORDS.get(a, a) if isinstance(a, str) else a for a in arguments)
        specs.append(LayerSpec(index, read, repeats, module, values, where))
    return tuple(specs)


def _absolute(where: str, index: int, source: object) -> int:
    """Resolve one entry of `from`, seen from layer `index`."""
    if is_whole(source):
        absolute = source if source >= 0 else index + source
        if IMAGE <= absolute < index:
            return absolute
    layers = f"0 to {index - 1}, or -1 to -{index}" if index else "none"
    raise ConfigError(
        f"{where}: `from` is {shown(source)}, expected an earlier layer: {layers}; or -{index + 1}, the images."
    )


def _activation(value: object) -> nn.Module:
    """Return an activation written as a call, such as "nn.LeakyReLU(0.1)", without evaluating it."""
    match = re.fullmatch(r"(?:torch\.)?nn\.(\w+)\(\s*(?:inplace=True|(\d*\.?\d+))?\s*\)", str(value).strip())
    if match is None or match[1] not in _ACTIVATIONS or (match[2] and match[1] not in _ACTIVATIONS_WITH_SLOPE):
        names = ", ".join(f"nn.{name}()" for name in _ACTIVATIONS)
        raise ValueError(f"one of {names}; {' and '.join(_ACTIVATIONS_WITH_SLOPE)} take a number")
    make = _ACTIVATIONS[match[1]]
    return make(float(match[2])) if match[2] else make()
