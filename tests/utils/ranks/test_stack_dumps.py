"""SIGUSR2 prints the stacks of a process's threads, any number of times, and the process continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tessera.utils.ranks.failures import start_signal_thread

ROOT = Path(__file__).resolve().parents[3]
START = """
import os, re, signal, sys, threading
from tessera.utils.ranks.failures import start_signal_thread
from tessera.utils.streams import capture_library_output
signal.alarm(60)  # ends a process that hangs
end = start_signal_thread('the one')
"""
BUSY = """
def deep(n):
    return n and deep(n - 1)

def work():
    while not over.is_set():
        deep(100)

def wait():
    print("ready", flush=True)
    sys.stdin.readline()

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
def child_waits():
    start_signal_thread('the one')
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    os._exit(0)

def parent_waits():
    os.waitpid(child, 0)

child = os.fork()
signal.alarm(60)
if child == 0:
    child_waits()
parent_waits()
end()
"""
HOLDING_BACK = """
with capture_library_output(re.compile(b'libjpeg')) as words:
    print(1, flush=True)
    sys.stdin.readline()
assert not words
end()
"""
ODD_PATH = """
exec(compile("print(1, flush=True); sys.stdin.readline(); end()", 'caf\\udce9.py', 'exec'))
"""


@contextmanager
def program(text: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", START + text]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as it:
        try:
            yield it
        finally:
            it.kill()


def write(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def ask(process: subprocess.Popen[str], pid: int) -> str:
    assert process.stderr
    os.kill(pid, signal.SIGUSR2)
    text = ""
    for line in process.stderr:
        text += line
        if line == f"the one (process {pid}) continues\n":
            assert text.startswith(f"the one (process {pid}) is here:\n")
            return text
    raise AssertionError(f"no answer of {pid}\n{text}")


def rest_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr
    text = process.stderr.read()
    assert process.wait(60) == 0, text
    return text


def test_a_busy_process_answers_every_time_and_outlives_it() -> None:
    with program(BUSY) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        for _ in range(100):
            answer = ask(process, process.pid)
            assert answer.count(", in wait\n") == 1
            assert answer.count('Thread "busy"') == 2
            assert 'Thread "signals"' not in answer
        write(process, "over")
        assert process.stdout.readline() == "ended\n"
        process.send_signal(signal.SIGUSR2)  # late, and ignored
        write(process, "end")
        assert rest_of(process) == ""


def test_a_forked_process_answers_for_itself() -> None:
    with program(FORKED) as process:
        assert process.stdout
        child = int(process.stdout.readline())
        answers = [ask(process, child), ask(process, process.pid)]
        write(process, "end")
        assert rest_of(process) == ""
    assert [", in child_waits\n" in answer for answer in answers] == [True, False]
    assert [", in parent_waits\n" in answer for answer in answers] == [False, True]


@pytest.mark.parametrize(
    ("text", "message"), [(ODD_PATH, r"caf\udce9.py"), (HOLDING_BACK, ", in <module>")], ids=["path", "stderr"]
)
def test_a_process_answers_from_a_file_of_any_name_and_while_words_of_libraries_are_held_back(
    text: str, message: str
) -> None:
    """Such as a loader worker that hangs in a decode."""
    with program(text) as process:
        assert process.stdout and process.stdout.readline() == "1\n"
        assert message in ask(process, process.pid)
        write(process, "end")
        assert rest_of(process) == ""


def test_what_listened_before_listens_again() -> None:
    heard = []
    handler = signal.signal(signal.SIGUSR2, lambda *_: heard.append(1))
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wake = signal.set_wakeup_fd(writer)
    try:
        start_signal_thread("the one")()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert os.read(reader, 9) == bytes([signal.SIGUSR2])
        assert heard == [1]
    finally:
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGUSR2, handler)
        os.close(reader)
        os.close(writer)
