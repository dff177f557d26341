"""The report of `--find-errors`: the table, the list and the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.data.source.scan import ImageLabels, label_lines
from tessera.utils.errors import tolerate
from tessera.utils.flags.val import ValConfig
from tessera.utils.report.albums.suspects_page import PAGE, write_suspects_page
from tessera.utils.report.console import print_lines
from tessera.utils.report.page.facts import Origin
from tessera.utils.suspects.evidence import Evidence
from tessera.utils.suspects.files import FILE, counts, suspect_table, write_suspects
from tessera.utils.suspects.ranking import suspects
from tessera.utils.types import DatasetIndex, DatasetSpec


def report_suspects(
    evidence: Evidence, index: DatasetIndex, spec: DatasetSpec, run: Path, origin: Origin, config: ValConfig
) -> dict[str, Any]:
    """Print the table, and write the list and the page; on rank 0.

    Args:
        evidence: of all images.
        index, spec: the split, and the dataset that it is of.
        run: the folder to write to.
        origin: of the page.
        config: the flags.

    Returns:
        Plain values, for `--json`: how many there are of each kind, and where the files are.
    """
    listed = suspects(evidence, index)
    kinds = [{"kind": name, "suspects": every, "likely": likely} for _, name, every, likely in counts(listed)]
    said: dict[str, Any] = {"kinds": kinds, "file": None, "page": None}
    judged = int(evidence.counts.supports.sum())
    print_lines(*suspect_table(listed, judged, len(index), len(index.classes) - judged))
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
    return said
