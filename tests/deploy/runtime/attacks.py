"""Malicious exported files: each writes a file when it is loaded or run."""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.deploy.runtime.made_files import STRINGS, write_pt2

_WEIGHTS, _CONSTANTS = "data/weights/", "data/constants/"


class _Touch:
    """Pickled, it becomes a file that is opened for writing."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._trace), "w")


def _pickled(trace: Path) -> bytes:
    file = io.BytesIO()
    torch.save({"a": _Touch(trace)}, file)
    return file.getvalue()


Changed = Callable[[bytes], bytes]


def _repacked(path: Path, member: str, change: Changed, added: str = "", content: bytes = b"") -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(members)).partition("/")[0]
    assert any(name.startswith(f"{root}/{member}") for name in members), "the format has changed"
    with zipfile.ZipFile(path, "w") as archive:
        for name, old in members.items():
            archive.writestr(name, change(old) if name.startswith(f"{root}/{member}") else old)
        if added:
            archive.writestr(f"{root}/{added}", content)


def _payload(name: str) -> Changed:
    described = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None}
    return lambda _: json.dumps({"config": {"w": described}}).encode()


def _expression(trace: Path) -> Changed:
    code = json.dumps(f"__import__('pathlib').Path({str(trace)!r}).touch() or 2")

    def change(content: bytes) -> bytes:
        changed, count = re.subn(r'"expr_str": "[^"]*"', lambda _: f'"expr_str": {code}', content.decode())
        assert count, "the format has changed"
        return changed.encode()

    return change


PT2: dict[str, Callable[[Path, Path], None]] = {
    "a pickled weight": lambda path, trace: _repacked(
        path, f"{_WEIGHTS}model_weights_config.json", _payload("weight_0"), f"{_WEIGHTS}weight_0", _pickled(trace)
    ),
    "an opaque constant": lambda path, trace: _repacked(
        path,
        f"{_CONSTANTS}model_constants_config.json",
        _payload("opaque_obj_0"),
        f"{_CONSTANTS}opaque_obj_0",
        pickle.dumps(_Touch(trace)),
    ),
    "pickled inputs": lambda path, trace: _repacked(path, "data/sample_inputs", lambda _: _pickled(trace)),
    "an expression": lambda path, trace: _repacked(path, "models/model.json", _expression(trace)),
}


class WritesWhenLoaded(nn.Module):
    """TorchScript that maps a file and writes to it while it is loaded."""

    def __init__(self, trace: str) -> None:
        super().__init__()
        self.trace, self.written = trace, 0

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.trace, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.trace = state[0]
        self.training = state[1]
        mapped = torch.from_file(self.trace, True, 4, dtype=torch.uint8).copy_(torch.ones(4, dtype=torch.uint8))
        self.written = int(mapped.sum())  # else the compiler would leave it out

    def forward(self, images: Tensor) -> Tensor:
        return images


class WritesWhenRun(nn.Module):
    """TorchScript that saves a tensor where it likes."""

    def __init__(self, trace: str) -> None:
        super().__init__()
        self.trace = trace

    def forward(self, images: Tensor) -> Tensor:
        torch.save(images, self.trace)
        return torch.zeros(images.shape[0], 4, 7)


def write_script(path: Path, module: nn.Module, strings: dict[str, str] = STRINGS) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module), path, _extra_files={"tessera.json": json.dumps(strings)})
    return path


def attack_files(folder: Path, trace: Path) -> dict[str, Path]:
    """Every attack by its name; each writes to `trace`."""
    good = write_pt2(folder / "good.pt2")
    files = {}
    for number, (name, change) in enumerate(PT2.items()):
        files[name] = folder / f"attack{number}.pt2"
        shutil.copy(good, files[name])
        change(files[name], trace)
    files["loaded script"] = write_script(folder / "loaded.torchscript", WritesWhenLoaded(str(trace)))
    files["running script"] = write_script(folder / "running.torchscript", WritesWhenRun(str(trace)))
    return files
