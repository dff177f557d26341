"""Which processes share the process ids, or the network interfaces, of one machine."""

from __future__ import annotations

from pathlib import Path


def namespace(kind: str) -> str:
    """Name of a namespace of this process, the same in all processes that share it, and in no others.

    Containers of one host have namespaces of their own, and every boot has others.

    Args:
        kind: "pid" for process ids, "net" for network interfaces.

    Returns:
        The name, without spaces; "" where the system does not say: only Linux does.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path(f'/proc/self/ns/{kind}').readlink()}"
    except OSError:
        return ""
