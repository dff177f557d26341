"""Resuming a run: which flags count, which data fits, what is restored."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.utils.checkpoints.resume import ResumedRun, run_of_checkpoint
from tessera.utils.config import TrainConfig, load_hyp
from tessera.utils.engine.state import TrainState
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.ranks.world import World
from tests.utils.checkpoints.made_state import full, make_state


def checkpoint() -> dict[str, Any]:
    hyp = load_hyp("hyp.scratch-low.yaml")
    return {"config": TrainConfig(name="mine", epochs=5).as_dict(), "hyp": hyp.as_dict(), "names": ["cat", "dog"]}


def test_flags_take_the_place_of_saved_ones_but_the_run_keeps_its_folder(tmp_path: Path) -> None:
    last = tmp_path / "mine" / "weights" / "last.pt"
    given = {"epochs": 9, "name": "other", "project": "elsewhere"}
    config, _, resumed = run_of_checkpoint(given, last, checkpoint(), World())
    assert (config.epochs, config.name, config.project) == (9, "mine", TrainConfig.project)
    assert resumed.run == tmp_path / "mine"


def test_a_run_saved_before_log_became_loggers_resumes(tmp_path: Path) -> None:
    older = checkpoint()
    older["config"]["log"] = older["config"].pop("loggers").replace("tensorboard", "wandb")
    last = tmp_path / "mine" / "weights" / "last.pt"
    assert run_of_checkpoint({}, last, older, World())[0].loggers == "wandb"
    assert run_of_checkpoint({"loggers": "none"}, last, older, World())[0].loggers == "none"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"hyp": "hyp.short.yaml"}, "--hyp 'hyp.short.yaml'"),
        ({"optimizer": "Adam"}, "--optimizer Adam"),
        ({"hyp": "hyp.scratch-low.yaml", "optimizer": "AdamW"}, "--optimizer AdamW"),
    ],
)
def test_another_kind_of_optimizer_is_refused_with_what_names_it(
    tmp_path: Path, given: dict[str, str], named: str
) -> None:
    last = tmp_path / "mine" / "weights" / "last.pt"
    with pytest.raises(
        ConfigError, match=rf"^{named} with --resume: .*/last.pt has the optimizer SGD.* Adam.* Leave {named} out, or"
    ):
        run_of_checkpoint(given, last, checkpoint(), World())
    config, hyp, _ = run_of_checkpoint({"hyp": "hyp.short.yaml", "optimizer": "SGD"}, last, checkpoint(), World())
    assert (config.optimizer, hyp.optimizer) == ("SGD", "AdamW"), "the flag wins"
    older = checkpoint()
    older["config"]["optimizer"] = "Adam"
    assert run_of_checkpoint({"hyp": "hyp.short.yaml", "optimizer": "AdamW"}, last, older, World())[1].lr0 == 0.002


def test_other_frozen_layers_are_refused(tmp_path: Path) -> None:
    last, older = tmp_path / "mine" / "weights" / "last.pt", checkpoint()
    older["config"]["freeze"] = [3]
    assert run_of_checkpoint({"freeze": (0, 1, 2)}, last, older, World())[0].frozen_layers == (0, 1, 2), "the same"
    with pytest.raises(ConfigError, match=r"--freeze 2 with --resume: the run of .*/last.pt has --freeze 3 \(the"):
        run_of_checkpoint({"freeze": 2}, last, older, World())


@pytest.mark.parametrize("given", [{"tile": 320}, {"tile": 640, "overlap": 0.3}, {"overlap": 0.3}, {"tile": 0}])
def test_other_tiles_are_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    last, saved = tmp_path / "mine" / "weights" / "last.pt", checkpoint()
    saved["config"]["tile"] = 640
    config, _, _ = run_of_checkpoint({"tile": 640, "overlap": 0.2}, last, saved, World())
    assert (config.tile, config.overlap) == (640, 0.2), "the same"
    with pytest.raises(
        ConfigError, match=r"^--tile \d+ --overlap 0.\d with --resume: .* has --tile 640 --overlap 0.2 \("
    ):
        run_of_checkpoint(given, last, saved, World())


@pytest.mark.parametrize(
    ("given", "asked"),
    [({"sampling": "balanced"}, "--sampling balanced"), ({"image_weights": True}, "--image-weights")],
)
def test_other_sampling_is_refused(tmp_path: Path, given: dict[str, Any], asked: str) -> None:
    last, saved = tmp_path / "mine" / "weights" / "last.pt", checkpoint()
    with pytest.raises(ConfigError, match=rf"^{asked} with --resume: the run of .* has --sampling shuffled \(its"):
        run_of_checkpoint(given, last, saved, World())
    saved["config"].update(given)
    assert run_of_checkpoint(given, last, saved, World())[0].sampling == given.get("sampling", "shuffled"), "the same"


def test_rates_by_layer_cannot_begin_or_end_at_a_resume(tmp_path: Path) -> None:
    last, older = tmp_path / "mine" / "weights" / "last.pt", checkpoint()
    file = tmp_path / "decay.yaml"
    file.write_text("\n".join(f"{k}: {v}" for k, v in {**older["hyp"], "layer_decay": 0.9}.items()))
    given = {"hyp": str(file)}
    assert run_of_checkpoint(given, last, older, World())[1].layer_decay == 0.9, "from scratch it is not read"
    older["config"]["weights"] = "some.pt"
    with pytest.raises(ConfigError, match=r"the run of .*/last.pt has layer_decay 1 \(with 0.9 the optimizer"):
        run_of_checkpoint(given, last, older, World())
    older["hyp"]["layer_decay"] = 0.8
    assert run_of_checkpoint(given, last, older, World())[1].layer_decay == 0.9, "another one is only a rate"


def test_all_that_differs_is_one_message(tmp_path: Path) -> None:
    last, given = tmp_path / "mine" / "weights" / "last.pt", {"freeze": 2, "sampling": "balanced", "optimizer": "Adam"}
    flags = "--optimizer Adam, --freeze 2, --sampling balanced"
    has = r"the optimizer SGD \(.*\), --freeze 0 \(.*\), --sampling shuffled \(.*\)"
    with pytest.raises(ConfigError, match=rf"^{flags} with --resume: the run of {last} has {has}. Leave {flags} out"):
        run_of_checkpoint(given, last, checkpoint(), World())


@pytest.mark.parametrize("names", [["cat"], ["cat", "dog", "cow"]])
def test_data_with_other_classes_is_refused(tmp_path: Path, names: list[str]) -> None:
    run = ResumedRun(tmp_path, checkpoint())
    run.check_classes(["cat", "mouse"], TrainConfig(data="pets.yaml"))
    with pytest.raises(UserError, match=rf"pets.yaml has another number of classes, {len(names)}, than the run, 2"):
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
    assert state.progress.step_in_epoch == 48 // batch_size
    assert state.progress.mean_losses().tolist() == [1, 2, 3]


def test_a_run_that_had_stopped_early_has_nothing_left(tmp_path: Path) -> None:
    state = make_state()
    state.progress.epoch, state.stopper.best_epoch, state.stopper.best_fitness = 4, 0, 0.5
    saved = full(state, config=TrainConfig(epochs=9).as_dict())
    for patience, left in ((4, [4, 5, 6, 7, 8]), (3, [])):
        resumed, config = make_state(seed=1), TrainConfig(epochs=9, patience=patience)
        resumed.stopper.patience = patience
        ResumedRun(tmp_path, dict(saved)).restore(resumed, config, 100, "abc", World())
        assert list(resumed.epochs_left(9)) == left


def test_an_epoch_that_is_shorter_now_is_done(tmp_path: Path) -> None:
    """Else less than nothing would be left of it."""
    state, run, config = resumed_mid_epoch(tmp_path, 8)
    run.restore(state, config, 20, "of fewer images", World())
    assert state.progress.step_in_epoch == 3
    assert state.progress.mean_losses().tolist() == [1, 2, 3]


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
def test_flags_of_another_version_are_named_with_their_file(tmp_path: Path, flag: str, value: Any) -> None:
    other = checkpoint()
    other["config"][flag] = value
    last = tmp_path / "mine" / "weights" / "last.pt"
    with pytest.raises(
        UserError, match=r"last\.pt: this version does not take the flags of the run \(.*--weights"
    ) as e:
        run_of_checkpoint({}, last, other, World())
    assert "\x1b" not in str(e.value) and len(str(e.value)) < 600


def test_data_with_the_classes_in_another_order_is_refused(tmp_path: Path) -> None:
    run = ResumedRun(tmp_path, checkpoint())
    run.check_classes(["cat", "hound"], TrainConfig(data="pets.yaml"))
    message = r"pets\.yaml has the classes in another order than the run \('cat' is 0 in the checkpoint.* --weights"
    with pytest.raises(UserError, match=message):
        run.check_classes(["dog", "cat"], TrainConfig(data="pets.yaml"))
