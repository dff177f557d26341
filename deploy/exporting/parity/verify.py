"""Verification of an export: each file runs on images beside its network and is refused where detections differ."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tessera.deploy.exporting.job import ExportJob
from tessera.deploy.exporting.parity.difference import EXACT, HALF, INT8
from tessera.deploy.exporting.parity.file_content import precision_of, size_of
from tessera.deploy.exporting.parity.sample_images import sample_images
from tessera.deploy.exporting.parity.table import Row, accuracy, table
from tessera.deploy.exporting.parity.trial import ROUNDS, UNSURE_ROUNDS, Round, Trial, run_trial, trial_difference
from tessera.deploy.runtime.exported import MissingDevice
from tessera.deploy.runtime.pipeline import letterbox_image, network_input
from tessera.utils.bit_depth import Pixels
from tessera.utils.errors import UserError
from tessera.utils.evaluation.evaluate import Evaluation, Settings, evaluate_split
from tessera.utils.evaluation.network import ImageDetector, Network, is_exported, network_of_weights, open_model
from tessera.utils.machine.optional_packages import MissingExtra, explain_library_errors
from tessera.utils.ranks.world import World
from tessera.utils.types import DatasetIndex

_BATCH = 16


class Verified(NamedTuple):
    """Result of an export: the files, and the table rows of the network and of each file."""

    checkpoint: Path
    files: dict[str, Path]
    rows: list[Row]
    exit_code: int = 0

    def as_dict(self) -> dict[str, Any]:
        network, *rows = (row.as_dict() for row in self.rows)
        files = [
            {"format": name, "file": str(path), **row}
            for (name, path), row in zip(self.files.items(), rows, strict=True)
        ]
        return {"weights": str(self.checkpoint), "network": network, "files": files}


def verify(
    job: ExportJob, files: dict[str, Path], world: World, index: DatasetIndex | None, class_of: tuple[int, ...] = ()
) -> Verified:
    """Run every file beside the network and print the table.

    `files` are by format; `index` and `class_of` of `job.images`, None = synthetic images, without mAP.

    Raises:
        UserError: the detections of a file differ, or it loses more mAP than `--max-drop`.
    """
    images, origin = sample_images(index, job.imgsz)
    judge = Verifier(job, images, world, index, Settings(class_of=class_of))
    rows = [judge.network(), *(judge.file(path) for path in files.values())]
    print(f"Compared on {origin}; ms: median per image, from pixels to boxes; px: of {job.imgsz}")
    print("\n".join(table(rows)), flush=True)
    verified = Verified(job.path, files, rows)
    if refused := [f"{row.name}: {row.failures}" for row in rows if row.failures]:
        raise UserError("\n".join(refused) + "\nDo not use the files named here.", details=verified.as_dict())
    return verified


class Evaluated(NamedTuple):
    """A network or file, its detections, and its evaluation; None = no dataset."""

    backend: Network | ImageDetector
    findings: Trial
    evaluation: Evaluation | None


class Verifier:
    """Comparison of files with their network on images, and of their mAP where there is an index."""

    def __init__(
        self, job: ExportJob, images: Sequence[Pixels], world: World, index: DatasetIndex | None, settings: Settings
    ) -> None:
        self._job, self._images, self._world, self._index, self._settings = job, images, world, index, settings
        self._network = network_of_weights(job.model, job.weights, world.accelerator)
        self._references: dict[tuple[int, int] | None, Evaluated] = {}

    def network(self) -> Row:
        """Return the row of the network of `--weights`.

        It must predict finite numbers: NaN exceeds no threshold, so that a NaN network and its file would agree.
        """
        path, (_, findings, evaluation) = self._job.path, self.reference(None)
        canvases = (letterbox_image(one, self._job.imgsz, self._network.stride)[0] for one in self._images)
        rows = (self._network(network_input(canvas, self._world.accelerator.device)) for canvas in canvases)
        broken = sum(not bool(torch.isfinite(one).all()) for one in rows)
        acc = None if evaluation is None else accuracy(evaluation, evaluation)
        reason = f"predicts NaN or infinite numbers for {broken} of {len(self._images)} images" if broken else ""
        return Row(path.name, size_of(path) / 1e6, "float32", findings.milliseconds, acc, failures=reason)

    def file(self, path: Path) -> Row:
        """Return the row of an exported file."""
        row = Row(path.name, size_of(path) / 1e6, "")
        end2end = not is_exported(path.name) and not self._job.model.head.needs_nms
        try:
            with explain_library_errors(str(path), (), ""):
                row = replace(row, dtypes=precision_of(path))
            backend = open_model(str(path), self._world, end2end=end2end, trust_file=True)  # written just now
            network, expected, reference = self.reference(backend.size_hw)
            _, found, evaluation = self._evaluate(backend, expected.rounds)
        except (MissingExtra, MissingDevice) as error:
            return replace(row, unverified=str(error))
        except UserError as error:  # a damaged file, or invalid output
            return replace(row, failures=str(error))
        assert isinstance(network, Network)
        allowed = INT8 if "int8" in row.dtypes else HALF if "float16" in row.dtypes else EXACT
        apart = trial_difference(expected, found, self._images, self._imgsz(network), allowed, network)
        failures, acc, most = [apart.exceeds(allowed)], None, self._job.config.max_drop
        if evaluation is not None and reference is not None:
            acc = accuracy(evaluation, reference)
            if acc.drop > most:
                failures.append(f"loses {acc.drop:.4f} mAP50-95, expected at most {most:g} (--max-drop)")
        nothing = f"neither it nor {self._job.path.name} detects anything on these images"
        return replace(
            row,
            milliseconds=found.milliseconds,
            accuracy=acc,
            difference=apart,
            failures="; ".join(filter(None, failures)),
            unverified="" if apart.detections else nothing,
        )

    def reference(self, size_hw: tuple[int, int] | None) -> Evaluated:
        """Return the detections and evaluation of the network at one input size; None = any."""
        if size_hw not in self._references:
            network = copy.copy(self._network)
            network.size_hw = size_hw
            found = self._evaluate(network, ROUNDS)
            if not any(len(one) for images in found.findings.found for one in images):
                unsure = run_trial(network, self._images, self._imgsz(network), UNSURE_ROUNDS)
                found = found._replace(findings=unsure)
            self._references[size_hw] = found
        return self._references[size_hw]

    def _evaluate(self, backend: Network | ImageDetector, rounds: tuple[Round, ...]) -> Evaluated:
        imgsz, evaluation = self._imgsz(backend), None
        findings = run_trial(backend, self._images, imgsz, rounds)
        if self._index is not None:
            evaluation = evaluate_split(
                backend, self._index, self._world, imgsz, self._settings, batch_size=_BATCH, workers=0
            )
        return Evaluated(backend, findings, evaluation)

    def _imgsz(self, backend: Network | ImageDetector) -> int:
        return backend.fixed_imgsz or self._job.imgsz
