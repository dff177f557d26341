"""Hostile labels: YOLO text, COCO JSON, VOC XML."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

from tessera.analysis.checks.run_checks import check_dataset
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tessera.utils.types import DatasetIndex
from tests.data.labels.test_voc import voc as voc_text
from tests.data.labels.test_voc import voc_object
from tests.data.make import write_image
from tests.hostile.damages import named
from tests.hostile.expect import Message, checked, message_or_result
from tests.hostile.images import make_special

CASES, FAST_CASES = 3000, 20
IMAGES = ((7, "a.jpg"), (9, "b.jpg"), (4, "c.jpg"))
TIME_LIMIT_S = 60

_TOKENS = (
    *("0", "1", "0.5", "-1", "2", "nan", "inf", "1e400", "1e-400", "0x1", "1_0", "٣", "", "\x1b[2J", "\0", "a" * 500),
    *("9" * 6000, "-0", "0.5.5", "True", "1e5", "\u202e", "0,5", "½", "\ufeff0", "2147483648", "1" + "0" * 30),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 10**30, 1e308, float("inf"), float("nan"), "", "7", "a\0b", "\ud800", "\x1b[2J"),
    *("x" * 5000, [], [1], [[1, 2]], {}, {"a": []}, [1e308] * 4, [0, 0, -5, 5], [float("nan")] * 4, [10**30] * 4),
    *("../../../etc/passwd", "/dev/zero", "~root", "a/" * 3000, 2**63, -(2**63), 17, 7, 9, "a.jpg"),
)
_XML = (
    *("<a>" * 100_000, "&lol;", "<!DOCTYPE a [<!ENTITY b 'c'>]>", "</object>", "<object>", "<bndbox>", "]]>", "<!--"),
    *("&#0;", "<name>\u202e</name>", "<xmin>1e999</xmin>", "<ymax>" + "9" * 6000 + "</ymax>", "<width>٣</width>"),
    *("\x1b[2J", "<a"),
    *("<difficult>1</difficult>", "<size/>", " x='" + "y" * 5000 + "'", "<?xml version='1.0' encoding='rot13'?>", "\0"),
)
_NUMBERS = ("1e308", "-1e308", "1e999", "-1e999", "9" * 400, "9" * 40, "1e-320", "-0", "4294967296")
_ENCODINGS = ("utf-8", "gb2312", "shift_jis", "utf-16", "utf-7", "utf-32", "cp1251", "rot13", "idna", "hz", "x" * 30)


def trial(rng: random.Random, folder: Path) -> str:
    for name in "abc":
        write_image(folder / "images" / f"{name}.jpg")
    kind = rng.choice([*_KINDS])
    _KINDS[kind](rng, folder)
    yaml = folder / "set.yaml"
    entry = next((name for name in ("set.json", "set.txt") if os.path.lexists(folder / name)), "images")
    ignore = rng.choice(("", "ignore: [猫]\n"))
    if os.path.lexists(yaml):
        assert isinstance(message_or_result(lambda: load_spec(yaml)), Message)
        return kind
    yaml.write_text(f"path: {folder}\ntrain: {entry}\nval: {entry}\nnames: [cat, dog]\n{ignore}")
    split = rng.choice(("train", "val"))
    first = message_or_result(lambda: build_index(load_spec(yaml), split, single_cls=rng.random() < 0.2))
    if isinstance(first, DatasetIndex):
        for line in first.problems:
            checked(line)
        assert (first.boxes_xyxy >= 0).all() and (first.boxes_xyxy <= (64, 48, 64, 48)).all()
        assert (first.classes < 2).all() and len(first.ignored_classes) == len(first.ignored_boxes_xyxy)
        assert ((first.ignored_classes >= -1) & (first.ignored_classes < 2)).all()
        assert first.coco_ids() is None or len(first.coco_ids().images) == len(first)  # type: ignore[union-attr]
    found = message_or_result(lambda: check_dataset(load_spec(yaml)))
    for line in [] if isinstance(found, Message) else found.lines():
        checked(line)
    return kind


def text_rows(rng: random.Random, folder: Path) -> None:
    rows = [
        " ".join(rng.choice(_TOKENS) for _ in range(rng.choice((5, 5, 7, 9, 3)))) for _ in range(rng.randint(1, 20))
    ]
    if rng.random() < 0.5:
        rows = ["0 0.5 0.5 0.2 0.2", rng.choice(rows)]
    put(folder, "labels/a.txt", rng.choice(("\n", "\r\n", "\r", "\x0b")).join(rows).encode("utf-8", "surrogatepass"))


def text_bytes(rng: random.Random, folder: Path) -> None:
    good = "0 0.5 0.5 0.2 0.2\n" * 3
    raw = rng.choice((rng.randbytes(rng.randrange(300)), good.encode("utf-16"), good.encode("utf-32"), b"\0" * 1000))
    put(folder, "labels/a.txt", raw)


def special_file(rng: random.Random, folder: Path) -> None:
    places = [
        "labels/a.txt",
        "labels/auto_labels.jsonl",
        "set.json",
        "images/a.xml",
        "images/d.jpg",
        "set.txt",
        "set.yaml",
    ]
    path = folder / rng.choice(places)
    path.parent.mkdir(exist_ok=True)
    make_special(path, rng)


def coco_values(rng: random.Random, folder: Path) -> None:
    content: Any = coco()
    for _ in range(rng.randint(1, 3)):
        part = content[rng.choice([*content])]
        if not isinstance(part, list) or not part or rng.random() < 0.05:
            content[rng.choice([*content])] = rng.choice(_VALUES)
            continue
        at = rng.randrange(len(part))
        if not isinstance(part[at], dict) or rng.random() < 0.1:
            part[at] = rng.choice(_VALUES)
        elif rng.random() < 0.1:
            part.append(part[at])
        else:
            part[at][rng.choice([*part[at], "segmentation", "iscrowd", "ignore"])] = rng.choice(_VALUES)
    put(folder, "set.json", json.dumps(content).encode())


def coco_numbers(rng: random.Random, folder: Path) -> None:
    raw = json.dumps(coco())
    for _ in range(rng.randint(1, 3)):
        found = rng.choice([*re.finditer(r"(?<![\w.])\d+(?![\w.])", raw)])
        raw = raw[: found.start()] + rng.choice(_NUMBERS) + raw[found.end() :]
    put(folder, "set.json", raw.encode())


def coco_deep(rng: random.Random, folder: Path) -> None:
    depth = rng.choice((100, 900, 5000, 100_000))
    deep = rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth))
    content: Any = coco()
    part = content[rng.choice([*content])]
    part[rng.randrange(len(part))][rng.choice(("bbox", "segmentation", "file_name", "id", "name", "other"))] = "DEEP"
    put(folder, "set.json", json.dumps(content).replace('"DEEP"', deep).encode())


def auto_labels(rng: random.Random, folder: Path) -> None:
    put(folder, "labels/a.txt", b"0 0.5 0.5 0.2 0.2\n")
    deep = "[" * 100_000 + "]" * 100_000
    words = ("null", "[]", '"a\\u0000b"', '"' + "a/" * 3000 + '"', "9" * 5000, '"/dev/zero"', '"\\ud800"')
    odd = (deep, *_NUMBERS, *words)
    run = {"schema": '"tessera-auto-labels 1"', "weights": '"best.pt"', "names": '["cat", "dog"]'}
    file = {"labels": '"a.txt"', "sha256": '"0"', "scores": "[0.5]"}
    for _ in range(rng.randint(0, 2)):
        line = rng.choice((run, file))
        line[rng.choice([*line])] = rng.choice((*odd, f"[{rng.choice(odd)}]"))
    lines = ["{" + ", ".join(f'"{key}": {value}' for key, value in line.items()) + "}" for line in (run, file)]
    put(folder, "labels/auto_labels.jsonl", "\n".join([*lines, rng.choice(("", deep, "{", "1"))]).encode())


def coco_bytes(rng: random.Random, folder: Path) -> None:
    raw = json.dumps(coco()).encode()
    deep = b"[" * rng.choice((900, 5000, 200_000))
    at = rng.randrange(len(raw))
    digits = b"9" * rng.choice((30, 4000, 5000))
    changed = rng.choice((raw[:at], raw[:at] + rng.randbytes(3) + raw[at:], raw[:at] + deep, digits, deep))
    put(folder, "set.json", changed)
    if rng.random() < 0.3:
        put(folder, "set.json", raw.replace(b"17", digits, 1))


def voc_parts(rng: random.Random, folder: Path) -> None:
    text = voc(rng.choice(("cat", "dog", "猫", "\u202e", "x" * 3000)), rng.choice(_TOKENS[:12]))
    for _ in range(rng.randint(0, 3)):
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(_XML) + text[at:]
    declared, used = rng.choice(_ENCODINGS), rng.choice(("utf-8", "gb2312", "shift_jis", "utf-16"))
    header = f'<?xml version="1.0" encoding="{declared}"?>' if rng.random() < 0.7 else ""
    put(folder, "images/a.xml", (header + text).encode(used, "replace"))


def voc_numbers(rng: random.Random, folder: Path) -> None:
    text = voc("cat", "3")
    found = rng.choice([*re.finditer(r"(?<=>)\d+(?=<)", text)])
    put(folder, "images/a.xml", (text[: found.start()] + rng.choice(_NUMBERS) + text[found.end() :]).encode())


def voc_bytes(rng: random.Random, folder: Path) -> None:
    raw = bytearray(voc("cat", "3").encode())
    for _ in range(rng.randint(1, 10)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    put(folder, "images/a.xml", bytes(raw[: rng.randint(1, len(raw))]))


_KINDS = named(
    *(text_rows, text_bytes, special_file, coco_values, coco_numbers, coco_deep, coco_bytes),
    *(voc_parts, voc_numbers, voc_bytes, auto_labels),
)


def coco() -> dict[str, Any]:
    return {
        "images": [{"id": own, "file_name": name, "width": 64, "height": 48} for own, name in IMAGES],
        "categories": [{"id": 17, "name": "cat"}, {"id": 3, "name": "dog"}],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 17, "bbox": [1, 2, 30, 20], "area": 600, "iscrowd": 0},
            {"id": 2, "image_id": 9, "category_id": 3, "bbox": [0, 0, 64, 48], "segmentation": [[0, 0, 9, 0, 9, 9]]},
            {"id": 3, "image_id": 9, "category_id": 3, "bbox": [5, 5, 20, 20], "iscrowd": 1},
        ],
    }


def voc(name: str, left: str) -> str:
    return voc_text(voc_object(name, f"{left} 2 30 20")).decode()


def put(folder: Path, place: str, raw: bytes) -> None:
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    (folder / place).write_bytes(raw)
