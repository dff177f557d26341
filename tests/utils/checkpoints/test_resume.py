"""Resuming a run: flags, class names, training state restored bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import gc
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.utils.checkpoints.format import check_values, load_checkpoint, save_checkpoint
from tessera.utils.checkpoints.resume import (
    ResumedRun,
    dump_state,
    restore_state,
    rng_state,
    run_of_checkpoint,
    set_rng_state,
)
from tessera.utils.config import Hyp, TrainConfig, load_hyp
from tessera.utils.engine.state import TrainState
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.world import World
from tests.utils.checkpoints.made_state import assert_equal, full, make_state, train

LAST = Path("mine/weights/last.pt")
TEACHER = "/old.pt#0123456789abcdef"  # as a run stores it, with its digest


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
        ({"teacher": TEACHER}, {"teacher": "none"}, "--teacher none", r"--teacher FILE \(its"),
        ({"teacher": "none"}, {"teacher": "old.pt"}, "--teacher FILE", r"--teacher none \(its"),
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
        ({"teacher": TEACHER}, {}, "teacher", TEACHER),
        ({"teacher": TEACHER}, {"teacher": "auto"}, "teacher", TEACHER),
        ({"teacher": TEACHER}, {"teacher": "moved.pt"}, "teacher", "moved.pt#0123456789abcdef"),  # verified later
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
    state.progress.epoch, state.stopper.best_epoch, state.stopper.best_score = 4, 0, 0.5
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


# Training state


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Muon", "mixed"])
def test_resuming_is_exact(tmp_path: Path, optimizer: str) -> None:
    straight = make_state(optimizer=optimizer)
    train(straight, 4)
    save_checkpoint(tmp_path / "last.pt", full(straight))
    train(straight, 5)

    resumed = make_state(seed=99, optimizer=optimizer)
    train(resumed, 2)
    restore_state(resumed, load_checkpoint(tmp_path / "last.pt"))
    assert resumed.progress.step == 4 and len(resumed.progress.class_maps) == 2
    assert resumed.ema.updates == 4 and resumed.stopper.best_score == 0.04
    train(resumed, 5)
    assert_equal(dump_state(straight), dump_state(resumed))


def test_generators() -> None:
    state = rng_state(Accelerator())
    sampled = (random.random(), np.random.rand(), torch.rand(3))  # noqa: NPY002
    np.random.randn()  # noqa: NPY002 - leaves a cached value behind
    middle = rng_state(Accelerator())
    more = (np.random.randn(), random.gauss(0, 1))  # noqa: NPY002
    set_rng_state(state, Accelerator())
    again = (random.random(), np.random.rand(), torch.rand(3))  # noqa: NPY002
    assert sampled[:2] == again[:2] and torch.equal(sampled[2], again[2])
    set_rng_state(middle, Accelerator())
    assert (np.random.randn(), random.gauss(0, 1)) == more  # noqa: NPY002


def test_other_ranks_keep_their_generators(tmp_path: Path) -> None:
    state = make_state()
    train(state, 1)
    save_checkpoint(tmp_path / "last.pt", full(state))
    state = make_state()
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    restore_state(state, load_checkpoint(tmp_path / "last.pt"), rank=1, size=2)
    assert torch.equal(torch.rand(4), expected)
    assert state.progress.losses.tolist() == [0, 0, 0]  # rank 0 has the sum over all ranks


def test_loss_scaling_may_be_switched_on_and_off() -> None:
    state, enabled, again = make_state(), make_state(), make_state()
    enabled.precision.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=True)
    again.precision.scaler = torch.amp.GradScaler("cpu", enabled=True)
    restore_state(enabled, full(state))
    assert enabled.precision.scaler.get_scale() == 256.0, "kept, as a run on the CPU has no scale"
    for other in (state, again):
        restore_state(other, full(enabled))
    assert again.precision.scaler.get_scale() == 256.0


def test_resuming_with_another_model_is_refused() -> None:
    saved = full(make_state(nc=2))
    with pytest.raises(UserError, match=r"model\.2\.weight is \(3, 4, 1, 1\), in the checkpoint \(2, 4, 1, 1\)"):
        restore_state(make_state(nc=3), saved)
    saved["model"] = {**saved["model"], "model.9.weight": torch.zeros(1)}
    with pytest.raises(UserError, match=r"model\.9\.weight of the checkpoint has no place"):
        restore_state(make_state(nc=2), saved)


def one_group(name: str, weight_decay: float = 0.0) -> TrainState:
    """As `build_optimizer` makes them: the same groups whatever the optimizer."""
    state = make_state()
    state.optimizer = getattr(torch.optim, name)(state.model.parameters(), lr=0.01, weight_decay=weight_decay)
    return state


@pytest.mark.parametrize(("before", "after"), [("SGD", "AdamW"), ("Adam", "SGD"), ("SGD", "SGD of fewer")])
def test_resuming_with_another_optimizer_or_other_frozen_layers_is_refused(before: str, after: str) -> None:
    started, other = one_group(before), one_group(after.split()[0])
    train(started, 2)
    if "fewer" in after:
        other.optimizer = torch.optim.SGD([*other.model.parameters()][1:], lr=0.01)
    with pytest.raises(UserError, match="--optimizer and the --freeze"):
        restore_state(other, full(started))


def test_decay_is_that_of_the_flags_given_now() -> None:
    """A resume with another --hyp or --batch-size must not keep the checkpoint's."""
    started, other = (one_group("AdamW", weight_decay=decay) for decay in (0.1, 0.2))
    train(started, 2)
    restore_state(other, full(started))
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.2
    assert len(other.optimizer.state) == len(started.optimizer.state) > 0


def test_step_counters_are_those_of_the_kernels_of_this_device() -> None:
    """Of a file from a device without fused kernels; torch places and converts them for fused ones only."""
    started, other = make_state(optimizer="AdamW"), make_state(optimizer="AdamW")
    train(started, 2)
    saved = copy.deepcopy(full(started))
    for fused, groups in ((False, saved["optimizer"]["param_groups"]), (True, other.optimizer.param_groups)):
        for group in groups:
            group["fused"] = fused
    for moments in saved["optimizer"]["state"].values():
        moments["step"] = moments["step"].double()
    restore_state(other, saved)
    assert {m["step"].dtype for m in other.optimizer.state.values()} == {torch.float32}


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Muon"])
def test_moments_have_the_memory_layout_of_their_parameters(optimizer: str) -> None:
    """Fused kernels go through memory in its order, and took one weight's moment for another's."""
    state, other = make_state(optimizer=optimizer), make_state(optimizer=optimizer)
    for made in (state, other):
        made.model.to(memory_format=torch.channels_last)
    train(state, 2)
    saved = copy.deepcopy(dump_state(state))
    for moments in saved["optimizer"]["state"].values():
        moments.update({name: m.contiguous() for name, m in moments.items() if isinstance(m, torch.Tensor)})
    restore_state(other, saved)
    for parameter, moments in other.optimizer.state.items():
        kept = [m for m in moments.values() if isinstance(m, torch.Tensor) and m.shape == parameter.shape]
        assert kept and all(m.stride() == parameter.stride() for m in kept)
    assert_equal(dump_state(other)["optimizer"], dump_state(state)["optimizer"])


def restored(change: Callable[[dict[str, Any]], object], optimizer: str = "SGD") -> None:
    state = make_state(optimizer=optimizer)
    train(state, 2)
    saved = full(state)
    change(saved)
    check_values(saved)
    restore_state(make_state(optimizer=optimizer), saved)


def moments(saved: dict[str, Any]) -> dict[str, Any]:
    return saved["optimizer"]["state"][0]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Muon"])
@pytest.mark.parametrize(
    "change",
    [
        lambda saved: moments(saved).update({name: torch.zeros(7) for name in moments(saved) if name != "step"}),
        lambda saved: moments(saved).update({name: 0.5 for name in moments(saved) if name != "step"}),
        lambda saved: moments(saved).update(other=torch.zeros(2)),
        lambda saved: saved["optimizer"].pop("param_groups"),
        lambda saved: saved["optimizer"]["state"].update({99: {"momentum_buffer": torch.zeros(2)}}),
        lambda saved: saved["optimizer"]["param_groups"][0].update(params=torch.zeros(0)),
    ],
)
def test_an_optimizer_state_that_would_fail_in_the_first_step(change: Any, optimizer: str) -> None:
    with pytest.raises(UserError, match=r"The optimizer's state in the checkpoint does not fit \("):
        restored(change, optimizer)


@pytest.mark.parametrize("names", ["AdamW exp_avg_sq norm_sq", "Muon norm_sq exp_avg_sq"])
def test_an_optimizer_state_of_another_kind_of_parameter(names: str) -> None:
    optimizer, name, other = names.split()
    with pytest.raises(UserError, match=rf"does not fit \(it has (?!.*{name})"):
        restored(lambda saved: moments(saved).update({other: moments(saved).pop(name)}), optimizer)


def test_losses_of_another_head() -> None:
    with pytest.raises(UserError, match=r"its losses are of shape \(1, 5\) in torch.float32, expected 3"):
        restored(lambda saved: saved.update(epoch_losses=torch.zeros(1, 5)))


@pytest.mark.parametrize(
    "change",
    [
        {"python": (3, (1, 2), None)},
        {"python": (3, (*range(624), 10**12), None)},
        {"numpy": ("MT19937", [1, 2], 0, 0, 0.0)},
        {"numpy": ("other", [1] * 624, 0, 0, 0.0)},
        {"numpy": ("MT19937", [2**40] * 624, 0, 0, 0.0)},
        {"torch": torch.zeros(7)},
        {"torch": torch.zeros(7, dtype=torch.uint8)},
    ],
)
def test_invalid_generator_states(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="invalid states of random generators"):
        restored(lambda saved: saved["rng"].update(change))
