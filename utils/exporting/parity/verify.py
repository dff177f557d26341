"""The end of an export: each file runs on real pictures beside the network that it was made of, and is refused where
it finds something else."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tessera.models.detector import DetectionModel
from tessera.utils.checkpoints.weights import Weights
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.evaluation.evaluate import Evaluation
from tessera.utils.exporting.parity.accuracy import Accuracy, accuracy, measure
from tessera.utils.exporting.parity.agreement import EXACT, HALF, INT8, Agreement, Tolerance
from tessera.utils.exporting.parity.content import precision_of, size_of
from tessera.utils.exporting.parity.pictures import Pictures, find_index, gather
from tessera.utils.exporting.parity.report import Row, table
from tessera.utils.exporting.parity.trial import ROUNDS, UNSURE_ROUNDS, Trial, agreement, try_out
from tessera.utils.machine.extras import MissingExtra
from tessera.utils.ranks.world import World
from tessera.utils.runtime.checkpoint import TorchNetwork
from tessera.utils.runtime.exported import MissingDevice
from tessera.utils.runtime.model import Backend, PictureBackend
from tessera.utils.runtime.open_model import is_exported, open_model
from tessera.utils.types import DatasetIndex

Size = tuple[int, int] | None


@dataclass(frozen=True)
class Original:
    """The network that files were made of.

    Attributes:
        path: of its checkpoint.
        model: raw, its head's `keep_inference` done.
        weights: what else the checkpoint says.
        imgsz: long side in pixels that pictures are brought to.
    """

    path: Path
    model: DetectionModel
    weights: Weights
    imgsz: int


def comparison_index(original: Original, data: str) -> DatasetIndex | None:
    """The images that a network and its files are compared and measured on; None where there are none.

    Args:
        original: the network.
        data: dataset YAML; "" = the one that was trained on, where it is there.

    Raises:
        UserError: of `data` alone: it is not there, has a mistake, or other classes.
    """
    index = find_index(data, original.weights.data)
    if index is not None and len(index.names) != original.model.nc:
        if data:
            raise ConfigError(
                f"--data {data}: names {len(index.names)} classes, but {original.path.name} knows {original.model.nc}. "
                "Give the YAML that it was trained with."
            )
        return None
    return index


def verify(
    original: Original, files: Sequence[Path], world: World, index: DatasetIndex | None, *, max_drop: float = 0.01
) -> None:
    """Run every file beside the network, and print the table.

    Args:
        original: the network.
        files: that were made of it, in any format.
        world: this process.
        index: images to measure on, those of `comparison_index`; None = compare on drawn ones.
        max_drop: largest loss of mAP50-95 that is no failure.

    Raises:
        UserError: of files that find something else than the network, or lose more: what, and by how much.
    """
    pictures = gather(index, original.imgsz)
    judge = Judge(original, pictures, index, world, max_drop)
    rows = [judge.network(), *(judge.file(path) for path in files)]
    print(f"Compared on {pictures.origin}; ms: a picture, from pixels to boxes, the median; px: of {original.imgsz}")
    print("\n".join(table(rows)), flush=True)
    if refused := [f"{row.name}: {row.failures}" for row in rows if row.failures]:
        raise UserError(
            "\n".join(refused) + "\nDo not use what is named here: it does not find what the checkpoint finds."
        )


class Judge:
    """Compares files with a network.

    Args:
        original: the network.
        pictures: to compare on.
        index: to measure mAP on; None = not measured.
        world: this process.
        max_drop: largest loss of mAP50-95 that is no failure.
    """

    def __init__(
        self, original: Original, pictures: Pictures, index: DatasetIndex | None, world: World, max_drop: float
    ) -> None:
        self._original, self._pictures, self._index = original, pictures.pictures, index
        self._world, self._max_drop = world, max_drop
        self._backend = TorchNetwork(original.model, original.weights, world.accelerator)
        self._trials: dict[tuple[Size, int], Trial] = {}
        self._evaluations: dict[tuple[Size, int], Evaluation] = {}

    def network(self) -> Row:
        """The network itself."""
        trial = self._reference(None, self._original.imgsz)
        return Row(
            self._original.path.name,
            size_of(self._original.path) / 1e6,
            trial.milliseconds,
            self._accuracy(None, None, self._original.imgsz),
            precision="float32",
            failures=self._broken(trial),
        )

    def file(self, path: Path) -> Row:
        """A file that was made of it."""
        megabytes, precision = size_of(path) / 1e6, precision_of(path)
        try:
            backend = self._open(path)
        except (MissingExtra, MissingDevice) as error:
            return Row(path.name, megabytes, precision=precision, unverified=str(error))
        size_hw, imgsz = _size(backend, self._original.imgsz)
        try:
            near, trial = self.compare(backend, tolerance_of(precision))
            found = self._accuracy(backend, size_hw, imgsz)
        except UserError as error:  # what it finds is nothing that a detector finds
            return Row(path.name, megabytes, precision=precision, failures=str(error))
        failures = [near.exceeds(tolerance_of(precision)), self._broken(trial)]
        if found is not None and found.drop > self._max_drop:
            failures.append(f"loses {found.drop:.4f} of mAP50-95, at most {self._max_drop:g} may be lost (--max-drop)")
        return Row(
            path.name,
            megabytes,
            trial.milliseconds,
            found,
            near,
            precision,
            "; ".join(filter(None, failures)),
            "" if near.detections else f"on these pictures neither it nor {self._original.path.name} finds anything",
        )

    def _broken(self, trial: Trial) -> str:
        """What is wrong with what a network predicts, in words; "" where nothing is."""
        if not trial.broken:
            return ""
        return f"predicts what is not a finite number for {trial.broken} of {len(self._pictures)} pictures"

    def compare(self, backend: Backend | PictureBackend, allowed: Tolerance) -> tuple[Agreement, Trial]:
        """How far it agrees with the network, and what it found."""
        size_hw, imgsz = _size(backend, self._original.imgsz)
        reference = self._reference(size_hw, imgsz)
        trial = try_out(backend, self._pictures, imgsz, reference.rounds)
        return agreement(reference, trial, self._pictures, imgsz, allowed, self._network(size_hw)), trial

    def _open(self, path: Path) -> Backend | PictureBackend:
        end2end = not is_exported(path.name) and not self._original.model.head.needs_suppression
        return open_model(str(path), self._world, end2end=end2end, trust_file=True)  # written just now

    def _network(self, size_hw: Size) -> TorchNetwork:
        """The network at the size of a file."""
        backend = copy.copy(self._backend)
        backend.size_hw = size_hw
        return backend

    def _reference(self, size_hw: Size, imgsz: int) -> Trial:
        """What the network finds at the size of a file."""
        key = (size_hw, imgsz)
        if key not in self._trials:
            backend = self._network(size_hw)
            trial = try_out(backend, self._pictures, imgsz, ROUNDS)
            if trial.is_empty:
                trial = try_out(backend, self._pictures, imgsz, UNSURE_ROUNDS)
            self._trials[key] = trial
        return self._trials[key]

    def _accuracy(self, backend: Backend | PictureBackend | None, size_hw: Size, imgsz: int) -> Accuracy | None:
        """mAP of a file, or of the network where None; None without a dataset."""
        if self._index is None:
            return None
        index, world, stride = self._index, self._world, self._original.model.stride
        key = (size_hw, imgsz)
        if key not in self._evaluations:
            self._evaluations[key] = measure(self._backend, index, world, imgsz, stride, size_hw)
        reference = self._evaluations[key]
        found = reference if backend is None else measure(backend, index, world, imgsz, stride, size_hw)
        return accuracy(found, reference)


def tolerance_of(precision: str) -> Tolerance:
    """What may differ, by the numbers in a file."""
    if "int8" in precision:
        return INT8
    return HALF if "float16" in precision else EXACT


def _size(backend: Backend | PictureBackend, imgsz: int) -> tuple[Size, int]:
    """The one size of a network that takes no other, and the long side of its pictures."""
    size_hw = backend.size_hw if isinstance(backend, Backend) else None
    return size_hw, imgsz if size_hw is None else max(size_hw)
