"""`--finetune N`: the checkpoint learns to lose less in 8 bits, by a training of its own, and is exported then."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tessera.utils.config import TrainConfig
from tessera.utils.exporting.job import ExportJob

PROJECT = "runs/export"
# Flags that stay as the checkpoint was trained with: which images, which objects, cut how.
_KEPT = ("cache", "image_weights", "label_smoothing", "overlap", "sampling", "seed", "single_cls", "tile")


def training_flags(job: ExportJob, ranks: int) -> dict[str, Any]:
    """The flags of the training: as the model's recipe for such weights, but without mosaic, which is how that ends.

    Its name is a digest of weights, data and size: the same command finds its run again, to go on with it or to be
    done, wherever the checkpoint lies now.
    """
    before, config = (job.weights.checkpoint or {}).get("config", {}), job.config
    data = config.data or job.weights.data
    digest = hashlib.sha256(f"{job.sha256} {data} {job.imgsz}".encode()).hexdigest()[:8]
    name = f"{job.path.stem}-int8-{digest}"
    begun = _saved(name, "last.pt").exists()
    return {
        **{flag: before[flag] for flag in _KEPT if flag in before},
        **({} if begun else {"weights": str(job.path.absolute())}),
        "batch_size": -(-int(before.get("batch_size", TrainConfig.batch_size)) // ranks) * ranks,
        "data": data,
        "imgsz": job.imgsz,
        "epochs": config.finetune,
        "close_mosaic": config.finetune,
        "int8": True,
        "device": config.device,
        "resume": "auto",
        "project": PROJECT,
        "name": name,
    }


def trained_best(flags: dict[str, Any]) -> Path:
    """What the training with these flags ends with."""
    return _saved(flags["name"], "best.pt")


def _saved(name: str, file: str) -> Path:
    """A checkpoint of the run with this name."""
    return Path(PROJECT).absolute() / name / "weights" / file
