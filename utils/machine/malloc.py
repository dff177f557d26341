"""The C library's memory, for computing on the CPU."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory() -> None:
    """Let malloc keep what is freed, for the next step needs as much again.

    By default glibc maps every large block anew and gives it back when it is freed: activations and gradients then
    arrive page by page through the kernel, which zeroes them, in each step. That costs a fifth of a training step on
    the CPU. The process stays as large as it has ever been. Without glibc nothing happens.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
