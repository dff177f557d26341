"""A store that counts what it is asked, for as many ranks as a test makes up."""

from __future__ import annotations

import threading
from collections import Counter

from torch.distributed import HashStore, Store


class CountedStore(Store):
    """`store`, or one in memory; calls by name are counted in `asked`, of all ranks that share that."""

    def __init__(self, store: Store | None = None, asked: Counter[str] | None = None) -> None:
        super().__init__()
        self._store = HashStore() if store is None else store
        self.asked: Counter[str] = Counter() if asked is None else asked
        self._lock = threading.Lock()

    def _count(self, name: str) -> None:
        with self._lock:
            self.asked[name] += 1

    def set(self, key: str, value: str) -> None:
        self._count("set")
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._count("get")
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._count("multi_get")
        return self._store.multi_get(keys)

    def check(self, keys: list[str]) -> bool:
        self._count("check")
        return self._store.check(keys)

    def add(self, key: str, value: int) -> int:
        self._count("add")
        return self._store.add(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count("compare_set")
        return self._store.compare_set(key, expected, desired)
