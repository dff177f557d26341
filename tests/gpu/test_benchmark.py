"""The benchmark of `make gpu`, in small: that it runs and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.gpu import main


@pytest.mark.parametrize("more", [[], ["--stand-in"]], ids=["chosen device", "stand-in"])
def test_the_benchmark_prints_a_table_and_writes_it(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--cfg", "tiny", "--imgsz", "64", "--batch", "4", "--images", "8", "--steps", "1", "--rounds", "1"]
    main([*small, *more, "--no-compile", "--json", str(tmp_path / "gpu.json")])
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["group"] for row in found["rows"]} == {"training step", "loader", "validation"}
    assert not more or found["device"] == "stand-in"
    printed = capsys.readouterr().out
    assert all(row["images_per_s"] > 0 and row["name"] in printed for row in found["rows"])
