"""A journal that is damaged, lost, or torn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.errors import UserError
from tessera.utils.ranks.world import World
from tessera.utils.search.watch import Watch
from tessera.utils.types import Metrics
from tests.utils.search.searches import nothing, search, table


@pytest.mark.parametrize("content", ["{}\n", "nonsense\n", "\0\n", '{"op_code": 99, "worker_id": "a"}\n', "[1]\n"])
def test_a_journal_that_is_none(tmp_path: Path, content: str) -> None:
    search(tmp_path, 1)
    (tmp_path / "exp" / "journal.log").write_text(content)
    with pytest.raises(UserError, match=r"journal.log: not a journal that a search has written, .* another --name"):
        search(tmp_path, 2, resume="newest")


def test_a_journal_that_has_lost_its_trials(tmp_path: Path) -> None:
    search(tmp_path, 1)
    before = (tmp_path / "exp" / "evolve.csv").read_bytes()
    (tmp_path / "exp" / "journal.log").write_text("")
    for how in ({"resume": "newest"}, {"exist_ok": True}):
        with pytest.raises(UserError, match=r"journal.log: empty, though evolve.csv beside it has trials"):
            search(tmp_path, 2, **how)
    assert (tmp_path / "exp" / "evolve.csv").read_bytes() == before


def test_a_torn_last_line_is_removed(tmp_path: Path) -> None:
    """Also where it is torn by another worker while this one is at work."""

    def tear() -> None:
        with (tmp_path / "exp" / "journal.log").open("a") as file:
            file.write('{"op_code":8,"worker_id":"a","tri')

    def train(config: TrainConfig, hyp: Hyp, world: World, watch: Watch) -> Metrics:
        tear()
        return nothing(config, hyp, world, watch)

    search(tmp_path, 1, train)
    tear()
    search(tmp_path, 2, train, resume="newest")
    assert len(table(tmp_path / "exp")) == 2
