"""Data of the report page."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.analysis.error_analysis.files import ErrorItem
from tessera.data.source.scan import ImageLabels
from tessera.utils.config import TrainConfig
from tessera.utils.evaluation.average_precision import Intervals
from tessera.utils.evaluation.evaluate import Evaluation
from tessera.utils.evaluation.matching import Kind
from tessera.utils.flags.program import started
from tessera.utils.flags.val import ValConfig
from tessera.utils.text import one_line
from tessera.utils.thresholds import LOWEST_CONF
from tessera.utils.types import DatasetIndex

if TYPE_CHECKING:
    import pandas as pd  # a validation does without


@dataclass(frozen=True)
class RunInfo:
    """Flags and circumstances of a run.

    Attributes:
        weights: path or name.
        imgsz: size of the images in pixels.
        device, ranks: device name of rank 0, and number of ranks.
        trained_on: training images; None for a validation.
        epochs: number of trained epochs.
        best_epoch: `EarlyStopping.best_epoch`.
        skipped: training steps skipped in this process.
        unused_losses: names of the losses that are 0 by design.
    """

    config: TrainConfig | ValConfig
    weights: str
    imgsz: int
    device: str
    ranks: int = 1
    trained_on: DatasetIndex | None = None
    epochs: int = 0
    best_epoch: int | None = None
    skipped: int = 0
    unused_losses: frozenset[str] = frozenset()

    @property
    def command(self) -> str:
        """The command line with its flags."""
        return shlex.join([*shlex.split(started(self.config.program)), *self.config.as_args()])


@dataclass(frozen=True)
class ReportData:
    """Data of the report page of a run.

    Attributes:
        index: the validation split.
        interval: of mAP.
        gains: of mAP50, by kind of error.
        items, labels: the worst errors by cost, and the locations of their images' labels.
        run: run directory.
        results: as of `read_results`; None for a validation.
    """

    found: Evaluation
    index: DatasetIndex
    interval: Intervals
    gains: Mapping[Kind, float]
    items: Sequence[ErrorItem]
    labels: Mapping[int, ImageLabels]
    origin: RunInfo
    run: Path
    results: pd.DataFrame | None = None

    @property
    def is_taken(self) -> bool:
        """Whether detect.py uses the confidence of the page: best.pt stores it, and it is not too low."""
        return self.results is not None and self.found.errors.confidence >= LOWEST_CONF

    def name(self, class_id: int) -> str:
        """Return a class name for the page."""
        return one_line(self.index.names[class_id])
