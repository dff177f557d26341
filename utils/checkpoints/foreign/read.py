"""Which family a file of another program belongs to: its content says it, not its name."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from tessera.data.source.annotations.coco_ids import COCO_NAMES
from tessera.utils.checkpoints.archive import ARCHIVE_ERRORS, Archive, unreadable
from tessera.utils.checkpoints.foreign import yolov5, yolov9, yolox
from tessera.utils.checkpoints.foreign.tensors import Imported, UnfitWeights, find_name, find_table, loaded
from tessera.utils.checkpoints.foreign.yolov5 import find_module
from tessera.utils.errors import UserError

log = logging.getLogger(__name__)


# Known by the name of a tensor, MARKER; a file of YOLOv5 is known by the module that it holds.
_FAMILIES = {"YOLOX": yolox, "YOLOv9": yolov9}


def read_foreign(path: Path) -> tuple[str, Imported] | None:
    """Return the family of another program's file, and its weights; None where it is none, or cannot be read at all.

    COCO's names are those of a file without names that has 80 classes, as YOLOX's and YOLOv9's are.

    Raises:
        UserError: it is damaged, holds what has no place in such a file, or tensors that do not fit the family.
    """
    if not path.is_file():
        return None  # to open a FIFO would be to wait for ever
    outline = _outline(path)
    family = next((name for name, known in _FAMILIES.items() if find_table(outline, known.MARKER) is not None), None)
    if family is None and find_module(outline) is not None:
        family = "YOLOv5"
    if family is not None:
        return family, _imported(path, family)
    for family, known in _FAMILIES.items():
        if name := find_name(outline, known.MARKER_OF_RELATED):
            raise _cannot(path, family, f"it has {name}, but no {known.MARKER}, as {known.EXPECTED_SIZES} have")
    return None


def _outline(path: Path) -> Any:
    """What the file holds, with empty tensors; None where it cannot be read, which the next reader reports."""
    try:
        with Archive.open(path) as archive:
            return archive.outline()
    except (UserError, *ARCHIVE_ERRORS):
        return None


def _imported(path: Path, family: str) -> Imported:
    limit = path.stat().st_size
    try:
        with Archive.open(path) as archive:
            content = archive.content()
        if family not in _FAMILIES:
            module = find_module(content)
            assert module is not None, "the outline had it"
            imported = yolov5.convert(module, limit)
            return replace(imported, model_yaml={"name": path.stem, **imported.model_yaml})
        table = find_table(content, _FAMILIES[family].MARKER)
        assert table is not None, "the outline had it"
        imported = _FAMILIES[family].convert(loaded(table, limit))
    except UnfitWeights as error:
        raise _cannot(path, family, str(error)) from error
    except ARCHIVE_ERRORS as error:
        raise unreadable(path, error) from error
    if imported.model_yaml["nc"] != len(COCO_NAMES):
        return imported
    log.info(f"{path.name}: files of {family} name no classes; its {len(COCO_NAMES)} are taken for COCO's.")
    return replace(imported, names=COCO_NAMES)


def _cannot(path: Path, family: str, found: str) -> UserError:
    return UserError(
        f"{path}: a file of {family} that cannot be taken: {found}. Take a published one (--list-weights)."
    )
