"""What a head's loss must be, so that any can be trained, validated and reported without knowing which it is.

    assignment = accelerator.send(criterion.assign(targets, batch_size, size_hw))    # host work, before the forward
    counts = all-reduced assignment.counts                                           # during the forward
    loss, parts = criterion(model(images), assignment, counts, sum_over_ranks)

A loss is a sum over what this rank holds, divided by a count of the whole batch on all ranks. Losses and gradients then
simply add up: nothing depends on how a batch is cut into ranks, nor a validation loss on its batch size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Begins to sum a tensor over the ranks, in place; the function that it returns waits for the sum. `World.sum_later`.
SumOverRanks = Callable[[Tensor], Callable[[], Tensor]]


def sum_of_one_rank(tensor: Tensor) -> Callable[[], Tensor]:
    """`SumOverRanks` of a single rank: the sum is the tensor itself."""
    return lambda: tensor


class Targets(NamedTuple):
    """The objects (T, 6) and the ignored regions (R, 6) of a batch, rows as in `Criterion.assign`."""

    objects: NDArray[np.float32]
    regions: NDArray[np.float32]


def checked_targets(targets: Tensor, nc: int, batch_size: int) -> Targets:
    """The targets of a batch as arrays, checked to fit its images and the classes."""
    assert targets.ndim == 2 and targets.shape[1] == 6, targets.shape
    rows = targets.detach().numpy().astype(np.float32, copy=False)
    if len(rows):
        assert rows[:, 0].min() >= 0 and rows[:, 0].max() < batch_size, "image outside the batch"
        assert rows[:, 1].max() < nc, f"class outside the head's {nc}"
    ignored = rows[:, 1] < 0
    return Targets(rows[~ignored], rows[ignored]) if ignored.any() else Targets(rows, rows[:0])


@dataclass(frozen=True)
class Assignment:
    """What the host works out of a batch's targets before the forward. A head adds fields; tensors go to the device."""

    # float32, of any shape, `(0,)` included: sums that the loss is divided by and that are known before the forward.
    # They are all-reduced while the model computes.
    counts: Tensor
    # bool, of all predictions of the batch end to end: those in an ignored region, which are not trained to find
    # nothing. None where the batch has no region.
    ignored: Tensor | None = field(default=None, kw_only=True)


A = TypeVar("A", bound=Assignment)


class Criterion(ABC, Generic[A]):
    """The loss of a head.

    Attributes:
        names: of the losses, such as ("box", "obj", "cls"), in results.csv and the progress bar.
        class_weights: float32 (C,), on the device that computes: what a class loss counts at a cell that is trained
            to find an object of the class; None = as much for each.
    """

    names: tuple[str, ...]
    class_weights: Tensor | None

    def weighted(self, losses: Tensor, classes: Tensor) -> Tensor:
        """Class losses of cells that find an object, (P,), times the weights of the objects' classes, int64 (P,)."""
        return losses if self.class_weights is None else losses * self.class_weights[classes]

    @abstractmethod
    def assign(self, targets: Tensor, batch_size: int, size_hw: tuple[int, int]) -> A:
        """Do what the loss needs of the targets alone; host work, before the forward.

        Args:
            targets: float32 (T, 6) on the CPU, rows image, class, x1, y1, x2, y2 in pixels of the batch. Class -1 is an
                ignored region: what finds no object in it has no loss.
            batch_size: images of the batch.
            size_hw: height and width of the images as the model gets them.
        """

    @abstractmethod
    def __call__(
        self,
        predictions: Any,
        assignment: A,
        global_counts: Tensor | None = None,
        sum_over_ranks: SumOverRanks = sum_of_one_rank,
    ) -> tuple[Tensor, Tensor]:
        """Loss of a batch: this rank's sums over the counts of all ranks.

        Args:
            predictions: what the head returns in training mode.
            assignment: of the same batch, on the same device.
            global_counts: `assignment.counts` added up over the ranks; None with a single rank.
            sum_over_ranks: for counts that only the predictions tell, such as a sum of target scores, detached. Every
                rank must call it equally often, also for a batch without objects; begin early, wait late.

        Returns:
            The loss, a scalar; and its parts, detached float32 (len(names),). Added up over the ranks, both are the
            mean losses of the whole batch, not multiplied by its size.
        """

    @abstractmethod
    def totals(self, predictions: Any, assignment: A) -> Tensor:
        """Everything of a batch that `losses` needs, as sums of one shape for all batches; all on the device."""

    @abstractmethod
    def losses(self, totals: NDArray[np.float64]) -> tuple[float, ...]:
        """The mean losses, one for each of `names`, from a sum of `totals`."""


class LossMeter:
    """Validation losses as means over the whole set, whatever its batches and ranks; no batch is read back."""

    def __init__(self, criterion: Criterion[Any]) -> None:
        self.criterion = criterion
        self._batches: list[Tensor] = []

    @torch.no_grad()
    def update(self, predictions: Any, assignment: Assignment) -> None:
        """Add a batch."""
        self._batches.append(self.criterion.totals(predictions, assignment))

    def total(self) -> NDArray[np.float64] | None:
        """The sum of what was added so far, float64; None where nothing was."""
        if not self._batches:
            return None
        return torch.stack(self._batches).cpu().double().sum(0).numpy()

    def losses(self, totals: Iterable[NDArray[np.float64] | None]) -> tuple[float, ...]:
        """The criterion's losses over the `totals` of all ranks; 0 where none has any."""
        measured = [total for total in totals if total is not None]
        return self.criterion.losses(np.sum(measured, axis=0)) if measured else (0.0,) * len(self.criterion.names)
