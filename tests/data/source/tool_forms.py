"""Datasets of six images with known boxes, each written as some tool exports them: FORMS, read as EXPECTED."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.data.labels.test_voc import voc as voc_text
from tests.data.labels.test_voc import voc_object
from tests.data.make import write_image

WIDTH, HEIGHT = 96, 64
NAMES = ("cat", "dog")
STEMS = [f"p{number}" for number in range(6)]
# Class and corners in pixels; p5 shows background.
EXPECTED: dict[str, list[tuple[int, list[int]]]] = {
    "p0": [(0, [10, 8, 50, 40])],
    "p1": [(1, [0, 0, 96, 64])],
    "p2": [(0, [3, 5, 20, 21]), (1, [40, 10, 90, 60])],
    "p3": [(1, [60, 30, 61, 63])],
    "p4": [(0, [10, 8, 50, 40]), (0, [12, 9, 52, 44])],
    "p5": [],
}
SPLITS = "train: {0}\nval: {0}\n"


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def images(folder: Path, name: str = "{}.jpg") -> None:
    for seed, stem in enumerate(STEMS):
        write_image(folder / name.format(stem), (HEIGHT, WIDTH), seed)


def rows(stem: str, first: int = 0) -> str:
    """A YOLO label file."""
    lines = []
    for label, (left, top, right, bottom) in EXPECTED[stem]:
        centre = (left + right) / 2 / WIDTH, (top + bottom) / 2 / HEIGHT
        numbers = *centre, (right - left) / WIDTH, (bottom - top) / HEIGHT
        lines.append(f"{label + first} {' '.join(f'{number:.6f}' for number in numbers)}\n")
    return "".join(lines)


def polygon_rows(stem: str) -> str:
    """As Roboflow and Ultralytics write segments."""
    lines = []
    for label, (left, top, right, bottom) in EXPECTED[stem]:
        points = (left, top), (right, top), (right, bottom), (left, bottom)
        lines.append(f"{label} {' '.join(f'{x / WIDTH:.6f} {y / HEIGHT:.6f}' for x, y in points)}\n")
    return "".join(lines)


def labels(folder: Path, text: Callable[[str], str] = rows, name: str = "{}.txt") -> None:
    for stem in STEMS:
        write(folder / name.format(stem), text(stem))


def coco(
    name: str = "{}.jpg",
    image: Mapping[str, Any] | Callable[[str], Mapping[str, Any]] | None = None,
    annotation: Callable[[list[int]], Mapping[str, Any]] | None = None,
    first: int = 1,
    root: bool = False,
) -> dict[str, Any]:
    """A COCO file. `image` and `annotation` replace keys of each record; a value of ... takes the key away."""
    records, boxes = [], []
    for number, stem in enumerate(STEMS):
        record = {"id": number + first, "width": WIDTH, "height": HEIGHT, "file_name": name.format(stem)}
        records.append(merged(record, image(stem) if callable(image) else image or {}))
        for label, corners in EXPECTED[stem]:
            left, top, right, bottom = corners
            box = [left, top, right - left, bottom - top]
            own = {"image_id": number + first, "category_id": label + 1, "bbox": box, "iscrowd": 0, "segmentation": []}
            own |= {"id": len(boxes) + 1, "area": box[2] * box[3]}
            boxes.append(merged(own, annotation(corners) if annotation else {}))
    categories = [{"id": 0, "name": "pets", "supercategory": "none"}] if root else []
    categories += [{"id": number, "name": own, "supercategory": "pets"} for number, own in enumerate(NAMES, 1)]
    return {"images": records, "annotations": boxes, "categories": categories, "info": {}, "licenses": []}


def merged(record: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**record, **changes}.items() if value is not ...}


def polygon(corners: list[int]) -> list[int]:
    left, top, right, bottom = corners
    return [left, top, right, top, right, bottom, left, bottom]


def voc(stem: str, name: str = "{}.jpg", size: tuple[int, int] = (WIDTH, HEIGHT)) -> str:
    """A VOC annotation, whose corners count from 1."""
    objects = [
        voc_object(NAMES[label], f"{left + 1} {top + 1} {right} {bottom}", "<difficult>0</difficult>")
        for label, (left, top, right, bottom) in EXPECTED[stem]
    ]
    stated = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    return voc_text(*objects, size=f"<filename>{name.format(stem)}</filename>{stated}").decode()


class Form(NamedTuple):
    """What a tool writes; {} in a name stands for a stem."""

    images: str
    entry: str
    labels: str = ""
    text: Callable[[str], str] = rows
    files: Mapping[str, Any] = {}

    def write(self, root: Path) -> str:
        """Write into a folder; returns lines of a YAML."""
        images(root, self.images)
        if self.labels:
            labels(root, self.text, self.labels)
        for path, content in self.files.items():
            write(root / path, content)
        return SPLITS.format(self.entry)


def listed(pattern: str) -> str:
    return "".join(f"{pattern.format(stem)}\n" for stem in STEMS)


def lvis_image(stem: str) -> dict[str, Any]:
    lists = {"neg_category_ids": [], "not_exhaustive_category_ids": []}
    return {"file_name": ..., "coco_url": f"http://images.cocodataset.org/train2017/{stem}.jpg", **lists}


CLASSES = "cat\ndog\n"
ROBOFLOW, STUDIO = "{}_jpg.rf.0a1b2c", "0a1b2c3d-{}"
OBJ_DATA = "classes = 2\ntrain = data/train.txt\nnames = data/obj.names\n"
SIZES_AS_TEXT = {"width": f"{WIDTH}.0", "height": str(HEIGHT)}
VIA_IMAGE = {"width": -1, "height": -1, "coco_url": "", "flickr_url": ""}
ADDRESS = "https://bucket.s3.amazonaws.com/sets/a%20b/{}.jpg?X-Amz-Date=2020/x"
TRAIN = "images/train/{}.jpg", "images/train", "labels/train/{}.txt"


def listing(images: str, labels: str, pattern: str, **files: str) -> Form:
    """Images, label files and a list of the images by `pattern`."""
    return Form(images, "train.txt", labels, rows, {"train.txt": listed(pattern), **files})


def one_json(images: str, entry: str, content: Any, **files: Any) -> Form:
    return Form(images, entry, files={entry: content, **files})


def polygons(corners: list[int]) -> dict[str, Any]:
    return {"segmentation": [polygon(corners)]}


_FORMS = {
    "ultralytics": Form(*TRAIN),
    "ultralytics_segments": Form(*TRAIN, polygon_rows),
    "roboflow_yolo": Form(f"train/images/{ROBOFLOW}.jpg", "../train/images", f"train/labels/{ROBOFLOW}.txt"),
    "windows_yaml": Form(TRAIN[0], r"images\train", TRAIN[2], lambda stem: rows(stem).replace("\n", "\r\n")),
    "darknet": listing("obj/{}.jpg", "obj/{}.txt", "build/darknet/x64/data/obj/{}.jpg"),
    "cvat_yolo": listing(
        "obj_train_data/{}.jpg", "obj_train_data/{}.txt", "data/obj_train_data/{}.jpg", **{"obj.data": OBJ_DATA}
    ),
    "cvat_ultralytics": listing(TRAIN[0], TRAIN[2], "data/images/train/{}.jpg"),
    "windows_list": listing("images/{}.jpg", "labels/{}.txt", "C:\\Users\\me\\set\\images\\{}.jpg\r"),
    "labelimg_yolo": Form("set/{}.jpg", "set", "set/{}.txt", files={"set/classes.txt": CLASSES}),
    "coco_itself": one_json("train2017/{}.jpg", "annotations/instances_train2017.json", coco()),
    "roboflow_coco": one_json(
        f"train/{ROBOFLOW}.jpg", "train/_annotations.coco.json", coco(f"{ROBOFLOW}.jpg", first=0, root=True)
    ),
    "cvat_coco": one_json(
        "images/default/{}.jpg",
        "annotations/instances_default.json",
        coco(annotation=lambda _: {"attributes": {"occluded": False, "rotation": 0.0}}),
    ),
    "label_studio_server_coco": one_json(
        f"images/{STUDIO}.jpg", "result.json", coco(f"/label-studio/data/media/upload/1/{STUDIO}.jpg")
    ),
    "via_coco": one_json(
        "{}.jpg", "via_project_coco.json", coco(image=VIA_IMAGE, annotation=lambda own: {"segmentation": polygon(own)})
    ),
    "lvis": one_json(
        "train2017/{}.jpg",
        "lvis_v1_train.json",
        coco(image=lvis_image, annotation=lambda own: {**polygons(own), "iscrowd": ...}),
    ),
    "absolute_coco": one_json("images/{}.jpg", "a.json", coco("/home/somebody/sets/pets/{}.jpg")),
    "windows_coco": one_json(TRAIN[0], "a.json", coco(r"C:\data\{}.jpg")),
    "backslash_coco": one_json(TRAIN[0], "annotations/a.json", coco(r"images\train\{}.jpg")),
    "renamed_folder_coco": one_json("images/{}.jpg", "a.json", coco("train2017/{}.jpg")),
    "address_coco": one_json("pictures/a b/{}.jpg", "a.json", coco(ADDRESS)),
    "polygons_without_boxes": one_json(
        "images/{}.jpg", "a.json", coco(annotation=lambda own: {"bbox": ..., **polygons(own)})
    ),
    "unknown_sizes": one_json("images/{}.jpg", "a.json", coco(image={"width": None, "height": 0})),
    "sizes_and_crowds_as_text": one_json(
        "images/{}.jpg", "a.json", coco(image=SIZES_AS_TEXT, annotation=lambda _: {"iscrowd": "0"})
    ),
    "kit_of_voc": Form(
        "JPEGImages/{}.jpg",
        "ImageSets/Main/train.txt",
        "Annotations/{}.xml",
        voc,
        {"ImageSets/Main/train.txt": listed("{}")},
    ),
    "labelimg_voc": Form("set/{}.png", "set", "set/{}.xml", lambda stem: voc(stem, name="{}.png")),
    "kaggle_voc": Form("images/{}.png", "images", "annotations/{}.xml", voc),
    "annots_of_voc": Form("images/train/{}.jpg", "images/train", "Annots/train/{}.xml", voc),
    "xml_beside_voc": Form("photos/train/{}.jpg", "photos/train", "photos/xmls/{}.xml", voc),
    "voc_without_sizes": Form(
        "JPEGImages/{}.jpg", "JPEGImages", "Annotations/{}.xml", lambda stem: voc(stem, size=(0, 0))
    ),
    "fiftyone_voc": Form("data/{}.jpg", "data", "labels/{}.xml", voc),
}
FORMS: dict[str, Callable[[Path], str]] = {name: form.write for name, form in _FORMS.items()}
