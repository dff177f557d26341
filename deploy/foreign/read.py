"""Detection of the family of another program's weights file, from its content."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from tessera.data.labels.coco import COCO_NAMES
from tessera.deploy.foreign import yolov5, yolov9, yolox
from tessera.deploy.foreign.tensors import WrongTensors, checked_copy, find_table
from tessera.utils.checkpoints.archive import DamagedFile, pickled_module
from tessera.utils.checkpoints.weights import Weights
from tessera.utils.errors import UserError

log = logging.getLogger(__name__)

# Recognised by the name of one tensor, MARKER. A YOLOv5 file is recognised by its pickled module.
_FAMILIES = {"YOLOX": yolox, "YOLOv9": yolov9}


def import_foreign(path: Path, content: Any) -> Weights | None:
    """Return the weights of a file of YOLOX, YOLOv9 or YOLOv5 from its content; None if it belongs to none.

    A file without class names that has 80 classes, as YOLOX's and YOLOv9's, gets the names of COCO. The size of the
    file bounds its tensors.

    Raises:
        UserError: tensors that do not fit the family.
    """
    limit = path.stat().st_size
    try:
        for family, known in _FAMILIES.items():
            if (table := find_table(content, known.MARKER)) is not None:
                imported = known.convert(checked_copy(table, limit))
                if imported.model_yaml["nc"] == len(COCO_NAMES):
                    log.info(
                        f"{path.name}: no class names in this {family} file; its 80 classes are assumed to be COCO's."
                    )
                    imported = replace(imported, names=COCO_NAMES)
                break
        else:
            family, module = "YOLOv5", pickled_module(content)
            if module is None:
                return None
            imported = yolov5.convert(module, limit)
            imported = replace(imported, model_yaml={"name": path.stem, **imported.model_yaml})
    except WrongTensors as error:
        raise UserError(f"{path}: unsupported {family} file: {error}. Use a published one (--list-weights).") from error
    except DamagedFile as error:
        raise UserError(f"{path}: damaged: {error}. Use another file.") from error
    source = f"{path.name} (original {family})"
    return Weights(imported.state_dict, imported.model_yaml, imported.names, source, family=family)
