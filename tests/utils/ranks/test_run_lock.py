"""One process at a time writes a run directory."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tessera.deploy.inference.flags import DetectConfig
from tessera.utils.checkpoints.run_directory import new_run
from tessera.utils.config import TrainConfig
from tessera.utils.errors import UserError
from tessera.utils.files import LOCK
from tessera.utils.flags.val import ValConfig
from tessera.utils.ranks import run_lock
from tessera.utils.ranks.run_lock import RunLock, RunLockedError, lock_run
from tessera.utils.ranks.world import World
from tests.data.feed.another_process import another_process, in_another_process


def holding(run: Path) -> Callable[[Connection], None]:
    def hold(pipe: Connection) -> None:
        with lock_run(run, World()):
            if (child := os.fork()) == 0:
                time.sleep(20)
                os._exit(0)
            pipe.send(child)
            time.sleep(60)

    return hold


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_LOCK_TIMEOUT", "0.3")


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("flags", [TrainConfig, ValConfig, DetectConfig])
def test_a_second_process_is_refused_and_leaves_nothing_and_a_kill_frees_the_lock(
    tmp_path: Path, flags: type[Any]
) -> None:
    given = {"weights": "a.pt", "data": "a.yaml", "source": ["a"]}
    own = {name: value for name, value in given.items() if name in flags.__dataclass_fields__}
    wanted = flags(**own, project=str(tmp_path), name="night", exist_ok=True)
    with another_process(holding(tmp_path / "night")) as (process, pipe):
        child, who = pipe.recv(), rf"process {process.pid} on {socket.gethostname()} since 20\d\d-\d\d-\d\d \d\d:"
        before = sorted(tmp_path.rglob("*")), (tmp_path / "night" / LOCK).read_text()
        message = f"night is still being written by {who}.*after 0.3 s.*--name"
        with pytest.raises(RunLockedError, match=message) as error, new_run(wanted, World()):
            pass
        assert error.value.exit_code == 4
        assert (sorted(tmp_path.rglob("*")), (tmp_path / "night" / LOCK).read_text()) == before
        process.kill()
        process.join()
        with new_run(wanted, World()) as run:
            os.kill(child, 0)  # it is alive
            assert run == tmp_path / "night"
        os.kill(child, 9)


def test_a_process_has_the_lock_as_often_as_it_asks_and_leaves_no_empty_directory(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_run(tmp_path / "runs" / "night", World()) as run:
            assert (run / LOCK).is_file()
            (run / "weights").mkdir()
        assert not run.exists()
    with lock_run(run, World()):
        (run / "opt.yaml").touch()
    with lock_run(run, World()):
        pass
    assert [path.name for path in run.iterdir()] == ["opt.yaml"]


def test_a_directory_that_its_holder_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = RunLock(tmp_path / "night"), RunLock(tmp_path / "night")
    assert first.take() is None
    monkeypatch.setattr(run_lock, "_HELD", set())  # as in two processes
    lockf = fcntl.lockf

    def late(*given: Any) -> None:
        monkeypatch.setattr(fcntl, "lockf", lockf)
        first.__exit__()
        lockf(*given)

    monkeypatch.setattr(fcntl, "lockf", late)
    assert second.take() == "a process that is ending" and not (tmp_path / "night").exists()
    with second:
        assert second.take() is None and (tmp_path / "night" / LOCK).is_file()


def test_a_new_run_takes_no_directory_that_another_start_has_taken_since_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal, wanted = RunLock._refusal, TrainConfig(project=str(tmp_path))

    def held(lock: RunLock, file: Any) -> str:
        return "another start" if lock.run.name == "exp" else refusal(lock, file)

    monkeypatch.setattr(RunLock, "_refusal", held)
    with new_run(wanted, World()) as run:
        assert run.name == "exp2"


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "lockf", refused)
    with lock_run(tmp_path / "night", World()) as run:
        (run / "opt.yaml").touch()
    assert [path.name for path in run.iterdir()] == ["opt.yaml"]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{run}: this file system has no locks (No locks available)")


@pytest.mark.parametrize("name", ["run", "project"])
def test_a_link_to_a_disk_that_is_not_there_is_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("no directory")
    message = r"Run directory .*file: cannot be made or written to \(.*a file, or a link to nothing\).*--project"
    with pytest.raises(UserError, match=message), lock_run(tmp_path / "file", World()):
        pass
    (tmp_path / "project").symlink_to(tmp_path / ("unmounted" if name == "project" else "."))
    (tmp_path / "night").symlink_to(tmp_path / "unmounted" / "night")
    message = r"night: cannot be made or written to \(.* a link to nothing\)"
    with pytest.raises(UserError, match=message), lock_run(tmp_path / "project" / "night", World()):
        pass
    if name == "project":  # where a new run looks for a free name
        with (
            pytest.raises(UserError, match="a link to nothing"),
            new_run(TrainConfig(project=str(tmp_path / "project")), World()),
        ):
            pass


def test_a_failing_disk_at_the_end_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(KeyError, match="the run's own"), lock_run(tmp_path / "night", World()):
        monkeypatch.setattr(run_lock, "is_same_file", broken)
        raise KeyError("the run's own")
    monkeypatch.undo()
    with lock_run(tmp_path / "night", World()):
        pass


@pytest.mark.usefixtures("short")
def test_a_process_does_not_get_a_lock_that_it_has(tmp_path: Path) -> None:
    with lock_run(tmp_path / "night", World()):
        with pytest.raises(RunLockedError, match="by this process"), lock_run(tmp_path / "night", World()):
            pass
        begun = time.monotonic()
        with pytest.raises(RunLockedError), lock_run(tmp_path / "night", World(), waits=False):
            pass
        assert time.monotonic() - begun < 0.3
        assert in_another_process(lambda _: RunLock(tmp_path / "night").take()).startswith(f"process {os.getpid()} ")


def test_a_link_in_place_of_the_lock_never_changes_the_file_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "night").mkdir()
    (mine := tmp_path / "mine").write_text("mine")
    mine.chmod(0o600)
    for target in (mine, tmp_path / "nothing"):
        (tmp_path / "night" / LOCK).symlink_to(target)
        with pytest.raises(UserError, match=r"\.lock is a link, expected"), lock_run(tmp_path / "night", World()):
            pass
        (tmp_path / "night" / LOCK).unlink()
    assert mine.read_text() == "mine" and mine.stat().st_mode & 0o777 == 0o600 and not (tmp_path / "nothing").exists()


def test_who_may_write_into_a_directory_may_lock_it_after_another_user(tmp_path: Path) -> None:
    for mode in (0o770, 0o755):
        (tmp_path / "night").mkdir(exist_ok=True)
        (tmp_path / "night").chmod(mode)
        with lock_run(tmp_path / "night", World()) as run:
            assert (run / LOCK).stat().st_mode & 0o777 == mode & 0o666
