"""Tests of the Python API: equal detections for every kind of input and in every thread, no setting changed."""

from __future__ import annotations

import io
import itertools
import logging
import pickle
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from tessera.deploy.inference.detector import Detector, class_numbers, detect_ahead, prefetch
from tessera.deploy.inference.results import Result
from tessera.utils.checkpoints.format import save_checkpoint
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.evaluation.network import open_model
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.world import World
from tessera.utils.thresholds import detection_threshold
from tests.deploy.exporting.made import ANCHORED, FREE, NAMES, checkpoint, made_image

SIZES = ((90, 120), (33, 140), (128, 40), (1, 1), (300, 200), (7, 400))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("weights") / "best.pt", ANCHORED)


@pytest.fixture(scope="module")
def detector(weights: Path) -> Detector:
    return Detector(weights, device="cpu")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}.png" for number in range(len(SIZES))]
    for number, (path, size_hw) in enumerate(zip(paths, SIZES, strict=True)):
        Image.fromarray(made_image(*size_hw, seed=number)).save(path)
    return paths


def assert_equal(one: Result, other: Result) -> None:
    np.testing.assert_array_equal(one.boxes_xyxy, other.boxes_xyxy)
    np.testing.assert_array_equal(one.scores, other.scores)
    np.testing.assert_array_equal(one.classes, other.classes)
    assert one.size_hw == other.size_hw


def test_results_are_typed_and_sorted_and_inside(detector: Detector, files: list[Path]) -> None:
    results = list(detector(files[0].parent))
    assert [Path(result.source) for result in results] == files and sum(map(len, results)) > 20
    assert detector.names == NAMES and detector.imgsz == 96, "as the weights say"
    for result, (height, width) in zip(results, SIZES, strict=True):
        assert result.size_hw == (height, width) and result.frame is result.time_s is result.pixels is None
        assert result.boxes_xyxy.dtype == result.scores.dtype == np.float32 and result.classes.dtype == np.int64
        assert result.boxes_xyxy.shape == (len(result), 4) and (np.diff(result.scores) <= 0).all()
        assert (result.scores > 0.375).all() and (result.boxes_xyxy >= 0).all()
        assert (result.boxes_xyxy <= (width, height, width, height)).all()
        with pytest.raises(ValueError, match="read-only"):
            result.scores[:] = 0
        with pytest.raises(AttributeError):
            result.source = "other"  # type: ignore[misc]


def test_every_kind_of_image_gives_the_same(detector: Detector, files: list[Path]) -> None:
    path, pixels = files[0], made_image(*SIZES[0], seed=0)
    (expected,) = detector(path)
    kinds: list[Any] = [
        pixels,
        str(path),
        path.read_bytes(),
        Image.open(path),
        torch.from_numpy(pixels.transpose(2, 0, 1)),
    ]
    mixed = list(detector(kinds))
    assert [result.source for result in mixed] == ["image 0", str(path), "image 2", "image 3", "image 4"]
    with path.open("rb") as opened:
        (of_file,) = detector(opened)
        alone = [of_file, *detector([io.BytesIO(path.read_bytes())])]
    alone += [result for kind in kinds for result in detector(kind)]
    for found in (*mixed, *alone, *detector(pixels[..., ::-1], color="bgr")):
        assert_equal(found, expected)
    (swapped,) = detector(pixels[..., ::-1])
    assert len(expected) > 3 and not np.array_equal(swapped.scores, expected.scores)


def test_a_generator_is_read_image_by_image(detector: Detector, files: list[Path]) -> None:
    asked = []

    def camera() -> Iterator[Any]:
        for number in count():
            asked.append(number)
            yield made_image(32, 32, number)

    found = detector(camera())
    assert [next(found).source for _ in range(3)] == ["image 0", "image 1", "image 2"] and len(asked) == 3
    assert [result.source for result in detector(iter(files))] == list(map(str, files))
    assert list(detector([])) == []


@pytest.mark.parametrize("described", [ANCHORED, FREE], ids=["anchored", "free"])
def test_eight_threads_detect_what_one_detects(tmp_path: Path, described: Any) -> None:
    detector = Detector(checkpoint(tmp_path / "w.pt", described), conf_thres=0.1, device="cpu")
    images = [made_image(*SIZES[seed % len(SIZES)], seed=seed) for seed in range(24)]
    serial = [result for (result,) in map(detector, images)]
    with ThreadPoolExecutor(8) as pool:
        parallel = list(pool.map(lambda pixels: next(detector(pixels)), images))
    assert sum(map(len, serial)) > 50
    for one, other in zip(serial, parallel, strict=True):
        assert_equal(one, other)


def test_nothing_of_the_process_is_changed(weights: Path, files: list[Path]) -> None:
    def state() -> tuple[Any, ...]:
        root = logging.getLogger()
        backends = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
        return (
            *(torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.initial_seed()),
            *(torch.are_deterministic_algorithms_enabled(), backends, cv2.getNumThreads()),
            *(root.level, list(root.handlers), logging.getLogger("tessera").level, np.geterr()),
        )

    before = state()
    detector = Detector(weights, device="cpu")
    assert state() == before
    for _ in detector(files):
        assert state() == before, "while a caller has a result"
    assert state() == before


def test_thresholds(weights: Path, files: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def scores(**options: Any) -> list[tuple[int, float]]:
        results = Detector(weights, device="cpu", **options)(files[4])
        return [(box.class_id, box.score) for result in results for box in result]

    low = scores(conf_thres=0.25)
    assert {c for c, _ in low} == {0, 1, 2}
    # Classes do not suppress each other: what is above the threshold of its class stays.
    assert scores(conf_thres="auto") == [(c, s) for c, s in low if s > (0.25, 0.375, 0.5)[c]]
    assert scores() == [(c, s) for c, s in low if s > 0.375]
    assert scores(conf_thres=0.25, classes=[0, "star"]) == [(c, s) for c, s in low if c != 1]
    assert scores(conf_thres=0.25, classes="SQUARE") == [(c, s) for c, s in low if c == 1]
    assert scores(conf_thres="auto", classes="2") == [(c, s) for c, s in low if c == 2 and s > 0.5]
    assert scores(conf_thres=0.25, max_det=3) == low[:3]
    assert len(scores(conf_thres=0.25, agnostic_nms=True)) < len(low)
    assert scores(conf_thres=1) == []
    opened = open_model(str(weights), World(accelerator=Accelerator()))
    unknown = replace(opened, confidence=None, class_confidences=(), threshold=detection_threshold(None))
    assert Detector(unknown).rules.conf == Detector(unknown, conf_thres="auto").rules.conf == 0.25
    assert "has no confidence of each class" in caplog.text
    # Weights of earlier versions store 0 where F1 is best from there on.
    old = replace(unknown, confidence=0.0, class_confidences=(0.0, 0.4, 0.01), threshold=detection_threshold(0.0))
    assert Detector(old).rules.conf == 0.25
    assert Detector(old, conf_thres="auto").rules.class_confs == (0.25, 0.4, 0.25)
    assert "using 0.25 for 2 classes whose best F1 is at a confidence below 0.05: circle, star." in caplog.text


def test_results_can_be_drawn_cut_out_and_written_down(detector: Detector, files: list[Path]) -> None:
    pixels = made_image(*SIZES[4], seed=4)
    (result,) = detector(files[4])
    drawn = result.draw()  # the file is read once more
    assert drawn.shape == pixels.shape and (drawn != pixels).any()
    np.testing.assert_array_equal(result.draw(pixels), drawn)
    bare = result.draw(pixels, labels=False, line_width=1)
    assert (bare != pixels).sum() < (drawn != pixels).sum()
    for crop, (x1, y1, x2, y2) in zip(result.crops(), result.boxes_xyxy.tolist(), strict=True):
        left, top = int(x1), int(y1)
        assert (crop == pixels[top : top + crop.shape[0], left : left + crop.shape[1]]).all()
        assert crop.shape[1] >= x2 - x1 - 1e-3 and crop.shape[0] >= y2 - y1 - 1e-3
    plain = result.to_dict()
    assert (plain["source"], plain["height"], plain["width"]) == (str(files[4]), *SIZES[4])
    rows = plain["detections"]
    assert [row["name"] for row in rows] == [NAMES[c] for c in result.classes]
    np.testing.assert_array_equal(np.array([row["box_xyxy"] for row in rows], np.float32), result.boxes_xyxy)
    np.testing.assert_array_equal(np.array([row["score"] for row in rows], np.float32), result.scores)
    assert_equal(pickle.loads(pickle.dumps(result)), result)
    assert [box.name for box in result] == [row["name"] for row in rows] and "circle" in repr(result)


def test_images_in_memory_are_stored_on_request(detector: Detector) -> None:
    pixels = made_image(60, 80)
    (result,) = detector(pixels)
    with pytest.raises(UserError, match=r"image 0: the image was not stored.*keep_images=True"):
        result.draw()
    (kept,) = detector(pixels, keep_images=True)
    np.testing.assert_array_equal(kept.draw(), result.draw(pixels))
    with pytest.raises(UserError, match="found an image of 50 x 40 pixels, expected 80 x 60"):
        result.crops(made_image(40, 50))


def test_the_rule_for_more_than_8_bits_is_in_the_weights(weights: Path, tmp_path: Path) -> None:
    state = torch.load(weights, weights_only=True)
    save_checkpoint(tmp_path / "ruled.pt", {**state, "pixels": {"range": [0, 4095]}})
    torch.save({key: value for key, value in state.items() if key != "pixels"}, tmp_path / "older.pt")
    pixels = made_image(90, 120)
    deep = np.rint(pixels * (4095 / 255)).astype(np.uint16)
    (expected,) = Detector(weights, device="cpu")(pixels)
    ruled, older = (Detector(tmp_path / name, device="cpu") for name in ("ruled.pt", "older.pt"))
    cv2.imwrite(str(tmp_path / "deep.png"), deep[..., ::-1])
    for door in (deep, tmp_path / "deep.png", (tmp_path / "deep.png").read_bytes()):
        (found,) = ruled(door)
        assert_equal(found, expected)
    (dark,) = older(deep)
    assert not np.array_equal(dark.scores, expected.scores)


def test_unreadable_images(detector: Detector, files: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    files[2].write_bytes(b"\x89PNG\r\n\x1a\n broken")
    events = []
    assert len(list(detector(files, on_event=events.append))) == len(files) - 1
    assert [event.kind for event in events] == ["unreadable"] and str(files[2]) in events[0].message
    assert len(list(detector(files))) == len(files) - 1
    assert str(files[2]) in caplog.text
    with pytest.raises(UserError, match=r"2\.png: found 15 bytes that do not decode"):
        list(detector(files[2]))
    with pytest.raises(UserError, match="no such file"):
        detector(files[0].with_name("none.png"))  # at once, not when it is iterated
    with pytest.raises(UserError, match="expected an image"):
        next(detector(3.5))  # type: ignore[arg-type]


def test_results_store_no_image(detector: Detector) -> None:
    results = []
    for seed in range(3):
        pixels = made_image(40, 60, seed)
        alive = weakref.ref(pixels)
        results += detector(pixels)
        del pixels
        assert alive() is None


def test_numbers_and_names_of_classes() -> None:
    assert class_numbers(["7", "1", "SEVEN", "seven"], ("7", "seven", "Seven")) == (0, 1)
    assert class_numbers([], NAMES) is None
    unknown: list[Any] = ["circel", 3, -1, "3", "", True]
    for one in unknown:
        with pytest.raises(ConfigError, match=f"there is no class {one!r}"):
            class_numbers([one], NAMES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"imgsz": 16}, "imgsz: found 16, allowed is 32 to 8192"),
        ({"conf_thres": 1.5}, "conf_thres: found 1.5, expected a number from 0 to 1, or auto"),
        ({"iou_thres": -0.1}, "iou_thres: found -0.1"),
        ({"max_det": 0}, "max_det: found 0"),
        ({"device": "tpu"}, "--device tpu: expected cpu, mps, or numbers"),
        ({"device": "99"}, "there is no CUDA device 99"),
        ({"classes": "circel"}, "Did you mean 'circle'.* Expected numbers from 0 to 2, or names: circle"),
    ],
)
def test_wrong_options(weights: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Detector(weights, **{"device": "cpu", **options})


def test_images_that_break_off_are_reported(weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    detector = Detector(weights, device="cpu")
    encoded = cv2.imencode(".jpg", made_image(200, 300))[1].tobytes()
    (tmp_path / "cut.jpg").write_bytes(encoded[: len(encoded) // 2])
    for given, name in ((tmp_path / "cut.jpg",) * 2, ([encoded[: len(encoded) // 2]], "image 0")):
        caplog.clear()
        assert len(list(detector(given))) == 1
        assert f"{name}: damaged: the end of the file is missing" in caplog.text


def test_the_same_items_in_order_and_an_error_after_them() -> None:
    made_in = set()

    def items() -> Iterator[int]:
        for number in range(100):
            made_in.add(threading.current_thread().name)
            yield number
        raise OSError("gone")

    with prefetch(items()) as ahead:
        assert list(itertools.islice(ahead, 100)) == list(range(100))
        with pytest.raises(OSError, match="gone"):
            next(ahead)
    assert made_in == {"prefetch_0"}


@pytest.mark.parametrize("of_items", [False, True])
@pytest.mark.parametrize("at_once", [1, 3])
def test_detections_come_in_the_order_of_the_items(at_once: int, of_items: bool) -> None:
    """And so does an error, of the items or of what is done with one; no more is begun than a few."""
    barrier, begun = threading.Barrier(at_once), list[int]()

    def items() -> Iterator[int]:
        for number in itertools.count():
            if of_items and number == 20:
                raise OSError("gone")
            yield number

    def find(number: int) -> int:
        begun.append(number)
        if number < 9:
            barrier.wait(10)  # as many are at work at once
        if number == 20:
            raise OSError("gone")
        return -number

    before = threading.active_count()
    with detect_ahead(items(), find, at_once) as found:
        assert [next(found) for _ in range(20)] == [(number, -number) for number in range(20)]
        with pytest.raises(OSError, match="gone"):
            next(found)
    assert max(begun) <= 20 + at_once
    for thread in threading.enumerate():
        if thread.name.startswith("detection"):
            thread.join(10)
    assert threading.active_count() == before
