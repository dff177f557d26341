"""A process tells where its threads are, as often as it is asked, and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUSY = """
import signal, sys, threading
from utils.stacks import answer_where

def deep(n):
    return n and deep(n - 1)

def work():
    while not over.is_set():
        deep(100)

def wait():
    print("ready", flush=True)
    sys.stdin.readline()

signal.alarm(60)  # ends a process that hangs
end = answer_where()
over = threading.Event()
threads = [threading.Thread(target=work, name="busy") for _ in range(2)]
for thread in threads:
    thread.start()
wait()
over.set()
for thread in threads:
    thread.join()
end()
print("ended", flush=True)
sys.stdin.readline()
"""
FORKED = """
import os, signal, sys
from utils.stacks import answer_where

end = answer_where()
child = os.fork()
signal.alarm(60)
if child == 0:
    answer_where()
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    os._exit(0)
os.waitpid(child, 0)
end()
"""

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="there is no SIGUSR2 here")


@contextmanager
def program(text: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program in the background."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", text], cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=pipe
    ) as it:
        try:
            yield it
        finally:
            it.kill()


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Write a line to the program."""
    assert process.stdin
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def ask(process: subprocess.Popen[str], pid: int) -> str:
    """Signal `pid`, and read what comes up to the head of its answer."""
    assert process.stderr
    os.kill(pid, signal.SIGUSR2)
    text = ""
    for line in process.stderr:
        text += line
        if line == f"process {pid} is here:\n":
            return text
    raise AssertionError(f"no answer of {pid}\n{text}")


def rest_of(process: subprocess.Popen[str]) -> str:
    """What the program still prints as it ends in order."""
    assert process.stderr
    text = process.stderr.read()
    assert process.wait(30) == 0, text
    return text


def test_a_busy_process_answers_every_time_and_outlives_it() -> None:
    with program(BUSY) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        text = "".join(ask(process, process.pid) for _ in range(200))
        tell(process, "over")
        assert process.stdout.readline() == "ended\n"
        process.send_signal(signal.SIGUSR2)  # late, and overheard
        tell(process, "end")
        text += rest_of(process)
    assert text.count(", in wait\n") == 200
    assert text.count('Thread "busy"') == 400
    assert 'Thread "where"' not in text


def test_a_forked_process_answers_for_itself() -> None:
    with program(FORKED) as process:
        assert process.stdout
        child = int(process.stdout.readline())
        assert "os.waitpid" not in ask(process, child)
        assert ask(process, process.pid).count("sys.stdin.readline()") == 0
        tell(process, "end")
        assert "process" not in rest_of(process)
