"""data_report.html: results of `--check-data` as a self-contained page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tessera.analysis.checks.drift import FAMILIES, LEVEL
from tessera.analysis.checks.images import KINDS
from tessera.analysis.checks.results import DatasetCheck, Drift
from tessera.analysis.report.html_page import ThumbnailEncoder, render_page
from tessera.analysis.report.page_data import MOST_ROWS
from tessera.utils.errors import UserError
from tessera.utils.files import write_whole
from tessera.utils.flags.program import started
from tessera.utils.text import one_line, plural
from tessera.utils.types import DatasetSpec

NAME = "data_report.html"
MOST_PAIRS = 60  # with their images
MOST_UNUSUAL = 12  # of a kind, with their images
MOST_LINES = 200  # of errors, of problems and of notes
MOST_CHANGED = 40  # of a family
_LINE = 600  # characters of a line


def write_data_page(check: DatasetCheck, spec: DatasetSpec, folder: Path) -> Path:
    """Write data_report.html into a folder, created if missing, or raise UserError; return the file."""
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, data_page(check, spec).encode())
    except OSError as error:
        raise UserError(
            f"--report {folder}: {path.name} cannot be written there ({error.strerror}). Give a folder that can be "
            "written to, or a new one."
        ) from error
    return path


def data_page(check: DatasetCheck, spec: DatasetSpec) -> str:
    """Render the page; equal datasets give equal text."""
    copies = ThumbnailEncoder(spec.pixels)
    findings = {"Errors": check.errors, "Problems": check.problems, "Notes": check.notes}
    unusual = {kind: [image for image in check.unusual_images if kind == image.kind] for kind in KINDS}
    columns = [column for own in check.counts for column in (own.class_images, own.class_objects)]
    rows = zip(check.names, *columns, strict=True) if columns else ()
    return render_page(
        "data.html",
        title=f"{one_line(spec.yaml_path.name)}: dataset report",
        verdict=check.lines()[-1],
        check=check,
        words=in_words(check),
        findings=[
            (kind, [one_line(line, _LINE) for line in lines[:MOST_LINES]], len(lines))
            for kind, lines in findings.items()
            if lines
        ],
        counts=check.counts,
        classes=[(one_line(name), figures) for name, *figures in rows][:MOST_ROWS],
        classes_left=max(len(check.names) - MOST_ROWS, 0),
        families=FAMILIES,
        readable=one_line,
        drifts=check.drifts,
        most_changed=MOST_CHANGED,
        level=LEVEL,
        pairs=[
            (
                " and ".join(dict.fromkeys(pair.splits)),
                pair.bits,
                [
                    {"uri": copies.whole(path), "name": one_line(shown, 200)}
                    for path, shown in zip(pair.paths, pair.shown, strict=True)
                ],
            )
            for pair in check.near_duplicates[:MOST_PAIRS]
        ],
        pairs_found=len(check.near_duplicates),
        between=_between(check),
        unusual=[
            (
                KINDS[kind],
                f"{len(own):,} {kind}",
                len(own),
                [
                    {
                        "uri": copies.whole(one.path),
                        "name": one_line(one.shown, 200),
                        "detail": f"{one.split}; {one.detail}",
                    }
                    for one in own[:MOST_UNUSUAL]
                ],
            )
            for kind, own in unusual.items()
            if own
        ],
        command=f"{started('train.py')} --data {one_line(str(spec.yaml_path), 200)} --check-data",
    )


def in_words(check: DatasetCheck) -> dict[str, list[str]]:
    """Return questions about the dataset with their answers."""
    usable = f"{'No' if check.errors else 'Yes'}: {check.verdict()}."
    if check.skipped_images:
        usable += f" {plural(len(check.skipped_images), 'image')} would be skipped."
    like = [
        f"{drift.family[0].upper()}{drift.family[1:]} of {drift.splits[1]} differ: {_describe_drift(drift)}."
        for drift in check.drifts
        if drift.changed
    ]
    if rest := [f"{drift.family} of {drift.splits[1]}" for drift in check.drifts if not drift.changed]:
        like.append(f"No sign of drift in {', '.join(rest)}: differences are small, or may be chance.")
    between = _between(check)
    alike = f"{plural(between, 'pair')} of near-duplicates between two splits, "
    alike += f"{len(check.near_duplicates) - between:,} within one."
    kinds = Counter(image.kind for image in check.unusual_images)
    odd = ", ".join(f"{kinds[kind]:,} {kind}" for kind in KINDS if kinds[kind])
    return {
        "Can it be trained on?": [usable],
        "Do the splits match?": like or ["Unknown: there are too few images, or one split alone."],
        "Does it have near-duplicates?": [alike if check.near_duplicates else "None."],
        "Does it have unusual images?": [f"{odd}." if odd else "None."],
    }


def _between(check: DatasetCheck) -> int:
    """Count the near-duplicates between two splits."""
    return sum(pair.splits[0] != pair.splits[1] for pair in check.near_duplicates)


def _describe_drift(drift: Drift) -> str:
    first, second = drift.splits
    fractions = ((one_line(one.name), *(100 * fraction for fraction in one.fractions)) for one in drift.changed[:3])
    return "; ".join(f"{name} {a:.0f} % in {first}, {b:.0f} % in {second}" for name, a, b in fractions)
