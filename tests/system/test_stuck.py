"""A file whose runtime never comes back: a signal ends the command all the same."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from tests.at_once import at_once
from tests.system.jobs import Job
from tests.system.launch import ROOT, Outcome, python_command
from tests.system.tiny import make_data
from tests.utils.runtime.attacks import NeverEnds, NeverLoads, write_script
from tests.utils.runtime.made_files import write_endless

pytestmark = pytest.mark.slow


def ended(folder: Path, command: list[str], number: int, stuck: Callable[[Job], bool]) -> Outcome:
    """How a command ends that gets a signal where its runtime never comes back."""
    with Job(command, folder) as job:
        job.until(partial(stuck, job), 180)
        job.process.send_signal(number)
        return job.wait(120)


def computes(job: Job) -> bool:
    job.tell_where()
    return ", in predict\n" in job.err or "onnxruntime_inference_collection.py" in job.err


def test_a_signal_ends_a_command_whose_runtime_does_not_come_back(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pictures, begun = tmp_path / "pictures", tmp_path / "begun"
    pictures.mkdir()
    Image.new("RGB", (64, 64)).save(pictures / "a.png")
    data = make_data(tmp_path / "data", train=1, val=1)
    loop = write_endless(tmp_path / "loop.onnx")
    script = write_script(tmp_path / "loop.torchscript", NeverEnds())
    load = write_script(tmp_path / "load.torchscript", NeverLoads(str(begun)))
    find = ["--source", str(pictures), "--project", str(tmp_path / "runs"), "--device", "cpu", "--save-json"]
    detect, val = ROOT / "detect.py", ROOT / "val.py"
    commands = [
        (python_command(detect, "--weights", str(loop), *find, "--name", "a"), signal.SIGTERM, computes),
        (
            python_command(detect, "--weights", str(script), "--trust-file", *find, "--name", "b"),
            signal.SIGINT,
            computes,
        ),
        (
            python_command(val, "--weights", str(load), "--trust-file", "--data", str(data), "--device", "cpu"),
            signal.SIGTERM,
            lambda job: begun.exists(),
        ),
    ]
    one, other, loading = at_once(
        [partial(ended, tmp_path / f"said{number}", *command) for number, command in enumerate(commands)]
    )
    assert one.code == 143 and "SIGTERM: ended in the middle of a call that does not return" in one.err, one.said
    assert other.code == 130 and "SIGINT: ended in the middle of a call that does not return" in other.err, other.said
    assert loading.code == -signal.SIGTERM, loading.said
    for outcome in (one, other, loading):
        assert "Traceback" not in outcome.err, outcome.said
