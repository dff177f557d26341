"""`val.py --find-errors`: the list, the page and the copy; the same on more ranks; out of fold; refusals."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tessera.commands import train, val
from tessera.data.source.index import build_index
from tessera.data.source.spec import load_spec
from tessera.utils.errors import ConfigError
from tessera.utils.flags.val import ValConfig
from tests.system.launch import ROOT, Command, torchrun
from tests.system.tiny import flags, make_data
from tests.utils.suspects.planted import plant


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of val.py: a run of one epoch, on data that has a few labels twice."""
    folder = tmp_path_factory.mktemp("trained")
    data = make_data(folder, train=16, val=9)
    for split in ("train", "val"):
        plant(folder / "shapes" / "labels" / split, 0.1, 6, kinds=["duplicate"])
    assert train.main(flags(data, folder / "runs", "--epochs", "1")) == 0
    weights = folder / "runs" / "exp" / "weights" / "best.pt"
    return ["--weights", str(weights), "--device", "cpu", "--workers", "0"]


def listed(run: Path) -> list[dict[str, object]]:
    """The suspects of a run."""
    return [json.loads(line) for line in (run / "label_errors.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_list_page_and_copy_and_the_same_on_two_ranks(trained: list[str], tmp_path: Path, command: Command) -> None:
    copy = tmp_path / "copy"
    args = [*trained, "--find-errors", "--project", str(tmp_path)]
    done = command(val.main, *args, "--name", "alone", "--corrected", str(copy), "--corrected-score", "0.5")
    assert done.code == 0, done.said
    rows = listed(tmp_path / "alone")
    twins = [row for row in rows if row["kind"] == "duplicate"]
    assert len(twins) >= 3 and [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)  # type: ignore[type-var]
    for row in twins:
        lines = Path(str(row["label"])).read_text().splitlines()
        own, other = (lines[int(str(row[key])) - 1].split()[0] for key in ("line", "other_line"))
        assert own == other
    assert f"Label errors: {len(rows)} suspects" in done.out
    page = (tmp_path / "alone" / "label_errors.html").read_text()
    assert page.count("<li data-kind=") == min(len(rows), 140) and len(page) < 5_000_000
    assert page.count('data-kind="duplicate"') == len(twins) and "<script>" in page

    together = torchrun(ROOT / "val.py", *args, "--name", "together", "--batch", "2")
    assert together.code == 0, together.said
    names = "label_errors.jsonl", "label_errors.html"
    one, many = ([(tmp_path / run / name).read_bytes() for name in names] for run in ("alone", "together"))
    assert one[0] == many[0]

    applied = [row for row in rows if float(str(row["score"])) >= 0.5]
    changes = [json.loads(line) for line in (copy / "changes.jsonl").read_text().splitlines()]
    assert Counter(row["kind"] for row in changes) == Counter(row["kind"] for row in applied)
    spec, before = load_spec(copy / "tiny.yaml"), load_spec(Path(trained[1]).parents[3] / "tiny.yaml")
    gone = sum(not row["after"] for row in changes) - sum(not row["before"] for row in changes)
    assert len(build_index(spec, "val").classes) == len(build_index(before, "val").classes) - gone
    assert len(build_index(spec, "train")) == 16
    refused = command(val.main, *args, "--corrected", str(copy))
    assert refused.code == 1 and "--corrected" in refused.err and "not empty" in refused.err
    assert refused.err.count("error:") == 1


@pytest.mark.slow
def test_out_of_fold(trained: list[str], tmp_path: Path, command: Command) -> None:
    args = [*trained, "--task", "train", "--find-errors", "--folds", "2", "--project", str(tmp_path)]
    done = command(val.main, *args)
    assert done.code == 0, done.said
    run = tmp_path / "exp"
    rows = listed(run)
    assert sum(row["kind"] == "duplicate" for row in rows) >= 3
    assert {Path(str(row["label"])).parent.name for row in rows} == {"train"}
    parts = [(run / "folds" / "copy" / f"fold{n}-train.txt").read_text().splitlines() for n in (1, 2)]
    assert len(parts[0]) + len(parts[1]) == 16 and not set(parts[0]) & set(parts[1])
    weights = [run / "folds" / f"fold{n}" / "weights" / "best.pt" for n in (1, 2)]
    written = [path.stat().st_mtime_ns for path in weights]
    (run / "folds" / "copy").rename(tmp_path / "kept")  # as where it was killed before it wrote the copy
    again = command(val.main, *args, "--exist-ok")  # takes what is trained already
    assert again.code == 0 and listed(run) == rows, again.said
    assert [path.stat().st_mtime_ns for path in weights] == written
    other = command(val.main, *args, "--exist-ok", "--epochs", "2")
    assert other.code == 2 and "it has folds of another training" in other.err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"corrected": "copy"}, "--corrected without --find-errors"),
        ({"folds": 3}, "--folds without --find-errors"),
        ({"find_errors": True, "folds": 1}, "--folds: found 1, allowed is 2 to 100, or 0"),
        ({"find_errors": True, "folds": 3}, "--folds 3 --task val: .* Give --task train"),
        ({"find_errors": True, "task": "speed"}, "--find-errors --task speed"),
        ({"find_errors": True, "single_cls": True}, "--find-errors --single-cls"),
        ({"find_errors": True, "conf_thres": 0.3}, "--find-errors --conf-thres 0.3"),
        ({"find_errors": True, "epochs": 3}, "--epochs without --folds"),
        ({"find_errors": True, "corrected_score": 0.5}, "--corrected-score without --corrected"),
    ],
)
def test_flags_that_do_not_go_together(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ValConfig(**given)  # type: ignore[arg-type]


def test_weights_that_do_not_say_how_they_were_trained_have_no_folds(
    trained: list[str], tmp_path: Path, shared: Path, command: Command
) -> None:
    args = ["--find-errors", "--task", "train", "--device", "cpu", "--project", str(tmp_path)]
    weights = str(shared / "weights" / "yolov5n.pt")
    done = command(val.main, "--weights", weights, *args, "--folds", "2", "--data", "shapes.yaml")
    assert done.code == 1 and "does not say how it was trained" in done.err
    many = command(val.main, *trained, *args, "--folds", "17")
    assert many.code == 1 and "--folds 17: train has 16 images" in many.err, many.said
