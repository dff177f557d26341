"""However a job ends, nothing of it stays: no process, no shared memory, no temporary file, no port."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from tests.system.jobs import Job, assert_no_shared_memory_but, shared_memory
from tests.system.launch import ROOT, free_port, torchrun_command
from tests.system.tiny import flags, make_data

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("how", ["success", "failure", "ctrl-c"])
def test_nothing_is_left_behind(tmp_path: Path, temporary: Path, how: str) -> None:
    data, port = make_data(tmp_path), free_port()
    more = "--epochs 3 --cache ram --save-steps 1 --loggers tensorboard"
    words = flags(data, tmp_path / "runs", *more.split())
    words.remove("--noplots")
    program = ROOT / "tests" / "system" / "fault_program.py"
    command = torchrun_command(program, *words, port=port)
    before = shared_memory()
    env = {"TMPDIR": str(temporary), "FAULT": "1 loss 5 raise" if how == "failure" else ""}
    with Job(command, tmp_path / "said", env) as job:
        if how == "ctrl-c":
            job.until((tmp_path / "runs" / "exp" / "weights" / "last.pt").is_file)
            job.process.send_signal(signal.SIGINT)
        outcome = job.wait(120)
        assert job.left_over() == [], outcome.said
    assert (outcome.code == 0) == (how == "success"), outcome.said
    assert_no_shared_memory_but(before)
    foreign = ("torchelastic_", "torchinductor_")  # torch's own; the second comes with the import of torchvision
    own = [path.name for path in temporary.iterdir() if not path.name.startswith(foreign)]
    assert own == []
    assert not list((tmp_path / "runs").rglob("*.tmp"))
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
