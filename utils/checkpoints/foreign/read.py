"""Detection of the family of another program's weights file, from its content."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from tessera.data.labels.coco import COCO_NAMES
from tessera.utils.checkpoints.foreign import yolov5, yolov9, yolox
from tessera.utils.checkpoints.foreign.tensors import ConvertedWeights, WrongTensors, checked_copy, find_table
from tessera.utils.checkpoints.foreign.yolov5 import find_module
from tessera.utils.checkpoints.restricted_unpickler import DamagedFile
from tessera.utils.errors import UserError

log = logging.getLogger(__name__)


# Recognised by the name of one tensor, MARKER. A YOLOv5 file is recognised by its pickled module.
_FAMILIES = {"YOLOX": yolox, "YOLOv9": yolov9}


def import_foreign(path: Path, content: Any) -> tuple[str, ConvertedWeights] | None:
    """Return the family and the weights of another program's file; None if it belongs to none.

    A file without class names that has 80 classes, as YOLOX's and YOLOv9's, gets the names of COCO. The size of the
    file bounds its tensors.

    Raises:
        UserError: tensors that do not fit the family.
    """
    limit = path.stat().st_size
    for family, known in _FAMILIES.items():
        if (table := find_table(content, known.MARKER)) is not None:
            try:
                imported = known.convert(checked_copy(table, limit))
            except WrongTensors as error:
                raise _cannot(path, family, str(error)) from error
            if imported.model_yaml["nc"] == len(COCO_NAMES):
                log.info(f"{path.name}: no class names in this {family} file; its 80 classes are assumed to be COCO's.")
                imported = replace(imported, names=COCO_NAMES)
            return family, imported
    if (module := find_module(content)) is not None:
        try:
            imported = yolov5.convert(module, limit)
        except WrongTensors as error:
            raise _cannot(path, "YOLOv5", str(error)) from error
        except DamagedFile as error:
            raise UserError(f"{path}: damaged: {error}. Use another file.") from error
        return "YOLOv5", replace(imported, model_yaml={"name": path.stem, **imported.model_yaml})
    return None


def _cannot(path: Path, family: str, found: str) -> UserError:
    return UserError(f"{path}: unsupported {family} file: {found}. Use a published one (--list-weights).")
