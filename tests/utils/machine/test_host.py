"""Malloc settings, processors and memory by affinity and control groups (v1, v2), open files."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.utils.machine import host
from tessera.utils.machine.host import available_memory, capture_library_output, cpus_of_process, usable_cpus

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


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(host, "_SYSTEM", tmp_path)


V1_ON_THE_HOST = "4:memory:/docker/1\n1:cpu,cpuacct:/docker/1\n"


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        ("", {}, 16),
        ("0::/a/b\n", {"cpu.max": "max 100000"}, 16),
        ("0::/a/b\n", {"cpu.max": "400000 100000"}, 4),
        ("0::/a/b\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/a/b\n", {"cpu.max": "3200000 100000"}, 16),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 2),
        (V1_ON_THE_HOST, {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_cpu_quota(tmp_path: Path, groups: str, files: dict[str, str], cpus: int) -> None:
    write(tmp_path, {"proc/self/cgroup": groups})
    write(tmp_path / "sys/fs/cgroup", files)
    assert usable_cpus() == cpus


@pytest.mark.usefixtures("made_up")
def test_memory_is_the_least_of_machine_and_groups(tmp_path: Path) -> None:
    assert available_memory() is None
    write(tmp_path, {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n", "proc/self/cgroup": "0::/job\n"})
    assert available_memory() == 8000 * 1024
    group = {"memory.max": "5000000", "memory.current": "3000000", "memory.stat": "anon 1\ninactive_file 500000\n"}
    write(tmp_path / "sys/fs/cgroup/job", group)
    assert available_memory() == 2500000
    write(tmp_path, {"proc/self/cgroup": "4:memory:/x\n"})  # version 1
    group = {"limit_in_bytes": "1000", "usage_in_bytes": "900", "stat": "total_inactive_file 50\n"}
    write(tmp_path / "sys/fs/cgroup/memory/x", {f"memory.{name}": text for name, text in group.items()})
    assert available_memory() == 150


@pytest.mark.parametrize(
    ("sharing", "quota", "cpus"),
    [
        ([range(9)] * 3, math.inf, 3),
        ([range(9)] * 3, 4.5, 1),
        ([range(9), range(9, 20)], math.inf, 9),
        ([range(8), range(4, 8), range(4, 8)], math.inf, 5),  # four of its own, and a third of four
        ([range(2)] * 8, math.inf, 1),
    ],
)
def test_processors_are_divided_among_those_that_may_run_on_them(sharing: list[range], quota: float, cpus: int) -> None:
    affinities = [frozenset(found) for found in sharing]
    assert cpus_of_process(affinities[0], affinities, quota) == cpus


def test_the_limit_of_open_files_is_raised_where_it_may_be() -> None:
    """In another process, for a limit cannot be taken back."""
    program = (
        "import resource; from tessera.utils.machine.host import open_files_left as left; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 300)); "
        "print(left(100) >= 100, resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 200, left(1000) < 300)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True"] * 3, done.stderr
