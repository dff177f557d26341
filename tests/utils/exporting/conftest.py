"""One small detector, exported once: a session's tests share it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tessera.commands import export
from tests.utils.exporting.made import ANCHORED, checkpoint


@pytest.fixture(scope="session")
def made_pt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with anchors, three classes."""
    return checkpoint(tmp_path_factory.mktemp("exported") / "best.pt", ANCHORED)


@pytest.fixture(scope="session")
def made_onnx(made_pt: Path) -> Path:
    """Its whole file."""
    (path,) = export.run(weights=str(made_pt), imgsz=96, device="cpu")
    return path


@pytest.fixture(scope="session")
def session(made_onnx: Path) -> Any:
    """The whole file in ONNX Runtime."""
    return open_session(made_onnx)


def open_session(path: Path) -> Any:
    """A file in ONNX Runtime, one thread."""
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(str(path), options)
