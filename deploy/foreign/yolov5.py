"""Original YOLOv5 checkpoints: weights, architecture and class names of the pickled model, without its code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from tessera.deploy.foreign.tensors import ConvertedWeights, WrongTensors, checked_copy
from tessera.utils.checkpoints.archive import DamagedFile, InertObject
from tessera.utils.checkpoints.format import check_parts

_MOST_PARTS = 20_000  # modules and tensors, or plain values; far more than any model has


def convert(module: InertObject, limit: int) -> ConvertedWeights:
    """Return weights, architecture and class names of a module, whose tensors have at most `limit` elements together.

    Raises:
        WrongTensors: it lacks its architecture, or has an unexpected tensor.
        DamagedFile: an invalid part, or parts without end.
    """
    model_yaml = module.state.get("yaml")
    if not isinstance(model_yaml, dict):
        raise WrongTensors("its model has no `yaml`, from which to rebuild it, expected YOLOv5 v4 or later")
    check_parts(model_yaml, _MOST_PARTS)
    # Before v6 the anchors in pixels were stored, too.
    tensors = {name: tensor for name, tensor in _named_tensors(module) if not name.endswith(".anchor_grid")}
    return ConvertedWeights(checked_copy(tensors, limit), model_yaml, _names(module.state.get("names")))


def _named_tensors(module: InertObject) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers in the order of torch's state_dict."""
    pending, seen = [("", module)], 0
    while pending:
        prefix, current = pending.pop()
        parameters, buffers, children = (_part(current, key) for key in ("_parameters", "_buffers", "_modules"))
        seen += 1 + len(parameters) + len(buffers)
        if seen > _MOST_PARTS:
            raise DamagedFile("its modules contain each other")
        state = current.state
        transient = state.get("_non_persistent_buffers_set", ()) if isinstance(state, dict) else ()
        for name, tensor in [*parameters.items(), *((k, v) for k, v in buffers.items() if k not in transient)]:
            if isinstance(tensor, Tensor):
                yield f"{prefix}{name}", tensor
        pending += [(f"{prefix}{name}.", m) for name, m in reversed([*children.items()]) if isinstance(m, InertObject)]


def _part(module: InertObject, key: str) -> Mapping[str, Any]:
    part = module.state.get(key, {}) if isinstance(module.state, dict) else {}
    if not isinstance(part, dict):
        raise DamagedFile(f"{key} of a {module.name} is a {type(part).__name__}")
    return part


def _names(names: Any) -> tuple[str, ...]:
    """Return class names from a list, or from a dict keyed 0, 1, 2 …"""
    if isinstance(names, dict):
        if sorted(names, key=str) != sorted(range(len(names)), key=str):
            raise DamagedFile("the class names are not numbered from 0 without a gap")
        names = [names[index] for index in range(len(names))]
    if names is None:
        return ()
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise DamagedFile("the class names are not a list of text")
    return tuple(names)
