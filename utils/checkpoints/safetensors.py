"""Weights in the safetensors format: tensors behind a header of plain text, nothing that could be run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tessera.utils.errors import UserError
from tessera.utils.files import atomic_write
from tessera.utils.machine.extras import import_extra
from tessera.utils.pixels import PixelRule
from tessera.utils.text import first_line, shown, strict_json

if TYPE_CHECKING:
    from tessera.utils.checkpoints.weights import Weights

SUFFIX, FORMAT = ".safetensors", "tessera-weights 1"


def save_safetensors(path: Path, weights: Weights, described: Mapping[str, str], *, half: bool = False) -> None:
    """Write weights with what their file says.

    Args:
        path: to write, whole or not at all.
        weights: to write.
        described: further strings of the header.
        half: floats as float16.

    Raises:
        UserError: the package is missing, or the file cannot be written.
    """
    module = import_extra("safetensors.torch", "safetensors", str(path))
    tensors = {
        name: (tensor.half() if half and tensor.is_floating_point() else tensor).detach().cpu().contiguous().clone()
        for name, tensor in weights.state_dict.items()
    }
    own = {
        "format": FORMAT,
        "model_yaml": strict_json(weights.model_yaml),
        "names": strict_json(list(weights.names)),
        "data": weights.data,
        "trained_imgsz": strict_json(weights.imgsz),
        "confidence": strict_json(weights.confidence),
        "class_confidences": strict_json(list(weights.class_confidences)),
        "pixels": strict_json(None if weights.pixels is None else weights.pixels.as_dict()),
    }
    try:
        with atomic_write(path) as file:
            file.write(module.save(tensors, {**described, **own}))
    except OSError as error:
        raise UserError(
            f"{path}: cannot write the export: {error.strerror or error}. Make room, or the folder writable."
        ) from error


def read_safetensors(path: Path) -> dict[str, Any]:
    """The fields of `Weights` that a file holds.

    Raises:
        UserError: the package is missing; the file is damaged, or another program's.
    """
    module = import_extra("safetensors", "safetensors", str(path))
    try:
        with module.safe_open(path, "pt") as file:
            found = dict(file.metadata() or {})
            tensors = {name: _full(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (module.SafetensorError, OSError) as error:
        raise UserError(f"{path}: no sound safetensors file ({first_line(error)}). Copy or export it again.") from error
    if found.get("format") != FORMAT:
        raise UserError(
            f"{path}: found {shown(found.get('format'))} as its format, expected {FORMAT!r}: another program wrote it, "
            "and it does not say of which model the weights are. Give a file of export.py, or the checkpoint."
        )
    try:
        values = {key: json.loads(found[key]) for key in ("model_yaml", "names", "trained_imgsz", "confidence")}
        confidences, pixels = json.loads(found["class_confidences"]), json.loads(found["pixels"])
        return {
            "state_dict": tensors,
            "model_yaml": dict(values["model_yaml"]),
            "names": tuple(values["names"]),
            "source": path.name,
            "data": found["data"],
            "imgsz": None if values["trained_imgsz"] is None else int(values["trained_imgsz"]),
            "confidence": None if values["confidence"] is None else float(values["confidence"]),
            "class_confidences": tuple(float(one) for one in confidences),
            "pixels": PixelRule.from_plain(pixels, f"{path}: pixels"),
        }
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{path}: its header is damaged ({said}). Export it again.") from error


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
