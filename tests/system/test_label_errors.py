"""`val.py --find-errors`: the list and the page, the same on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessera.commands import train, val
from tests.system.launch import ROOT, Command, torchrun
from tests.system.tiny import flags, make_data
from tests.utils.label_errors.planted import plant


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
    return [json.loads(line) for line in (run / "label_errors.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_list_and_page_and_the_same_on_two_ranks(trained: list[str], tmp_path: Path, command: Command) -> None:
    args = [*trained, "--find-errors", "--project", str(tmp_path)]
    done = command(val.main, *args, "--name", "alone")
    assert done.code == 0, done.said
    rows = listed(tmp_path / "alone")
    duplicates = [row for row in rows if row["kind"] == "duplicate"]
    scores = [float(str(row["score"])) for row in rows]
    assert len(duplicates) >= 3 and scores == sorted(scores, reverse=True)
    for row in duplicates:
        lines = Path(str(row["label"])).read_text().splitlines()
        own, other = (lines[int(str(row[key])) - 1].split()[0] for key in ("line", "other_line"))
        assert own == other
    assert f"Label errors: {len(rows)} suspects" in done.out
    page = (tmp_path / "alone" / "label_errors.html").read_text()
    assert page.count("<li data-kind=") == min(len(rows), 140) and len(page) < 5_000_000
    assert page.count('data-kind="duplicate"') == len(duplicates) and "<script>" in page

    together = torchrun(ROOT / "val.py", *args, "--name", "together", "--batch", "2")
    assert together.code == 0, together.said
    names = "label_errors.jsonl", "label_errors.html"
    one, many = ([(tmp_path / run / name).read_bytes() for name in names] for run in ("alone", "together"))
    assert one[0] == many[0]
