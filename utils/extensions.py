"""Parts outside the core, opened by name when a flag or a file asks for them: the core never imports them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tessera.utils.errors import UserError

EXTENSIONS = {
    "dataset checks": "tessera.analysis.checks.run_checks",  # --check-data
    "dataset page": "tessera.analysis.image_pages.dataset_page",  # --check-data --report
    "validation report": "tessera.analysis.validation_report",  # tables of errors, report.html; not with --noreport
    "label errors": "tessera.analysis.label_errors.candidates",  # --find-errors
    "search": "tessera.analysis.search.evolve",  # --evolve
    "runtimes": "tessera.deploy.runtime.runtimes",  # exported files as --weights
    "tiles": "tessera.deploy.runtime.pipeline",  # --tile
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
        if not (error.name and module.startswith(error.name)):
            raise
        raise UserError(f"This installation lacks the {name}: {module} is missing.") from error
