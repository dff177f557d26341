"""The table of published weights: what it lists, and what a name means."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tessera.deploy.exporting.flags import ExportConfig
from tessera.deploy.foreign.published import (
    PUBLISHED,
    PublishedWeights,
    licence_of,
    published_table,
    published_weights,
    suggestion,
)
from tessera.deploy.inference.flags import DetectConfig
from tessera.models.detector import DetectionModel, count_parameters
from tessera.utils.config import TrainConfig
from tessera.utils.errors import ConfigError
from tessera.utils.flags.options import Options
from tessera.utils.flags.val import ValConfig


def test_every_file_is_in_the_table_with_what_is_known_of_it() -> None:
    lines = published_table().splitlines()
    rows = {line.split()[0]: line for line in lines[1 : len(PUBLISHED) + 1]}
    assert list(rows) == [weights.name for weights in PUBLISHED] and lines[len(PUBLISHED) + 1] == ""
    assert re.split(r" {2,}", rows["yolox_tiny.pth"]) == [
        *("yolox_tiny.pth", "5.1 M", "40.8 MB", "Apache-2.0", "32.8", "416 px", "yolox-tiny.yaml")
    ]
    assert re.split(r" {2,}", rows["v9-t.pt"]) == ["v9-t.pt", "2.4 M", "-", "MIT", "38.3", "640 px", "yolov9-t.yaml"]
    assert "AGPL-3.0" in rows["yolov5x6.pt"] and "1280 px" in rows["yolov5x6.pt"]
    assert len({line.index("px") for line in rows.values()}) == 1  # columns
    assert max(map(len, lines)) <= 110


def test_facts_have_their_form() -> None:
    assert len(PUBLISHED) == len({weights.name for weights in PUBLISHED}) == 20
    for weights in PUBLISHED:
        assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/releases/download/[\w.-]+/", weights.folder)
        assert weights.url == weights.folder + weights.name
        assert weights.sha256 == "" or re.fullmatch("[0-9a-f]{64}", weights.sha256)
        assert weights.sha256 == "" or weights.size is not None
        # Parameters in float16 at least; at most two copies in float32, and their names.
        assert weights.size is None or 1.9 * weights.millions < weights.size / 1e6 < 8.1 * weights.millions + 0.35


@pytest.mark.parametrize("weights", PUBLISHED, ids=lambda weights: weights.name)
def test_the_model_of_a_file_is_there_and_as_large_as_said(weights: PublishedWeights) -> None:
    with torch.device("meta"):
        model = DetectionModel(weights.cfg)
    assert count_parameters(model) == pytest.approx(1e6 * weights.millions, rel=0.03)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        *((weights.name, weights.name) for weights in PUBLISHED),
        *((weights.stem, weights.name) for weights in PUBLISHED),
        *((Path(weights.cfg).stem, weights.name) for weights in PUBLISHED),
        ("yolox_s.pt", "yolox_s.pth"),
        ("yolox-s.pth", "yolox_s.pth"),
        ("yolov9-t.pt", "v9-t.pt"),
        ("yolov9-t.yaml", None),
        ("yolov9t", None),
        ("yolox_s.onnx", None),
        ("", None),
    ],
)
def test_names(typed: str, name: str | None) -> None:
    found = published_weights(typed)
    assert (found and found.name) == name


def test_no_two_files_share_a_spelling_and_a_family_has_one_licence() -> None:
    spellings = [spelling for weights in PUBLISHED for spelling in {weights.stem, Path(weights.cfg).stem}]
    assert len(spellings) == len(set(spellings))
    licences = {"YOLOX": "Apache-2.0", "YOLOv9": "MIT", "YOLOv5": "AGPL-3.0"}
    assert {weights.family: weights.licence for weights in PUBLISHED} == licences
    assert all(weights.licence == licence_of(weights.family) for weights in PUBLISHED)


def test_files_of_the_users_own_are_suggested_within_the_family() -> None:
    assert suggestion("yolox_custm.pt", ["yolov5_custom.pt", "yolox_custom.pt"]) == " Did you mean 'yolox_custom.pt'?"
    assert suggestion("yolox_custm.pt", ["yolov5_custom.pt"]).startswith(" Published ones of YOLOX: yolox_nano.pth, ")
    assert suggestion("bst.pt", ["best.pt"]) == " Did you mean 'best.pt'?"
    assert suggestion("bst.pt") == suggestion("") == ""


@pytest.mark.parametrize("options", [TrainConfig, ValConfig, DetectConfig, ExportConfig])
def test_the_list_is_printed_and_is_no_field(options: type[Options], capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--list-weights", "--list_weights"):
        with pytest.raises(SystemExit) as ended:
            options.from_args([flag])
        assert ended.value.code == 0 and capsys.readouterr().out == published_table() + "\n"
    assert not any("list" in key for key in options().as_dict())
    with pytest.raises(ConfigError, match="unknown option 'list_weights'"):
        options.named({"list_weights": True})
