"""Respelled label files, other image formats, and placeholders such as git-lfs pointers."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from tessera.data.source.decode import _read_by_pillow, decode_raw_pixels, read_image
from tessera.deploy.inference.sources.source_arguments import parse_sources
from tessera.utils.bit_depth import READS_HEIC
from tessera.utils.errors import UserError
from tests.data.source.made_yaml import build, check
from tests.data.source.tool_forms import images as tool_images
from tests.data.source.tool_forms import labels as tool_labels
from tests.data.source.tool_forms import voc

BOX = "0 0.5 0.5 0.25 0.5\n"
PIXELS = np.full((40, 60, 3), 90, np.uint8)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def dataset(folder: Path, labels: Mapping[str, str | None], more: str = "names: [a]\n") -> Path:
    """Images with the names of their label files: one YAML, train and val alike."""
    for image, label in labels.items():
        path = folder / "set" / "images" / image
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cv2.imencode(".jpg", PIXELS)[1].tobytes())
        if label is not None:
            (folder / "set" / "labels").mkdir(exist_ok=True)
            (folder / "set" / "labels" / label).write_text(BOX)
    yaml = folder / "a.yaml"
    yaml.write_text(f"path: {folder / 'set'}\ntrain: images\nval: images\n{more}")
    return yaml


def objects(yaml: Path) -> dict[str, int]:
    """How many objects each image has."""
    index = build(yaml)
    counts = np.diff(index.box_offsets).tolist()
    return {index.path(image).name: count for image, count in enumerate(counts)}


def problems(yaml: Path) -> list[str]:
    return list(build(yaml).problems)


def test_escapes_and_accents_of_a_label_files_name(tmp_path: Path) -> None:
    """As Label Studio and macOS write them; the literal name goes first, and a file has one image."""
    apart, composed = (unicodedata.normalize(form, "région") for form in ("NFD", "NFC"))
    labels = {"a+b.jpg": "a%2Bb.txt", f"{composed}.jpg": f"{apart}.txt", "c.jpg": "c.TXT", "d%2Be.jpg": "d%2Be.txt"}
    yaml = dataset(tmp_path, {**labels, "d+e.jpg": None, "good.jpg": "good.txt"})
    assert objects(yaml) == {**dict.fromkeys(labels, 1), "d+e.jpg": 0, "good.jpg": 1}
    assert build(yaml).notes[-1] == (
        "3 label files matched by a differently spelled name: labels/a%2Bb.txt for a+b.txt, "
        r"labels/c.TXT for c.txt, labels/re\u0301gion.txt for r\xe9gion.txt"
    )
    assert not [line for line in check(yaml).problems if " of its side" in line]


def test_a_broken_link_is_no_background(tmp_path: Path) -> None:
    yaml = dataset(tmp_path, {"a.jpg": "a.txt", "b.jpg": None})
    (tmp_path / "set/labels/b.txt").symlink_to(tmp_path / "gone.txt")
    (tmp_path / "set/images/c.jpg").symlink_to(tmp_path / "gone.jpg")
    assert objects(yaml) == {"a.jpg": 1} and problems(yaml) == [
        "labels/b.txt: cannot be read (No such file or directory, a broken link); image skipped",
        "images/c.jpg: cannot be read (No such file or directory); image skipped",
    ]


@pytest.mark.parametrize("entry, folder", [("set", "set"), ("Annotations", "JPEGImages"), ("JPEGImages", "JPEGImages")])
def test_escapes_of_a_voc_files_name(tmp_path: Path, entry: str, folder: str) -> None:
    tool_images(tmp_path / folder, "a+{}.jpg")
    tool_labels(tmp_path / ("set" if folder == "set" else "Annotations"), voc, "a%2B{}.xml")
    (tmp_path / "a.yaml").write_text(f"path: {tmp_path}\ntrain: {entry}\nnames: [cat, dog]\n")
    assert [*objects(tmp_path / "a.yaml").values()] == [1, 1, 2, 1, 2, 0] and not problems(tmp_path / "a.yaml")
    (note,) = build(tmp_path / "a.yaml").notes
    assert note.startswith("6 label files matched by a differently spelled name: ")


def test_two_files_that_may_be_meant_are_not_used(tmp_path: Path) -> None:
    yaml = dataset(tmp_path, {"a b.jpg": "a%20b.txt", "c.jpg": "c.txt"})
    (tmp_path / "set" / "labels" / "a%20b.TXT").write_text(BOX)
    assert objects(yaml) == {"a b.jpg": 0, "c.jpg": 1}
    assert "labels: 2 label files without an image, objects not used: a%20b.TXT, a%20b.txt" in problems(yaml)


@pytest.mark.parametrize("suffix", [".jfif", ".jpe", ".ppm", ".pgm", ".pbm", ".gif", ".jp2", ".avif", ".heic"])
def test_images_of_other_suffixes_are_trained_on(tmp_path: Path, suffix: str) -> None:
    if suffix == ".heic" and not READS_HEIC:
        pytest.skip("pillow-heif is not installed")
    yaml = dataset(tmp_path, {"a.jpg": "a.txt"})
    path = tmp_path / "set" / "images" / f"b{suffix}"
    form = {".jfif": "JPEG", ".jpe": "JPEG", ".pgm": "PPM", ".pbm": "PPM", ".jp2": "JPEG2000"}.get(suffix)
    try:
        Image.fromarray(PIXELS).convert({".pgm": "L", ".pbm": "1"}.get(suffix, "RGB")).save(path, form)
    except (OSError, ValueError, KeyError):
        pytest.skip("this Pillow does not write it")
    (tmp_path / "set" / "labels" / "b.txt").write_text(BOX)
    assert objects(yaml) == {"a.jpg": 1, f"b{suffix}": 1} and not problems(yaml)
    assert read_image(path).shape == PIXELS.shape
    by_pillow = _read_by_pillow(np.fromfile(path, np.uint8))
    assert by_pillow is not None and (suffix == ".pbm" or np.abs(by_pillow.astype(int) - read_image(path)).max() <= 2)


def test_images_that_are_not_read_are_counted_by_suffix(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    yaml = dataset(tmp_path, {"a.jpg": "a.txt"})
    images = tmp_path / "set" / "images"
    for name in ("b.jxl", "c.JXL", "d.psd", "notes.md"):
        (images / name).write_bytes(b"what")
    said = "3 images not read because of their suffix: 2 .jxl, 1 .psd. Convert them to PNG or JPEG"
    assert problems(yaml) == [f"train: {said}"]
    for source in (images, images / "*"):
        caplog.clear()
        assert [Path(origin.where).name for origin in parse_sources([source])] == ["a.jpg"]
        assert "--source " in caplog.text and f": {said}." in caplog.text
    (images / "a.jpg").unlink()
    for read in (lambda: build(yaml), lambda: parse_sources([images])):
        with pytest.raises(UserError, match=r"3 images not read because of their suffix: 2 \.jxl, 1 \.psd"):
            read()


def test_a_source_that_is_not_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.jxl").write_bytes(b"\xff\x0a1234")
    with pytest.raises(UserError, match=r"1 image not read because of its suffix: 1 \.jxl"):
        parse_sources([tmp_path / "b.jxl"])
    if not READS_HEIC:
        with pytest.raises(UserError, match=r"a\.heic: 1 image not read .* pip install pillow-heif"):
            decode_raw_pixels(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "a.heic")


def test_what_hides_all_images_is_named(tmp_path: Path) -> None:
    yaml = dataset(tmp_path, {"a.jpg": "a.txt"})
    yaml.write_text(yaml.read_text().replace("train: images", "train: a.txt"))
    (tmp_path / "set" / "a.txt").write_text("https://x/a?sig=a/b\n")
    with pytest.raises(UserError, match=r"no image found in\n.*\n.*'https://x/a\?sig=a/b' is not the path of an image"):
        build(yaml)
    (tmp_path / "set" / "a.txt").write_text("https://x/a.jpg?sig=a/b\n")
    assert objects(yaml) == {"a.jpg": 1}


def test_git_lfs_pointers_are_named(tmp_path: Path) -> None:
    yaml = dataset(tmp_path, {"a.jpg": "a.txt", "b.jpg": "b.txt", "c.jpg": "c.txt"})
    (tmp_path / "set" / "images" / "a.jpg").write_bytes(POINTER)
    (tmp_path / "set" / "labels" / "b.txt").write_bytes(POINTER)
    named = "it is a git-lfs pointer, and not the file itself; run `git lfs pull` in its repository; image skipped"
    assert problems(yaml) == [f"images/a.jpg: {named}", f"labels/b.txt: {named}"]


@pytest.mark.parametrize("content, why", [("a.jpg\n".encode("utf-16"), "UTF-16, expected UTF-8"), (POINTER, "git-lfs")])
def test_lists_that_are_no_text_are_named(tmp_path: Path, content: bytes, why: str) -> None:
    yaml = dataset(tmp_path, {"a.jpg": "a.txt"})
    yaml.write_text(yaml.read_text().replace("train: images", "train: a.txt"))
    (tmp_path / "set" / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.txt: .*{why}"):
        build(yaml)
