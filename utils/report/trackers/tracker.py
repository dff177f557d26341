"""What every experiment tracker has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tessera.models.detector import GraphNode


class Tracker(ABC):
    """What `Loggers` asks of a tracker. Every method runs in the tracker's own thread and may raise anything.

    Attributes:
        module, package: what is imported and handed to the constructor, and the name to install it by.
        run_id: what `--resume` continues the tracker's run by; None where the run directory is enough.
    """

    module: ClassVar[str]
    package: ClassVar[str]
    run_id: str | None = None

    @abstractmethod
    def __init__(self, api: Any, run: Path, config: Mapping[str, Any], previous_id: str | None) -> None:
        """Open a run of the tracker, or continue `previous_id`."""

    @abstractmethod
    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Report numbers by name."""

    @abstractmethod
    def image(self, tag: str, path: Path, step: int) -> None:
        """Report a picture file under a name."""

    def graph(self, nodes: Sequence[GraphNode]) -> None:  # noqa: B027 - not every tracker shows one
        """Show the layers of the model, where the tracker can."""

    @abstractmethod
    def checkpoint(self, path: Path) -> None:
        """Keep a checkpoint."""

    @abstractmethod
    def close(self) -> None:
        """Send everything and end the tracker's run."""


def project_name(config: Mapping[str, Any]) -> str:
    """The project's name in a tracker: the folder of runs, unless that is the default one."""
    name = Path(str(config.get("project", ""))).name
    return name if name and name != "train" else "tessera"
