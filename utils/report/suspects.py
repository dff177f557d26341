"""The report of `--find-errors`: the table, the list, the page, and the corrected copy."""

from __future__ import annotations

from pathlib import Path

from tessera.data.source.label_lines import ImageLabels, label_lines
from tessera.utils.errors import tolerate
from tessera.utils.flags.val import ValConfig
from tessera.utils.report.console import print_lines
from tessera.utils.suspects.evidence import Evidence
from tessera.utils.suspects.files import FILE, suspect_table, write_suspects
from tessera.utils.suspects.ranking import suspects
from tessera.utils.types import DatasetIndex, DatasetSpec


def report_suspects(
    evidence: Evidence, index: DatasetIndex, spec: DatasetSpec, run: Path, config: ValConfig
) -> None:
    """Print the table, and write the list, the page and the copy that was asked for; on rank 0.

    Args:
        evidence: of all images.
        index, spec: the split, and the dataset that it is of.
        run: the folder to write to.
        config: the flags.
    """
    listed = suspects(evidence, index)
    print_lines(*suspect_table(listed, len(index.classes), len(index)))
    labels: dict[int, ImageLabels] = {}
    with tolerate("lines of the labels"):
        labels = label_lines(spec, index, sorted({suspect.image for suspect in listed}))
    with tolerate(FILE):
        write_suspects(run / FILE, listed, index, labels)
        print_lines(f"Suspects: {run / FILE}")
