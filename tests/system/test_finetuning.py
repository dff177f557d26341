"""`export.py --int8 --finetune N`: a training by the trainer itself, which is resumed and has ranks, then an export."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tessera.commands import export, train
from tessera.utils.checkpoints.format import load_any_checkpoint
from tessera.utils.errors import ConfigError
from tests.system.jobs import Job
from tests.system.launch import ROOT, torchrun, torchrun_command, wait_until
from tests.system.tiny import assert_same_checkpoint, make_data
from tests.utils.exporting.made import ANCHORED, NAMES, checkpoint, dataset


@pytest.mark.slow
def test_it_is_killed_on_two_ranks_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of a run that nobody killed. The exported file has no memory of it, nor has the checkpoint."""
    pytest.importorskip("onnxruntime")
    data = dataset(tmp_path, train=96, val=4, size=64)
    weights = checkpoint(tmp_path / "best.pt", ANCHORED, data=str(data))
    before = weights.read_bytes()

    given = {"weights": str(weights), "imgsz": 64, "output": str(tmp_path), "max_drop": 1.0, "finetune": 6}
    words = [str(ROOT / "export.py"), "--int8"]
    words += [word for flag, value in given.items() for word in (f"--{flag.replace('_', '-')}", str(value))]

    def last(folder: str) -> Path | None:
        return next((tmp_path / folder / "runs" / "export").glob("best-int8-*/weights/last.pt"), None)

    for folder in ("killed", "whole"):
        (tmp_path / folder).mkdir()
    with Job(torchrun_command(*words), tmp_path / "job", cwd=tmp_path / "killed") as job:
        wait_until(lambda: last("killed"), 200, lambda: job.said)
    for folder in ("killed", "whole"):
        outcome = torchrun(*words, cwd=tmp_path / folder)
        assert outcome.code == 0, outcome.said
        assert outcome.out.count("Compared on") == 1, "rank 0 exports"
        assert (tmp_path / "best-int8-finetune.onnx").is_file()
    resumed, whole = last("killed"), last("whole")
    assert resumed and whole
    assert f"--weights {whole.with_name('best.pt')} --int8\n" in outcome.out, "how its weights are exported"
    page = whole.parent.with_name("report.html").read_text()
    assert '<span class="flag">--include</span> onnx <span class="flag">--int8</span>' in page
    assert_same_checkpoint(resumed, whole)
    assert load_any_checkpoint(whole)["epoch"] == 6 and weights.read_bytes() == before
    saved = whole.read_bytes()
    monkeypatch.chdir(tmp_path / "whole")
    (tmp_path / "moved").mkdir()
    moved = weights.rename(tmp_path / "moved" / "best.pt")
    (path,) = export.run(**{**given, "weights": str(moved)}, int8=True)
    assert path.name == "best-int8-finetune.onnx" and whole.read_bytes() == saved, "it is trained already"
    assert "is done, after 6 epochs" in capsys.readouterr().err


def test_what_cannot_learn_to_compute_in_8_bits(tmp_path: Path) -> None:
    data = make_data(tmp_path, train=2, val=2)
    weights = str(checkpoint(tmp_path / "best.pt", ANCHORED))
    with pytest.raises(ConfigError, match="--finetune 2 without --int8"):
        export.run(weights=weights, finetune=2)
    with pytest.raises(ConfigError, match="--int8 without --weights: a model learns its objects first"):
        train.run(data=str(data), int8=True)
    with pytest.raises(ConfigError, match=r"--end2end"):  # before it is trained
        export.run(weights=weights, data=str(dataset(tmp_path / "own")), int8=True, finetune=2, end2end=True)
    own = dataset(tmp_path / "trained")
    for flags, why in (
        ({"data": data}, "knows 3 classes, expected the 6 of"),
        ({"data": renamed(own, ["x", "y", "z"])}, "knows other classes than .* 'x' in the data"),
        ({"data": renamed(own, list(NAMES[::-1]))}, "knows the classes of .* in another order"),
        ({"data": own, "cfg": "yolov5s.yaml"}, "is another model than --cfg yolov5s.yaml"),
    ):
        where = {name: str(value) for name, value in flags.items()}
        with pytest.raises(ConfigError, match=rf"--int8: best\.pt .* {why}.*: a model learns its objects first"):
            train.run(**where, int8=True, weights=weights, project=str(tmp_path / "runs"), device="cpu")
        assert not (tmp_path / "runs" / "exp").exists()


def renamed(data: Path, names: list[str]) -> Path:
    """A dataset with other names for its classes."""
    other = data.with_name(f"{'-'.join(names)}.yaml")
    other.write_text(yaml.safe_dump({**yaml.safe_load(data.read_text()), "names": names}))
    return other
