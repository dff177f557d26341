"""Calls of train.run and val.run in one job: each is a run of its own, and a restart resumes the one it was in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessera.analysis.charts import read_results
from tests.system.jobs import Job
from tests.system.launch import ROOT, torchrun_command
from tests.system.tiny import make_data


@pytest.mark.slow
def test_calls_in_one_job_are_runs_of_their_own(tmp_path: Path) -> None:
    data, project = make_data(tmp_path, train=64, val=4), tmp_path / "runs"
    program = ROOT / "tests" / "system" / "calls_program.py"
    command = torchrun_command(program, str(data), str(project), options=("--max-restarts=1",))
    with Job(command, tmp_path / "said") as job:
        outcome = job.wait(600)
        assert job.left_over() == [], outcome.said
    assert outcome.code == 0, outcome.said

    lines = [json.loads(line) for line in outcome.out.splitlines() if line.startswith("{")]
    found = {(line["call"], line["rank"], line["attempt"]): line["found"] for line in lines}
    calls = [
        *((call, "0") for call in ("train", "val")),
        *((call, "1") for call in ("train", "val", "same", "auto", "again", "search")),
    ]
    assert found.keys() == {(call, rank, attempt) for call, attempt in calls for rank in "01"}, outcome.said
    assert len({found[("train", rank, attempt)] for rank in "01" for attempt in "01"}) == 1, found
    assert {call for (call, _, _), metrics in found.items() if metrics is None} == {"again"}
    assert outcome.err.count(f"the run in {project}/auto is finished, after 1 epoch") == 1, outcome.said

    assert sorted(path.name for path in project.iterdir()) == ["auto", "evolve", "exp", "exp2", "val", "val2"]
    for run in ("exp", "exp2", "auto"):
        assert read_results(project / run / "results.csv")["epoch"].tolist() == [0], run
        assert (project / run / "weights" / "best.pt").is_file()
    assert outcome.err.count("this training had ended") == 1, outcome.said
    assert outcome.err.count(f"resuming from {project}/exp2/weights/last.pt") == 1, outcome.said
    assert "Resuming " in outcome.err and "in epoch 0 after batch 2" in outcome.err, outcome.said
    assert outcome.err.count("AutoBatch") == 2, "a restart keeps what was chosen: " + outcome.said
    assert [path.name for path in (project / "evolve").iterdir()] == ["exp"]
    assert len((project / "evolve" / "exp" / "evolve.csv").read_text().splitlines()) == 2
