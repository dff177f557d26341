"""YOLOX's and YOLOv9's published files in every command: tuned on coco128, stopped, resumed, measured, exported, used.

The files are made by the reference data's rule (tests/families.py), so nothing that they find is an object, and mAP is
near 0: what is compared is what a file and its export find, and bits.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tessera.commands import detect, export, train, val
from tessera.data.source.annotations.coco_ids import COCO_NAMES
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.report.results import read_results, result_columns
from tests.system import jobs
from tests.system.tiny import assert_same_checkpoint, losses

LOSSES = {"yolox": ("box", "obj", "cls"), "yolov9": ("box", "cls", "dfl")}
SIZE = 64
LIMIT_S = 900  # of a command, on a machine that is busy with others
KEPT = {0: 0, 2: 1, 16: 2}  # person, car and dog, of the set of three classes
CPU: dict[str, Any] = {"device": "cpu", "workers": 0}
FEW: dict[str, Any] = {**CPU, "imgsz": SIZE, "batch_size": 8, "epochs": 1, "noplots": True, "loggers": "none"}
each_smallest = pytest.mark.parametrize("reference", ["yolox_tiny", "yolov9-t"])


@dataclass(frozen=True)
class Tuned:
    """An epoch on coco128: what it was told, its folder, and what it said."""

    wanted: tuple[str, ...]
    folder: Path
    said: str


def described(path: Path, root: Path, train: str, val: str, names: tuple[str, ...] = COCO_NAMES) -> Path:
    path.write_text(yaml.safe_dump({"path": str(root), "train": train, "val": val, "names": list(names)}))
    return path


@pytest.fixture(scope="session")
def pictures(shared: Path) -> list[Path]:
    """The first 16 images of coco128."""
    return sorted((shared / "coco128" / "images" / "train2017").iterdir())[:16]


@pytest.fixture(scope="session")
def few(pictures: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("few")
    (folder / "few.txt").write_text("\n".join(map(str, pictures)))
    return described(folder / "few.yaml", folder, "few.txt", "few.txt")


@pytest.fixture(scope="session")
def coco128(few: Path, shared: Path) -> Path:
    """All of coco128 for training, `pictures` for validation."""
    images = shared / "coco128" / "images" / "train2017"
    return described(few.with_name("coco128.yaml"), few.parent, str(images), "few.txt")


@pytest.fixture
def three(pictures: list[Path], shared: Path, tmp_path: Path) -> Path:
    """16 images with the objects of three classes alone."""
    root = tmp_path / "three"
    (root / "images").mkdir(parents=True)
    (root / "labels").mkdir()
    for path in pictures:
        shutil.copyfile(path, root / "images" / path.name)
        label = shared / "coco128" / "labels" / "train2017" / f"{path.stem}.txt"
        rows = [line.split() for line in label.read_text().splitlines()] if label.is_file() else []
        kept = [" ".join((str(KEPT[int(row[0])]), *row[1:])) for row in rows if int(row[0]) in KEPT]
        (root / "labels" / label.name).write_text("\n".join(kept))
    return described(tmp_path / "three.yaml", root, "images", "images", ("person", "car", "dog"))


@pytest.fixture(scope="session")
def tuned(
    family_files: Callable[[str], Path], coco128: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Tuned]:
    """An epoch of fine-tuning a family's file, by its reference; made once."""

    @cache
    def tune(reference: str) -> Tuned:
        project = tmp_path_factory.mktemp(reference)
        flags = f"--imgsz {SIZE} --batch-size 16 --epochs 1 --workers 1 --device cpu --loggers none"
        wanted = ("--data", str(coco128), "--weights", str(family_files(reference)), *flags.split())
        outcome = jobs.train(project, 1, *wanted, "--project", str(project), timeout=LIMIT_S)
        assert outcome.code == 0, outcome.said
        return Tuned(wanted, project / "exp", outcome.err)

    return tune


def best(run: Path) -> str:
    return str(run / "weights" / "best.pt")


def last(run: Path) -> dict[str, Any]:
    return dict(torch.load(run / "weights" / "last.pt", weights_only=True))


def names_of_losses(reference: str) -> tuple[str, ...]:
    (names,) = (names for family, names in LOSSES.items() if reference.startswith(family))
    return names


def taken(said: str) -> tuple[int, int]:
    found = re.search(r"Loaded (\d+) of (\d+) tensors", said)
    assert found, said
    return int(found[1]), int(found[2])


def head_of(state: dict[str, torch.Tensor]) -> str:
    return f"model.{max(int(name.split('.')[1]) for name in state)}."


@pytest.mark.parametrize("reference", ["yolox_tiny", pytest.param("yolov9-t", marks=pytest.mark.slow)])
def test_a_published_file_alone_is_tuned_and_its_best_measured(
    reference: str, family_files: Callable[[str], Path], few: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        found = train.run(data=str(few), weights=str(family_files(reference)), project=str(tmp_path), **FEW)
    count, of = taken(caplog.text)
    assert count == of and "hyp.tessera-known.yaml" in caplog.text
    table = read_results(tmp_path / "exp" / "results.csv")
    assert tuple(table.columns) == result_columns(names_of_losses(reference))
    assert table.map(math.isfinite).all().all()
    measured = val.run(weights=best(tmp_path / "exp"), data=str(few), imgsz=SIZE, project=str(tmp_path / "val"), **CPU)
    assert found is not None and measured.images == found.images == 16 and measured.objects == found.objects > 0
    assert measured.map == pytest.approx(found.map, abs=1e-3)


@pytest.mark.slow
@each_smallest
def test_an_epoch_trains_validates_saves_and_draws(reference: str, tuned: Callable[[str], Tuned]) -> None:
    run, names = tuned(reference), names_of_losses(reference)
    count, of = taken(run.said)
    assert count == of
    assert all(f"{name}_loss" in run.said for name in names), "columns of the progress bar"
    table = read_results(run.folder / "results.csv")
    assert tuple(table.columns) == result_columns(names)
    assert len(table) == 1 and table.map(math.isfinite).all().all()
    for picture in ("results.png", "labels.jpg", "confusion_matrix.png", "PR_curve.png", "val_batch0_pred.jpg"):
        assert (run.folder / picture).stat().st_size > 0, picture
    saved = last(run.folder)
    assert saved["anchors"] is None and saved["stride"] == [8.0, 16.0, 32.0]
    assert tuple(load_weights(Path(best(run.folder))).names) == COCO_NAMES


@pytest.mark.slow
@each_smallest
def test_stopped_inside_the_epoch_it_resumes_bit_by_bit(
    reference: str, tuned: Callable[[str], Tuned], tmp_path: Path
) -> None:
    whole, again = tuned(reference), tmp_path / "exp"
    wanted = (*whole.wanted, "--project", str(tmp_path))
    stopped = jobs.train(tmp_path, 1, *wanted, fault="0 step 4 SIGTERM", timeout=LIMIT_S)
    assert stopped.code == 143, stopped.said
    assert last(again)["step_in_epoch"] == 4, "inside the epoch"
    checkpoint = str(again / "weights" / "last.pt")
    resumed = jobs.train(tmp_path, 1, "--resume", checkpoint, "--device", "cpu", timeout=LIMIT_S)
    assert resumed.code == 0, resumed.said
    assert_same_checkpoint(again / "weights" / "last.pt", whole.folder / "weights" / "last.pt")
    assert losses(again).equals(losses(whole.folder))


@pytest.mark.slow
@each_smallest
def test_its_bare_network_is_exported(reference: str, tuned: Callable[[str], Tuned]) -> None:
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    weights = best(tuned(reference).folder)
    flags: dict[str, Any] = {"include": ["onnx"], "imgsz": SIZE, "device": "cpu", "raw": True}
    (written,) = export.run(weights=weights, **flags)  # raises where it differs
    assert written.is_file()


@pytest.mark.slow
@each_smallest
def test_its_best_and_the_exported_file_measure_and_detect_the_same(
    reference: str, tuned: Callable[[str], Tuned], few: Path, pictures: list[Path], tmp_path: Path
) -> None:
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    weights = tmp_path / "best.pt"
    shutil.copyfile(best(tuned(reference).folder), weights)
    (written,) = export.run(weights=str(weights), include=["onnx"], imgsz=SIZE, device="cpu")
    metrics, best_of_each, best_of_one = [], [], []
    for path in (weights, written):
        project = tmp_path / path.suffix[1:]
        common: dict[str, Any] = {"weights": str(path), "imgsz": SIZE, "project": str(project)}
        metrics.append(val.run(data=str(few), name="val", save_json=True, **common, **CPU))
        best_of_each.append(best_scores(json.loads((project / "val" / "predictions.json").read_text())))
        source = [str(pictures[0])]
        detect.run(source=source, name="detect", conf_thres="0.001", max_det=50, save_json=True, device="cpu", **common)
        assert (project / "detect" / pictures[0].name).stat().st_size > 0
        _, line = (project / "detect" / "predictions.jsonl").read_text().splitlines()
        best_of_one.append(max(found["score"] for found in json.loads(line)["detections"]))
    assert metrics[0].images == metrics[1].images == len(best_of_each[0]) == len(pictures)
    # Of made weights many cells find the same to the last digit, and a suppression may keep any of them: so no mAP.
    assert best_of_each[0] == pytest.approx(best_of_each[1], rel=1e-3)
    assert best_of_one[0] == pytest.approx(best_of_one[1], rel=1e-3)


def best_scores(found: list[dict[str, Any]]) -> dict[str, float]:
    scores: dict[str, float] = {}
    for one in found:
        key = str(one["image_id"])
        scores[key] = max(scores.get(key, 0.0), one["score"])
    return scores


@pytest.mark.slow
def test_the_body_of_yolox_is_taken_whole_under_the_free_head_and_stays_where_it_is_frozen(
    family_files: Callable[[str], Path], few: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = family_files("yolox_tiny")
    with caplog.at_level(logging.INFO):
        wanted: dict[str, Any] = {"cfg": "yolox-tiny-free.yaml", "freeze": [10], "project": str(tmp_path)}
        train.run(data=str(few), weights=str(file), **wanted, **FEW)
    original, trained = load_weights(file).state_dict, last(tmp_path / "exp")["model"]
    body = {name for name in trained if not name.startswith(head_of(trained))}
    assert body == {name for name in original if not name.startswith(head_of(original))}
    assert taken(caplog.text) == (len(body), len(trained))
    frozen = {name for name in body if int(name.split(".")[1]) < 10}
    parameters = {name for name in body if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    moved = {name for name in parameters if not torch.equal(original[name], trained[name])}
    assert frozen & parameters and moved == parameters - frozen


@pytest.mark.slow
@each_smallest
def test_some_of_the_classes_keep_their_outputs_and_have_the_recipe_of_known_ones(
    reference: str, family_files: Callable[[str], Path], three: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = family_files(reference)
    with caplog.at_level(logging.INFO):
        train.run(data=str(three), weights=str(file), project=str(tmp_path), **FEW)
    original, trained = load_weights(file).state_dict, last(tmp_path / "exp")["model"]
    other = {name for name in original if original[name].shape != trained[name].shape}
    assert original.keys() == trained.keys()
    assert len(other) == 2 * 3, "weights and biases of three levels"
    assert all(original[name].shape[0] == 80 and trained[name].shape[0] == 3 for name in other)
    assert taken(caplog.text) == (len(original), len(original)) and "hyp.tessera-known.yaml" in caplog.text
    assert tuple(load_weights(Path(best(tmp_path / "exp"))).names) == ("person", "car", "dog")
