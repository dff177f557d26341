"""Parts outside the core, opened by name when a flag or a file asks for them: the core never imports them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tessera.utils.errors import UserError

EXTENSIONS = {
    "dataset checks": "tessera.analysis.checks.run_checks",  # --check-data
    "dataset page": "tessera.analysis.report.data_page",  # --check-data --report
    "validation report": "tessera.analysis.report.validation_report",  # error tables, report.html
    "plots": "tessera.analysis.plots",  # without --noplots
    "trackers": "tessera.analysis.trackers",  # --loggers
    "profile": "tessera.analysis.profile",  # --profile
    "label errors": "tessera.analysis.label_errors",  # --find-errors
    "search": "tessera.analysis.search",  # --evolve
    "downloads": "tessera.deploy.foreign.download",  # `download` of a dataset YAML
    "generated shapes": "tessera.deploy.foreign.synthetic_shapes",  # `generate` of a dataset YAML
    "published weights": "tessera.deploy.foreign.published",  # --weights yolov5n, --list-weights
    "weights of other programs": "tessera.deploy.foreign.read",  # --weights yolov5n.pt
    "ImageNet weights": "tessera.deploy.foreign.efficientnet_lite",  # --weights imagenet
    "safetensors files": "tessera.deploy.foreign.safetensors_file",  # --weights x.safetensors
    "runtimes": "tessera.deploy.runtime.runtimes",  # exported files as --weights
    "tiles": "tessera.deploy.runtime.pipeline",  # --tile
    "result files": "tessera.deploy.inference.result_files",  # --save-txt, --save-json
}


def extension(name: str) -> Any:
    """Import and return the module of a part.

    Raises:
        UserError: this installation does not have it.
    """
    module = EXTENSIONS[name]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if not f"{error.name}.".startswith("tessera."):
            raise
        raise UserError(f"This installation lacks the {name}: {error.name} is missing.") from error
