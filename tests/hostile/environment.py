"""Short trainings under system limits, without shared memory, or with unwritable streams."""

from __future__ import annotations

import json
import random
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.hostile.campaign import may_mount
from tests.hostile.checkpoints import ARCHITECTURE
from tests.hostile.expect import checked
from tests.system.launch import ROOT, environment
from tests.system.tiny import make_data

CASES, FAST_CASES = 60, 1
TIME_LIMIT_S = 240
MEMORY = 2**44  # the commands that it starts inherit the limit

_WITHOUT_SHARED_MEMORY = {
    "read-only /dev/shm": "mount -t tmpfs -o ro tmpfs /dev/shm",
    "full /dev/shm": "mount -t tmpfs -o size=64k tmpfs /dev/shm",
    "no /dev/shm": "mount -t tmpfs tmpfs /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9",
}


def trial(rng: random.Random, folder: Path) -> str:
    """Train for an epoch in one hostile environment: it ends well, or with one message."""
    kind = rng.choice([*_STREAMS, "open files", "address space", *(_WITHOUT_SHARED_MEMORY if may_mount() else ())])
    command = training(folder)
    limit: Callable[[], None] | None = None
    if kind in _STREAMS:
        command = ["sh", "-c", f"{shlex.join(command)} {_STREAMS[kind]}"]
    elif kind in _WITHOUT_SHARED_MEMORY:
        mount = f"{_WITHOUT_SHARED_MEMORY[kind]} && exec {shlex.join(command)}"
        command = ["unshare", "--mount", "sh", "-c", mount]
    elif kind == "open files":
        most = rng.randint(12, 80)
        limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # noqa: E731
    else:
        size = rng.randint(2**29, 2**33)
        limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size))  # noqa: E731
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=limit, env=environment())
    said = f"{kind}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in said, said
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    if done.returncode:
        assert done.returncode in (1, 2) and len(errors) == 1, said
        checked(errors[0])
    else:
        assert (folder / "runs" / "exp" / "weights" / "last.pt").is_file(), said
    assert not list(folder.rglob(".*.tmp")), said
    return kind if done.returncode == 0 else f"{kind}, refused"


def training(folder: Path) -> list[str]:
    data, model = make_data(folder, train=8, val=4), folder / "model.yaml"
    model.write_text(json.dumps(ARCHITECTURE | {"nc": 3}))
    words = f"train.py --data {data} --cfg {model} --project {folder / 'runs'} --epochs 1 --imgsz 64 --batch 4"
    return [sys.executable, *shlex.split(words), *shlex.split("--workers 2 --device cpu --loggers none --noplots")]


_STREAMS = {
    "stdout full": "> /dev/full",
    "stderr full": "2> /dev/full",
    "both full": "> /dev/full 2>&1",
    "stdout closed": ">&-",
    "stderr closed": "2>&-",
    "all closed": "<&- >&- 2>&-",
    "stdout a broken pipe": "| true",
    "stderr a broken pipe": "2>&1 >/dev/null | true",
}
