"""Files that do something else than to find objects: each leaves a file behind when it is loaded, or when it runs."""

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

from tests.utils.runtime.made_files import STRINGS, write_pt2

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


def _repacked(path: Path, change: Callable[[str, bytes], bytes], **added: bytes) -> None:
    """Change the members of a .pt2, and add some."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(members)).partition("/")[0]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, change(name.partition("/")[2], content))
        for name, content in added.items():
            archive.writestr(f"{root}/{name}", content)


def _payload(name: str) -> bytes:
    described = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None}
    return json.dumps({"config": {"w": described}}).encode()


def _pt2_weights(path: Path, trace: Path) -> None:
    """`use_pickle: true` of a weight."""
    _repacked(
        path,
        lambda name, content: _payload("weight_0") if name == f"{_WEIGHTS}model_weights_config.json" else content,
        **{f"{_WEIGHTS}weight_0": _pickled(trace)},
    )


def _pt2_constant(path: Path, trace: Path) -> None:
    """A constant that is any object."""
    config = f"{_CONSTANTS}model_constants_config.json"
    _repacked(
        path,
        lambda name, content: _payload("opaque_obj_0") if name == config else content,
        **{f"{_CONSTANTS}opaque_obj_0": pickle.dumps(_Touch(trace))},
    )


def _pt2_inputs(path: Path, trace: Path) -> None:
    """The example of its input."""
    _repacked(path, lambda name, content: _pickled(trace) if name.startswith("data/sample_inputs") else content)


def _pt2_expression(path: Path, trace: Path) -> None:
    """A size that is an expression."""

    code = json.dumps(f"__import__('pathlib').Path({str(trace)!r}).touch() or 2")

    def change(name: str, content: bytes) -> bytes:
        if name != "models/model.json":
            return content
        changed, count = re.subn(r'"expr_str": "[^"]*"', lambda _: f'"expr_str": {code}', content.decode())
        assert count, "the format has changed"
        return changed.encode()

    _repacked(path, change)


PT2: dict[str, Callable[[Path, Path], None]] = {
    "a pickled weight": _pt2_weights,
    "an opaque constant": _pt2_constant,
    "pickled inputs": _pt2_inputs,
    "an expression": _pt2_expression,
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
    """A scripted module with the metadata of export.py."""
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
