"""Thread pools for computing, and malloc settings, in a separate process since they change all of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tessera.utils.machine.host import capture_library_output, single_threaded_pool

PROGRAM = """
import resource
import numpy as np
from tessera.utils.machine.host import keep_malloc_memory

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
by_default = faults()
keep_malloc_memory()
faults()
print(by_default, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is Linux's")
def test_freed_memory_is_used_again_without_the_kernel() -> None:
    output = subprocess.check_output([sys.executable, "-c", PROGRAM], text=True, timeout=60)
    by_default, reused = map(int, output.split())
    if by_default < 50:
        pytest.skip(f"this C library or kernel maps no memory again: {by_default} page faults for 128 MiB")
    assert reused < by_default / 10


def test_each_of_the_threads_apart_computes_alone_and_those_after_them_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, real = torch.get_num_threads(), torch.set_num_threads

    def late(count: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.1)
        real(count)

    real(3)
    try:
        with single_threaded_pool(2, "apart") as pool:
            assert pool.submit(torch.get_num_threads).result() == 1 and torch.get_num_threads() == 3
        monkeypatch.setattr(torch, "set_num_threads", late)
        with single_threaded_pool(2, "apart") as pool:
            pool.submit(int)
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 3
    finally:
        real(before)


def test_of_what_libraries_print_the_known_lines_are_held_back_and_others_have_no_controls(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with capture_library_output(re.compile(b"Corrupt JPEG")) as words:
        os.write(2, b"name: \x1b[2Jcaf\xe9\nCorrupt JPEG data: bad\nanother thread")
    assert words == ["Corrupt JPEG data: bad"]
    assert capfd.readouterr().err == "name: \\x1b[2Jcaf\\xe9\nanother thread"
    with capture_library_output(re.compile(b"Corrupt JPEG")) as words:
        pass
    assert not words and not capfd.readouterr().err
