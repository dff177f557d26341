"""Checks before the first step that all ranks have the same code, flags, model and data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePath

import torch
from torch import nn

import tessera
from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.errors import UserError
from tessera.utils.flags.options import Options
from tessera.utils.ranks.launch import ranks_by_value
from tessera.utils.ranks.world import World
from tessera.utils.text import plural
from tessera.utils.types import DatasetIndex

# Flags that may differ between ranks: settings of one rank, and paths, whose content is compared.
_PER_RANK = frozenset(
    {"device", "local_rank", "workers", "project", "name", "resume", "data", "hyp", "weights", "a", "b"}
)


def require_same_command(config: Options, world: World) -> None:
    """Raise UserError on every rank, before the command's first collective, where the ranks got different flags.

    Ranks with different flags would wait for each other forever. Weights, which rank 0 reads, are compared by name.
    """
    if world.size == 1:
        return
    values = config.as_dict()
    mine = {"command": config.program}
    mine |= {f"--{key.replace('_', '-')}": str(value) for key, value in values.items() if key not in _PER_RANK}
    mine |= {f"--{key}": "given" if values.get(key) else "not given" for key in ("hyp", "resume")}
    for key in config.weights_fields:
        files = [values[key]] if isinstance(values[key], str) else values[key]
        mine[f"--{key}"] = " ".join(PurePath(file).name for file in files) or "none"
    require_agreement(mine, world)


def run_fingerprint(hyp: Hyp, indexes: Mapping[str, DatasetIndex], model: nn.Module) -> dict[str, str]:
    """Return what must be equal on all ranks, by name: values and hashes short enough for a message."""
    values = {f"hyp {k}": v if isinstance(v, str) else f"{v:g}" for k, v in hyp.as_dict().items()}
    shapes = "".join(f"{name}{tuple(tensor.shape)}" for name, tensor in model.state_dict().items())
    return {
        "code": code_version(),
        "torch": torch.__version__,
        **values,
        **data_fingerprint(indexes),
        "model": f"{sum(p.numel() for p in model.parameters())} parameters, {_short(shapes.encode())}",
    }


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
    everyone = world.all_gather(dict(mine))
    lines = []
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        ranks = ranks_by_value([theirs.get(name, "missing") for theirs in everyone])
        if len(ranks) > 1:
            lines.append(f"\n  {name}: " + "; ".join(f"{value} on rank {those}" for value, those in ranks.items()))
    if lines:
        raise UserError(
            f"the ranks do not agree:{''.join(lines)}\nGive all hosts the same code, command, flags and data."
        )


def describe_call(config: TrainConfig) -> str:
    """Return the flags as a text that is equal on every host, whose folders may differ."""
    values = {key: value for key, value in config.as_dict().items() if key not in ("device", "local_rank", "workers")}
    return repr({key: PurePath(value).name if isinstance(value, str) else value for key, value in values.items()})


def code_version() -> str:
    """Return a hash of the program's Python files, the same for a clone and an installation."""
    package = Path(tessera.__file__).parent
    # In a clone these are links.
    folders = [package / name for name in ("commands", "data", "models", "utils", "analysis", "deploy")]
    files = sorted(path.relative_to(package) for folder in folders for path in folder.rglob("*.py"))
    return _short(b"".join((package / path).read_bytes() for path in files))


def _short(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()
