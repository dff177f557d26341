"""`--finetune N`: the checkpoint learns to lose less in 8 bits, by a training of its own, and is exported then."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tessera.data.source.download import locked
from tessera.utils.config import TrainConfig
from tessera.utils.errors import UserError
from tessera.utils.exporting.job import ExportJob

# Flags that stay as the checkpoint was trained with: which images, which objects, cut how.
_KEPT = ("cache", "image_weights", "label_smoothing", "overlap", "sampling", "seed", "single_cls", "tile")


def folder_of(job: ExportJob) -> Path:
    """Where the training of these weights, data and size lies: a digest of them, wherever the checkpoint lies now.

    So the same command finds its run again, to go on with it or to be done.
    """
    digest = hashlib.sha256(f"{job.sha256} {_data(job)} {job.imgsz}".encode()).hexdigest()[:8]
    return Path("runs", "export", f"{job.path.stem}-int8-{digest}")


@contextmanager
def alone_in(run: Path) -> Iterator[None]:
    """While inside, no other process trains in the folder; waits for one that does.

    Raises:
        UserError: beside the folder nothing can be written, or the disk has no locks.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(run.with_name(f".{run.name}.lock")))
        except OSError as error:
            raise UserError(
                f"--finetune: {run.parent.absolute()}: cannot be locked or written to ({error.strerror or error}). "
                "Change its permissions, or start the command in another directory; on a network's disk, one with "
                "locks."
            ) from error
        yield


def training_flags(job: ExportJob, run: Path, ranks: int) -> dict[str, Any]:
    """The flags of the training in the folder `run`: as the model's recipe for such weights, but without mosaic."""
    before, config = (job.weights.checkpoint or {}).get("config", {}), job.config
    begun = (run / "weights" / "last.pt").exists()
    return {
        **{flag: before[flag] for flag in _KEPT if flag in before},
        **({} if begun else {"weights": str(job.path.absolute())}),
        "batch_size": -(-int(before.get("batch_size", TrainConfig.batch_size)) // ranks) * ranks,
        "data": _data(job),
        "imgsz": job.imgsz,
        "epochs": config.finetune,
        "close_mosaic": config.finetune,
        "int8": True,
        "device": config.device,
        "resume": "auto",
        "project": str(run.parent),
        "name": run.name,
    }


def _data(job: ExportJob) -> str:
    return job.config.data or job.weights.data
