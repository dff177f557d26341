"""Which family a file of another program belongs to: its content says it, not its name."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tessera.data.source.annotations.coco_names import COCO_NAMES
from tessera.utils.checkpoints.archive import ARCHIVE_ERRORS, Archive, unreadable
from tessera.utils.checkpoints.foreign import yolov9, yolox
from tessera.utils.checkpoints.foreign.tensors import Imported, UnfitWeights, find_name, find_table, loaded
from tessera.utils.checkpoints.foreign.yolov5 import is_legacy, load_legacy
from tessera.utils.errors import UserError

log = logging.getLogger(__name__)


class _Family(NamedTuple):
    """A family of models.

    Attributes:
        marker: a tensor's name that only its files have.
        related: the end of a name that files of its other models have too, which are not taken.
        expected_sizes: those that are taken, in words.
        convert: gives its tensors this program's names.
    """

    marker: str
    related: re.Pattern[str]
    expected_sizes: str
    convert: Callable[[Mapping[str, Tensor]], Imported]


_FAMILIES = {
    "YOLOX": _Family(yolox.MARKER, yolox.MARKER_OF_RELATED, yolox.EXPECTED_SIZES, yolox.convert),
    "YOLOv9": _Family(yolov9.MARKER, yolov9.MARKER_OF_RELATED, yolov9.EXPECTED_SIZES, yolov9.convert),
}


@dataclass(frozen=True)
class Foreign:
    """Weights of another program's file, in this one's names.

    Attributes:
        family: "YOLOv5", "YOLOX" or "YOLOv9".
        state_dict: float32 tensors, and counters, by name.
        model_yaml: the architecture, plain.
        names: class names by index; COCO's where a file of YOLOX or YOLOv9, which have none, has 80 classes, else ().
    """

    family: str
    state_dict: dict[str, Tensor]
    model_yaml: dict[str, Any]
    names: tuple[str, ...]


def read_foreign(path: Path) -> Foreign | None:
    """Weights of a file of another program; None where it is none, or cannot be read at all.

    Raises:
        UserError: it is damaged, holds what has no place in such a file, or tensors that do not fit the family.
    """
    if not path.is_file():
        return None  # to open a FIFO would be to wait for ever
    outline = _outline(path)
    for family, known in _FAMILIES.items():
        if find_table(outline, known.marker) is not None:
            imported = _imported(path, family, known)
            coco = imported.model_yaml["nc"] == len(COCO_NAMES)
            if coco:
                log.info(f"{path.name}: files of {family} name no classes; its {len(COCO_NAMES)} are taken for COCO's.")
            return Foreign(family, imported.state_dict, imported.model_yaml, COCO_NAMES if coco else ())
    for family, known in _FAMILIES.items():
        if name := find_name(outline, known.related):
            raise _cannot(path, family, f"it has {name}, but no {known.marker}, as {known.expected_sizes} have")
    if not is_legacy(path):
        return None
    original = load_legacy(path)
    return Foreign("YOLOv5", original.state_dict, {"name": path.stem, **original.model_yaml}, original.names)


def _outline(path: Path) -> Any:
    """What the file holds, with empty tensors; None where it cannot be read, which its reader will say."""
    try:
        with Archive.open(path) as archive:
            return archive.outline()
    except (UserError, *ARCHIVE_ERRORS):
        return None


def _imported(path: Path, family: str, known: _Family) -> Imported:
    try:
        with Archive.open(path) as archive:
            table = find_table(archive.content(), known.marker)
        assert table is not None, "the outline had it"
        return known.convert(loaded(table, path.stat().st_size))
    except UnfitWeights as error:
        raise _cannot(path, family, str(error)) from error
    except ARCHIVE_ERRORS as error:
        raise unreadable(path, error) from error


def _cannot(path: Path, family: str, found: str) -> UserError:
    return UserError(
        f"{path}: a file of {family} that cannot be taken: {found}. Take a published one (--list-weights)."
    )
