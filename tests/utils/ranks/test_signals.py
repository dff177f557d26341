"""Signals before the first step, in the steps, during the shutdown, and while a library call does not return."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tessera.utils.errors import Interrupted
from tessera.utils.ranks.failures import SIGNALS, StopSignals, ignore_sigterm
from tests.system.launch import ROOT

pytestmark = pytest.mark.usefixtures("hangs_up")


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


def test_sigusr2_prints_the_stacks_of_a_process_in_a_library_call_and_it_continues() -> None:
    program = """
import signal, sys, threading
from tessera.utils.ranks.failures import print_stacks_on_sigusr2
print_stacks_on_sigusr2()
lock = threading.Lock()
def waits():
    lock.acquire()
lock.acquire()
thread = threading.Thread(target=waits)
thread.start()
def reads():
    print("ready", flush=True)
    sys.stdin.readline()
reads()
lock.release()
thread.join()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin and process.stdout and process.stderr and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGUSR2)
        found = b""
        while b" in <module>" not in found:
            found += process.stderr.readline()
        assert b"in waits" in found and b"in reads" in found
        errors = process.communicate(b"\n", timeout=60)[1]
    assert process.returncode == 0 and not errors
