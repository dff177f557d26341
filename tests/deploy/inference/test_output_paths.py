"""Tests of output paths: unique in a run, whatever the names of the sources."""

from __future__ import annotations

import os
from pathlib import PurePath

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.deploy.inference.outputs import OutputPaths, class_folders
from tessera.deploy.inference.sources.frames import Frame, Media, SourceEvent
from tessera.utils.evaluation.result_files import name_key

PIXELS = np.zeros((1, 1, 3), np.uint8)


def files_of(places: OutputPaths, source: str, name: str, media: Media) -> list[str]:
    """What may be written for a source: three frames of a video, three crops of each."""
    moments = [None] if media == "image" else [0, 1, 12]
    found = []
    for moment in moments:
        place = places.of(Frame(PIXELS, source, media, PurePath(name), moment))
        frame = place.name if moment is None else f"{place.name}_{moment}"
        suffix = PurePath(name).suffix.lower() or ".jpg"
        found += [f"labels/{place.with_name(frame)}.txt"]
        found += [f"crops/car/{place.with_name(frame)}_{crop}.jpg" for crop in (0, 1, 12)]
        found += [str(place.with_name(f"{place.name}{suffix if moment is None else '.mp4'}"))]
    return list(dict.fromkeys(found))


def require_outside(files: list[str]) -> None:
    """No two are one file on any file system, none lies in a file, and each name is short enough."""
    keys = [name_key(file) for file in files]
    assert len(set(keys)) == len(keys), sorted(files)
    folders = {str(above) for key in keys for above in PurePath(key).parents}
    assert not folders & {*keys}
    assert max(len(os.fsencode(part)) for file in files for part in PurePath(file).parts) <= 255


@pytest.mark.parametrize(
    "names",
    [
        ["a.mp4", "a_12.jpg"],
        ["a_12.jpg", "a.mp4"],
        ["a.mp4", "A.mp4", "a.avi", "a_1.png", "a_1.jpg", "a.mp4_1.jpg", "a-2_12.jpg"],
        ["labels/a.jpg", "crops/car/a_0.jpg", "a.jpg", "a.mp4"],
        ["a.jpg", "a.txt/b.jpg", "a.jpg/b.jpg", "a_0.jpg/b.jpg"],
        ["x" * 251 + ".jpg", "x" * 251 + ".png", "x" * 251 + ".mp4", "é" * 125 + ".mp4"],
        ["\udcff.mp4", "\udcff.jpg", "ä.jpg", "a\u0308.jpg", "..jpg", "...jpg", "a.", "a"],
        ["/".join(["d" * 250] * 15) + "/a.jpg", "/".join(["d" * 250] * 14 + ["e"]) + "/a.jpg", "../a.jpg"],
        ["same/a.mp4", "same/a.mp4", "same/a.jpg", "same/a.jpg"],
    ],
)
def test_each_result_has_a_name_of_its_own(names: list[str]) -> None:
    places, files = OutputPaths(), list[str]()
    for number, name in enumerate(names):
        files += files_of(places, f"{number}/{name}", name, "video" if name.endswith((".mp4", ".avi")) else "image")
    require_outside(files)


_PART = st.sampled_from(
    ["a", "A", "a_1", "a_12", "a_1_0", "a-2", "labels", "crops", "car", "a.txt", "a.mp4", "x" * 250]
)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.lists(_PART, min_size=1, max_size=3), st.sampled_from([".jpg", ".mp4", ""])), max_size=8))
def test_so_it_is_in_any_order(sources: list[tuple[list[str], str]]) -> None:
    places, files = OutputPaths(), list[str]()
    for number, (parts, suffix) in enumerate(sources):
        name = "/".join(parts)[: 250 - len(suffix)] + suffix
        files += files_of(places, f"{number}", name, "video" if suffix in (".mp4", "") else "image")
    if files:
        require_outside(files)


def test_a_video_that_is_given_again_has_another_path() -> None:
    places, name = OutputPaths(), PurePath("a.mp4")
    first = places.of(Frame(PIXELS, "a.mp4", "video", name, 0))
    assert first == places.of(Frame(PIXELS, "a.mp4", "video", name, 1)) == PurePath("a")
    places.event(SourceEvent("a.mp4", "ended", "a.mp4: ended", "video", name))
    assert places.of(Frame(PIXELS, "a.mp4", "video", name, 0)) == PurePath("a.mp4")


def test_folders_of_classes() -> None:
    names = ["car", "Car", "a/b", "a:b", "a_b", "car", "n" * 300, "n" * 299, "..", "", "\x1b[31m", "é", "e\u0301"]
    folders = class_folders(names)
    found = [folders[name] for name in dict.fromkeys(names)]
    assert len({name_key(folder) for folder in found}) == len(found) == len(names) - 1
    assert all(0 < len(os.fsencode(folder)) <= 200 and "/" not in folder and folder.isprintable() for folder in found)
