"""Training state: saved and restored bit for bit."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.utils.checkpoints.format import load_checkpoint, save_checkpoint
from tessera.utils.checkpoints.resume import dump_state, restore_state, rng_state, set_rng_state
from tessera.utils.engine.state import TrainState
from tessera.utils.errors import UserError
from tessera.utils.machine.accelerator import Accelerator
from tests.utils.checkpoints.made_state import assert_equal, full, make_state, train


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_resuming_is_exact(tmp_path: Path, optimizer: str) -> None:
    straight = make_state(optimizer=optimizer)
    train(straight, 4)
    save_checkpoint(tmp_path / "last.pt", full(straight))
    train(straight, 5)

    resumed = make_state(seed=99, optimizer=optimizer)
    train(resumed, 2)
    restore_state(resumed, load_checkpoint(tmp_path / "last.pt"))
    assert resumed.progress.step == 4 and len(resumed.progress.class_maps) == 2
    assert resumed.ema.updates == 4 and resumed.stopper.best_fitness == 0.04
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
    made = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[name]
    state.optimizer = made(state.model.parameters(), lr=0.01, weight_decay=weight_decay)
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
    started = one_group("AdamW", weight_decay=0.1)
    train(started, 2)
    other = one_group("AdamW", weight_decay=0.2)
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


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
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
