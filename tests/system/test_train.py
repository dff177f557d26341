"""Whole trainings on a tiny dataset of synthetic shapes."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml

from tessera.analysis.charts import read_results
from tessera.analysis.search import start_of_search
from tessera.commands import detect, train, val
from tessera.utils.bit_depth import PixelRule
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.config import TrainConfig, load_hyp
from tessera.utils.ranks.world import World
from tessera.utils.report.results_csv import result_columns
from tessera.utils.training.data import warn_of_problems
from tessera.utils.training.validation import Validation
from tests.data.made_index import make_index
from tests.system import jobs
from tests.system.launch import ROOT, Command, Outcome, run_python
from tests.system.tiny import assert_same_checkpoint, flags, label_in_part, losses, make_data

ONE_EPOCH = "weights/best.pt"  # of the run that the tests share
RECIPE = ["hyp.short.yaml", "optimizer=Muon"]  # of the model
CURVES = [f"{name}_curve.png" for name in ("F1", "P", "R", "PR")]
IMAGES = ["results.png", "labels.jpg", "confusion_matrix.png", *CURVES, *(f"train_batch{i}.jpg" for i in range(3))]
IMAGES += ["val_batch0_labels.jpg", "val_batch0_pred.jpg"]
FLOAT32 = ("--sync-bn", "--amp", "off")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def one_epoch(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of one epoch on one rank, in float32; to be copied."""
    folder = tmp_path_factory.mktemp("one")
    assert train.main(flags(data, folder, "--epochs", "1", *FLOAT32)) == 0
    return folder / "exp"


def with_everything(data: Path, project: Path) -> list[str]:
    """Flags of a run of two epochs with plots, report and TensorBoard."""
    given = flags(data, project, "--epochs", "2", "--save-period", "1", "--cache", "ram", "--loggers", "tensorboard")
    given += ["--optimizer", "AdamW"]  # whose second epoch is the better one
    return [flag for flag in given if flag not in ("--noplots", "--noreport")]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Outcome]:
    """Such a run: its dataset, run directory and outcome."""
    folder = tmp_path_factory.mktemp("whole")
    ruled = folder / "ruled.yaml"
    ruled.write_text(data.read_text() + "pixels: {range: [0, 4095]}\n")
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # as in this process: sums depend on them
    outcome = run_python(ROOT / "train.py", *with_everything(ruled, folder / "runs"), env=threads)
    assert outcome.code == 0, outcome.said
    return ruled, folder / "runs" / "exp", outcome


@pytest.mark.slow
def test_the_same_run_twice_gives_the_same_report(
    whole: tuple[Path, Path, Outcome], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apart from times, which are in two elements, and the folder; the second run evaluates its best epoch again."""
    data, first, outcome = whole
    assert "Best epoch 1; validated in the last epoch" in outcome.out
    monkeypatch.setattr(Validation, "_last_evaluation_of", lambda self, model: None)
    again = command(train.main, *with_everything(data, tmp_path))
    assert "Best epoch 1; validated again" in again.out, again.said
    pages, left = [], []
    for run in (first, tmp_path / "exp"):
        files = [p for p in run.iterdir() if p.suffix in (".png", ".jpg", ".jsonl") or p.name == "images.csv"]
        left.append({p.name: p.read_bytes() for p in files if p.name != "results.png"})  # which has times
        page = (run / "report.html").read_text().replace(str(run.parent), "")
        timed = r'<div[^>]* id="(?:speed|times)">.*?(?=</div>\n</section>)'
        assert len(re.findall(timed, page, re.DOTALL)) == 2
        pages.append(re.sub(timed, "", page, flags=re.DOTALL))
    assert pages[0] == pages[1]
    assert left[0] == left[1] and {"val_batch0_pred.jpg", "errors.jsonl", "images.csv"} <= left[0].keys()


@pytest.mark.slow
def test_a_run_leaves_everything_a_user_expects(
    whole: tuple[Path, Path, Outcome], data: Path, tmp_path: Path, command: Command
) -> None:
    ruled, run, outcome = whole
    for name in (*IMAGES, "opt.yaml", "hyp.yaml"):
        assert (run / name).stat().st_size > 0, name
    assert sorted(p.name for p in (run / "weights").iterdir()) == ["best.pt", "epoch0.pt", "epoch1.pt", "last.pt"]
    assert list(run.glob("events.out.tfevents.*"))
    header = (run / "results.csv").read_text().splitlines()[0]
    assert header.split(",") == list(result_columns(("box", "obj", "cls")))
    assert yaml.safe_load((run / "opt.yaml").read_text())["hyp"] == RECIPE
    assert yaml.safe_load((run / "hyp.yaml").read_text()) == load_hyp(*RECIPE).as_dict()
    assert outcome.err.count("too few for a model from scratch. Use more --epochs") == 1
    table = read_results(run / "results.csv")
    assert table["epoch"].tolist() == [0, 1]
    assert table.notna().all().all()
    assert str(run) in outcome.out
    assert "Traceback" not in outcome.err
    report = (run / "report.html").read_text().replace("<wbr>", "")
    assert f"Report: {run / 'report.html'}" in outcome.out
    for said in (
        "Curves of the training",
        '<span class="flag">--cfg</span> yolov5n.yaml',
        "epochs were validated",
        "shapes/labels/val",
    ):
        assert said in report, said

    weights = ("--data", str(ruled), "--weights", str(run / "weights" / "best.pt"), "--project", str(tmp_path / "val"))
    more = "--imgsz 64 --device cpu --workers 0 --verbose --save-txt --save-conf --save-json"
    measured = command(val.main, *weights, *more.split())
    assert measured.code == 0, measured.said
    last_line = [line for line in outcome.out.splitlines() if line.split()[:1] == ["all"]][-1]
    assert last_line in measured.out, "val.py measures what train.py reported"
    assert len(list((tmp_path / "val" / "exp" / "labels").glob("*.txt"))) == 8
    assert (tmp_path / "val" / "exp" / "predictions.json").is_file()
    report = (tmp_path / "val" / "exp" / "report.html").read_text()
    assert "validation report" in report and "Curves of the training" not in report

    last = [shlex.split(line) for line in outcome.out.splitlines()[-2:]]
    best = str(run / "weights" / "best.pt")
    assert last[0] == ["Detect:", "uv", "run", "detect.py", "--weights", best, "--source", "…"]
    assert last[1] == ["Export:", "uv", "run", "--extra", "export", "export.py", "--weights", best]
    images = data.parent / "shapes" / "images" / "val"
    found = detect.run(weights=best, source=str(images), nosave=True, device="cpu")
    assert found.images == 8, "best.pt holds all that detection needs"
    assert load_weights(Path(best)).pixels == PixelRule("range", 0, 4095)


def test_warnings_of_the_data_name_what_lists_them_all(caplog: pytest.LogCaptureFixture) -> None:
    sound = make_index([(24, 32), (32, 24)])
    warn_of_problems("my set.yaml", sound, sound)
    assert not caplog.messages
    warn_of_problems("my set.yaml", sound, dataclasses.replace(sound, problems=("a.txt:1: class 9",)))
    assert len(caplog.messages) == 2 and "a.txt:1: class 9" in caplog.messages[0]
    assert caplog.messages[1].startswith("`train.py --data 'my set.yaml' --check-data`")


@pytest.mark.parametrize(
    ("ranks", "hyp", "more"),
    [
        (1, " ".join(RECIPE), ()),
        pytest.param(
            *(1, "hyp.tessera-backbone.yaml", ("--cfg", "tessera-lite0.yaml", "--weights", "imagenet")),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(1, "hyp.tessera-short.yaml", ("--cfg", "yolox-nano.yaml", "--teacher", ONE_EPOCH)), marks=pytest.mark.slow
        ),
        pytest.param(2, "hyp.known.yaml", ("--weights", ONE_EPOCH), marks=pytest.mark.slow),
    ],
)
def test_two_epochs_and_one_more_are_three(
    tmp_path: Path, one_epoch: Path, ranks: int, hyp: str, more: tuple[str, ...], command: Command
) -> None:
    """With objects, ignored regions, and images that label one class alone."""
    data = make_data(tmp_path)
    label_in_part(data)
    more = tuple(str(one_epoch / flag) if flag == ONE_EPOCH else flag for flag in more)
    wanted = flags(data, tmp_path / "whole", "--epochs", "3", "--save-period", "1", *more)
    start = partial(command, train.main) if ranks == 1 else partial(jobs.train, tmp_path, ranks)
    whole = start(*wanted)
    assert whole.code == 0, whole.said
    half = tmp_path / "half" / "exp"
    shutil.copytree(tmp_path / "whole" / "exp", half)
    for name in ("best.pt", "last.pt"):
        shutil.copy(tmp_path / "whole" / "exp" / "weights" / "epoch1.pt", half / "weights" / name)
    # Rows that the resumed run will make again must not stay beside its own.
    resumed = start("--resume", str(half / "weights" / "last.pt"), "--device", "cpu", "--workers", "2")
    assert resumed.code == 0, resumed.said
    assert_same_checkpoint(half / "weights" / "last.pt", tmp_path / "whole" / "exp" / "weights" / "last.pt")
    assert losses(half).equals(losses(tmp_path / "whole" / "exp"))
    for outcome in (whole, resumed):
        assert any(line.startswith(f"Recipe:   {hyp}") for line in outcome.err.splitlines()), outcome.said
        assert "; 12 training images with some classes labelled only" in outcome.err, outcome.said
    assert read_results(half / "results.csv")["epoch"].tolist() == [0, 1, 2]
    if "--teacher" in more:
        refused = start(*wanted, "--exist-ok", "--teacher", str(tmp_path / "whole" / "exp" / "weights" / "best.pt"))
        assert refused.code == 2 and "an input in the output directory" in refused.err, refused.said


def test_a_finished_run_can_be_extended(one_epoch: Path, tmp_path: Path, command: Command) -> None:
    shutil.copytree(one_epoch, tmp_path / "exp")
    resume = ["--resume", "--project", str(tmp_path), "--device", "cpu"]
    refused = command(train.main, *resume)
    assert refused.code == 1
    assert "finished epochs: 1, --epochs 1" in refused.err and "larger --epochs" in refused.err
    assert train.main([*resume, "--epochs", "2"]) == 0
    assert read_results(tmp_path / "exp" / "results.csv")["epoch"].tolist() == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        "--multi-scale --rect --label-smoothing 0.1 --freeze 3",
        "--image-weights --optimizer AdamW --cos-lr --single-cls --close-mosaic 1",
        "--nosave --noval --deterministic --amp bf16 --cache disk --noautoanchor",
    ],
)
def test_every_flag_trains(data: Path, tmp_path: Path, extra: str) -> None:
    assert train.main(flags(data, tmp_path, "--epochs", "2", *extra.split())) == 0
    assert losses(tmp_path / "exp").notna().all().all()


@pytest.mark.slow
def test_patience_stops_all_ranks_together(one_epoch: Path, tmp_path: Path) -> None:
    shutil.copytree(one_epoch, tmp_path / "exp")
    last = tmp_path / "exp" / "weights" / "last.pt"
    state = torch.load(last, weights_only=True)
    state["stopper"] = {"best_fitness": 0.9, "best_epoch": 0}  # what no tiny training reaches again
    torch.save(state, last)
    outcome = jobs.train(tmp_path, 2, "--resume", str(last), "--epochs", "30", "--patience", "2", "--device", "cpu")
    assert outcome.code == 0, outcome.said
    assert read_results(tmp_path / "exp" / "results.csv")["epoch"].tolist() == [0, 1, 2]
    assert outcome.err.count("Stopped early") == 1
    assert "Best epoch 0; validated again" in outcome.out


@pytest.mark.slow
def test_evolve_searches_and_resumes(data: Path, tmp_path: Path, command: Command) -> None:
    args = flags(data, tmp_path / "search", "--epochs", "1", "--evolve")
    first = command(train.main, *args, "1")
    assert first.code == 0, first.said
    more = command(train.main, *args, "2", "--resume")
    assert more.code == 0, more.said
    folder = tmp_path / "search" / "exp"
    assert len((folder / "evolve.csv").read_text().splitlines()) == 3
    assert yaml.safe_load((folder / "opt.yaml").read_text())["hyp"] == RECIPE
    assert "Trial 1 of 2" in more.err and "Trial 0" not in more.err
    files = ["evolve.csv", "hyp_evolved.yaml", "journal.log", "opt.yaml", "search.md"]
    assert sorted(p.name for p in folder.iterdir()) == files


@pytest.mark.slow
def test_a_pruned_training_ends_on_all_ranks_together(data: Path, tmp_path: Path) -> None:
    args = flags(data, tmp_path, "--epochs", "2", "--evolve", "2")
    outcome = jobs.train(tmp_path, 2, *args, fault="0 report 3 prune")  # epoch 0 of trial 1
    assert outcome.code == 0, outcome.said
    assert outcome.err.count("Pruned: ") == 1
    table = pd.read_csv(tmp_path / "exp" / "evolve.csv")
    assert table["end"].tolist() == ["measured", "pruned"]
    assert table["objective"][1] == pytest.approx(table["fitness"][1])


def test_a_search_leaves_every_rank_its_own_flags(tmp_path: Path) -> None:
    """Hosts may have the data in different places."""
    told: list[Any] = []

    class First(World):
        def run_on_main(self, work: Callable[[], Any]) -> Any:
            told.append(work())
            return told[-1]

    class Second(World):
        def run_on_main(self, work: Callable[[], Any]) -> Any:
            return told.pop(0)

    here, there = (str(make_data(tmp_path / host, train=2, val=2)) for host in ("here", "there"))
    start_of_search(TrainConfig(cfg="yolov5n.yaml", data=here, evolve=1), First())
    asked = TrainConfig(cfg="yolov5n.yaml", data=there, evolve=1, workers=3)
    config, hyp, unread = start_of_search(asked, Second())
    assert (config.data, config.workers) == (there, 3)
    assert config.hyp == tuple(RECIPE) and hyp == load_hyp(*RECIPE) and "topk" in unread
