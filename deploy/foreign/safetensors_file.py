"""Weights as safetensors, with the description of their model in the header: reading and writing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tessera.utils.bit_depth import PixelRule
from tessera.utils.checkpoints.weights import Weights
from tessera.utils.errors import UserError
from tessera.utils.files import atomic_write
from tessera.utils.image_size import image_size
from tessera.utils.machine.optional_packages import import_extra
from tessera.utils.text import first_line, shown, strict_json

_FORMAT = "tessera-weights 1"


def read_safetensors(path: Path) -> Weights:
    """Read the weights of `save_safetensors`.

    Raises:
        UserError: the package is missing, or the file is damaged or of another program.
    """
    module = import_extra("safetensors", "safetensors", str(path))
    try:
        with module.safe_open(path, "pt") as file:
            found = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (module.SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: not a valid safetensors file ({first_line(error)}). Copy or export it again."
        ) from error
    if found.get("format") != _FORMAT:
        raise UserError(
            f"{path}: found format {shown(found.get('format'))}, expected {_FORMAT!r}. A file of another program does "
            "not describe its model. Give an exported file, or the checkpoint."
        )
    try:
        imgsz, confidence = json.loads(found["trained_imgsz"]), json.loads(found["confidence"])
        return Weights(
            {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()},
            model_yaml=dict(json.loads(found["model_yaml"])),
            names=tuple(json.loads(found["names"])),
            source=path.name,
            data=found["data"],
            imgsz=None if imgsz is None else image_size(imgsz),
            confidence=None if confidence is None else float(confidence),
            class_confidences=tuple(float(one) for one in json.loads(found["class_confidences"])),
            pixels=PixelRule.from_plain(json.loads(found["pixels"]), f"{path}: pixels"),
        )
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{path}: its header is damaged ({problem}). Export it again.") from error


def save_safetensors(path: Path, weights: Weights, described: Mapping[str, str], *, half: bool = False) -> None:
    """Write weights as safetensors atomically, floats as float16 if `half`; `described` adds strings to the header.

    Raises:
        UserError: the package is missing, or the file cannot be written.
    """
    module = import_extra("safetensors.torch", "safetensors", str(path))
    tensors = {
        name: (tensor.half() if half and tensor.is_floating_point() else tensor).detach().cpu().contiguous().clone()
        for name, tensor in weights.state_dict.items()
    }
    own = {
        "format": _FORMAT,
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
            f"{path}: cannot write the export: {error.strerror or error}. Free space, or make the directory writable."
        ) from error
