"""Checks before the first step that all ranks have the same code, flags, model and data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

import tessera
from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.errors import UserError
from tessera.utils.files import sha256
from tessera.utils.flags.options import Options
from tessera.utils.ranks.rendezvous import ranks_by_value
from tessera.utils.ranks.world import World
from tessera.utils.text import plural
from tessera.utils.types import DatasetIndex

# Flags that may differ between ranks: settings of one rank, and paths, whose content is compared.
_PER_RANK = frozenset(
    {"device", "local_rank", "workers", "project", "name", "resume", "data", "hyp", "weights", "a", "b"}
)
# These decide which collectives come next: ranks with different values would wait for each other forever.
_CONTROL_FLOW = {
    *("command", "--cache", "--check-data", "--evolve", "--hyp", "--resume", "--weights", "--a", "--b"),
    *("--loggers", "--task", "--save-json", "--save-txt"),
}
_CONTENT = "content of "


def require_same_command(config: Options, world: World) -> None:
    """Raise UserError on every rank, before the command's first collective, where the ranks got different commands."""
    if world.size == 1:
        return
    everyone = world.all_gather(_command(config))
    for flag in (f"--{name}" for name in config.weights_fields):
        contents = [theirs.pop(f"{_CONTENT}{flag}", "") for theirs in everyone]
        if all(contents):  # else a rank lacks the file: rank 0 reads it, and the names are compared
            name_of = {content: theirs[flag] for content, theirs in zip(contents, everyone, strict=True)}
            for content, theirs in zip(contents, everyone, strict=True):
                theirs[flag] = f"{name_of[content]} ({content})"
    differences = _differences(everyone)
    if differences.keys() & _CONTROL_FLOW:
        raise _disagreement(differences)


def _command(config: Options) -> dict[str, str]:
    values = config.as_dict()
    files = {
        f"--{name}": [values[name]] if isinstance(values[name], str) else values[name] for name in config.weights_fields
    }
    return {
        "command": config.program,
        **flags_fingerprint(config),
        **{f"--{key}": "given" if values.get(key) else "not given" for key in ("hyp", "resume")},
        **{flag: " ".join(names) or "none" for flag, names in files.items()},
        **{f"{_CONTENT}{flag}": _contents(names) for flag, names in files.items()},
    }


def _contents(files: Sequence[str]) -> str:
    """Return hashes of files on this host; "" where one is missing."""
    try:
        paths = [Path(file).expanduser() for file in files]
        return " ".join(sha256(path)[:12] for path in paths) if all(path.is_file() for path in paths) else ""
    except (OSError, ValueError, RuntimeError):  # reported where the file is read
        return ""


def run_fingerprint(
    config: TrainConfig, hyp: Hyp, indexes: Mapping[str, DatasetIndex], model: nn.Module
) -> dict[str, str]:
    """Return what must be equal on all ranks, by name: values and hashes short enough for a message."""
    values = {f"hyp {k}": v if isinstance(v, str) else f"{v:g}" for k, v in hyp.as_dict().items()}
    shapes = "".join(f"{name}{tuple(tensor.shape)}" for name, tensor in model.state_dict().items())
    return {
        "code": code_version(),
        "torch": torch.__version__,
        **flags_fingerprint(config),
        **values,
        **data_fingerprint(indexes),
        "model": f"{sum(p.numel() for p in model.parameters())} parameters, {_short(shapes.encode())}",
    }


def flags_fingerprint(config: Options) -> dict[str, str]:
    return {f"--{key.replace('_', '-')}": str(value) for key, value in config.as_dict().items() if key not in _PER_RANK}


def data_fingerprint(indexes: Mapping[str, DatasetIndex]) -> dict[str, str]:
    """Return classes, images and labels of the splits, by name."""
    return {
        **{f"{split} classes": f"{len(i.names)} ({','.join(i.names)[:60]})" for split, i in indexes.items()},
        **{f"{split} data": _content_of(index) for split, index in indexes.items()},
    }


def _content_of(index: DatasetIndex) -> str:
    rule = f", `pixels: {index.pixels}`" if index.pixels else ""
    regions = f", {len(index.ignored_classes)} ignored regions" if len(index.ignored_classes) else ""
    return f"{plural(len(index), 'image')}, {index.content_hash()}{rule}{regions}"


def require_agreement(mine: Mapping[str, str], world: World) -> None:
    """Raise UserError on every rank, with names, values and ranks, where `mine` differs between ranks."""
    if differences := _differences(world.all_gather(dict(mine))):
        raise _disagreement(differences)


def _differences(everyone: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return a line for each name whose values differ between ranks."""
    lines = {}
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        values = [theirs.get(name, "missing") for theirs in everyone]
        if len(set(values)) > 1:
            lines[name] = f"{name}: {ranks_by_value(values)}"
    return lines


def _disagreement(differences: Mapping[str, str]) -> UserError:
    lines = "\n  ".join(differences.values())
    return UserError(f"the ranks do not agree:\n  {lines}\nGive all hosts the same code, command, flags and data.")


def code_version() -> str:
    """Return a hash of the program's Python files, the same for a clone and an installation."""
    package = Path(tessera.__file__).parent
    folders = [
        package / name for name in ("commands", "data", "models", "utils", "analysis", "deploy")
    ]  # in a clone they are links
    files = sorted(path.relative_to(package) for folder in folders for path in folder.rglob("*.py"))
    return _short(b"".join((package / path).read_bytes() for path in files))


def _short(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()
