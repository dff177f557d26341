"""Networks that other runtimes compute, in the cache: exported once for each file of weights, whole, on every host."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tessera import __version__
from tessera.utils.checkpoints.resolve import resolve_weights
from tessera.utils.environment import cache_dir
from tessera.utils.errors import UserError
from tessera.utils.exporting.formats import FORMATS, Format
from tessera.utils.exporting.job import ExportJob
from tessera.utils.exporting.parity.content import files_of
from tessera.utils.files import atomic_write, sha256
from tessera.utils.flags.export import ExportConfig
from tessera.utils.flags.program import git_revision
from tessera.utils.ranks.world import World
from tessera.utils.runtime.checkpoint import TorchNetwork

_FORMATS = {one.name: one for one in FORMATS}
EXPORTS = {"onnxruntime": _FORMATS["onnx"], "openvino": _FORMATS["openvino"]}  # by runtime, what it computes
_KEPT = 16  # networks in the cache
_WRITABLE = "Set TESSERA_CACHE to a folder that can be written."


def job_of(network: TorchNetwork, weights: str) -> ExportJob:
    """The export of the bare network for images of any size, into the cache."""
    job = ExportJob.read(ExportConfig(weights=weights, raw=True, end2end=not network.needs_suppression))
    own = place(state_of(weights, list(EXPORTS), end2end=job.config.end2end))
    return replace(job, config=replace(job.config, output=str(own)))


def exported(one: Format, job: ExportJob) -> Path:
    """The network's file in the cache, made where it is not there as it was written."""
    path = job.file(one.suffix)
    if not _is_whole(path):
        _forget_oldest()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            one.export(job)
            with atomic_write(_note(path)) as file:
                file.write(_sums(path))
        except OSError as error:
            raise UserError(f"{path.parent}: cannot be written ({error.strerror}). {_WRITABLE}") from error
    return path


def _is_whole(path: Path) -> bool:
    """Whether a file of the cache is what was written."""
    try:
        return _note(path).read_bytes() == _sums(path)
    except OSError:
        return False


def _note(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _sums(path: Path) -> bytes:
    return "".join(f"{sha256(part)}  {part.name}\n" for part in files_of(path)).encode()  # as sha256sum writes it


def state_of(weights: str, names: Sequence[str], **others: Any) -> bytes:
    """All that the result depends on."""
    versions = {package: _version(package) for name in names for package in packages(name)}
    program = f"{__version__} {git_revision()}"
    said = {
        "weights": sha256(resolve_weights(weights)),
        "program": program,
        "torch": torch.__version__,
        **versions,
        **others,
    }
    return json.dumps(said, sort_keys=True).encode()


def packages(runtime: str) -> tuple[str, ...]:
    """Modules that must be there."""
    return (*EXPORTS[runtime].packages, *(["onnxruntime"] if runtime == "onnxruntime" else []))


def _version(package: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def place(state: bytes) -> Path:
    """Where in the cache what depends on it lies."""
    return folder() / hashlib.blake2b(state, digest_size=16).hexdigest()


def folder() -> Path:
    """Of the cache."""
    return cache_dir() / "runtimes"


def _forget_oldest() -> None:
    """Make room in the cache for one more network."""
    folders = sorted((path for path in folder().glob("*") if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in folders[: 1 - _KEPT]:
        shutil.rmtree(path, ignore_errors=True)


def on_this_host(made: Path, world: World) -> Path:
    """The same file in this host's cache. What is not there comes from rank 0, as the weights do; every rank."""
    path = folder() / made.parent.name / made.name
    if all(world.all_gather(world.is_main or _is_whole(path))):
        return path
    parts = (*files_of(path), _note(path))
    contents = world.broadcast([part.read_bytes() for part in parts] if world.is_main else [])
    if not world.is_main:
        try:
            for part, content in zip(parts, contents, strict=True):
                with atomic_write(part) as file:
                    file.write(content)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}). {_WRITABLE}") from error
    return path
