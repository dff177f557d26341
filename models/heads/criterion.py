"""Interface of a head's target assignment and loss, and the mean validation loss.

    # Before the forward, on the host; the counts are all-reduced during the forward.
    assignment = accelerator.send(criterion.assign(targets, batch_size, size_hw, unlabelled))
    counts = all-reduced assignment.counts
    loss, parts = criterion(model(images), assignment, counts, sum_over_ranks)

A loss is a sum over this rank's images, divided by a count of the global batch. Losses and gradients of ranks add up to
those of the batch, and a validation loss does not depend on the batch size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

# Starts to sum a tensor over the ranks, in place; the returned function waits for the sum. See `World.begin_sum`.
SumOverRanks = Callable[[Tensor], Callable[[], Tensor]]


@dataclass(frozen=True, eq=False)
class LossSettings:
    """Gains and other settings of a head's assignment and loss; a head reads some of them (`Head.loss_hyps`)."""

    box: float  # gains of the losses
    cls: float
    obj: float = 1.0
    dfl: float = 1.5
    cls_pw: float = 1.0  # weights of positives
    obj_pw: float = 1.0
    fl_gamma: float = 0.0  # exponent of the focal loss; 0 = off
    anchor_t: float = 4.0  # largest ratio of the sides of an object and its anchor
    topk: float = 10.0  # task-aligned assignment: cells per object, exponents of the class probability and of the IoU
    alpha: float = 0.5
    beta: float = 6.0
    imgsz: int = field(default=640, kw_only=True)  # training size in pixels, of height and width the larger
    label_smoothing: float = field(default=0.0, kw_only=True)  # ε of the class targets
    class_weights: Tensor | None = field(default=None, kw_only=True)  # as of `Criterion`

    @classmethod
    def of(cls, hyp: object, **others: Any) -> LossSettings:
        """Return the settings that hyperparameters have as attributes, and others by name."""
        return cls(**{name: getattr(hyp, name) for name in LOSS_HYPS}, **others)


# Hyperparameters that only heads and their losses read.
LOSS_HYPS = frozenset(f.name for f in fields(LossSettings) if not f.kw_only)


def no_reduction(tensor: Tensor) -> Callable[[], Tensor]:
    """Return the tensor itself: `SumOverRanks` of a single rank."""
    return lambda: tensor


def gather_rows(outputs: Tensor, cells: Tensor) -> Tensor:
    """Return the rows of outputs (N, …) of some cells (S,), float32 (S, …).

    An embedding is an index_select whose backward sums the gradients of a repeated row in a fixed order; on CUDA only
    under torch.use_deterministic_algorithms. CUDA's kernel for up to 3,072 rows has a race from 2,017 on: the next
    indices may replace those that slower warps still compare. The rows added for the other kernel have no gradient.
    """
    if 2016 < len(cells) <= 3072:
        return F.embedding(F.pad(cells, (0, 3073 - len(cells))), outputs)[: len(cells)].float()
    return F.embedding(cells, outputs).float()


class Targets(NamedTuple):
    """Objects (T, 6), ignored regions (R, 6) and unlabelled regions (U, 6), rows as in `Criterion.assign`.

    `weights` are those of the objects, (T,); None = all 1.
    """

    objects: NDArray[np.float32]
    regions: NDArray[np.float32]
    unlabelled: NDArray[np.float32]
    weights: NDArray[np.float32] | None = None


def split_targets(targets: Tensor, nc: int, batch_size: int) -> Targets:
    """Return the targets of a batch as arrays, after checking images and classes.

    Objects with weights are sorted by these: where the last one of a prediction counts, it is the surest.
    """
    assert targets.ndim == 2 and targets.shape[1] in (6, 7), targets.shape
    rows = targets.detach().numpy().astype(np.float32, copy=False)
    weights = None
    if rows.shape[1] == 7:
        rows = rows[rows[:, 6].argsort(kind="stable")]
        rows, weights = rows[:, :6], rows[rows[:, 1] >= 0, 6]
    if len(rows):
        assert rows[:, 0].min() >= 0 and rows[:, 0].max() < batch_size, "image outside the batch"
        assert rows[:, 1].max() < nc, f"class outside the head's {nc}"
    if not (rows[:, 1] < 0).any():
        return Targets(rows, rows[:0], rows[:0], weights)
    return Targets(rows[rows[:, 1] >= 0], rows[rows[:, 1] == -1], rows[rows[:, 1] < -1], weights)


class Taught(NamedTuple):
    """Targets of a teacher, on the device."""

    probabilities: Tensor  # float32 (B, A, C) of all predictions, level by level; 0 for classes that it does not know
    known: Tensor  # bool (C,), the classes that it knows
    boxes: Tensor  # float32 (B, A, 4), cxcywh in pixels; 0 with all scores


@dataclass(frozen=True)
class Assignment:
    """Part of the target assignment that needs labels only.

    It is computed on the host before the forward; its tensors go to the device. Subclasses add fields.
    """

    # float32, any shape: divisors of the loss that are known before the forward, and all-reduced during it.
    counts: Tensor
    # bool, of all predictions of the batch: those in an ignored region that have no loss; None without regions.
    ignored: Tensor | None = field(default=None, kw_only=True)
    # Classes without labels: the set of each prediction, int64 in the shape of `ignored`, as row of sets, bool (S, C),
    # whose first is empty; None if there are none. AnchorLoss has -1 for ignored regions.
    set_of_row: Tensor | None = field(default=None, kw_only=True)
    unlabelled_sets: Tensor | None = field(default=None, kw_only=True)
    # Factors of the losses of predictions, in the shape of `ignored`, except those that the device assigns; None = 1.
    row_weights: Tensor | None = field(default=None, kw_only=True)
    # What a teacher predicts, for classes without labels; None without a teacher.
    taught: Taught | None = field(default=None, kw_only=True)

    def with_teacher(self: A, taught: Taught) -> A:
        """Return the assignment, on the device, with a teacher's targets."""
        return replace(self, taught=taught)


A = TypeVar("A", bound=Assignment)


class Criterion(ABC, Generic[A]):
    """Loss of a head."""

    takes_teacher: ClassVar[bool] = False  # whether `Assignment.taught` has an effect
    names: tuple[str, ...]  # of the losses, such as ("box", "obj", "cls"), for results.csv and the progress bar
    class_weights: Tensor | None  # float32 (C,), factor of the class loss of positive cells, on their device; None = 1

    @property
    def unused(self) -> frozenset[str]:
        """Those of `names` that are 0 by design in this run, such as for a gain of 0."""
        return frozenset()

    def weighted(self, losses: Tensor, classes: Tensor) -> Tensor:
        """Return class losses (P,) of positive cells times the weights of their classes, int64 (P,)."""
        return losses if self.class_weights is None else losses * self.class_weights[classes]

    @abstractmethod
    def assign(self, targets: Tensor, batch_size: int, size_hw: tuple[int, int], unlabelled: Tensor | None = None) -> A:
        """Compute what the loss needs from the targets alone, on the host, before the forward.

        Args:
            targets: float32 (T, 6) on the CPU, rows image, class, x1, y1, x2, y2 in pixels of the batch; or (T, 7),
                with a weight, 0 … 1. An object of weight w counts as w objects, in the divisor of the loss too, so that
                the others weigh as without it. Its losses, and those of other cells inside of it, are multiplied by
                w: weight 0 is an ignored region. Of several objects around a cell the least w counts. Class -1 is an
                ignored region: predictions without object in it have no loss. Class -2 - k is a region whose image does
                not label the classes of row k of `unlabelled`: predictions without object in it have no loss of these
                classes, and no objectness loss.
            batch_size: images of the batch.
            size_hw: height and width of the model's input.
            unlabelled: bool (K, C) on the CPU; None if no target has a class below -1.
        """

    @abstractmethod
    def __call__(
        self,
        predictions: Any,
        assignment: A,
        global_counts: Tensor | None = None,
        sum_over_ranks: SumOverRanks = no_reduction,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch: this rank's sums over the counts of all ranks.

        Args:
            predictions: the head's output in training mode.
            assignment: of the same batch, on the same device.
            global_counts: `assignment.counts` summed over the ranks; None with a single rank.
            sum_over_ranks: sums detached counts that depend on predictions, such as target scores. Every rank must call
                it equally often, also for a batch without objects. Call it early, and wait late.

        Returns:
            The loss, a scalar; and its parts, detached float32 (len(names),). Summed over the ranks, both are the mean
            losses of the global batch, not multiplied by its size.
        """

    @abstractmethod
    def totals(self, predictions: Any, assignment: A) -> Tensor:
        """Return the sums of a batch that `losses` needs, on the device, in a shape common to all batches."""

    @abstractmethod
    def losses(self, totals: NDArray[np.float64]) -> tuple[float, ...]:
        """Return the mean losses, one for each of `names`, from a sum of `totals`."""


class LossMeter:
    """Mean validation losses over the whole set, independent of batches and ranks, without synchronising per batch."""

    def __init__(self, criterion: Criterion[Any]) -> None:
        self.criterion = criterion
        self._batches: list[Tensor] = []

    @torch.no_grad()
    def update(self, predictions: Any, assignment: Assignment) -> None:
        """Add a batch."""
        self._batches.append(self.criterion.totals(predictions, assignment))

    def total(self) -> NDArray[np.float64] | None:
        """Return the float64 sum of the batches so far; None without batches."""
        if not self._batches:
            return None
        return torch.stack(self._batches).cpu().double().sum(0).numpy()

    def losses(self, totals: Iterable[NDArray[np.float64] | None]) -> tuple[float, ...]:
        """Return the losses from the `totals` of all ranks; 0 without any."""
        measured = [total for total in totals if total is not None]
        return self.criterion.losses(np.sum(measured, axis=0)) if measured else (0.0,) * len(self.criterion.names)
