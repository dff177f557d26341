"""Ranks that miss each other, or die while they join: a message within seconds, and an end within the time limit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.system.jobs import started
from tests.system.launch import Outcome, free_port, python_command

pytestmark = pytest.mark.slow

JOIN = """
import os, signal, sys
from tessera.utils.environment import configure_command
configure_command()
from tessera.utils.ranks import launch
from tessera.utils.ranks.failures import run_rank

def body():
    with launch.open_world("cpu") as world:
        world.barrier()

if os.environ["RANK"] == os.environ.get("DIES"):
    launch._make_groups = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(run_rank(body)[0])
"""
LIMITS = {"TESSERA_JOIN_TIMEOUT": "12", "TESSERA_PEER_TIMEOUT": "5"}


def join(folder: Path, *envs: dict[str, str]) -> list[Outcome]:
    program = folder / "join.py"
    program.write_text(JOIN)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **LIMITS}
    with started(folder, [python_command(program)] * len(envs), [{**common, **env} for env in envs]) as jobs:
        return [job.wait(90) for job in jobs]


def plain(outcome: Outcome) -> None:
    assert outcome.code == 1, outcome.said
    assert "Traceback" not in outcome.err and "frame #" not in outcome.err and "[W" not in outcome.err, outcome.said
    assert len(re.findall(r"rank \d: error: ", outcome.err)) == 1, outcome.said


@pytest.mark.parametrize("dies", ["0", "1"])
def test_a_rank_dies_while_it_joins(tmp_path: Path, dies: str) -> None:
    outcomes = join(tmp_path, *({"RANK": rank, "WORLD_SIZE": "2", "DIES": dies} for rank in "01"))
    left = outcomes[1 - int(dies)]
    plain(left)
    assert outcomes[int(dies)].code == -9
    assert re.search(
        rf"error: (rank {dies} on \S+ .*(is gone|has not answered)|the connection to the job's store)", left.err
    ), left.said


def test_rank_1_never_starts(tmp_path: Path) -> None:
    (alone,) = join(tmp_path, {"RANK": "0", "WORLD_SIZE": "2"})
    plain(alone)
    assert "Waiting for rank 1 of 2 to start, for at most 12 s" in alone.err
    assert "rank 0: error: of 2 ranks 1 did not start within 12 s" in alone.err


def test_rank_0_never_starts(tmp_path: Path) -> None:
    (alone,) = join(tmp_path, {"RANK": "1", "WORLD_SIZE": "2"})
    plain(alone)
    assert "Waiting for rank 0 at 127.0.0.1:" in alone.err
    assert "rank 1: error: rank 1 could not connect to 127.0.0.1:" in alone.err
