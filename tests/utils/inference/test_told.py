"""What a detector tells from Python, and what stays quiet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from tessera.utils.inference.detector import Detector
from tests.utils.exporting.made import ANCHORED, checkpoint, picture


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("weights") / "best.pt", ANCHORED)


def test_pictures_that_break_off_or_come_dark_are_told(
    weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    detector = Detector(weights, device="cpu")
    encoded = cv2.imencode(".jpg", picture(200, 300))[1].tobytes()
    (tmp_path / "cut.jpg").write_bytes(encoded[: len(encoded) // 2])
    for given, name in ((tmp_path / "cut.jpg",) * 2, ([encoded[: len(encoded) // 2]], "picture 0")):
        caplog.clear()
        assert len(list(detector(given))) == 1
        assert f"{name}: damaged: the end of the file is missing" in caplog.text
    caplog.clear()
    dark = picture(40, 50).astype(np.uint16) * 16
    assert len(list(Detector(weights, device="cpu")([dark, dark]))) == 2
    assert caplog.text.count("comes dark") == 1


def test_an_overlap_without_tiles_is_told(weights: Path, caplog: pytest.LogCaptureFixture) -> None:
    Detector(weights, device="cpu", tile=64, overlap=0.5)
    Detector(weights, device="cpu")
    assert "overlap" not in caplog.text
    Detector(weights, device="cpu", overlap=0.5)
    assert "overlap 0.5: without effect" in caplog.text


@pytest.mark.parametrize("level", ["", "3"])
def test_opencv_is_quiet_where_it_was_imported_before(level: str) -> None:
    code = (
        "import cv2\nfrom tessera.utils.machine.opencv import cv2 as same\n"
        "print(getattr(same.utils, 'logging', same).getLogLevel())"
    )
    environment = {key: value for key, value in os.environ.items() if key != "OPENCV_LOG_LEVEL"}
    environment |= {"OPENCV_LOG_LEVEL": "WARNING"} if level else {}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == (level or "1")
