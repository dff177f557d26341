"""Datasets of six images with known boxes, each written as some tool exports them.

Each form writes into a folder and returns its YAML's lines; EXPECTED has what training must read of all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
FORMS: dict[str, Callable[[Path], str]] = {}


def form(function: Callable[[Path], str]) -> Callable[[Path], str]:
    """Add a form by its name."""
    FORMS[function.__name__] = function
    return function


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
    image: Mapping[str, Any] | None = None,
    annotation: Callable[[list[int]], Mapping[str, Any]] | None = None,
    first: int = 1,
    root: bool = False,
) -> dict[str, Any]:
    """A COCO file. `image` and `annotation` replace keys of each record; a value of ... takes the key away."""
    records, boxes = [], []
    for number, stem in enumerate(STEMS):
        record = {"id": number + first, "width": WIDTH, "height": HEIGHT, "file_name": name.format(stem)}
        records.append(merged(record, image or {}))
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


def counts(corners: list[int]) -> list[int]:
    """Run lengths of a rectangle, column by column."""
    left, top, right, bottom = corners
    pixels = [left <= x < right and top <= y < bottom for x in range(WIDTH) for y in range(HEIGHT)]
    lengths, value = [0], False
    for pixel in pixels:
        if pixel != value:
            lengths.append(0)
            value = pixel
        lengths[-1] += 1
    return lengths


def voc(stem: str, *, name: str = "{}.jpg", size: tuple[int, int] = (WIDTH, HEIGHT), first: int = 1) -> str:
    """A VOC annotation; corners count from `first`, which VOC's own are read from: 1."""
    objects = ""
    for label, (left, top, right, bottom) in EXPECTED[stem]:
        box = zip(("xmin", "ymin", "xmax", "ymax"), (left + first, top + first, right, bottom), strict=True)
        corners = "".join(f"<{key}>{value}</{key}>" for key, value in box)
        objects += f"<object><name>{NAMES[label]}</name><difficult>0</difficult><bndbox>{corners}</bndbox></object>\n"
    return (
        f"<annotation><folder>x</folder><filename>{name.format(stem)}</filename>"
        f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>\n{objects}</annotation>"
    )


@form
def ultralytics(root: Path) -> str:
    images(root / "images/train")
    labels(root / "labels/train")
    return SPLITS.format("images/train")


@form
def ultralytics_segments(root: Path) -> str:
    images(root / "images/train")
    labels(root / "labels/train", polygon_rows)
    return SPLITS.format("images/train")


@form
def roboflow_yolo(root: Path) -> str:
    images(root / "train/images", "{}_jpg.rf.0a1b2c.jpg")
    labels(root / "train/labels", name="{}_jpg.rf.0a1b2c.txt")
    return SPLITS.format("../train/images")


@form
def windows_yaml(root: Path) -> str:
    images(root / "images/train")
    labels(root / "labels/train", lambda stem: rows(stem).replace("\n", "\r\n"))
    return SPLITS.format(r"images\train")


@form
def darknet(root: Path) -> str:
    images(root / "obj")
    labels(root / "obj")
    write(root / "train.txt", "".join(f"build/darknet/x64/data/obj/{stem}.jpg\n" for stem in STEMS))
    return SPLITS.format("train.txt")


@form
def cvat_yolo(root: Path) -> str:
    images(root / "obj_train_data")
    labels(root / "obj_train_data")
    write(root / "train.txt", "".join(f"data/obj_train_data/{stem}.jpg\n" for stem in STEMS))
    write(root / "obj.data", "classes = 2\ntrain = data/train.txt\nnames = data/obj.names\n")
    return SPLITS.format("train.txt")


@form
def cvat_ultralytics(root: Path) -> str:
    images(root / "images/train")
    labels(root / "labels/train")
    write(root / "train.txt", "".join(f"data/images/train/{stem}.jpg\n" for stem in STEMS))
    return SPLITS.format("train.txt")


@form
def windows_list(root: Path) -> str:
    images(root / "images")
    labels(root / "labels")
    write(root / "train.txt", "".join(f"C:\\Users\\me\\set\\images\\{stem}.jpg\r\n" for stem in STEMS))
    return SPLITS.format("train.txt")


@form
def label_studio_yolo(root: Path) -> str:
    images(root / "images", "0a1b2c3d-{}.jpg")
    labels(root / "labels", name="0a1b2c3d-{}.txt")
    write(root / "classes.txt", "cat\ndog\n")
    write(root / "notes.json", {"categories": []})
    return SPLITS.format("images")


@form
def datumaro_yolo(root: Path) -> str:
    images(root / "obj_train_data")
    labels(root / "obj_train_data")
    write(root / "train.txt", "".join(f"data/obj_train_data/{stem}.jpg\n" for stem in STEMS))
    write(root / "obj.names", "cat\ndog\n")
    return SPLITS.format("train.txt")


@form
def fiftyone_yolov5(root: Path) -> str:
    images(root / "images/val")
    labels(root / "labels/val")
    return f"path: {root}\n{SPLITS.format('./images/val/')}"


@form
def labelimg_yolo(root: Path) -> str:
    images(root / "set")
    labels(root / "set")
    write(root / "set/classes.txt", "cat\ndog\n")
    return SPLITS.format("set")


@form
def coco_itself(root: Path) -> str:
    images(root / "train2017")
    write(root / "annotations/instances_train2017.json", coco())
    return SPLITS.format("annotations/instances_train2017.json")


@form
def roboflow_coco(root: Path) -> str:
    images(root / "train", "{}_jpg.rf.0a1b2c.jpg")
    write(root / "train/_annotations.coco.json", coco("{}_jpg.rf.0a1b2c.jpg", first=0, root=True))
    return SPLITS.format("train/_annotations.coco.json")


@form
def cvat_coco(root: Path) -> str:
    images(root / "images/default")
    extra = {"attributes": {"occluded": False, "rotation": 0.0}}
    write(root / "annotations/instances_default.json", coco(annotation=lambda _: extra))
    return SPLITS.format("annotations/instances_default.json")


@form
def label_studio_coco(root: Path) -> str:
    images(root / "images", "0a1b2c3d-{}.jpg")
    content = coco("images\\0a1b2c3d-{}.jpg", first=0, annotation=lambda _: {"ignore": 0})
    write(root / "result.json", content)
    return SPLITS.format("result.json")


@form
def label_studio_server_coco(root: Path) -> str:
    images(root / "images", "0a1b2c3d-{}.jpg")
    write(root / "result.json", coco("/label-studio/data/media/upload/1/0a1b2c3d-{}.jpg"))
    return SPLITS.format("result.json")


@form
def fiftyone_coco(root: Path) -> str:
    images(root / "data")
    write(root / "labels.json", coco(annotation=lambda _: {"segmentation": ..., "score": None}))
    return SPLITS.format("labels.json")


@form
def supervisely_coco(root: Path) -> str:
    images(root / "dataset 1/images")
    write(root / "dataset 1/annotations/instances.json", coco(annotation=lambda own: {"segmentation": [polygon(own)]}))
    return SPLITS.format("dataset 1/annotations/instances.json")


@form
def via_coco(root: Path) -> str:
    images(root)
    image = {"width": -1, "height": -1, "coco_url": "", "flickr_url": ""}
    write(root / "via_project_coco.json", coco(image=image, annotation=lambda own: {"segmentation": polygon(own)}))
    return SPLITS.format("via_project_coco.json")


@form
def lvis(root: Path) -> str:
    images(root / "train2017")
    image = {"file_name": ..., "neg_category_ids": [], "not_exhaustive_category_ids": []}
    content = coco(image=image, annotation=lambda own: {"segmentation": [polygon(own)], "iscrowd": ...})
    for record, stem in zip(content["images"], STEMS, strict=True):
        record["coco_url"] = f"http://images.cocodataset.org/train2017/{stem}.jpg"
    write(root / "lvis_v1_train.json", content)
    return SPLITS.format("lvis_v1_train.json")


@form
def absolute_coco(root: Path) -> str:
    images(root / "images")
    write(root / "a.json", coco("/home/somebody/sets/pets/{}.jpg"))
    return SPLITS.format("a.json")


@form
def windows_coco(root: Path) -> str:
    images(root / "images/train")
    write(root / "a.json", coco(r"C:\data\{}.jpg"))
    return SPLITS.format("a.json")


@form
def backslash_coco(root: Path) -> str:
    images(root / "images/train")
    write(root / "annotations/a.json", coco(r"images\train\{}.jpg"))
    return SPLITS.format("annotations/a.json")


@form
def renamed_folder_coco(root: Path) -> str:
    images(root / "images")
    write(root / "a.json", coco("train2017/{}.jpg"))
    return SPLITS.format("a.json")


@form
def renamed_folder_list(root: Path) -> str:
    images(root / "imgs")
    labels(root / "imgs")
    write(root / "train.txt", "".join(f"data/{stem}.jpg\n" for stem in STEMS))
    return SPLITS.format("train.txt")


@form
def address_coco(root: Path) -> str:
    images(root / "pictures/a b")
    write(root / "a.json", coco("https://bucket.s3.amazonaws.com/sets/a%20b/{}.jpg?X-Amz-Date=2020/x"))
    return SPLITS.format("a.json")


@form
def polygons_without_boxes(root: Path) -> str:
    images(root / "images")
    write(root / "a.json", coco(annotation=lambda own: {"bbox": ..., "segmentation": [polygon(own)]}))
    return SPLITS.format("a.json")


@form
def masks_without_boxes(root: Path) -> str:
    images(root / "images")
    mask = {"size": [HEIGHT, WIDTH]}
    write(root / "a.json", coco(annotation=lambda own: {"bbox": [], "segmentation": {**mask, "counts": counts(own)}}))
    return SPLITS.format("a.json")


@form
def unknown_sizes(root: Path) -> str:
    images(root / "images")
    write(root / "a.json", coco(image={"width": None, "height": 0}))
    return SPLITS.format("a.json")


@form
def sizes_and_crowds_as_text(root: Path) -> str:
    images(root / "images")
    size = {"width": f"{WIDTH}.0", "height": str(HEIGHT)}
    write(root / "a.json", coco(image=size, annotation=lambda _: {"iscrowd": "0"}))
    return SPLITS.format("a.json")


@form
def kit_of_voc(root: Path) -> str:
    images(root / "JPEGImages")
    labels(root / "Annotations", voc, "{}.xml")
    write(root / "ImageSets/Main/train.txt", "".join(f"{stem}\n" for stem in STEMS))
    return SPLITS.format("ImageSets/Main/train.txt")


@form
def labelimg_voc(root: Path) -> str:
    images(root / "set", "{}.png")
    labels(root / "set", lambda stem: voc(stem, name="{}.png"), "{}.xml")
    return SPLITS.format("set")


@form
def roboflow_voc(root: Path) -> str:
    images(root / "train", "{}_jpg.rf.0a1b2c.jpg")
    labels(root / "train", lambda stem: voc(stem, name="{}_jpg.rf.0a1b2c.jpg"), "{}_jpg.rf.0a1b2c.xml")
    return SPLITS.format("train")


@form
def kaggle_voc(root: Path) -> str:
    images(root / "images", "{}.png")
    labels(root / "annotations", voc, "{}.xml")
    return SPLITS.format("images")


@form
def voc_without_sizes(root: Path) -> str:
    images(root / "JPEGImages")
    labels(root / "Annotations", lambda stem: voc(stem, size=(0, 0)), "{}.xml")
    return SPLITS.format("JPEGImages")


@form
def fiftyone_voc(root: Path) -> str:
    images(root / "data")
    labels(root / "labels", voc, "{}.xml")
    return SPLITS.format("data")
