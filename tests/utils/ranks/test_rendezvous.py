"""How ranks agree on a name for their start, in a store that remembers earlier ones."""

from __future__ import annotations

import re
import time
from functools import partial

import pytest
from torch.distributed import HashStore, Store

from tessera.utils.errors import ConfigError, UserError
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks import rendezvous
from tessera.utils.ranks.rendezvous import agree_on_session, require_own_devices
from tests.at_once import at_once
from tests.utils.ranks.counted_store import CountedStore


def start(store: Store, size: int, delays: dict[int, float] | None = None) -> set[str]:
    """All ranks at once, or some later; the names they came to."""

    def one(rank: int) -> str:
        time.sleep((delays or {}).get(rank, 0))
        return agree_on_session(store, rank, size, 10)

    return set(at_once([partial(one, rank) for rank in range(size)]))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_all_ranks_find_one_new_name_at_each_start(late: int) -> None:
    store = HashStore()
    names = [start(store, size, {late: 0.2}) for size in (3, 3, 2, 4, 1)]
    assert all(len(found) == 1 for found in names)
    assert len(set.union(*names)) == len(names)


def test_who_is_missing_is_named() -> None:
    store = HashStore()
    store.set("rendezvous/nonce/1", "of a rank that died")
    with pytest.raises(UserError, match="of 3 ranks 1, 2 did not start"):
        agree_on_session(store, 0, 3, 0.2)
    with pytest.raises(UserError, match="rank 2 has waited"):
        agree_on_session(store, 2, 3, 0.2)


def test_waiting_for_a_straggler_names_it_and_asks_the_store_seldom(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "NOTICE_S", 1.0)
    store = CountedStore()
    assert len(start(store, 24, {23: 1.5})) == 1
    assert store.asked.total() < 24 * 150, store.asked  # with 20 ms between questions there are 10,000
    (line,) = capfd.readouterr().err.splitlines()  # on a busy machine others may be late too
    assert re.fullmatch(r"Waiting for rank.*\b23 of 24 to start, for at most 10 s \(TESSERA_JOIN_TIMEOUT\)\.", line)


class Device(Accelerator):
    """A GPU with a name of its own, or a CPU."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.backend, self._name = "nccl" if name else "gloo", name

    @property
    def identity(self) -> str:
        return self._name


@pytest.mark.parametrize(
    ("devices", "shared"),
    [
        (["GPU-a", "GPU-b", "GPU-c"], ""),
        (["", "", ""], ""),
        (["GPU-a", "GPU-b", "GPU-a"], r"ranks 0, 2 .* \(GPU-a\)"),
        (["GPU-a", "", "GPU-b"], "the ranks compute on different kinds .*: nccl on rank 0, 2; gloo on rank 1"),
    ],
)
def test_every_rank_needs_a_device_of_its_own(devices: list[str], shared: str) -> None:
    store, errors = HashStore(), []

    def one(rank: int) -> None:
        try:
            require_own_devices(store, rank, len(devices), Device(devices[rank]))
        except ConfigError as error:
            errors.append(str(error))

    at_once([partial(one, rank) for rank in range(len(devices))])
    assert len(errors) == (len(devices) if shared else 0)
    assert all(re.match(shared, error) for error in errors)


@pytest.mark.parametrize(
    ("networks", "shared"), [(["a", "a", "a"], True), (["a", "a", "b"], False), (["", "", ""], False)]
)
def test_ranks_know_whether_they_share_a_loopback_interface(
    networks: list[str], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers of one host do not."""
    left = iter(networks)
    monkeypatch.setattr(rendezvous, "namespace", lambda kind: next(left))
    store = HashStore()
    found = at_once([partial(require_own_devices, store, rank, 3, Accelerator()) for rank in range(3)])
    assert found == [shared] * 3
