"""No command talks, starts a program or writes outside the folders that it was given; nothing is left in others."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from tessera.commands import export
from tessera.utils.exporting.formats import Format
from tests.system.launch import ROOT, forget_tests, run_python
from tests.system.tiny import flags, make_data
from tests.utils.exporting.made import ANCHORED, checkpoint, picture

GUARD = Path(__file__).parent / "guard"
ATTEMPTS = {
    "import socket; socket.socket().connect(('192.0.2.1', 80))": "socket.connect: ('192.0.2.1', 80)",
    "import socket; socket.getaddrinfo('example.org', 80)": "socket.getaddrinfo: example.org",
    "import urllib.request; urllib.request.urlopen('http://example.org', timeout=1)": "socket.getaddrinfo: example.org",
    "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('192.0.2.1', 9))": "socket.sendto",
    "import subprocess; subprocess.run(['true'])": "subprocess.Popen: ('true'",
    "import os; os.system('true')": "os.system",
    "import os; os.execv('/bin/true', ['true'])": "os.exec",
    "import os; os.posix_spawn('/bin/true', ['true'], {})": "os.posix_spawn",
    "import multiprocessing.util as u; u.spawnv_passfds(b'/bin/true', ['true'], [])": "fork_exec: ['true']",
    "open('../elsewhere', 'w')": "open: ",
    "import os; os.mkdir('../elsewhere')": "os.mkdir: ",
    "import os; os.rename('own', '../elsewhere')": "os.rename: ",
    "import pathlib; pathlib.Path('../elsewhere').write_text('')": "open: ",
    "import os, multiprocessing as m; p = m.Process(target=os.mkdir, args=['../elsewhere']); p.start(); p.join(60)"
    "; raise SystemExit(p.exitcode)": "os.mkdir: ",
}
ALLOWED = (
    "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname()).close()",
    "import multiprocessing as m; m.get_context('spawn').Lock(); open('own', 'w').write('')",
    "import os, shutil; os.makedirs('a/b'); open('a/b/c', 'w').close(); shutil.rmtree('a')",
)


class Guarded(NamedTuple):
    """What a command did.

    Attributes:
        attempts: at what it must not do.
        changed: files that it made, changed or removed below the folder of the test, from there.
        said: what it printed, for messages.
        code: that it ended with.
    """

    attempts: list[str]
    changed: set[str]
    said: str
    code: int


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, a folder for temporary files and one for runs, and what commands read."""
    forget_tests(monkeypatch)
    for name in ("home", "tmp", "runs", "weights", "pictures"):
        (tmp_path / name).mkdir()
    for i in range(3):
        Image.fromarray(picture(80 + 20 * i, 100, i)).save(tmp_path / "pictures" / f"{i}.png")
    return tmp_path


def guarded(place: Path, command: list[str], folders: tuple[Path, ...]) -> Guarded:
    """Run Python with the guard; it may write to `folders` and the one for temporary files."""
    log = place / "guard.log"
    log.unlink(missing_ok=True)
    before = content(place)
    env = {
        "PYTHONPATH": os.pathsep.join((str(GUARD), str(ROOT))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "GUARD_LOG": str(log),
        "GUARD_FOLDERS": os.pathsep.join(map(str, (*folders, place / "tmp"))),
        "HOME": str(place / "home"),
        "TMPDIR": str(place / "tmp"),
    }
    done = run_python(*command, env=env, timeout=600)
    changed = {name for name, _ in content(place) ^ before} - {log.name}
    return Guarded(log.read_text().splitlines(), changed, done.said, done.code)


def content(folder: Path) -> set[tuple[str, tuple[int, int]]]:
    """Every file with its time and size, and every folder."""
    states = ((path, path.lstat()) for path in folder.rglob("*"))
    return {
        (str(path.relative_to(folder)), (0, 0) if path.is_dir() else (state.st_mtime_ns, state.st_size))
        for path, state in states
    }


def assert_wrote_only(found: Guarded, *starts: str) -> None:
    """It ended well, tried nothing, and everything that it changed is below one of these."""
    assert found.code == 0, found.said
    assert found.attempts == [], "\n".join(found.attempts)
    # torch's compiler makes its own folder when it is imported, and leaves it empty.
    foreign = {name for name in found.changed if name.startswith("tmp/torchinductor_") and name.count("/") == 1}
    elsewhere = {name for name in found.changed - foreign if not name.startswith(starts)}
    assert elsewhere == set(), sorted(elsewhere)
    assert any(name.startswith(starts[0]) for name in found.changed), f"nothing of it is in {starts[0]}"


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=[said.partition(":")[0] for said in ATTEMPTS.values()])
def test_the_guard_refuses(place: Path, attempt: str) -> None:
    code = f"import os; os.chdir({str(place / 'runs')!r}); open('own', 'w').close()\n{attempt}"
    found = guarded(place, ["-c", code], (place / "runs",))
    assert found.code != 0, found.said
    assert len(found.attempts) == 1 and found.attempts[0].startswith(ATTEMPTS[attempt]), found
    assert found.changed == {"runs/own"}


def test_the_guard_lets_pass(place: Path) -> None:
    code = "\n".join((f"import os; os.chdir({str(place / 'runs')!r})", *ALLOWED))
    found = guarded(place, ["-c", code], (place / "runs",))
    assert (found.code, found.attempts, found.changed) == (0, [], {"runs/own"}), found


def test_detect(place: Path) -> None:
    weights = checkpoint(place / "weights" / "best.pt", ANCHORED)
    words = ["detect.py", "--weights", str(weights), "--source", str(place / "pictures"), "--device", "cpu"]
    words += ["--project", str(place / "runs"), "--save-txt", "--save-json", "--save-csv", "--save-crop"]
    found = guarded(place, words, (place / "runs", place / "cache"))
    assert_wrote_only(found, "runs/exp", "cache")


@pytest.mark.slow
def test_every_command(place: Path) -> None:
    data = make_data(place / "datasets", train=16, val=8)
    runs, own = str(place / "runs"), (place / "runs", place / "cache")
    train = ["train.py", *flags(data, place / "runs", "--epochs", "1")]
    train.remove("--noplots")
    assert_wrote_only(guarded(place, train, own), "runs/exp", "cache")
    run = place / "runs" / "exp" / "weights"
    weights = place / "weights" / "best.pt"
    weights.write_bytes((run / "best.pt").read_bytes())
    formats = [one.name for one in export.FORMATS if is_here(one)]
    assert "pt" in formats
    words = ["export.py", "--weights", str(weights), "--include", *formats, "--device", "cpu"]
    assert_wrote_only(guarded(place, words, (place / "weights", place / "cache")), "weights/best", "cache")
    # Every file has been opened by the export itself, in its trial: of these, some are enough.
    for path in (weights, *sorted((place / "weights").glob("best.onnx"))):
        val = ["val.py", "--weights", str(path), "--data", str(data), "--project", runs, "--device", "cpu"]
        val += ["--name", f"val{path.suffix}", "--imgsz", "64", "--workers", "1", "--save-json", "--save-txt"]
        assert_wrote_only(guarded(place, val, own), f"runs/val{path.suffix}", "cache")
    for path in sorted((place / "weights").glob("best.xml")):
        detect = ["detect.py", "--weights", str(path), "--source", str(place / "pictures"), "--device", "cpu"]
        detect += ["--name", f"detect{path.suffix}", "--project", runs, "--save-json"]
        assert_wrote_only(guarded(place, detect, own), f"runs/detect{path.suffix}", "cache")


def is_here(one: Format) -> bool:
    """Whether a format's packages are installed."""
    return all(find_spec(package) is not None for package in one.packages)
