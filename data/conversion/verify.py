"""Whether a converted dataset is read as the one that it was made from."""

from __future__ import annotations

from pathlib import Path

from tessera.data.conversion.read import LabelledDataset
from tessera.data.source.listing import list_images
from tessera.data.source.refusals import unknown_classes
from tessera.data.source.scan import ClassNames, scan
from tessera.data.source.spec import load_spec
from tessera.utils.errors import UserError
from tessera.utils.text import first_of

_SHOWN = 5


def verify(found: LabelledDataset, yaml: Path) -> list[str]:
    """Read the dataset of `yaml` as training does.

    Returns:
        A line for each split of which other numbers of objects or regions are read than from the source.

    Raises:
        UserError: images would be missing, or a class unknown: something in the source that the format cannot hold.
    """
    spec = load_spec(yaml, obtain=False)
    lines = []
    for split, before in found.figures.items():
        listing = list_images(spec, split)
        scanned = scan(listing, ClassNames.of(spec, False))
        after = len(scanned.sizes_hw), len(scanned.classes), len(scanned.ignored_classes)
        wrong = [*unknown_classes(spec, split, scanned), *scanned.problems]
        if scanned.unknown or after[0] != before[0]:
            raise UserError(
                f"{found.spec.yaml_path}: {split}: {before[0]:,} images can be read, and {after[0]:,} of what they "
                f"were converted to. {first_of(wrong, _SHOWN)} Rename hidden files, files without the suffix of a "
                "picture, and classes that begin or end with a blank."
            )
        if after != before:
            lines.append(
                f"{split}: {before[1]:,} objects and {before[2]:,} ignored regions are read from the source, "
                f"{after[1]:,} and {after[2]:,} from what was written: equal rows count once"
            )
    return lines
