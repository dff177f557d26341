"""Packages of trackers that note every call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tessera.utils.report.trackers import TRACKERS, Loggers

CONFIG = {"project": "runs/train", "epochs": 3, "hyp": {"lr0": 0.01}}


class Recorder:
    """Stands for any object of a tracker's package; every call lands in one list as (name, args, kwargs)."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]], path: str, **attributes: Any) -> None:
        self.calls, self.path = calls, path
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Callable[..., Recorder]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append((f"{self.path}.{name}", args, kwargs))
            return Recorder(self.calls, f"{self.path}.{name}()", id="id-1", info=SimpleNamespace(run_id="id-1"))

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def install(monkeypatch: pytest.MonkeyPatch, tracker: str, **members: Any) -> Recorder:
    """Put a fake package where the import of `tracker` finds it."""
    fake = Recorder([], tracker)
    module = ModuleType(TRACKERS[tracker].module)
    module.__getattr__ = lambda name: getattr(fake, name)  # type: ignore[method-assign]
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, TRACKERS[tracker].module, module)
    return fake


def use(names: list[str], run: Path, picture: Path, *, resume: bool = False) -> None:
    with closing(Loggers(names, run, CONFIG, resume=resume)) as log:
        log.scalars({"train/box_loss": 0.5, "metrics/mAP_0.5:0.95": float("nan")}, 2)
        log.image("val_batch0_pred", picture, 2)
        log.checkpoint(run / "best.pt")
