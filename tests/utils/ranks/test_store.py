"""The address of the job's store: nobody there, somebody else there, or taken."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from tessera.utils.environment import Launch
from tessera.utils.errors import UserError
from tessera.utils.ranks import rendezvous
from tessera.utils.ranks.liveness import Watchdog
from tessera.utils.ranks.rendezvous import agree_on_session, connect_to_store, open_store
from tests.system.launch import free_port
from tests.utils.ranks.conftest import SERVER, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "NOTICE_S", 0.05)
    monkeypatch.setenv("TESSERA_JOIN_TIMEOUT", "0.5")


def rank(number: int, port: int, agent: bool = False) -> Launch:
    return Launch(number, number, 2, 2, "127.0.0.1", port, "torchrun", agent)


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A port on which somebody listens, who takes connections and says nothing."""
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen(20)
        yield listener


@pytest.mark.parametrize(("agent", "keeper"), [(False, "rank 0"), (True, "torchrun")])
def test_nobody_listens(guard: Watchdog, capfd: pytest.CaptureFixture[str], agent: bool, keeper: str) -> None:
    port = free_port()
    with pytest.raises(
        UserError, match=rf"found nobody at 127.0.0.1:{port} for 0 s \(.*\). Does {keeper} run"
    ) as found:
        connect_to_store(rank(1, port, agent), guard)
    assert found.value.reporter == 1
    assert f"Waiting for {keeper} at 127.0.0.1:{port}" in capfd.readouterr().err


def test_somebody_listens_who_never_answers(
    guard: Watchdog, said: list[str], taken: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    def connect() -> None:
        with contextlib.suppress(UserError):  # at the test's end
            connect_to_store(rank(1, taken.getsockname()[1]), guard)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    until(lambda: said)
    taken.close()
    thread.join(60)
    assert said[0].startswith(f"{SERVER} has not answered")
    assert "does not answer as a job's store" in capfd.readouterr().err


def test_the_port_of_rank_0_is_taken(guard: Watchdog, taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    with pytest.raises(UserError, match=rf"rank 0 cannot listen on port {port} of this host: .*MASTER_PORT") as found:
        open_store(rank(0, port), guard)
    assert "frame #" not in str(found.value)


def test_ranks_of_jobs_of_different_size(capfd: pytest.CaptureFixture[str]) -> None:
    store, errors = HashStore(), {}

    def one(number: int, size: int) -> None:
        try:
            agree_on_session(store, number, size, 0.5)
        except UserError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=one, args=case) for case in ((0, 3), (1, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "of 3 ranks 1, 2 did not start" in errors[0]
    assert "rank 1 was started as one of 2, this one as one of 3" in errors[0]
    assert "rank 0 was started as one of 3, this one as one of 2" in errors[1]
    assert capfd.readouterr().err.count("Waiting for rank") == 2
