"""YOLOX's and YOLOv9's published files in every command: fine-tuned, validated, exported, used for detection.

The files are made by the reference data's rule (tests/families.py), so nothing that they predict is an object, and mAP
is near 0: what is compared is what a file and its export predict, and bits. YOLOX-Nano's are the published weights.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tessera.analysis.charts import read_results
from tessera.commands import train, val
from tessera.data.labels.coco import COCO_NAMES
from tessera.models.model_yaml import MODELS_DIR
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.report.results_csv import result_columns

LOSSES = {"yolox_nano": ("box", "obj", "cls"), "yolov9-t": ("box", "cls", "dfl")}
SIZE = 64
CPU: dict[str, Any] = {"device": "cpu", "workers": 0}
FEW: dict[str, Any] = {**CPU, "imgsz": SIZE, "batch_size": 8, "epochs": 1, "noplots": True, "loggers": "none"}


@pytest.fixture(scope="session")
def images(shared: Path) -> list[Path]:
    """The first 16 images of coco128."""
    return sorted((shared / "coco128" / "images" / "train2017").iterdir())[:16]


@pytest.fixture(scope="session")
def few(images: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("few")
    (folder / "few.txt").write_text("\n".join(map(str, images)))
    content = {"path": str(folder), "train": "few.txt", "val": "few.txt", "names": list(COCO_NAMES)}
    (folder / "few.yaml").write_text(yaml.safe_dump(content))
    return folder / "few.yaml"


def taken(said: str) -> tuple[int, int]:
    found = re.search(r"Loaded (\d+) of (\d+) tensors", said)
    assert found, said
    return int(found[1]), int(found[2])


def head_of(state: dict[str, torch.Tensor]) -> str:
    return f"model.{max(int(name.split('.')[1]) for name in state)}."


@pytest.mark.parametrize("reference", ["yolox_nano", pytest.param("yolov9-t", marks=pytest.mark.slow)])
def test_a_published_file_is_fine_tuned_and_its_best_checkpoint_evaluated(
    reference: str, family_files: Callable[[str], Path], few: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        found = train.run(data=str(few), weights=str(family_files(reference)), project=str(tmp_path), **FEW)
    count, of = taken(caplog.text)
    assert count == of and "hyp.tessera-known.yaml" in caplog.text
    table = read_results(tmp_path / "exp" / "results.csv")
    assert tuple(table.columns) == result_columns(LOSSES[reference])
    assert table.map(math.isfinite).all().all()
    best = str(tmp_path / "exp" / "weights" / "best.pt")
    evaluated = val.run(weights=best, data=str(few), imgsz=SIZE, project=str(tmp_path / "val"), **CPU)
    assert found is not None and evaluated.images == found.images == 16 and evaluated.objects == found.objects > 0
    assert evaluated.map == pytest.approx(found.map, abs=1e-3)


@pytest.mark.slow
def test_the_backbone_of_yolox_is_loaded_whole_under_the_free_head_and_stays_where_it_is_frozen(
    family_files: Callable[[str], Path], few: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = family_files("yolox_nano")
    with caplog.at_level(logging.INFO):
        cfg, plain = tmp_path / "yolox-nano-free.yaml", (MODELS_DIR / "yolox-nano.yaml").read_text()
        cfg.write_text(plain.replace("DetectYOLOX, [nc, DepthwiseSeparableConv]", "DetectFree, [nc]"))
        wanted: dict[str, Any] = {"cfg": str(cfg), "freeze": [10], "project": str(tmp_path)}
        train.run(data=str(few), weights=str(file), **wanted, **FEW)
    original = load_weights(file).state_dict
    trained = torch.load(tmp_path / "exp" / "weights" / "last.pt", weights_only=True)["model"]
    body = {name for name in trained if not name.startswith(head_of(trained))}
    assert body == {name for name in original if not name.startswith(head_of(original))}
    assert taken(caplog.text) == (len(body), len(trained))
    frozen = {name for name in body if int(name.split(".")[1]) < 10}
    parameters = {name for name in body if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    moved = {name for name in parameters if not torch.equal(original[name], trained[name])}
    assert frozen & parameters and moved == parameters - frozen
