"""`--finetune N`: the checkpoint learns to lose less in 8 bits, by a training of its own, and is exported then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.utils.checkpoints.resolve import resolve_weights
from tessera.utils.checkpoints.resume import saved_config
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.errors import ConfigError
from tessera.utils.exporting.job import output_folder
from tessera.utils.files import sha256
from tessera.utils.flags.export import ExportConfig

# Flags that stay as the checkpoint was trained with: which images, which objects, cut how.
_KEPT = ("batch_size", "cache", "image_weights", "label_smoothing", "overlap", "sampling", "seed", "single_cls", "tile")
_DIGITS = 8  # of the checkpoint's digest, in the name of the run


def training_flags(config: ExportConfig) -> dict[str, Any]:
    """The flags of the training. It ends as the model's recipe for such weights does: without mosaic.

    The same command finds its run again, and continues it or is done; another checkpoint has another run.

    Raises:
        UserError: there is no such checkpoint, or none that can be trained; no dataset is known.
    """
    path = resolve_weights(config.weights)
    weights = load_weights(path)
    if not (config.data or weights.data):
        raise ConfigError(
            f"--finetune {config.finetune}: no --data given, and {config.weights} does not say which dataset it was "
            "trained on. Give its YAML, such as --data coco128.yaml."
        )
    trained = saved_config(weights.checkpoint or {"config": {}}, path)  # of a file without flags: as by default
    return {
        **{flag: getattr(trained, flag) for flag in _KEPT},
        "weights": str(path.absolute()),
        "data": config.data or weights.data,
        "imgsz": max(config.imgsz, default=weights.usual_imgsz),
        "epochs": config.finetune,
        "close_mosaic": config.finetune,
        "int8": True,
        "device": config.device,
        "resume": "auto",
        "project": str(output_folder(config, path)),
        "name": f"{path.stem}-int8-{sha256(path)[:_DIGITS]}",
    }


def trained_best(flags: dict[str, Any]) -> Path:
    """What the training with these flags ends with."""
    return Path(flags["project"]) / flags["name"] / "weights" / "best.pt"
