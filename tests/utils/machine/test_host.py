"""utils/machine/malloc.py, in a process of its own, for it changes the whole process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from tessera.utils.machine.host import keep_freed_memory

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
mapped_anew = faults()
keep_freed_memory()
faults()
print(mapped_anew, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is Linux's")
def test_freed_memory_is_used_again_without_the_kernel() -> None:
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    mapped_anew, kept = map(int, said.split())
    if mapped_anew < 50:
        pytest.skip(f"this C library or kernel maps no memory anew: {mapped_anew} page faults for 128 MiB")
    assert kept < mapped_anew / 10
