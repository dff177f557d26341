"""What the page of a run is made from."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.data.source.scan import ImageLabels
from tessera.utils.config import TrainConfig
from tessera.utils.error_analysis.files import ErrorItem
from tessera.utils.evaluation.bootstrap import Intervals
from tessera.utils.evaluation.evaluate import Evaluation
from tessera.utils.evaluation.matching import Kind
from tessera.utils.flags.program import started
from tessera.utils.flags.val import ValConfig
from tessera.utils.text import one_line
from tessera.utils.types import DatasetIndex

if TYPE_CHECKING:
    import pandas as pd  # a validation does without


@dataclass(frozen=True)
class Origin:
    """What was asked for, and what was evaluated where.

    Attributes:
        weights: path or name.
        imgsz: size of the images in pixels.
        device, ranks: the name of rank 0's, and how many ranks there were.
        trained_on: images of the training; None where it is none.
        best_epoch: of the training, from 0; None where no epoch is better than what it began with.
        skipped: steps of the training that were skipped, as far as this process has seen it.
    """

    config: TrainConfig | ValConfig
    weights: str
    imgsz: int
    device: str
    ranks: int = 1
    trained_on: DatasetIndex | None = None
    best_epoch: int | None = None
    skipped: int = 0

    @property
    def command(self) -> str:
        """The command with its flags, as one would type it."""
        return shlex.join([*shlex.split(started(self.config.program)), *self.config.as_args()])


@dataclass(frozen=True)
class ReportData:
    """All that the page of a run shows.

    Attributes:
        index: the split of the validation.
        interval: of mAP.
        gains: of mAP50, by kind of error.
        items, labels: the worst errors, by cost, and where the labels of their images are.
        run: the folder.
        results: an epoch a row, as `read_results` returns them; None where there is no training.
    """

    found: Evaluation
    index: DatasetIndex
    interval: Intervals
    gains: Mapping[Kind, float]
    items: Sequence[ErrorItem]
    labels: Mapping[int, ImageLabels]
    origin: Origin
    run: Path
    results: pd.DataFrame | None = None

    @property
    def is_taken(self) -> bool:
        """Whether detect.py takes the confidence of the page: that of a training is kept in best.pt, unless it is 0."""
        return self.results is not None and self.found.errors.confidence > 0

    def name(self, class_id: int) -> str:
        """A class as the page calls it."""
        return readable(self.index.names[class_id])


def readable(text: str, most: int = 60) -> str:
    """Text of a user in one line of bounded length: no control character, none that turns the text around it."""
    return one_line(text, most)
