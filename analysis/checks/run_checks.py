"""Entry point of `--check-data`: runs all dataset checks and collects their results."""

from __future__ import annotations

from typing import Any

from tessera.analysis.checks.boxes import box_size_summary, check_boxes
from tessera.analysis.checks.classes import (
    check_classes,
    check_names,
    check_untrained,
    counts_of,
    ignored_regions,
    table,
)
from tessera.analysis.checks.drift import check_drift
from tessera.analysis.checks.image_quality import Fingerprint, check_images
from tessera.analysis.checks.missing_labels import check_auto_labels, check_label_files
from tessera.analysis.checks.near_duplicates import check_copies, check_near_duplicates
from tessera.analysis.checks.results import DatasetCheck, SplitData
from tessera.data.source.annotations.coco_file import MAX_UNMATCHED
from tessera.data.source.dataset_root import matching_paths
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.holdout import select_images
from tessera.data.source.index import class_names
from tessera.data.source.messages import beyond_max_det, check_usable, excluded_summary, shared_labels, unused_ignores
from tessera.data.source.scan import ClassNames, scan
from tessera.data.source.split_files import OFFER, list_images
from tessera.models.detector import round_imgsz
from tessera.utils.config import TrainConfig
from tessera.utils.errors import UserError
from tessera.utils.extensions import extension
from tessera.utils.files import user_path
from tessera.utils.ranks.world import World
from tessera.utils.text import plural
from tessera.utils.training.data import load_splits, training_data
from tessera.utils.types import DatasetSpec


def check_data(flags: TrainConfig, world: World) -> dict[str, Any]:
    """Print every problem of the dataset for `--check-data`, and with `--tile` the number of tiles.

    Returns the fields of `TrainingResult`.

    Raises:
        UserError: the dataset has errors, or the page of `--report` cannot be written.
    """
    checked = world.run_on_main(lambda: check_dataset(load_spec(flags.data), flags.single_cls, imgsz=flags.imgsz))
    if world.is_main:
        print("\n".join(checked.lines()))
    found = checked.as_dict()
    if flags.report:
        write_page, folder = extension("dataset page").write_data_page, user_path(flags.report, "--report")
        page = world.run_on_main(lambda: write_page(checked, load_spec(flags.data), folder))
        if world.is_main:
            print(f"Report: {page}")
    if checked.errors:
        raise UserError(
            f"--check-data: {flags.data} has {plural(len(checked.errors), 'error')}, listed above. Fix them first.",
            details={"checked": found},
        )
    if flags.tile:
        training_data(load_splits(flags, world), flags, round_imgsz(flags.imgsz, stride=1), world)
    return {"data": flags.data, "checked": found, "exit_code": checked.exit_code}


def check_dataset(spec: DatasetSpec, single_cls: bool = False, *, imgsz: int = 640) -> DatasetCheck:
    """Check all splits, decoding every image, with a bar on stderr; box sizes are at an image size of `imgsz`."""
    check = DatasetCheck()
    names = ClassNames.of(spec, single_cls)
    fingerprints: dict[SplitData, list[Fingerprint | None]] = {}
    if not single_cls:
        check_names(check, spec)
    for split in spec.splits:
        try:
            listing = select_images(spec, split, list_images(spec, split))
        except UserError as error:
            if split != "test":
                check.errors.append(str(error))
            elif any(matching_paths(spec.root, entry) for entry in spec.splits[split]):
                check.problems.append(str(error))
            else:
                check.notes.append(f"no training needs `test`: {error}")
            continue
        part = SplitData(spec, split, listing, scan(listing, names), single_cls)
        errors = len(check.errors)
        _check_part(check, part)
        fingerprints[part] = check_images(check, part)
        if split == "test":  # training does not read it
            check.problems += check.errors[errors:]
            del check.errors[errors:]
        excluded = excluded_summary(spec, split, part.scanned)
        check.facts += [box_size_summary(part, imgsz), *ignored_regions(part), *([excluded] if excluded else [])]
    for split in ("train", "val"):
        if split not in spec.splits:
            offer = f" {OFFER}" if split == "val" else ""
            check.errors.append(f"{spec.yaml_path}: names no {split} images. Add '{split}:' with their folder.{offer}")
    check.problems += shared_labels([part.listing for part in fingerprints])
    check_untrained(check, list(fingerprints))
    check_copies(check, fingerprints)
    check_near_duplicates(check, fingerprints)
    check_drift(check, list(fingerprints))
    check.names = class_names(spec, single_cls)
    check.counts = [counts_of(part) for part in fingerprints]
    check.facts += table(check.names, check.counts)
    return check


def _check_part(check: DatasetCheck, part: SplitData) -> None:
    listing, scanned = part.listing, part.scanned
    check.images += len(scanned.sizes_hw)
    check.objects += len(scanned.classes)
    check.errors += listing.unmatched_annotations[:MAX_UNMATCHED]
    if more := len(listing.unmatched_annotations[MAX_UNMATCHED:]):
        check.errors.append(f"{part.split}: {more:,} more annotations belong to no image")
    # Splits may share files.
    check.problems += [line for line in listing.problems if line not in check.problems] + scanned.problems
    check.notes += [line for line in listing.notes if line not in check.notes] + scanned.notes
    check.notes += unused_ignores(part.spec, part.split, scanned)
    check.skipped_images += [
        listing.shown(image) for image, usable in zip(listing.images, scanned.usable, strict=True) if not usable
    ]
    if not scanned.unknown:  # else the unknown classes are the errors
        try:
            check_usable(part.spec, part.split, listing, scanned)
        except UserError as error:
            check.errors.append(str(error))
    check_classes(check, part)
    check_label_files(check, part)
    check_auto_labels(check, part)
    check_boxes(check, part)
    if part.split != "train":
        dense = beyond_max_det(
            part.split, scanned.counts, lambda image: listing.shown(listing.images[part.places[image]]), None
        )
        check.problems += [dense] if dense else []
