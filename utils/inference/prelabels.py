"""`detect.py --save-as`: what was found on pictures, as labelling tools import it for a person to correct.

Each file is written as the pictures come, beside its place, and moved there when it is complete. Frames of videos and
streams are left out: these tools open files of pictures.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

from tessera.utils.checkpoints.provenance import written_by
from tessera.utils.errors import UserError
from tessera.utils.files import is_address, part_of, write_whole
from tessera.utils.inference.outputs import LineFile
from tessera.utils.inference.places import unwritable
from tessera.utils.inference.results import Result
from tessera.utils.inference.sources.frames import Frame
from tessera.utils.text import printable, strict_json

log = logging.getLogger(__name__)

_CORNERS = ("xtl", "ytl", "xbr", "ybr")


class Document(LineFile):
    """A file with a beginning, an item for each picture, and an end.

    Args:
        path: the file.
        head, separator: the beginning, and what stands between two items.
    """

    def __init__(self, path: Path, head: str, separator: str = "") -> None:
        self._target, self._separator, self._between = path, separator, ""
        self._names: set[str] = set()
        self._frames, self._is_whole = 0, True
        super().__init__(part_of(path))
        self.append(head)

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        """As Output."""
        if frame.media != "picture":
            self._frames += 1
            return
        name = printable(frame.name.as_posix())
        if name in self._names:  # of two folders that were given
            name = printable(frame.source)
        item = self.item(result, frame, name, len(self._names))
        self._names.add(name)
        if item:
            self.append(f"{self._between}{item}")
            self._between = self._separator

    def item(self, result: Result, frame: Frame, name: str, number: int) -> str:
        """What stands for a picture, called `name`, the `number`-th from 0."""
        raise NotImplementedError

    def tail(self) -> str:
        """The end."""
        raise NotImplementedError

    def append(self, lines: str) -> None:
        """As LineFile; where it fails, no file is there in the end."""
        try:
            super().append(lines)
        except UserError:
            self._is_whole = False
            raise

    def close(self) -> None:
        """As Output."""
        try:
            if self._is_whole:
                self.append(self.tail())
            super().close()
            if self._is_whole:
                self._path.replace(self._target)
        except OSError as error:
            raise unwritable(self._target, error) from error
        finally:
            self._path.unlink(missing_ok=True)
        if self._frames:
            log.warning(f"{self._target.name}: frames of videos and streams are left out: {self._frames:,}.")


class CocoDocument(Document):
    """A COCO detection file whose annotations have scores. Categories count from 1, in the order of the classes."""

    def __init__(self, folder: Path, names: Sequence[str], weights: str) -> None:
        super().__init__(folder / "predictions.coco.json", '{\n"annotations": [\n', ",\n")
        self._images: list[str] = []
        self._annotations = 0
        self._categories = [strict_json({"id": number, "name": name}) for number, name in enumerate(names, 1)]
        self._info = strict_json({"weights": weights, **written_by()})

    def item(self, result: Result, frame: Frame, name: str, number: int) -> str:
        """As Document."""
        height, width = result.size_hw
        self._images.append(strict_json({"id": number + 1, "file_name": name, "height": height, "width": width}))
        rows = []
        for found in result.to_dict()["detections"]:
            self._annotations += 1
            x1, y1, x2, y2 = found["box_xyxy"]
            row: dict[str, Any] = {
                "id": self._annotations,
                "image_id": number + 1,
                "category_id": found["class"] + 1,
                "bbox": [x1, y1, x2 - x1, y2 - y1],
                "segmentation": [],
                "area": (x2 - x1) * (y2 - y1),
                "iscrowd": 0,
                "score": found["score"],
            }
            rows.append(strict_json(row))
        return ",\n".join(rows)

    def tail(self) -> str:
        """As Document."""
        images, categories = (",\n".join(lines) for lines in (self._images, self._categories))
        return f'\n],\n"images": [\n{images}\n],\n"categories": [\n{categories}\n],\n"info": {self._info}\n}}\n'


class LabelStudioDocument(Document):
    """A list of tasks with predictions for Label Studio, and beside it the labelling interface that they are for."""

    def __init__(self, folder: Path, names: Sequence[str], weights: str) -> None:
        super().__init__(folder / "predictions.label-studio.json", "[\n", ",\n")
        self._weights = weights
        labels = "".join(f"    <Label value={quoteattr(printable(name))}/>\n" for name in names)
        view = '<View>\n  <Image name="image" value="$image"/>\n  <RectangleLabels name="label" toName="image">\n'
        config = folder / "label-studio.xml"
        try:
            write_whole(config, f"{view}{labels}  </RectangleLabels>\n</View>\n".encode())
        except OSError as error:
            raise unwritable(config, error) from error

    def item(self, result: Result, frame: Frame, name: str, number: int) -> str:
        """As Document."""
        height, width = result.size_hw
        found = result.to_dict()["detections"]
        boxes: list[dict[str, Any]] = []
        for at, row in enumerate(found):
            x1, y1, x2, y2 = row["box_xyxy"]
            sides = {
                "x": 100 * x1 / width,
                "y": 100 * y1 / height,
                "width": 100 * (x2 - x1) / width,
                "height": 100 * (y2 - y1) / height,
            }
            boxes.append(
                {
                    "id": str(at),
                    "type": "rectanglelabels",
                    "from_name": "label",
                    "to_name": "image",
                    "original_width": width,
                    "original_height": height,
                    "image_rotation": 0,
                    "value": {**sides, "rotation": 0, "rectanglelabels": [printable(row["name"])]},
                    "score": row["score"],
                }
            )
        image = frame.source if is_address(frame.source) else f"/data/local-files/?d={quote(name)}"
        score = min((row["score"] for row in found), default=1.0)  # sorted by it, what is least sure comes first
        prediction = {"model_version": self._weights, "score": score, "result": boxes}
        return strict_json({"data": {"image": image}, "predictions": [prediction]})

    def tail(self) -> str:
        """As Document."""
        return "\n]\n"


class CvatDocument(Document):
    """CVAT's XML for images, version 1.1; it has no place for scores."""

    def __init__(self, folder: Path, names: Sequence[str], weights: str) -> None:
        labels = "".join(f"<label><name>{_text(name)}</name><attributes/></label>" for name in names)
        task = f"<task><name>{_text(weights)}</name><labels>{labels}</labels></task>"
        head = f'<?xml version="1.0" encoding="utf-8"?>\n<annotations>\n<version>1.1</version>\n<meta>{task}</meta>\n'
        super().__init__(folder / "predictions.cvat.xml", head)

    def item(self, result: Result, frame: Frame, name: str, number: int) -> str:
        """As Document."""
        height, width = result.size_hw
        lines = [f'<image id="{number}" name={quoteattr(name)} width="{width}" height="{height}">']
        for row in result.to_dict()["detections"]:
            sides = " ".join(f'{key}="{side}"' for key, side in zip(_CORNERS, row["box_xyxy"], strict=True))
            label = quoteattr(printable(row["name"]))
            lines.append(f'  <box label={label} source="auto" occluded="0" {sides} z_order="0"></box>')
        return "\n".join([*lines, "</image>\n"])

    def tail(self) -> str:
        """As Document."""
        return "</annotations>\n"


DOCUMENTS = {"coco": CocoDocument, "label-studio": LabelStudioDocument, "cvat": CvatDocument}


def _text(text: str) -> str:
    return escape(printable(text))
