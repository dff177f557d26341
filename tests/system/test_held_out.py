"""`val: 0.2`: the same split on two ranks, in a resume by one rank from a moved dataset, and in val.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tessera.utils.report.results_csv import read_results
from tests.system.launch import ROOT, run_python, torchrun
from tests.system.tiny import flags, make_data


@pytest.mark.slow
def test_every_rank_every_run_and_val_hold_out_the_same_images(tmp_path: Path) -> None:
    data, train = make_data(tmp_path, train=20, val=0), ROOT / "train.py"
    plain = yaml.safe_load(data.read_text())
    data.write_text(yaml.safe_dump({**plain, "val": 0.2}))
    held_out = build_index(load_spec(data), "val")
    mine = {Path(held_out.path(image)).stem for image in range(len(held_out))}
    assert len(mine) == 4 and len(build_index(load_spec(data), "train")) == 16
    project, env = tmp_path / "runs", {"TESSERA_CACHE": str(tmp_path / "other-cache")}

    first = torchrun(train, *flags(data, project, "--epochs", "1"), ranks=2, timeout=600)
    assert first.code == 0, first.said
    assert re.search(r"^ *all +4 ", first.out + first.err, re.MULTILINE), first.said
    moved = tmp_path / "moved"
    Path(plain["path"]).rename(moved)
    data.write_text(yaml.safe_dump({**plain, "path": str(moved), "val": 0.2}))
    last = project / "exp" / "weights" / "last.pt"
    second = run_python(train, "--resume", str(last), "--epochs", "2", timeout=600, env=env)
    assert second.code == 0, second.said
    assert list(read_results(project / "exp" / "results.csv")["epoch"]) == [0, 1]

    best = project / "exp" / "weights" / "best.pt"
    args = ["--weights", str(best), "--device", "cpu", "--save-txt", "--project", str(tmp_path / "val")]
    evaluated = run_python(ROOT / "val.py", *args, timeout=600, env=env)
    assert evaluated.code == 0, evaluated.said
    assert {path.stem for path in (tmp_path / "val" / "exp" / "labels").iterdir()} == mine
