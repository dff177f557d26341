"""Host utilities: CPU info, concurrent reading, malloc settings, namespaces."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

from tessera.utils.text import escape_control

T = TypeVar("T")
_PIPE_BYTES = 1 << 16

_READERS = 16  # threads
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def cpuinfo() -> dict[str, str]:
    """Return /proc/cpuinfo of the first processor; {} on other systems than Linux."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}


def keep_malloc_memory() -> None:
    """Let glibc's malloc keep freed memory for the next step; do nothing without glibc.

    By default it maps every large block again, and the kernel zeroes activations and gradients page by page in each
    step, which costs a fifth of a training step on the CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def in_chunks(read: Callable[[int, int], T], count: int, length: int, slow_s: float) -> list[T]:
    """Return `read(start, end)` for chunks of `length` of `count` files, in order.

    One thread is fastest from memory or a local disk. After a chunk that took longer than `slow_s` per file, several
    threads read the rest. Processes must not be forked here, beside CUDA or communication threads.
    """
    chunks = [(start, min(start + length, count)) for start in range(0, count, length)]
    results: list[T] = []
    for start, end in chunks:
        began = time.perf_counter()
        results.append(read(start, end))
        if time.perf_counter() - began > slow_s * (end - start):
            break
    if rest := chunks[len(results) :]:
        with ThreadPoolExecutor(_READERS) as pool:
            results += pool.map(lambda chunk: read(*chunk), rest)
    return results


def namespace(kind: str) -> str:
    """Return an id of this process's Linux namespace ("pid" or "net"), unique over hosts and boots; "" elsewhere."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path(f'/proc/self/ns/{kind}').readlink()}"
    except OSError:
        return ""


_SYSTEM = Path("/")  # parent of /proc and /sys
_SPARE_FILES = 16  # for results, images, checkpoints


def usable_cpus() -> int:
    """Return the processors of this process by its affinity and the quota of its control groups, at least 1."""
    mine = affinity()
    return cpus_of_process(mine, [mine], cpu_quota())


def affinity() -> frozenset[int]:
    """Return the numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))  # macOS


def cpu_quota() -> float:
    """Return the CPU quota of this process's control groups (v1, v2) in processors; infinite without a limit."""
    quotas = [quota for group in _control_groups("cpu") if (quota := _cpu_quota(group)) is not None]
    return min(quotas, default=math.inf)


def cpus_of_process(mine: frozenset[int], sharing: Sequence[frozenset[int]], quota: float) -> int:
    """Return the processors for one of several processes of a machine, the one with affinity `mine`, at least 1.

    Each processor is divided among the processes that may run on it. The quota is divided among all of them, since
    batch systems often have one control group for all tasks of a node.
    """
    share = sum(Fraction(1, sum(cpu in other for other in sharing)) for cpu in mine)
    return max(1, math.floor(min(share, quota / len(sharing))))


def available_memory() -> int | None:
    """Return the bytes that may be allocated without swapping or being killed; None if the system does not report it.

    The minimum of MemAvailable and of each memory control group (v1, v2), with reclaimable file pages.
    """
    sizes = [size for group in _control_groups("memory") if (size := _memory_left(group)) is not None]
    for line in _read(_SYSTEM / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            sizes.append(int(line.split()[1]) * 1024)
    return max(0, min(sizes)) if sizes else None


def open_files_left(wanted: int) -> int:
    """Raise the soft limit of open files for `wanted` more, and return the number that may still be opened."""
    numbers = Path("/dev/fd")
    used = (len(list(numbers.iterdir())) if numbers.is_dir() else 0) + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = used + wanted
    if soft != resource.RLIM_INFINITY and soft < enough:
        raised = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
        with contextlib.suppress(ValueError, OSError):  # the real limit may be lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else soft - used


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group for `controller` and of its parents, which may set limits."""
    for line in _read(_SYSTEM / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = _SYSTEM / "sys/fs/cgroup" / (controller if controllers else "")
        # In a container the path may be the host's, which is not visible: then the mount's root is the group.
        yield from (base / group for group in (Path(path.lstrip("/")), *Path(path.lstrip("/")).parents))


def _cpu_quota(group: Path) -> float | None:
    """Return the quota in processors of cpu.max (v2) or cpu.cfs_quota_us (v1); None without a limit."""
    quota, _, period = _read(group / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip()
    if quota in ("", "max", "-1") or not period:
        return None
    return int(quota) / int(period)


def _memory_left(group: Path) -> int | None:
    """Return the bytes that `group` has left; None without a limit."""
    for limit_name, usage_name, reclaimable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _read(group / limit_name).strip(), _read(group / usage_name).strip()
        if limit in ("", "max") or not usage:
            continue
        cached = dict(line.split() for line in _read(group / "memory.stat").splitlines()).get(reclaimable, "0")
        return int(limit) - int(usage) + int(cached)
    return None


def _read(path: Path) -> str:
    """Return the text of a /proc or /sys file; "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


@contextmanager
def capture_library_output(known: re.Pattern[bytes]) -> Iterator[list[str]]:
    """Capture the lines that C code prints to stderr and that match `known`; the list is filled at the end.

    All other lines are printed at the end, with control characters escaped, as a name in a file may have some. The
    descriptor belongs to the whole process, so use this only where other threads print little, such as in a loader
    worker.
    """
    captured: list[str] = []
    stderr, reader, writer = os.dup(2), *os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)  # more than the pipe holds is dropped
    os.dup2(writer, 2)
    try:
        yield captured
    finally:
        os.dup2(stderr, 2)
        with contextlib.suppress(OSError):  # nothing was printed, or stderr fails
            lines = os.read(reader, _PIPE_BYTES).splitlines(keepends=True)
            captured += [line.decode(errors="replace").rstrip() for line in lines if known.match(line)]
            others = b"".join(line for line in lines if not known.match(line))
            os.write(2, escape_control(others.decode(errors="backslashreplace")).encode())
        for descriptor in (stderr, reader, writer):
            os.close(descriptor)
