"""Safe import of original YOLOv5 checkpoints.

Such a `.pt` is a zip archive with a pickle of a whole module; utils/checkpoints/inert_pickle.py reads it and runs
nothing of it. Here the module's weights, architecture and class names are picked out of the records.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.utils.checkpoints.archive import ARCHIVE_ERRORS, Archive, unreadable
from tessera.utils.checkpoints.inert_pickle import Damaged, Record, mentions_objects
from tessera.utils.errors import UserError

# Far above any model's; a file whose modules or values contain each other unfolds without end.
_MAX_ENTRIES = 20_000  # modules and tensors
_MAX_PLAIN = 100_000  # plain values


@dataclass(frozen=True)
class LegacyCheckpoint:
    """What training can use of an original YOLOv5 checkpoint.

    Attributes:
        state_dict: tensors by name ("model.0.conv.weight"), floating ones as float32; the EMA's where the file has one.
        names: class names by index; () where the file has none.
        nc: number of classes.
        model_yaml: the architecture, a plain dict: nc, depth_multiple, width_multiple, anchors, backbone, head.
        stride: pixels per cell of each detection layer.
        anchors: float32 (nl, na, 2) in cells, or None where the head has none.
        epoch: the epoch after which it was written; -1 or None: the training was finished.
        hyp: the hyperparameters that are plain numbers or text, or None.
    """

    state_dict: dict[str, Tensor]
    names: tuple[str, ...]
    nc: int
    model_yaml: dict[str, Any]
    stride: tuple[float, ...]
    anchors: Tensor | None
    epoch: int | None
    hyp: dict[str, float | str] | None


def is_legacy(path: Path) -> bool:
    """Whether `path` is a zip archive whose pickle mentions more than tensors and plain values; runs nothing of it.

    Raises:
        UserError: an archive that is no checkpoint, or one with packed members.
    """
    try:
        if not zipfile.is_zipfile(path):
            return False
        with Archive.open(path) as archive:
            mentions = mentions_objects(archive.pickled)
            if mentions:
                archive.check_sums()  # a checkpoint of this program with a wrong bit in a name is none
            return mentions
    except UserError:
        raise
    except (ValueError, *ARCHIVE_ERRORS):  # what is wrong, its reader says
        return False


def load_legacy(path: Path) -> LegacyCheckpoint:
    """Read an original YOLOv5 checkpoint without running anything of it.

    Args:
        path: a `.pt` file as YOLOv5 writes it: a zip archive (torch 1.6 or later) with a pickled dict or module.

    Raises:
        UserError: the file is not such a checkpoint, is damaged, or mentions a global that has no place in one.
    """
    try:
        content = _read(path)
        model = _pick_model(content, path)
        state = model.state
        model_yaml = _plain(state.get("yaml"))
        if not isinstance(model_yaml, dict):
            raise UserError(
                f"{path}: the model inside has no `yaml`, from which to rebuild it. Expected YOLOv5 v4 or later."
            )
        state_dict = {
            name: tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()
            for name, tensor in _bounded(_named_tensors(model), path.stat().st_size)
        }
        names = _names(state.get("names"))
        anchors = [tensor for name, tensor in state_dict.items() if name.endswith(".anchors")]
        epoch = content.get("epoch") if isinstance(content, dict) else None
        hyp = state.get("hyp")
        nc = state.get("nc", model_yaml.get("nc", len(names)))
        if not isinstance(nc, int):
            raise Damaged(f"the number of classes is a {type(nc).__name__}")
        return LegacyCheckpoint(
            state_dict=state_dict,
            names=names,
            nc=nc,
            model_yaml=model_yaml,
            stride=_strides(state.get("stride")),
            anchors=anchors[-1] if anchors else None,
            epoch=epoch if isinstance(epoch, int) else None,
            hyp=_plain_items(hyp) if isinstance(hyp, dict) else None,
        )
    except ARCHIVE_ERRORS as error:
        raise unreadable(path, error) from error


def _read(path: Path) -> Any:
    """The pickle's top object, of plain values, tensors, records and globals."""
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    with Archive.open(path) as archive:
        return archive.content()


def _pick_model(content: Any, path: Path) -> Record:
    """The module inside: the EMA's, else the trained one; with a dict for a state."""
    candidates = [content.get("ema"), content.get("model")] if isinstance(content, dict) else [content]
    for candidate in candidates:
        if isinstance(candidate, Record) and isinstance(candidate.state, dict):
            return candidate
    found = (
        f"a dict with {', '.join(map(str, content))}" if isinstance(content, dict) else f"a {type(content).__name__}"
    )
    raise UserError(
        f"{path}: not a YOLOv5 checkpoint: expected a pickled module under 'ema' or 'model', found {found}."
    )


def _named_tensors(module: Record) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers in the order of torch's state_dict."""
    pending, seen = [("", module)], 0
    while pending:
        prefix, current = pending.pop()
        parameters, buffers, children = (_part(current, key) for key in ("_parameters", "_buffers", "_modules"))
        seen += 1 + len(parameters) + len(buffers)
        if seen > _MAX_ENTRIES:
            raise Damaged("its modules contain each other")
        state = current.state
        transient = state.get("_non_persistent_buffers_set", ()) if isinstance(state, dict) else ()
        for name, tensor in [*parameters.items(), *((k, v) for k, v in buffers.items() if k not in transient)]:
            if isinstance(tensor, Tensor):
                yield f"{prefix}{name}", tensor
        pending += [(f"{prefix}{name}.", m) for name, m in reversed([*children.items()]) if isinstance(m, Record)]


def _part(module: Record, key: str) -> Mapping[str, Any]:
    part = module.state.get(key, {}) if isinstance(module.state, dict) else {}
    if not isinstance(part, dict):
        raise Damaged(f"{key} of a {module.name} is a {type(part).__name__}")
    return part


def _bounded(tensors: Iterator[tuple[str, Tensor]], limit: int) -> Iterator[tuple[str, Tensor]]:
    """`tensors`, as long as they have no more elements together than the file has bytes."""
    elements = 0
    for name, tensor in tensors:
        elements += tensor.numel()
        if elements > limit:
            raise Damaged("its tensors share their storages")
        yield name, tensor


def _plain(value: Any) -> Any:
    """`value` as new dicts, lists, text and numbers; whatever is nothing of the kind is refused."""
    budget = _MAX_PLAIN

    def copy(part: Any, depth: int) -> Any:
        nonlocal budget
        budget -= 1
        if budget < 0 or depth > 50:
            raise Damaged("its values contain each other")
        if part is None or isinstance(part, (str, bool, int, float)):
            return part
        if isinstance(part, (list, tuple)):
            return [copy(item, depth + 1) for item in part]
        if isinstance(part, dict):
            return {key: copy(item, depth + 1) for key, item in part.items()}
        raise Damaged(f"a {getattr(part, 'name', type(part).__name__)} where plain values belong")

    return copy(value, 0)


def _plain_items(values: dict[Any, Any]) -> dict[str, float | str]:
    return {
        key: value for key, value in values.items() if isinstance(key, str) and isinstance(value, (int, float, str))
    }


def _names(names: Any) -> tuple[str, ...]:
    """Class names from a list, or from a dict keyed 0, 1, 2 …"""
    if isinstance(names, dict):
        if sorted(names, key=str) != sorted(range(len(names)), key=str):
            raise Damaged("the class names are not numbered from 0 without a gap")
        names = [names[index] for index in range(len(names))]
    if names is None:
        return ()
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise Damaged("the class names are not a list of text")
    return tuple(names)


def _strides(stride: Any) -> tuple[float, ...]:
    if not isinstance(stride, Tensor) or stride.ndim != 1:
        raise Damaged("the model has no strides")
    return tuple(stride.float().tolist())
