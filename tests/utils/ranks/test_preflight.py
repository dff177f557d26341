"""What is advised before a job begins."""

from __future__ import annotations

from tessera.utils.ranks.preflight import Host, advise


def test_advice_where_something_looks_wrong() -> None:
    good = Host("a", "cpu", 2**33, 2**40)
    assert advise([good, good], 5000, 2) == []
    lines = advise([good, Host("b", "cpu", 2**20, 2**20)], 10, 2)
    assert len(lines) == 3 and "GLOO_SOCKET_IFNAME" in lines[0] and lines[1].startswith("b: /dev/shm")
