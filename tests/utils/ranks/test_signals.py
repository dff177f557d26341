"""Signals before the first step, in the steps, during the shutdown, and while a library call does not return."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tessera.utils.errors import Interrupted
from tessera.utils.ranks import failures
from tessera.utils.ranks.failures import (
    SIGNALS,
    StopSignals,
    agree_on_exit_code,
    default_signal_handlers,
    ignore_sigterm,
)
from tests.system.launch import ROOT
from tests.utils.ranks.conftest import until

pytestmark = pytest.mark.usefixtures("hangs_up")

STUCK = """
import contextlib, ctypes
from tessera.utils.errors import Interrupted
from tessera.utils.ranks import failures
failures.STUCK_S = 0.2
end = failures.start_signal_thread("the one")
library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_lock(lock)
while True:
    with contextlib.suppress(Interrupted), failures.StopSignals():  # raised where the signal comes before the call
        print("stuck", flush=True)
        library.pthread_mutex_lock(lock)  # it is locked: never returns, and no signal makes it
"""


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138), (signal.SIGHUP, 129)]
)
def test_at_first_a_signal_ends_the_run_at_once(number: signal.Signals, code: int) -> None:
    sentence = rf"^Stopped by {number.name} before the first step\.$"
    with pytest.raises(Interrupted, match=sentence) as caught, StopSignals("before the first step"):
        send(number)
    assert caught.value.exit_code == code and not caught.value.saved


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop_signals:
            send(signal.SIGHUP)
            assert not stop_signals.stop_requested() and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_deferred_signal_is_noted_for_the_step_and_ends_the_run_after_the_last() -> None:
    with StopSignals() as stop_signals:
        stop_signals.defer()
        send(signal.SIGUSR1)
        send(signal.SIGTERM)
        assert stop_signals.requested == signal.SIGUSR1
        with pytest.raises(Interrupted, match="Stopped by SIGUSR1 after the last step"):
            stop_signals.stop_immediately("after the last step")


@pytest.mark.parametrize(
    ("requested", "taken"), [([0, 15, 0], signal.SIGTERM), ([15, 0, 10], signal.SIGUSR1), ([0, 2, 10], signal.SIGINT)]
)
def test_the_ranks_take_one_of_their_signals_and_ignore_later_ones(requested: list[int], taken: int) -> None:
    with StopSignals() as outer, StopSignals() as stop_signals:
        stop_signals.defer()
        assert stop_signals.take(requested) == taken
        send(signal.SIGTERM)
        assert stop_signals.requested == taken
    assert outer.requested == taken


def test_a_second_ctrl_c_always_ends_at_once() -> None:
    with StopSignals() as stop_signals:
        stop_signals.defer()
        send(signal.SIGINT)
        with pytest.raises(Interrupted, match=r"^Ended immediately by Ctrl-C\."):
            send(signal.SIGINT)


def test_the_first_signal_is_acknowledged_at_once_by_rank_0(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, message in (("0", "\nSIGUSR1: stopping soon; Ctrl-C ends immediately.\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        with StopSignals() as stop_signals:
            stop_signals.defer()
            send(signal.SIGUSR1)
            assert capfd.readouterr().err == message
            send(signal.SIGTERM)
            assert capfd.readouterr().err == ""


def test_an_end_that_has_begun_is_not_cut_off_unless_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KeyboardInterrupt in the middle of closing loaders left "a loader worker is gone" behind."""
    with StopSignals() as outer:
        with pytest.raises(Interrupted), StopSignals() as inner:
            try:
                send(signal.SIGINT)
            finally:
                send(signal.SIGINT)
        send(signal.SIGINT)
        send(signal.SIGTERM)  # as launchers send it
        assert outer.requested == signal.SIGINT and inner.stop_requested()
        monkeypatch.setattr("tessera.utils.ranks.failures.GRACE_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignals():
        assert all(isinstance(signal.getsignal(number), StopSignals) for number in SIGNALS)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_outside_the_main_thread_signals_stay_as_they_are() -> None:
    def work() -> bool:
        before = signal.getsignal(signal.SIGTERM)
        with StopSignals() as stop_signals:
            stop_signals.defer()
            is_same = signal.getsignal(signal.SIGTERM) is before
            stop_signals.stop_immediately("later")
        ignore_sigterm()
        return is_same

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result()


def test_a_process_that_ends_ignores_sigterm_for_good() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with StopSignals():
            ignore_sigterm()
            send(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    ignore_sigterm()
    assert signal.getsignal(signal.SIGTERM) is before, "a program of its own keeps its handlers"


def test_a_forked_worker_leaves_the_decision_to_its_rank() -> None:
    with StopSignals() as stop_signals:
        child = os.fork()
        if child == 0:
            send(signal.SIGTERM)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert stop_signals.requested == 0


@pytest.mark.skipif(sys.platform != "linux", reason="a lock of zeros is Linux's")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_process_in_a_call_that_never_returns_ends(number: signal.Signals, code: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUCK], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "stuck\n"
        for _ in range(100):  # one that comes just before the call is handled
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
                break
        process.kill()
        message = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert f"{number.name}: ended during a call that does not return" in message


def test_a_rank_that_ends_in_such_a_call_takes_the_code_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with StopSignals():
        agree_on_exit_code(lambda code: 138)
        with StopSignals() as of_training:
            failures._end_if_stuck(signal.SIGTERM, of_training)
    assert ended == [138]


def test_a_signal_that_is_noted_or_handled_ends_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training saves and ends after its step, however long that takes; a later run is not the one that was meant."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with StopSignals() as deferred:
        deferred.defer()
        failures._end_if_stuck(signal.SIGTERM, deferred)
    with pytest.raises(Interrupted), StopSignals() as handled:
        try:
            send(signal.SIGTERM)
        finally:
            failures._end_if_stuck(signal.SIGTERM, handled)
    with StopSignals() as later:
        failures._end_if_stuck(signal.SIGTERM, handled)
        assert ended == []
        failures._end_if_stuck(signal.SIGTERM, later)
    assert ended == [143]


def test_what_is_no_signal_to_end_costs_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of a loader's worker that has ended, which torch handles."""
    waits: list[float] = []
    monkeypatch.setattr(threading.Timer, "start", lambda timer: waits.append(timer.interval))
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    end = failures.start_signal_thread("the one")
    try:
        with StopSignals() as stop_signals:
            stop_signals.defer()
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGTERM):
                send(number)
            until(lambda: len(waits) == 2)
    finally:
        end()
        signal.signal(signal.SIGCHLD, before)
    assert waits == [failures.STUCK_S, failures.GRACE_S]


def test_while_a_library_may_hold_pythons_lock_signals_end_the_process() -> None:
    with StopSignals() as stop_signals:
        with default_signal_handlers():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is stop_signals
    before = signal.getsignal(signal.SIGTERM)
    with default_signal_handlers():
        assert signal.getsignal(signal.SIGTERM) is before, "a program of its own keeps its handlers"
