"""Pascal VOC XML: boxes, encodings, invalid files and folder layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.labels.voc import parse_voc
from tests.data.make import write_image
from tests.data.source.made_yaml import build, write

IDS = {"cat": 0, "dog": 1}


def voc(*objects: str, size: str = "<size><width>64</width><height>48</height><depth>3</depth></size>") -> bytes:
    return "\n".join(["<annotation>", "<filename>x.jpg</filename>", size, *objects, "</annotation>"]).encode()


def voc_object(name: str = "cat", box: str = "1 1 64 48", extra: str = "") -> str:
    sides = zip(("xmin", "ymin", "xmax", "ymax"), box.split(), strict=False)
    corners = "".join(f"<{key}>{value}</{key}>" for key, value in sides)
    return f"<object><name>{name}</name>{extra}<bndbox>{corners}</bndbox></object>"


def write_voc(
    root: Path, stem: str, *objects: str, annotations: str = "Annotations", images: str = "JPEGImages"
) -> None:
    write_image(root / images / f"{stem}.jpg")
    (root / annotations).mkdir(parents=True, exist_ok=True)
    (root / annotations / f"{stem}.xml").write_bytes(voc(*objects))


PART = "<part><name>head</name><bndbox><xmin>5</xmin><ymin>5</ymin><xmax>6</xmax><ymax>6</ymax></bndbox></part>"
HARD = "<difficult>1</difficult>"
WHOLE = [0.5, 0.5, 1, 1]


@pytest.mark.parametrize(
    ("objects", "classes", "boxes"),
    [
        ([voc_object(), voc_object("dog", "17 13 32 24")], [0, 1], [*WHOLE, 24 / 64, 18 / 48, 0.25, 0.25]),
        ([voc_object(box="0 0 70 50")], [0], WHOLE),
        ([voc_object(extra=HARD), voc_object(extra=PART + "<difficult>0</difficult>")], [0], WHOLE),
    ],
    ids=["pixels count from one", "boxes from zero are cut", "difficult ones and parts are no objects"],
)
def test_voc_boxes(objects: list[str], classes: list[int], boxes: list[float]) -> None:
    found = parse_voc(voc(*objects), (48, 64), IDS)
    assert found.classes == classes and not found.problems
    np.testing.assert_allclose(found.boxes, boxes)


@pytest.mark.parametrize("difficult", ["0", "1"])
def test_voc_unknown_name_has_its_line(difficult: str) -> None:
    zebra = voc_object("zebra", extra=f"<difficult>{difficult}</difficult>")
    assert parse_voc(voc(voc_object(), zebra), (48, 64), IDS).unknown == [(5, "'zebra'")]


@pytest.mark.parametrize(
    ("raw", "line", "what"),
    [
        (b"<annotation>\n<object>\n</annotation>", 3, "not valid XML"),
        (b"", 1, "not valid XML"),
        (b"<html/>", 1, "expected <annotation>"),
        (voc(voc_object(box="5 5 20")), 4, "no <ymax>"),
        (voc(voc_object(box="5 5 20 x")), 4, "<ymax> is 'x', expected a number"),
        (voc(voc_object(box="5 5 20 inf")), 4, "expected a finite number"),
        (voc(voc_object(box="20 5 5 20")), 4, "xmax or ymax is smaller"),
        (voc(voc_object(box="100 5 120 20")), 4, "outside the image"),
        (b'<!DOCTYPE a [<!ENTITY x "y">]><annotation>&x;</annotation>', 1, "declares entities"),
    ],
)
def test_voc_problems(raw: bytes, line: int | None, what: str) -> None:
    ((found_line, found),) = parse_voc(raw, (48, 64), IDS).problems
    assert (found_line, what in found) == (line, True), found


@settings(deadline=None)
@given(st.binary(max_size=100) | st.text(alphabet="<>/objectanibdx &;", max_size=60).map(str.encode))
def test_voc_any_bytes_are_read(raw: bytes) -> None:
    assert parse_voc(raw, (48, 64), IDS).classes == []


@pytest.mark.parametrize(
    ("declared", "codec", "name"),
    [
        ("GB2312", "gb2312", "猫"),
        ("gb2312", "gbk", "貓"),  # declared too narrow, as many tools do
        ("GB18030", "gb18030", "猫"),
        ("Shift_JIS", "shift_jis", "ねこ"),
        ("shift-jis", "cp932", "①"),
        ("ISO-2022-JP", "iso2022_jp", "猫"),
        ("EUC-KR", "euc_kr", "고양이"),
        ("windows-1251", "cp1251", "кот"),
        ("utf-8", "utf-8-sig", "猫"),
        ("UTF-16", "utf-16", "猫"),
    ],
)
def test_voc_in_other_encodings(declared: str, codec: str, name: str) -> None:
    text = f'<?xml version="1.0" encoding="{declared}"?>\n' + voc(voc_object(name)).decode()
    objects = parse_voc(text.encode(codec), (48, 64), {name: 3})
    assert objects.classes == [3] and not objects.problems


@pytest.mark.parametrize(
    ("raw", "line", "what"),
    [
        (b'<?xml version="1.0" encoding="martian"?><annotation/>', 1, "the encoding 'martian', which is unknown. Save"),
        (b'<?xml version="1.0" encoding="zlib"?><annotation/>', 1, "the encoding 'zlib', which is unknown"),
        (b'<?xml version="1.0" encoding="idna"?><annotation/>', 1, "the encoding 'idna', which is unknown"),
        (b'<?xml version="1.0" encoding="GB2312"?>\n<annotation>\n\xff\xff</annotation>', 3, "but byte 0x"),
        ("<annotation>\n<name>小猫在此</name></annotation>".encode("gbk"), 2, "not utf-8. Save it as UTF-8, or"),
        (b"<annotation>\n" + b"<a>" * 1_000_000, 2, "nest deeper than 32"),
        (voc(size="<size><width>" + "9" * 6000 + "</width><height>48</height></size>"), None, ""),
        (voc(voc_object(box="1 1 " + "9" * 6000 + " 48")), 4, "<xmax> is 9999"),
        (voc(voc_object("\x85\u202e" * 3, box="1 1 x\x85 48")), 4, "expected a number"),
    ],
    ids=["unknown", "no-text", "no-bytes", "wrong", "undeclared", "deep", "size", "number", "controls"],
)
def test_voc_odd_bytes_are_one_problem(raw: bytes, line: int | None, what: str) -> None:
    found = parse_voc(raw, (48, 64), IDS).problems
    if not what:
        assert not found
        return
    ((number, said),) = found
    assert number == line and what in said and len(said) < 200 and said.isprintable()


@pytest.mark.parametrize("entry", ["JPEGImages", "'JPEGImages/**/*.jpg'", "own.txt"])
@pytest.mark.parametrize("folder", ["JPEGImages", "JPEGImages/day"])
def test_voc_images_find_their_annotations(tmp_path: Path, folder: str, entry: str) -> None:
    root = tmp_path / "voc"
    write_voc(root, "a", voc_object("dog"), images=folder, annotations=folder.replace("JPEGImages", "Annotations"))
    write_image(root / folder / "background.jpg")
    write(root / "own.txt", f"{folder}/a.jpg\n./{folder}/background.jpg\n")
    index = build(write(tmp_path / "voc.yaml", f"path: voc\ntrain: {entry}\nnames: [cat, dog]\n"))
    assert (len(index), index.classes.tolist()) == (2, [1])
    (root / folder / "a.txt").write_text("0 .5 .5 .2 .2\n")  # converted: the text counts
    assert build(tmp_path / "voc.yaml").classes.tolist() == [0]


@pytest.mark.parametrize("entry", ["photos", "'photos/*/*.jpg'", "own.txt"])
@pytest.mark.parametrize("annotations", ["photos/day", "photos/annots", "annots/day"])
def test_annotations_are_beside_or_near_the_images(tmp_path: Path, entry: str, annotations: str) -> None:
    write_voc(tmp_path / "voc", "a", voc_object("dog"), images="photos/day", annotations=annotations)
    write(tmp_path / "voc/own.txt", f"{tmp_path}/voc/photos/day/a.jpg\n")
    index = build(write(tmp_path / "voc.yaml", f"path: voc\ntrain: {entry}\nnames: [cat, dog]\n"))
    assert index.classes.tolist() == [1] and not index.problems
