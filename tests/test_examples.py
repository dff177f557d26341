"""The programs of examples/, for an epoch each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tessera
from examples import (
    custom_augmentation,
    custom_loss,
    custom_observer,
    custom_optimizer,
    detect_folder,
    model_alone,
    pretrain,
    train_and_evaluate,
)
from tessera.commands import compare, detect, export, val
from tessera.models import model_yaml
from tessera.utils.checkpoints.weights import load_weights, model_of_weights
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.evaluation.evaluate import DetectionCollector
from tessera.utils.report.observers import Observer
from tests.system.tiny import make_data


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A few small images in place of the data of the examples, without workers, plots and trackers."""
    yaml = make_data(tmp_path / "data", train=8, val=4)
    flags = {"data": yaml, "imgsz": 64, "workers": 0, "noplots": True, "loggers": "none", "device": "cpu"}
    train: Callable[..., Any] = tessera.train
    monkeypatch.setattr(tessera, "train", lambda **given: train(**{**given, **flags}), raising=False)
    return yaml


def test_train_evaluate_and_detect(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = train_and_evaluate.main(epochs=1, project=tmp_path / "runs")
    assert "on 4 images" in capsys.readouterr().out
    pytest.importorskip("supervision")
    detect_folder.main(best, data.parent / "shapes" / "images" / "val")
    assert capsys.readouterr().out.count(" objects, the largest of ") == 4


def test_augmentation(tmp_path: Path) -> None:
    custom_augmentation.main(epochs=1, project=tmp_path)
    saved = torch.load(tmp_path / "noise" / "weights" / "last.pt", weights_only=True)
    assert saved["config"]["transforms"] == ["examples.custom_augmentation:add_noise"]
    with pytest.raises(ConfigError, match="give the same again"):
        tessera.train(resume=tmp_path / "noise", epochs=2)


def test_head_and_loss(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with a head of the user's own resumes exactly, and no command imports it unasked."""
    monkeypatch.setattr(model_yaml, "HEADS", dict(model_yaml.HEADS))
    monkeypatch.setattr(tessera, "train", partial(tessera.train, save_period=1, nosave=False), raising=False)
    custom_loss.main(epochs=2, project=tmp_path)
    folder, name = tmp_path / "squared" / "weights", "examples.custom_loss:DetectSquared"
    last = torch.load(folder / "last.pt", weights_only=True)
    assert last["model_yaml"]["head"][-1][2] == "DetectSquared" and last["config"]["head"] == name

    del model_yaml.HEADS["DetectSquared"]
    with pytest.raises(ConfigError, match=f"the run has --head {name}.* give the same again"):
        tessera.train(resume=folder / "epoch0.pt")
    with pytest.raises(
        ConfigError, match=r"^--weights .*best\.pt: .*\(DetectSquared\): the last .*register_head\(DetectSquared\)\.$"
    ):
        tessera.val(data=data, weights=folder / "best.pt", workers=0)
    tessera.train(resume=folder / "epoch0.pt", head=name)
    resumed = torch.load(folder / "last.pt", weights_only=True)
    assert all(torch.equal(tensor, last["model"][name]) for name, tensor in resumed["model"].items())
    metrics = tessera.val(data=data, weights=folder / "best.pt", workers=0, imgsz=64, project=tmp_path)
    assert metrics.images == 4

    for wrong, complaint in (("examples.custom_loss:Tensor", "expected a subclass"), ("x:y", "no module x")):
        with pytest.raises(ConfigError, match=f"--head.*{complaint}"):
            tessera.train(head=wrong)


def test_commands_load_a_checkpoint_with_the_head_that_they_name(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    custom_loss.main(epochs=1, project=tmp_path)
    best, name = str(tmp_path / "squared" / "weights" / "best.pt"), "examples.custom_loss:DetectSquared"
    out = capsys.readouterr().out
    assert all(f"{hint} --weights {best} --head {name}" in out for hint in ("detect.py", "export.py"))

    images = str(data.parent / "shapes" / "images" / "val")
    for command, *flags in (
        (val, "--weights", best, "--data", str(data), "--workers", "0", "--noreport", "--project", str(tmp_path)),
        (detect, "--weights", best, "--source", images, "--project", str(tmp_path)),
        (export, "--weights", best, "--include", "onnx", "--output", str(tmp_path)),
        (compare, best, best, "--data", str(data), "--workers", "0", "--project", str(tmp_path)),
    ):
        monkeypatch.setattr(model_yaml, "HEADS", {k: v for k, v in model_yaml.HEADS.items() if k != "DetectSquared"})
        assert command.main([*flags, "--device", "cpu"]) == 2
        assert "given with --head module:DetectSquared" in capsys.readouterr().err
        code = command.main([*flags, "--device", "cpu", "--head", name])
        assert code == 0 or (command is export and (tmp_path / "best.onnx").exists())  # untrained: its scores are ties


def test_model_alone() -> None:
    loss = model_alone.main()
    assert loss.isfinite() and float(loss) > 0


def test_optimizer(tmp_path: Path) -> None:
    custom_optimizer.main(epochs=1, project=tmp_path)
    state = torch.load(tmp_path / "lion" / "weights" / "last.pt", weights_only=True)["optimizer"]["state"]
    assert state and all(set(slots) == {"momentum"} and slots["momentum"].any() for slots in state.values())


def test_observer_and_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    custom_observer.main(epochs=2, project=tmp_path)
    lines = (tmp_path / "observed" / "moved.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["0", "1"] and float(lines[1].split(",")[2]) > 0
    assert yaml.safe_load((tmp_path / "observed" / "opt.yaml").read_text())["metric"] == "recall@p=0.95"
    assert "(recall@p=0.95 " in capsys.readouterr().out


class Stop(Observer):
    """An observer that ends a run before its second validation."""

    def collectors(self, epoch: int | None) -> list[DetectionCollector]:
        if epoch == 1 and not STOPPED:
            STOPPED.append(epoch)
            raise KeyboardInterrupt
        return []


STOPPED: list[int] = []


def test_a_resumed_run_with_parts_of_its_own_is_the_run_itself(tmp_path: Path) -> None:
    own = {"transforms": custom_augmentation.add_noise, "optimizer": custom_optimizer.lion, "callbacks": Stop}
    parts = {**own, "metric": "precision", "hyp": {"lr0": 0.0003}}
    STOPPED[:] = [1]
    tessera.train(**parts, epochs=3, batch=4, project=tmp_path, name="whole")
    STOPPED.clear()
    with pytest.raises(KeyboardInterrupt):
        tessera.train(**parts, epochs=3, batch=4, project=tmp_path, name="resumed")
    last = tmp_path / "resumed" / "weights" / "last.pt"
    named = (
        "--transforms examples.custom_augmentation:add_noise --optimizer examples.custom_optimizer:lion "
        "--callbacks tests.test_examples:Stop"
    )
    with pytest.raises(UserError, match=rf"the run has {named}\. A part of your own is imported only if"):
        tessera.train(resume=last)
    with pytest.raises(UserError, match=r"--metric 'map' with --resume: the run of .* has --metric 'precision'"):
        tessera.train(resume=last, **{**parts, "metric": "map"})
    tessera.train(resume=last, **own)
    whole, resumed = (
        torch.load(tmp_path / name / "weights" / "last.pt", weights_only=True) for name in ("whole", "resumed")
    )
    for key in ("model", "ema"):
        assert all(torch.equal(tensor, resumed[key][name]) for name, tensor in whole[key].items())
    momenta = [saved["optimizer"]["state"] for saved in (whole, resumed)]
    assert all(torch.equal(slots["momentum"], momenta[1][number]["momentum"]) for number, slots in momenta[0].items())
    assert whole["stopper"] == resumed["stopper"]


@pytest.mark.slow
def test_pretraining(tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_yaml, "HEADS", dict(model_yaml.HEADS))
    monkeypatch.setenv("TESSERA_DATASETS", str(tmp_path))
    monkeypatch.chdir(shared / "weights")
    pretrain.main(images=50, epochs=1, project=tmp_path, results=tmp_path)
    last = load_weights(tmp_path / "pretrained-tessera-n" / "weights" / "last.pt")
    assert any(".adapters." in name for name in last.state_dict) and pretrain.teacher()[1]
    weights = load_weights(tmp_path / "tessera-n.pt")
    assert weights.names[0] == "drawn circle" and not any(".adapters." in name for name in weights.state_dict)
    assert {t.dtype for t in weights.state_dict.values()} == {torch.float16, torch.int64}
    assert model_of_weights(weights, "tessera-n.pt").yaml["head"][-1][2] == "DetectFree"
