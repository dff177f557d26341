"""System calls of the commands: files written, processes started, and connections, which only ranks make."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from tessera.commands import export
from tests.deploy.exporting.made import ANCHORED, checkpoint, made_image
from tests.system.launch import ROOT, forget_tests, python_command, run_command, torchrun_command
from tests.system.tiny import flags, make_data

WRITING = "creat,mkdir,mkdirat,rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,truncate"
WRITING += ",chmod,fchmodat,utimensat,mknod,mknodat"
CALL = re.compile(r"(\w+)\((.*)\) += (-?\d+|\?)( EINPROGRESS)?")
PLACE = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"')
ADDRESS = re.compile(r'inet_addr\("([^"]*)"\)|inet_pton\(AF_INET6, "([^"]*)"')
PROGRAM = re.compile(r'"(?:[^"]*/)?([^"/]+)", \[(.*)\]')
SYSTEM = (Path("/dev"), Path("/proc"))  # memory, the null device, names of threads
ASKING = {"ldconfig", "fc-list", "git"}  # programs that say which libraries and fonts there are, and which commit
LOOPBACK = {"127.0.0.1", "0.0.0.0", "::", "::1", "::ffff:127.0.0.1"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace, which is not here"),
]


class Traced(NamedTuple):
    """System calls of a command and all that it started."""

    written: set[Path]  # opened for writing, made, changed, renamed or removed
    talked: bool
    addresses: set[str]
    programs: set[str]

    def outside(self, *own: Path) -> list[str]:
        return sorted(str(place) for place in self.written if not any(map(place.is_relative_to, (*own, *SYSTEM))))


def trace(command: list[str], folder: Path, temporary: Path, code: int = 0) -> Traced:
    """Run a command whose home is in `folder`; calls that failed do not count, but for a connection that was begun."""
    for old in folder.glob("trace.*"):
        old.unlink()
    watched = f"open,openat,openat2,{WRITING},connect,bind,socket,execve"
    env = {"TMPDIR": str(temporary), "HOME": str(folder / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    strace = ["strace", "-ff", "--seccomp-bpf", "-y", "-qq", "-e", f"trace={watched}", "-e", "signal=none"]
    done = run_command([*strace, "-o", str(folder / "trace"), *command], env=env, timeout=600)
    assert done.code == code, done.said
    # A file for each thread, so that no call is cut in two.
    lines = [line for log in folder.glob("trace.*") for line in log.read_text(errors="replace").splitlines()]
    found = map(CALL.match, lines)
    calls = [(call[1], call[2]) for call in found if call and (call[4] or not call[3].startswith("-"))]
    written = {
        Path(os.path.normpath(Path(base or ROOT, name)))
        for call, arguments in calls
        if call in WRITING.split(",") or re.search(r"O_WRONLY|O_RDWR|O_CREAT", arguments)
        for base, name in PLACE.findall(arguments)
    }
    said = [text for _, text in calls if "htons(53)" not in text]  # the resolver, which ranks ask for host names
    started = [PROGRAM.match(arguments) for call, arguments in calls if call == "execve"]
    programs = {f"{one[1]}: {one[2]}" for one in started if one and one[1] not in ASKING | {Path(sys.executable).name}}
    return Traced(
        written,
        any(call == "socket" and "AF_INET" in arguments for call, arguments in calls),
        {one for text in said for pair in ADDRESS.findall(text) for one in pair if one},
        programs,
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    forget_tests(monkeypatch)
    (tmp_path / "home").mkdir()
    return tmp_path


def test_the_trace_sees_what_must_not_be(home: Path, temporary: Path) -> None:
    code = f"""
import os, socket, subprocess, threading
os.chdir({str(home)!r})

def write(number):
    for at in range(100):
        open(f"{{number}}-{{at}}", "w").close()

threads = [threading.Thread(target=write, args=[number]) for number in range(3)]
[thread.start() for thread in threads]
try:
    socket.create_connection(("198.51.100.7", 9), timeout=0.1)
except OSError:
    pass
[thread.join() for thread in threads]
open("elsewhere", "w").close()
os.mkdir({str(home / "made")!r})
subprocess.run(["true"])
socket.socket(type=socket.SOCK_DGRAM).connect(("192.0.2.1", 9))
"""
    found = trace([sys.executable, "-c", code], home, temporary)
    files = {"elsewhere", "made", *(f"{number}-{at}" for number in range(3) for at in range(100))}
    assert found.outside(temporary) == sorted(str(home / name) for name in files)
    assert found.talked and "192.0.2.1" in found.addresses and [p.split(":")[0] for p in found.programs] == ["true"]


def test_detect(home: Path, temporary: Path) -> None:
    weights = checkpoint(home / "weights" / "best.pt", ANCHORED)
    Image.fromarray(made_image(80, 100)).save(home / "a.png")
    words = ["--weights", str(weights), "--source", str(home / "a.png"), "--project", str(home / "runs")]
    words += ["--device", "cpu", "--save-txt", "--save-json", "--save-csv", "--save-crop"]
    found = trace(python_command("detect.py", *words), home, temporary)
    assert found.outside(home / "runs", home / "cache", temporary) == []
    assert not found.talked and not found.addresses and not found.programs, found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_writes_to_its_own_folders_and_talks_to_its_own_ranks(home: Path, temporary: Path, ranks: int) -> None:
    data = make_data(home / "datasets", train=16, val=8)
    runs = home / "runs"
    started = torchrun_command if ranks > 1 else python_command
    train = started("train.py", *flags(data, runs, "--epochs", "1"))
    train.remove("--noplots")
    weights = runs / "exp" / "weights" / "best.pt"
    small = ["--imgsz", "64", "--device", "cpu", "--workers", "1", "--save-json", "--save-txt"]
    val = python_command("val.py", "--weights", str(weights), "--data", str(data), "--project", str(runs), *small)
    # Runtimes are compiled code, whose own connections only a trace shows.
    formats = [one.name for one in export.FORMATS if all(map(find_spec, one.packages))]
    written = python_command("export.py", "--weights", str(weights), "--include", *formats, "--device", "cpu")
    found = ("--weights", str(weights.with_suffix(".onnx")), "--source", str(data.parent), "--project", str(runs))
    detect = python_command("detect.py", *found, "--name", "detected", "--device", "cpu")
    others = (val, written, detect) if "onnx" in formats else (val,)
    for command in (train, *(others if ranks == 1 else ())):
        done = trace(command, home, temporary)
        assert any(place.is_relative_to(runs) for place in done.written), "the trace has what a run writes"
        # Neither the home folder nor the datasets are among these.
        assert done.outside(runs, home / "cache", temporary) == [] and not done.programs, done.programs
        assert done.talked == (ranks > 1) and done.addresses <= (LOOPBACK if ranks > 1 else set()), done.addresses
