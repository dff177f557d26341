"""The conversion of docs/datasets.md: what supervision writes is read as the same objects."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.data.make import write_dataset
from tests.data.source.made_yaml import build

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "datasets.md").read_text()
(SNIPPET,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_snippet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("supervision")
    yaml = write_dataset(tmp_path, {"train/a": "1 0.51 0.5 0.253 0.5\n0 0.25 0.5 0.5 1\n", "train/b": "", "val/c": ""})
    yaml.rename(tmp_path / "my.yaml")
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPET, "docs/datasets.md", "exec"), {})
    (tmp_path / "coco.yaml").write_text("path: .\ntrain: train.json\nval: train.json\n")
    before, after = build(tmp_path / "my.yaml"), build(tmp_path / "coco.yaml")
    assert after.names == before.names and len(after) == len(before) == 2
    for image in range(2):
        for one, other in zip(before.labels(image), after.labels(image), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
