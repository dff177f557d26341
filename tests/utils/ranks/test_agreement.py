"""Ranks that were started with something else are named, with what differs."""

from __future__ import annotations

import pytest

from utils.errors import UserError
from utils.ranks.agreement import require_agreement
from utils.ranks.world import World


class _Ranks(World):
    """Several ranks in one process: this one gives its own value, the others what is given."""

    def __init__(self, others: list[dict[str, str]]) -> None:
        super().__init__()
        self._others = others

    def all_gather(self, value):  # type: ignore[no-untyped-def]
        return [value, *getattr(self, "_others", [])]


def test_agreement_names_what_differs_and_where() -> None:
    mine = {"code": "a", "train data": "24 images"}
    require_agreement(mine, _Ranks([mine, mine]))
    with pytest.raises(UserError, match=r"train data: 24 images on rank 0, 2; 23 images on rank 1"):
        require_agreement(mine, _Ranks([{**mine, "train data": "23 images"}, mine]))
