"""What a checkpoint says of its run beside the state."""

from __future__ import annotations

import pytest

import tessera
from tessera.utils.checkpoints import provenance
from tessera.utils.checkpoints.format import KEYS, STATE_KEYS
from tessera.utils.checkpoints.provenance import describe_metrics, describe_run, written_by
from tessera.utils.checkpoints.saved_state import dump_state
from tests.utils.checkpoints.made_state import make_state


def test_a_file_says_which_program_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "git_revision", lambda: "c0ffee")
    assert written_by() == {"tessera_version": tessera.__version__, "git": "c0ffee"}
    described = describe_run(make_state().model, {}, {}, 64, "", "c0ffee")
    assert (described["tessera_version"], described["git"]) == (tessera.__version__, "c0ffee")


def test_description_and_state_share_no_key() -> None:
    state = make_state()
    assert set(dump_state(state)) == set(STATE_KEYS)
    described = set(describe_run(state.model, {}, {}, 64, "")) | set(describe_metrics(None))
    assert described == set(KEYS) - set(STATE_KEYS)
