"""What may watch the detections of a validation as they are found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tessera.utils.types import Batch, Detections


class Sink(ABC):
    """Receives the detections of this rank's images, batch by batch."""

    @abstractmethod
    def add(self, batch: Batch, found: Sequence[Detections]) -> None:
        """Take a batch with its detections, on the host, in pixels of the original images."""
