"""The report of `--find-errors`: the table, the list, the page, and the copy with corrections."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessera.data.source.index import build_index
from tessera.data.source.scan import ImageLabels, label_lines
from tessera.utils.errors import tolerate
from tessera.utils.flags.val import ValConfig
from tessera.utils.report.albums.suspects_page import PAGE, write_suspects_page
from tessera.utils.report.console import print_lines
from tessera.utils.report.page.facts import Origin
from tessera.utils.suspects.copy import CHANGES, write_copy
from tessera.utils.suspects.evidence import Evidence
from tessera.utils.suspects.files import FILE, counts, suspect_table, write_suspects
from tessera.utils.suspects.ranking import Suspect, suspects
from tessera.utils.text import counted
from tessera.utils.types import DatasetIndex, DatasetSpec


def report_suspects(
    evidence: Evidence, index: DatasetIndex, spec: DatasetSpec, run: Path, origin: Origin, config: ValConfig
) -> dict[str, Any]:
    """Print the table, and write the list, the page and the copy that was asked for; on rank 0.

    Args:
        evidence: of all images.
        index, spec: the split, and the dataset that it is of.
        run: the folder to write to.
        origin: of the page.
        config: the flags.

    Returns:
        Plain values, for `--json`: how many there are of each kind, and where the files are.

    Raises:
        UserError: the copy cannot be written.
    """
    listed = suspects(evidence, index)
    kinds = [{"kind": name, "suspects": every, "likely": likely} for _, name, every, likely in counts(listed)]
    said: dict[str, Any] = {"kinds": kinds, "file": None, "page": None, "corrected": None, "changes": None}
    print_lines(*suspect_table(listed, len(index.classes), len(index)))
    labels: dict[int, ImageLabels] = {}
    with tolerate("lines of the labels"):
        labels = label_lines(spec, index, sorted({suspect.image for suspect in listed}))
    with tolerate(FILE):
        write_suspects(run / FILE, listed, index, labels)
        said["file"] = str(run / FILE)
        print_lines(f"Suspects: {run / FILE}")
    if not config.noreport:
        with tolerate(PAGE):
            write_suspects_page(run, listed, index, labels, origin)
            said["page"] = str(run / PAGE)
            print_lines(f"Page: {run / PAGE}")
    if config.corrected:
        folder = Path(config.corrected).expanduser()
        said["corrected"] = str(folder / f"{spec.name}.yaml")
        said["changes"] = _corrected(folder, listed, index, spec, config.corrected_score)
    return said


def _corrected(folder: Path, listed: Sequence[Suspect], index: DatasetIndex, spec: DatasetSpec, least: float) -> int:
    """Write the copy, say what is in it, and return how many suggestions were applied."""
    applied: dict[int, list[Suspect]] = {}
    for suspect in listed:
        if suspect.score >= least:
            applied.setdefault(suspect.image, []).append(suspect)
    # Where a part of train is held out, the copy must say which: the two share their pictures.
    others = [split for split in ("train", "val") if spec.held_out and split != index.split]
    changes = write_copy(folder, spec, [index, *(build_index(spec, split) for split in others)], applied)
    print_lines(
        f"Corrected copy: {folder / spec.name}.yaml, with {len(changes):,} suggestions of a score of {least:g} and "
        f"more applied to {counted(len(applied), 'image')} of {index.split}"
        + (f"; {folder / CHANGES} lists them" if changes else "")
    )
    return len(changes)
