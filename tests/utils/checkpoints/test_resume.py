"""Resuming a run: flags, class names, restored position."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.utils.checkpoints.resume import ResumedRun, run_of_checkpoint
from tessera.utils.config import Hyp, TrainConfig, load_hyp
from tessera.utils.engine.state import TrainState
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.ranks.world import World
from tests.utils.checkpoints.made_state import full, make_state

LAST = Path("mine/weights/last.pt")


def checkpoint(**config: Any) -> dict[str, Any]:
    hyp, saved = load_hyp("hyp.scratch-low.yaml"), TrainConfig(weights="", name="mine", epochs=5).as_dict()
    return {"config": {**saved, **config}, "hyp": hyp.as_dict(), "names": ["cat", "dog"]}


def resumed(given: dict[str, Any], saved: dict[str, Any] | None = None) -> tuple[TrainConfig, Hyp, ResumedRun]:
    return run_of_checkpoint(given, LAST, saved or checkpoint(), World())


def test_flags_override_saved_ones_but_not_directory_and_start() -> None:
    config, _, run = resumed({"epochs": 9, "name": "x", "project": "else", "weights": ""}, checkpoint(weights="a.pt"))
    assert (config.epochs, config.name, config.project, config.weights) == (9, "mine", TrainConfig.project, "a.pt")
    assert run.run == Path("mine")


def test_a_run_saved_before_log_became_loggers_resumes() -> None:
    older = checkpoint()
    older["config"]["log"] = older["config"].pop("loggers").replace("tensorboard", "wandb")
    assert resumed({}, older)[0].loggers == "wandb"
    assert resumed({"loggers": "none"}, older)[0].loggers == "none"


@pytest.mark.parametrize(
    ("saved", "given", "wanted", "has"),
    [
        ({}, {"hyp": "hyp.short.yaml"}, "--hyp 'hyp.short.yaml'", "the optimizer SGD .* Adam"),
        ({}, {"optimizer": "Adam"}, "--optimizer Adam", "the optimizer SGD .* Adam"),
        ({"freeze": [3]}, {"freeze": 2}, "--freeze 2", r"--freeze 3 \(the"),
        ({"tile": 640}, {"tile": 320}, "--tile 320 --overlap 0.2", r"--tile 640 --overlap 0.2 \("),
        ({"tile": 640}, {"overlap": 0.3}, "--tile 640 --overlap 0.3", r"--tile 640 --overlap 0.2 \("),
        ({}, {"sampling": "balanced"}, "--sampling balanced", r"--sampling shuffled \(its"),
        ({}, {"image_weights": True}, "--image-weights", r"--sampling shuffled \(its"),
        (
            {},
            {"freeze": 2, "sampling": "balanced", "optimizer": "Adam"},
            "--optimizer Adam, --freeze 2, --sampling balanced",
            r"the optimizer SGD \(.*\), --freeze 0 \(.*\), --sampling shuffled \(.*\)",
        ),
    ],
)
def test_flags_that_prevent_a_resume_are_named_together(
    saved: dict[str, Any], given: dict[str, Any], wanted: str, has: str
) -> None:
    message = rf"^{wanted} with --resume: the run of {LAST} has {has}.* Omit {wanted}, or"
    with pytest.raises(ConfigError, match=message):
        resumed(given, checkpoint(**saved))


@pytest.mark.parametrize(
    ("saved", "given", "name", "value"),
    [
        ({}, {"hyp": "hyp.short.yaml", "optimizer": "SGD"}, "optimizer", "SGD"),  # the flag wins over hyp's AdamW
        ({"optimizer": "Adam"}, {"hyp": "hyp.short.yaml", "optimizer": "AdamW"}, "optimizer", "AdamW"),
        ({"freeze": [3]}, {"freeze": (0, 1, 2)}, "frozen_layers", (0, 1, 2)),
        ({"tile": 640}, {"tile": 640, "overlap": 0.2}, "overlap", 0.2),
        ({"sampling": "balanced"}, {"sampling": "balanced"}, "sampling", "balanced"),
        ({"image_weights": True}, {"image_weights": True}, "image_weights", True),
    ],
)
def test_equivalent_flags_are_accepted(saved: dict[str, Any], given: dict[str, Any], name: str, value: object) -> None:
    config, hyp, _ = resumed(given, checkpoint(**saved))
    assert getattr(config, name) == value
    assert hyp.lr0 == (0.002 if "hyp" in given else 0.01)


def test_single_hyperparameters_change_those_of_the_run() -> None:
    config, hyp, _ = resumed({"hyp": {"mosaic": 0.25}}, checkpoint(hyp=["hyp.scratch-low.yaml"]))
    assert config.hyp == ("hyp.scratch-low.yaml", "mosaic=0.25")
    assert hyp == dataclasses.replace(load_hyp("hyp.scratch-low.yaml"), mosaic=0.25)


def test_rates_by_layer_cannot_begin_or_end_at_a_resume(tmp_path: Path) -> None:
    older, file = checkpoint(), tmp_path / "decay.yaml"
    file.write_text("\n".join(f"{k}: {v}" for k, v in {**older["hyp"], "layer_decay": 0.9}.items()))
    given = {"hyp": str(file)}
    assert resumed(given, older)[1].layer_decay == 0.9, "from scratch it is not read"
    older["config"]["weights"] = "some.pt"
    with pytest.raises(ConfigError, match=r"the run of .*/last.pt has layer_decay 1 \(with 0.9 the optimizer"):
        resumed(given, older)
    older["hyp"]["layer_decay"] = 0.8
    assert resumed(given, older)[1].layer_decay == 0.9, "another one is only a rate"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["cat"], "1 class, the run has 2"),
        (["cat", "dog", "cow"], "3 classes, the run has 2"),
        (["dog", "cat"], r"the classes in another order than the run \('cat' is 0 in the checkpoint.* --weights"),
    ],
)
def test_data_with_other_classes_is_refused(names: list[str], text: str) -> None:
    run = ResumedRun(Path("mine"), checkpoint())
    run.check_classes(["cat", "mouse"], TrainConfig(data="pets.yaml"))
    with pytest.raises(UserError, match=rf"pets\.yaml has {text}"):
        run.check_classes(names, TrainConfig(data="pets.yaml"))


def resumed_mid_epoch(folder: Path, batch_size: int) -> tuple[TrainState[Any], ResumedRun, TrainConfig]:
    """A run that stopped after 6 batches of 8 images whose mean losses were 1, 2 and 3, and a state for it."""
    state = make_state()
    for _ in range(6):
        state.progress.advance(1, torch.tensor([1.0, 2.0, 3.0]))
    config = TrainConfig(batch_size=8, epochs=5)
    saved = full(state, config=config.as_dict())
    return make_state(seed=1), ResumedRun(folder, saved), TrainConfig(batch_size=batch_size, epochs=5)


@pytest.mark.parametrize("batch_size", [4, 8, 16])
def test_the_mean_losses_of_an_epoch_survive_another_batch_size(tmp_path: Path, batch_size: int) -> None:
    state, run, config = resumed_mid_epoch(tmp_path, batch_size)
    run.restore(state, config, 100, "abc", World())
    assert state.progress.batch_in_epoch == 48 // batch_size
    assert state.progress.mean_losses().tolist() == [1, 2, 3]


def test_a_run_that_had_stopped_early_has_nothing_left(tmp_path: Path) -> None:
    state = make_state()
    state.progress.epoch, state.stopper.best_epoch, state.stopper.best_fitness = 4, 0, 0.5
    saved = full(state, config=TrainConfig(epochs=9).as_dict())
    for patience, left in ((4, [4, 5, 6, 7, 8]), (3, [])):
        again, config = make_state(seed=1), TrainConfig(epochs=9, patience=patience)
        again.stopper.patience = patience
        ResumedRun(tmp_path, dict(saved)).restore(again, config, 100, "abc", World())
        assert list(again.epochs_left(9)) == left


def test_a_restored_checkpoint_is_released(tmp_path: Path) -> None:
    """Its tensors would stay in memory for the whole run, on every rank."""
    state, run, config = resumed_mid_epoch(tmp_path, 8)
    tensors = [weakref.ref(tensor) for key in ("model", "ema") for tensor in run.checkpoint[key].values()]
    assert all(tensor() is not None for tensor in tensors)
    run.restore(state, config, 100, "abc", World())
    gc.collect()
    assert not [tensor for tensor in tensors if tensor() is not None]
    assert run.run == tmp_path


@pytest.mark.parametrize(("flag", "value"), [("sharpness", 3), ("epochs", "many"), ("freeze", [None]), ("x\x1b[2J", 1)])
def test_flags_of_another_version_are_named_with_their_file(flag: str, value: Any) -> None:
    message = r"last\.pt: this version does not accept the flags of the run \(.*--weights"
    with pytest.raises(UserError, match=message) as e:
        resumed({}, checkpoint(**{flag: value}))
    assert "\x1b" not in str(e.value) and len(str(e.value)) < 600
