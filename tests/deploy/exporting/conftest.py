"""Fixtures for exports: one small detector, exported once a session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from tessera.commands import export
from tessera.deploy.exporting.detector_graph import Nodes
from tests.deploy.exporting.made import ANCHORED, checkpoint


@pytest.fixture(scope="session")
def made_pt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with anchors, three classes."""
    return checkpoint(tmp_path_factory.mktemp("exported") / "best.pt", ANCHORED)


@pytest.fixture(scope="session")
def made_onnx(made_pt: Path) -> Path:
    (path,) = export.run(weights=str(made_pt), imgsz=96, device="cpu")
    return path


@pytest.fixture(scope="session")
def session(made_onnx: Path) -> Any:
    return open_session(made_onnx)


def session_of(nodes: Nodes, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    graph = ir.Graph(
        inputs, outputs, nodes=nodes.nodes, initializers=nodes.initializers, opset_imports={"": 18}, name="part"
    )
    return open_session(ir.to_proto(ir.Model(graph, ir_version=8)).SerializeToString())


def open_session(file: Path | bytes) -> Any:
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(file if isinstance(file, bytes) else str(file), options)
