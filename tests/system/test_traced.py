"""Traced: nothing is written outside the run's folder, the cache and the temporary folder; only ranks talk."""

from __future__ import annotations

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.system.launch import ROOT, forget_tests, python_command, run_command, torchrun_command
from tests.system.tiny import flags, make_data

WRITING = "creat,mkdir,mkdirat,rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,truncate"
WRITING += ",chmod,fchmodat,utimensat,mknod,mknodat"
CALL = re.compile(r"(?:\[pid\s+\d+\] |\d+ +)?(\w+)\((.*)\) += (-?\d+|\?)")
PLACE = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"')
ADDRESS = re.compile(r'inet_addr\("([^"]*)"\)|inet_pton\(AF_INET6, "([^"]*)"')
SYSTEM = (Path("/dev"), Path("/proc"))  # memory, the null device, names of threads

EXPORTED = ("onnx", "openvino") if all(map(find_spec, ("onnx", "onnxscript", "onnxruntime", "openvino"))) else ()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace, which is not here"),
]


def trace(command: list[str], folder: Path, temporary: Path) -> list[tuple[str, str]]:
    """Calls that succeeded, (name, arguments), of a command and all that it starts; its home is in `folder`."""
    log = folder / "trace"
    watched = f"open,openat,openat2,{WRITING},connect,bind,socket"
    env = {"TMPDIR": str(temporary), "HOME": str(folder / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_command(
        ["strace", "-f", "-y", "-qq", "-e", f"trace={watched}", "-e", "signal=none", "-o", str(log), *command],
        env=env,
        timeout=600,
    )
    assert done.code == 0, done.said
    calls = [CALL.match(line) for line in log.read_text(errors="replace").splitlines()]
    return [(call[1], call[2]) for call in calls if call and not call[3].startswith("-")]


def places_written(calls: list[tuple[str, str]]) -> set[Path]:
    """Absolute paths that were opened for writing, made, changed, renamed or removed."""
    writing = {*WRITING.split(",")}
    return {
        Path(os.path.normpath(Path(folder or ROOT, name)))
        for call, arguments in calls
        if call in writing or re.search(r"O_WRONLY|O_RDWR|O_CREAT", arguments)
        for folder, name in PLACE.findall(arguments)
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_writes_to_its_own_folders_and_talks_to_its_own_ranks(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    forget_tests(monkeypatch)
    data = make_data(tmp_path / "datasets", train=16, val=8)
    runs, cache, home = (tmp_path / name for name in ("runs", "cache", "home"))
    home.mkdir()
    started = torchrun_command if ranks > 1 else python_command
    train = started("train.py", *flags(data, runs, "--epochs", "1"))
    train.remove("--noplots")
    weights = runs / "exp" / "weights" / "best.pt"
    small = ["--imgsz", "64", "--device", "cpu", "--workers", "1", "--save-json", "--save-txt"]
    val = started("val.py", "--weights", str(weights), "--data", str(data), "--project", str(runs), *small)
    # Runtimes are compiled code, whose own connections only a trace shows.
    exported = weights.parent / "best.onnx"
    export = python_command("export.py", "--weights", str(weights), "--include", *EXPORTED, "--device", "cpu")
    found = ("--weights", str(exported), "--source", str(tmp_path / "datasets"), "--project", str(runs))
    detect = python_command("detect.py", *found, "--name", "detected", "--device", "cpu")
    alone = (export, detect) if ranks == 1 and EXPORTED else ()
    for command in (train, val, *alone):
        calls = trace(command, tmp_path, temporary)
        written = places_written(calls)
        assert any(place.is_relative_to(runs) for place in written), "the trace has what a run writes"
        # Neither the home folder nor the datasets are among these.
        own = (runs, cache, temporary, *SYSTEM)
        elsewhere = {str(place) for place in written if not any(map(place.is_relative_to, own))}
        assert not elsewhere, sorted(elsewhere)
        networked = [arguments for call, arguments in calls if call == "socket" and "AF_INET" in arguments]
        said = [text for _, text in calls if "htons(53)" not in text]  # the resolver, which ranks ask for host names
        addresses = {found for text in said for pair in ADDRESS.findall(text) for found in pair if found}
        if ranks == 1:
            assert not networked and not addresses, (networked, addresses)
        else:
            assert networked and addresses <= {"127.0.0.1", "0.0.0.0", "::", "::1", "::ffff:127.0.0.1"}, addresses
