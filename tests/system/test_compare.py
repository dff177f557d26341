"""compare.py: the same on any number of ranks, what it writes, its exit codes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tessera
from tessera.commands import compare, train
from tessera.deploy.foreign.safetensors_file import save_safetensors
from tessera.utils.checkpoints.initial_model import build_model
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.config import TrainConfig, load_hyp
from tests.system.launch import ROOT, Command, torchrun
from tests.system.tiny import describe_coco128, flags, make_data

COMPARE = ROOT / "compare.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    data = make_data(folder, train=8, val=9)
    for seed in ("1", "2"):
        more = ("--epochs", "1", "--seed", seed, "--name", f"seed{seed}", "--noval")
        assert train.main(flags(data, folder / "runs", *more)) == 0
    return folder / "runs" / "seed1", folder / "runs" / "seed2", data


def args(project: Path, *more: str) -> list[str]:
    return ["--device", "cpu", "--workers", "0", "--max-det", "30", "--project", str(project), *more]


def result(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "compare.json").read_text())
    del content["ms"]
    for run in content["a"] + content["b"]:
        del run["ms"]
    return content


@pytest.mark.slow
def test_two_ranks_compare_as_one(runs: tuple[Path, Path, Path], tmp_path: Path, command: Command) -> None:
    a, b, data = runs
    alone = command(compare.main, str(a), str(b), *args(tmp_path, "--name", "alone"))
    assert alone.code == 0, alone.said
    together = torchrun(COMPARE, str(a), str(b), *args(tmp_path, "--name", "together"))
    assert together.code == 0, together.said
    one, two = result(tmp_path / "alone"), result(tmp_path / "together")
    assert one == two
    assert one["schema"] == "tessera.compare/1" and one["images"] == 9
    assert one["verdict"] in alone.out and one["verdict"] in together.out
    images = [sorted(path.name for path in (tmp_path / name).rglob("*.jpg")) for name in ("alone", "together")]
    assert images[0] == images[1]
    for side, run in (("a", a), ("b", b)):
        assert one[side][0]["file"] == str(run / "weights" / "best.pt"), "a run's folder means its best checkpoint"
        own = {"weights": str(run / "weights" / "best.pt"), "data": str(data), "project": str(tmp_path)}
        measured = tessera.val(**own, max_det=30, workers=0, device="cpu")
        assert one["map"][side] == pytest.approx(measured.map, abs=1e-12)
        assert one["precision"][side] == pytest.approx(measured.precision, abs=1e-12)
    assert sum(one["objects"].values()) == sum(each["objects"] for each in one["classes"]) == measured.objects


def test_requirements_decide_the_exit_code(runs: tuple[Path, Path, Path], tmp_path: Path, command: Command) -> None:
    """The same file twice: allowed, said, and no difference."""
    a, best = str(runs[0]), str(runs[0] / "weights" / "best.pt")
    met = command(compare.main, a, best, *args(tmp_path), "--require", "map >= 0", "map.low >= 0", "mb <= 0")
    assert met.code == 0 and met.out.count(": met, found") == 3, met.said
    assert "are the same file." in met.err and "A and B have equal metrics in every class." in met.out
    unmet = command(compare.main, a, best, *args(tmp_path), "--require", "map >= 0", "map > 0.01")
    assert unmet.code == 1 and '--require "map > 0.01": not met, found +0.0000' in unmet.err, unmet.said
    met_by = json.loads((tmp_path / "exp2" / "compare.json").read_text())["requirements"]
    assert [one["met"] for one in met_by] == [True, False]


def test_classes_of_each_side_are_matched_by_name(shared: Path, tmp_path: Path) -> None:
    """B is A with the outputs of its classes, and their names, in another order."""
    a = shared / "weights" / "yolov5n.pt"
    weights = load_weights(a)
    moved = build_model(TrainConfig(), load_hyp("hyp.short.yaml"), weights.names[::-1], weights)
    b = tmp_path / "moved.safetensors"
    save_safetensors(b, weights._replace(state_dict=moved.state_dict(), names=moved.names), {}, half=False)
    images = sorted((shared / "coco128" / "images" / "train2017").iterdir())[:6]
    (tmp_path / "few.txt").write_text("\n".join(map(str, images)))
    data = describe_coco128(tmp_path, shared)
    data.write_text(data.read_text().replace("images/train2017", str(tmp_path / "few.txt")))
    common = {"device": "cpu", "workers": 0, "imgsz": 128, "project": str(tmp_path)}
    found = tessera.compare(str(a), str(b), data=str(data), **common)
    assert found.map.a > 0 and found.map.difference == pytest.approx(0, abs=1e-6)
