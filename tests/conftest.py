"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from tessera.utils.environment import configure_command
from tessera.utils.machine.host import usable_cpus
from tests import families
from tests.system.launch import PART_FAILED, Outcome

MOST_WORKERS = 4  # each may start jobs of four ranks
SHARED = Path(__file__).resolve().parents[2] / "shared"
with suppress(ImportError):  # the tests on a GPU do without
    from hypothesis import settings

    # An example may wait for a busy machine, and which examples are tried does not change from one run to the next.
    settings.register_profile("tests", deadline=None, derandomize=True)
    settings.load_profile("tests")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes: one per core for the whole suite; 0 for files that are given by name."""
    by_name = config.args_source == pytest.Config.ArgsSource.ARGS
    return 0 if by_name else min(usable_cpus(), MOST_WORKERS)


def pytest_configure() -> None:
    """Give each process of the suite one thread, since they share the cores."""
    configure_command()
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with reference values, real images and an official checkpoint; skips where it does not exist."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the folder of reference data {SHARED}, which is not here")
    return SHARED


@pytest.fixture(scope="session")
def family_files(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's published file by the name of its reference, such as "yolox_s"; written once (tests/families.py)."""
    folder = tmp_path_factory.mktemp("families")

    @cache
    def written(reference: str) -> Path:
        return families.write(shared, reference, folder)

    return written


@pytest.fixture(autouse=True)
def whole_runs(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test where a part of a run failed and the run went on, unless it is marked `parts_fail`.

    Its own log and the output of the commands that it and its shared fixtures ran are searched.
    """
    yield
    logged = [record.getMessage() for when in ("setup", "call") for record in caplog.get_records(when)]
    lines = [line for text in (*logged, *Outcome.printed) for line in text.splitlines() if PART_FAILED in line]
    Outcome.printed.clear()
    if request.node.get_closest_marker("parts_fail") is None:
        assert not lines, "a part of a run failed; mark the test parts_fail where it is meant to"


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """SIGHUP as a terminal has it, for this process and those that it starts, though nohup has started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for TMPDIR; sockets in it need a short path."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def private_folders(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep caches and datasets of a test inside its own folder; all tests share matplotlib's list of fonts."""
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path_factory.getbasetemp() / "matplotlib"))
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TESSERA_DATASETS", str(tmp_path / "datasets"))
