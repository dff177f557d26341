"""Validation of the values in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.utils.checkpoints.archive import DamagedFile
from tessera.utils.checkpoints.format import KEYS, check_values, load_checkpoint
from tessera.utils.checkpoints.resume import restore_state
from tessera.utils.errors import UserError
from tests.utils.checkpoints.made_state import full, make_state, train

WRONG = (True, -1.5, 10**30, ["a", [1]], [1.5, "a"], {"a": "b"}, {"params": 1}, torch.zeros(3, dtype=torch.bool))


def test_a_wrong_value_is_named(tmp_path: Path) -> None:
    """hyp, config and model_yaml hold values by name, which their own readers check."""
    for key in sorted({*KEYS} - {"version", "hyp", "config", "model_yaml"}):
        refused = 0
        for value in WRONG:
            try:
                check_values({key: value})
            except DamagedFile as error:
                assert str(error).startswith(f"its `{key}` ({type(value).__name__}) is not ")
                refused += 1
        assert refused >= len(WRONG) - 1, key  # a number or a tensor is right in a few places
    torch.save({**full(make_state()), "epoch": "a"}, tmp_path / "last.pt")
    with pytest.raises(UserError, match=r"last\.pt: damaged: its `epoch` \(str\) is not a whole number\. Use"):
        load_checkpoint(tmp_path / "last.pt")


def restored(change: Callable[[dict[str, Any]], object], optimizer: str = "SGD") -> None:
    state = make_state(optimizer=optimizer)
    train(state, 2)
    saved = full(state)
    change(saved)
    check_values(saved)
    restore_state(make_state(optimizer=optimizer), saved)


def moments(saved: dict[str, Any]) -> dict[str, Any]:
    return saved["optimizer"]["state"][0]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    "change",
    [
        lambda saved: moments(saved).update({name: torch.zeros(7) for name in moments(saved) if name != "step"}),
        lambda saved: moments(saved).update({name: 0.5 for name in moments(saved) if name != "step"}),
        lambda saved: moments(saved).update(other=torch.zeros(2)),
        lambda saved: saved["optimizer"]["state"].update({99: {"momentum_buffer": torch.zeros(2)}}),
        lambda saved: saved["optimizer"]["param_groups"][0].update(params=[]),
    ],
)
def test_an_optimizer_state_that_would_fail_in_the_first_step(change: Any, optimizer: str) -> None:
    with pytest.raises(UserError, match=r"The optimizer's state in the checkpoint does not fit \("):
        restored(change, optimizer)


def test_losses_of_another_head() -> None:
    with pytest.raises(UserError, match="it has 5 losses, the model 3"):
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
