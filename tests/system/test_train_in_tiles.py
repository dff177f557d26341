"""Training in tiles: what it evaluates, and its warnings."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tessera.analysis.charts import read_results
from tessera.commands import train, val
from tests.system.launch import ROOT, Command, Outcome, run_python
from tests.system.tiny import flags, make_data

TILES = ("--tile", "64", "--overlap", "0.25")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as val.py predicts an image: sums depend on it, and with them equal scores


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five images in nine tiles each."""
    return make_data(tmp_path_factory.mktemp("data"), train=5, val=3, size=160)


def metrics(outcome: Outcome) -> list[str]:
    assert outcome.code == 0, outcome.said
    return [line.split() for line in outcome.out.splitlines() if line.split()[:1] == ["all"]][-1]


@pytest.mark.slow
def test_a_run_in_tiles_evaluates_whole_images_as_val_does(data: Path, tmp_path: Path, command: Command) -> None:
    trained = run_python(ROOT / "train.py", *flags(data, tmp_path, "--epochs", "2", *TILES), env=ONE_THREAD)
    run = tmp_path / "exp"
    best = run / "weights" / "best.pt"
    words = ["--weights", str(best), *TILES, "--project", str(tmp_path / "val"), "--workers", "0", "--device", "cpu"]
    evaluated = command(val.main, *words)
    labels = (data.parent / "shapes" / "labels" / "val").glob("*.txt")
    objects = sum(len(label.read_text().splitlines()) for label in labels)
    assert metrics(trained)[1:3] == ["3", str(objects)], "images and objects, not tiles"
    assert metrics(trained) == metrics(evaluated)
    assert "--tile 64: train: 5 images split into 50 tiles" in trained.err
    assert "--source … --tile 64 --overlap 0.25" in trained.out
    assert yaml.safe_load((run / "opt.yaml").read_text()).items() >= {"tile": 64, "overlap": 0.25}.items()
    table = read_results(run / "results.csv")
    assert table.filter(regex="^(train|metrics)/").notna().all().all()
    assert table.filter(regex="^val/").isna().all().all(), "a whole image has no loss"
    checked = command(train.main, "--data", str(data), "--check-data", *TILES)
    assert "5 images split into 50 tiles" in checked.err, checked.said


def test_tiles_that_cut_nothing_are_warned_of(data: Path, tmp_path: Path, command: Command) -> None:
    outcome = command(train.main, *flags(data, tmp_path, "--epochs", "1", "--tile", "160"))
    assert outcome.code == 0, outcome.said
    assert "WARNING: --tile 160: no image of train is larger; training on whole images." in outcome.err
