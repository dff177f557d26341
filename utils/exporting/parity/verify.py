"""The end of an export: each file runs on real pictures beside the network that it was made of, and is refused where
it finds something else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

from tessera.utils.errors import UserError
from tessera.utils.evaluation.evaluate import Evaluation, measure
from tessera.utils.evaluation.measurement import Settings
from tessera.utils.exporting.job import ExportJob
from tessera.utils.exporting.parity.accuracy import accuracy
from tessera.utils.exporting.parity.content import precision_of, size_of
from tessera.utils.exporting.parity.difference import EXACT, HALF, INT8, Tolerance
from tessera.utils.exporting.parity.samples import Samples, gather
from tessera.utils.exporting.parity.table import Row, table
from tessera.utils.exporting.parity.trial import ROUNDS, UNSURE_ROUNDS, Findings, Round, difference_of, try_out
from tessera.utils.machine.extras import MissingExtra, explain_failures
from tessera.utils.ranks.world import World
from tessera.utils.runtime.checkpoint import TorchNetwork
from tessera.utils.runtime.exported import MissingDevice
from tessera.utils.runtime.model import Backend, PictureBackend
from tessera.utils.runtime.open_model import is_exported, open_model
from tessera.utils.types import DatasetIndex

_BATCH = 16


class Verified(NamedTuple):
    """What an export ends with, and what was found of all: the network, the files."""

    checkpoint: Path
    files: dict[str, Path]
    rows: list[Row]
    exit_code: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        network, *rows = (row.as_dict() for row in self.rows)
        files = [
            {"format": name, "file": str(path), **row}
            for (name, path), row in zip(self.files.items(), rows, strict=True)
        ]
        return {"weights": str(self.checkpoint), "network": network, "files": files}


def verify(
    job: ExportJob,
    files: dict[str, Path],
    world: World,
    index: DatasetIndex | None,
    class_of: tuple[int, ...] = (),
) -> Verified:
    """Run every file beside the network, and print the table.

    Args:
        job: what was exported.
        files: that were made of it, by format.
        world: this process.
        index: images to compare and measure on; None = compare on drawn ones.
        class_of: as of Settings.

    Raises:
        UserError: of files that find something else than the network, or lose more than `--max-drop`: what, and by how
            much.
    """
    samples = gather(index, job.imgsz)
    judge = Judge(job, samples, world, index, Settings(class_of=class_of))
    rows = [judge.network(), *(judge.file(path) for path in files.values())]
    print(f"Compared on {samples.origin}; ms: a picture, from pixels to boxes, the median; px: of {job.imgsz}")
    print("\n".join(table(rows)), flush=True)
    verified = Verified(job.path, files, rows)
    if refused := [f"{row.name}: {row.failures}" for row in rows if row.failures]:
        raise UserError(
            "\n".join(refused) + "\nDo not use what is named here: it does not find what the checkpoint finds.",
            details=verified.as_dict(),
        )
    return verified


class Measured(NamedTuple):
    """What a network finds on the pictures, and on the images; None where there are none."""

    findings: Findings
    evaluation: Evaluation | None


class Judge:
    """Compares files with the network that they were made of.

    Args:
        job: what was exported.
        samples: to compare on.
        world: this process.
        index: to measure mAP on; None = not measured.
        settings: of that measurement.
    """

    def __init__(
        self, job: ExportJob, samples: Samples, world: World, index: DatasetIndex | None, settings: Settings
    ) -> None:
        self._job, self._pictures, self._world, self._index = job, samples.pictures, world, index
        self._settings = settings
        self._network = TorchNetwork(job.model, job.weights, world.accelerator)
        self._references: dict[tuple[int, int] | None, Measured] = {}

    def network(self) -> Row:
        """The network of `--weights`."""
        path, (findings, evaluation) = self._job.path, self._reference(None)
        measured = None if evaluation is None else accuracy(evaluation, evaluation)
        broken = self._broken(findings)
        return Row(path.name, size_of(path) / 1e6, "float32", findings.milliseconds, measured, failures=broken)

    def file(self, path: Path) -> Row:
        """A file that was made of it."""
        with explain_failures(str(path), (), ""):
            megabytes, precision = size_of(path) / 1e6, precision_of(path)
        try:
            backend = self._open(path)
        except (MissingExtra, MissingDevice) as error:
            return Row(path.name, megabytes, precision, unverified=str(error))
        size_hw = backend.size_hw if isinstance(backend, Backend) else None
        allowed = tolerance_of(precision)
        try:
            reference = self._reference(size_hw)
            found = self._measure(backend, reference.findings.rounds)
        except UserError as error:  # what it finds is nothing that a detector finds
            return Row(path.name, megabytes, precision, failures=str(error))
        network = _at_size(self._network, size_hw)
        apart = difference_of(
            reference.findings, found.findings, self._pictures, self._imgsz(network), allowed, network
        )
        failures, measured = [apart.exceeds(allowed), self._broken(found.findings)], None
        if found.evaluation is not None and reference.evaluation is not None:
            measured, most = accuracy(found.evaluation, reference.evaluation), self._job.config.max_drop
            if measured.drop > most:
                failures.append(f"loses {measured.drop:.4f} of mAP50-95, at most {most:g} may be lost (--max-drop)")
        return Row(
            path.name,
            megabytes,
            precision,
            found.findings.milliseconds,
            measured,
            apart,
            "; ".join(filter(None, failures)),
            "" if apart.detections else f"on these pictures neither it nor {self._job.path.name} finds anything",
        )

    def _open(self, path: Path) -> Backend | PictureBackend:
        end2end = not is_exported(path.name) and not self._job.model.head.needs_suppression
        return open_model(str(path), self._world, end2end=end2end, trust_file=True)  # written just now

    def _reference(self, size_hw: tuple[int, int] | None) -> Measured:
        """What the network itself finds, at one size or at any."""
        if size_hw not in self._references:
            network = _at_size(self._network, size_hw)
            found = self._measure(network, ROUNDS)
            if found.findings.is_empty:
                findings = try_out(network, self._pictures, self._imgsz(network), UNSURE_ROUNDS)
                found = found._replace(findings=findings)
            self._references[size_hw] = found
        return self._references[size_hw]

    def _measure(self, backend: Backend | PictureBackend, rounds: tuple[Round, ...]) -> Measured:
        """What a network or a file finds.

        Raises:
            UserError: nothing that a detector finds.
        """
        imgsz = self._imgsz(backend)
        findings = try_out(backend, self._pictures, imgsz, rounds)
        if self._index is None:
            return Measured(findings, None)
        found = measure(backend, self._index, self._world, imgsz, self._settings, batch_size=_BATCH, workers=0)
        return Measured(findings, found)

    def _imgsz(self, backend: Backend | PictureBackend) -> int:
        """The long side of its pictures."""
        size_hw = backend.size_hw if isinstance(backend, Backend) else None
        return self._job.imgsz if size_hw is None else max(size_hw)

    def _broken(self, findings: Findings) -> str:
        """What is wrong with what a network predicts, in words; "" where nothing is."""
        if not findings.broken:
            return ""
        return f"predicts what is not a finite number for {findings.broken} of {len(self._pictures)} pictures"


def _at_size(network: TorchNetwork, size_hw: tuple[int, int] | None) -> TorchNetwork:
    """The same network, which takes images of that size alone."""
    found = copy.copy(network)
    found.size_hw = size_hw
    return found


def tolerance_of(precision: str) -> Tolerance:
    """What may differ, by the numbers in a file."""
    if "int8" in precision:
        return INT8
    return HALF if "float16" in precision else EXACT
