"""A whole run of the anchor-free head with both branches, class weights and balanced sampling."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml

from tessera.analysis.charts import read_results
from tessera.commands import val
from tessera.utils.report.results_csv import result_columns
from tests.system.jobs import train
from tests.system.launch import ROOT, Command
from tests.system.tiny import flags, make_data

pytestmark = pytest.mark.slow

LOSSES = ("box", "cls", "dfl", "one_box", "one_cls", "one_dfl")


class Run(NamedTuple):
    """A finished training: its flags, run directory, dataset and log."""

    wanted: tuple[str, ...]
    folder: Path
    data: Path
    said: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("free")
    data, cfg, hyp = make_data(folder), folder / "changed.yaml", folder / "hyp.yaml"
    described = (ROOT / "models" / "tessera-n.yaml").read_text()
    cfg.write_text(described.replace("DetectFree, [nc]", "DetectFree, [nc, 16, 1, true]"))
    recipe = (ROOT / "data" / "hyps" / "hyp.scratch-low.yaml").read_text()
    hyp.write_text(recipe + yaml.safe_dump({"class_weights": {"star": 5, "circle": 0.5}}))
    wanted = ("--cfg", str(cfg), "--epochs", "2", "--hyp", str(hyp), "--sampling", "balanced")
    plotted = [flag for flag in flags(data, folder / "whole", *wanted) if flag != "--noplots"]
    whole = train(folder, 1, *plotted)
    assert whole.code == 0, whole.said
    return Run(wanted, folder / "whole" / "exp", data, whole.err)


def test_its_losses_are_reported_and_drawn(run: Run) -> None:
    assert all(f"{name}_loss" in run.said for name in LOSSES), "columns of the progress bar"
    assert run.said.count("Class weights from") == 1 == run.said.count("--sampling balanced: each image is sampled")
    table = read_results(run.folder / "results.csv")
    assert tuple(table.columns) == result_columns(LOSSES)
    assert table.notna().all().all()
    for image in ("results.png", "labels.jpg", "confusion_matrix.png", "PR_curve.png", "val_batch0_pred.jpg"):
        assert (run.folder / image).stat().st_size > 0, image
    last = torch.load(run.folder / "weights" / "last.pt", weights_only=True)
    assert last["anchors"] is None and last["stride"] == [8.0, 16.0, 32.0]


def test_it_is_validated_with_and_without_nms(run: Run, tmp_path: Path, command: Command) -> None:
    words = ["--weights", str(run.folder / "weights" / "best.pt"), "--data", str(run.data), "--workers", "0"]
    words += ["--imgsz", "64", "--device", "cpu", "--project", str(tmp_path)]
    assert command(val.main, *words, "--augment", "--half", "--save-json").code == 0
    assert (tmp_path / "exp" / "predictions.json").is_file()
    assert command(val.main, *words, "--end2end").code == 0
    refused = command(val.main, *words, "--end2end", "--augment")
    assert refused.code == 2 and refused.err.count("Leave out one of them") == 1, refused.said
