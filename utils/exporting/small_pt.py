"""A small .pt: the weights, without the optimizer, and all that detection and fine-tuning need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from tessera.utils.checkpoints.format import WEIGHTS_KEYS, load_any_checkpoint, save_checkpoint
from tessera.utils.checkpoints.provenance import describe_metrics, describe_run
from tessera.utils.exporting.formats import Format
from tessera.utils.exporting.subject import Subject


class SmallPt(Format):
    """What best.pt is, of any checkpoint; with `--half` in float16, half as large."""

    name, suffix = "pt", ".pt"
    variants = frozenset({"half"})

    def write(self, subject: Subject, path: Path) -> Path:
        """As Format; `path` gets "-weights" in its name, for it must not be the checkpoint's."""
        path = path.with_name(f"{path.stem}-weights.pt")
        content = _content(subject)
        if subject.config.half:
            content["ema"] = {name: _halved(tensor) for name, tensor in content["ema"].items()}
        save_checkpoint(path, content)
        return path


def _content(subject: Subject) -> dict[str, Any]:
    if not subject.weights.family:
        state = load_any_checkpoint(subject.path)
        return {key: state[key] for key in WEIGHTS_KEYS}
    origin = {"weights": subject.path.name}  # for the licence: see metadata.py
    described = describe_run(subject.model, origin, {}, subject.imgsz, "")
    return {
        **described,
        **describe_metrics(None),
        "ema": dict(subject.weights.state_dict),
        "epoch": 0,
        "imgsz": subject.weights.imgsz,
        "git": None,
    }


def _halved(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor
