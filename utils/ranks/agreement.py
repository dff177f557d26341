"""Before the first step: do all ranks run the same code, flags and model on the same data?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import nn

from utils.config import Hyp, TrainConfig
from utils.environment import REPO
from utils.errors import UserError
from utils.ranks.world import World
from utils.types import DatasetIndex

# May differ between ranks: settings of one rank, and paths, of which the content is compared.
_OWN = frozenset({"device", "local_rank", "workers", "project", "name", "cache", "resume", "data", "hyp"})


def run_fingerprint(
    config: TrainConfig, hyp: Hyp, indexes: Mapping[str, DatasetIndex], model: nn.Module
) -> dict[str, str]:
    """What must be equal on all ranks, by name: values and hashes short enough for a message."""
    flags = {f"--{k.replace('_', '-')}": str(v) for k, v in config.as_dict().items() if k not in _OWN}
    values = {f"hyp {key}": f"{value:g}" for key, value in hyp.as_dict().items()}
    data = {f"{split} data": f"{len(index)} images, {index.content_hash()}" for split, index in indexes.items()}
    classes = {f"{split} classes": f"{len(i.names)} ({','.join(i.names)[:60]})" for split, i in indexes.items()}
    shapes = "".join(f"{name}{tuple(tensor.shape)}" for name, tensor in model.state_dict().items())
    return {
        "code": code_version(),
        "torch": torch.__version__,
        **flags,
        **values,
        **classes,
        **data,
        "model": f"{sum(p.numel() for p in model.parameters())} parameters, {_short(shapes.encode())}",
    }


def require_agreement(mine: Mapping[str, str], world: World) -> None:
    """Compare over the ranks.

    Raises:
        UserError: on every rank, with the names, values and ranks that differ.
    """
    everyone = world.all_gather(dict(mine))
    lines = []
    for name in mine:
        ranks_of: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            ranks_of.setdefault(theirs.get(name, "missing"), []).append(rank)
        if len(ranks_of) > 1:
            found = "; ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in ranks_of.items())
            lines.append(f"{name}: {found}")
    if lines:
        raise UserError(
            "the ranks do not agree, and would train different things:\n  "
            + "\n  ".join(lines)
            + "\nGive all hosts the same code, flags and data."
        )


def code_version() -> str:
    """Hash of the program's own files."""
    files = sorted(
        (*REPO.glob("*.py"), *(p for folder in ("data", "models", "utils") for p in (REPO / folder).rglob("*.py")))
    )
    return _short(b"".join(path.read_bytes() for path in files))


def _short(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()
