"""A store that counts what it is asked, for as many ranks as a test makes up."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from torch.distributed import HashStore, Store


def _counted(name: str) -> Any:
    """A method of Store, counted."""

    def call(self: CountedStore, *args: Any) -> Any:
        with self._lock:
            self.asked[name] += 1
        return getattr(self._store, name)(*args)

    return call


class CountedStore(Store):
    """`store`, or one in memory; calls by name are counted in `asked`, of all ranks that share that."""

    def __init__(self, store: Store | None = None, asked: Counter[str] | None = None) -> None:
        super().__init__()
        self._store = HashStore() if store is None else store
        self.asked: Counter[str] = Counter() if asked is None else asked
        self._lock = threading.Lock()

    set, add, compare_set = _counted("set"), _counted("add"), _counted("compare_set")
    get, multi_get, check = _counted("get"), _counted("multi_get"), _counted("check")
