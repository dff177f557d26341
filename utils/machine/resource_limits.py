"""What this process may use of its machine: processors, memory and open files, control groups included.

A container or a batch system grants less than the machine has; `os.cpu_count()` and /proc/meminfo ignore that.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

_SYSTEM = Path("/")  # root of the file system that /proc and /sys are read from
_SPARE_FILES = 16  # that the rest of a run opens now and then: results, pictures, checkpoints


def usable_cpus() -> int:
    """Processors this process may use, at least 1: its affinity, cut by the quota of its control groups (v1, v2)."""
    mine = affinity()
    return share_of_cpus(mine, [mine], cpu_quota())


def affinity() -> frozenset[int]:
    """Numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))  # macOS


def cpu_quota() -> float:
    """Processors that the control groups of this process grant (v1, v2); infinite without a limit."""
    quotas = [quota for group in _control_groups("cpu") if (quota := _cpu_quota(group)) is not None]
    return min(quotas, default=math.inf)


def share_of_cpus(mine: frozenset[int], sharing: Sequence[frozenset[int]], quota: float) -> int:
    """Processors for the one with affinity `mine` of several processes of a machine, at least 1.

    Each processor is divided among the processes that may run on it, the quota among all of them: a batch system gives
    each task its own processors, but often one control group to all tasks of a node.
    """
    share = sum(Fraction(1, sum(cpu in other for other in sharing)) for cpu in mine)
    return max(1, math.floor(min(share, quota / len(sharing))))


def available_memory() -> int | None:
    """Bytes that may still be taken without swapping or being killed, None where the system does not report it.

    The least of MemAvailable and of what each memory control group (v1, v2) has left, reclaimable file pages included.
    """
    found = [room for group in _control_groups("memory") if (room := _memory_room(group)) is not None]
    for line in _read(_SYSTEM / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    return max(0, min(found)) if found else None


def open_files_left(wanted: int) -> int:
    """Files that this process may still open; its soft limit is raised, as far as the hard one lets it, to `wanted`."""
    numbers = Path("/dev/fd")
    used = (len(list(numbers.iterdir())) if numbers.is_dir() else 0) + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = used + wanted
    if soft != resource.RLIM_INFINITY and soft < enough:
        raised = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
        with contextlib.suppress(ValueError, OSError):  # a system may have a lower limit than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else soft - used


def _control_groups(controller: str) -> Iterator[Path]:
    """Folders of this process's control group for `controller` and of all groups above it: each may set a limit."""
    for line in _read(_SYSTEM / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = _SYSTEM / "sys/fs/cgroup" / (controller if controllers else "")
        # Inside a container the path may be the host's, which is not visible: the mount's own root is then the group.
        yield from (base / group for group in (Path(path.lstrip("/")), *Path(path.lstrip("/")).parents))


def _cpu_quota(group: Path) -> float | None:
    """Processors that `group` grants: cpu.max (v2) or cpu.cfs_quota_us (v1); None without a limit."""
    quota, _, period = _read(group / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip()
    if quota in ("", "max", "-1") or not period:
        return None
    return int(quota) / int(period)


def _memory_room(group: Path) -> int | None:
    """Bytes that `group` has left; None without a limit."""
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
    """Text of a /proc or /sys file, "" where this system has none or does not show it."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""
