"""Full, closed and broken stdout and stderr neither end a program nor damage a file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.utils.streams import capture_library_output

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, sys
from tessera.utils.streams import protect_streams
protect_streams()
with open(sys.argv[1], "w") as file:
    for _ in range(3):
        print("out", flush=True)
        print("err", file=sys.stderr, flush=True)
    os.write(1, b"from C\\n")
    os.write(2, b"from C\\n")
    print("kept back until the end")
    file.write("done")
"""


FULL_FOR_A_MOMENT = """
import os, sys
from tessera.utils.streams import protect_streams
reader, writer = os.pipe()
os.set_blocking(reader, False)
os.set_blocking(writer, False)
os.dup2(writer, 1)
protect_streams()
for _ in range(300):
    print("x" * 1000, flush=True)
while len(os.read(reader, 1 << 20)) == 1 << 20:
    pass
print("afterwards", flush=True)
assert b"afterwards" in os.read(reader, 1 << 20)
for _ in range(300):  # full again, at the end
    print("x" * 1000)
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("streams", ["", ">/dev/full", "2>/dev/full", ">/dev/full 2>&1", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_program_goes_on_and_its_files_are_its_own(tmp_path: Path, streams: str) -> None:
    words = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-c", PROGRAM, str(tmp_path / "file")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "done"
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    if streams == ">/dev/full":
        assert done.stderr.splitlines()[0].startswith("WARNING: stdout: No space left on device")
        assert done.stderr.count("WARNING") == 1 and done.stderr.count("err\n") == 3
    if streams == "2>/dev/full":
        assert "WARNING: stderr: No space left" in done.stdout and done.stdout.count("out\n") == 3
    if not streams:
        assert done.stdout == "out\nout\nout\nfrom C\nkept back until the end\n"
        assert done.stderr == "err\nerr\nerr\nfrom C\n"


def test_a_pipe_that_is_full_for_a_moment_loses_what_is_printed_then_and_nothing_later() -> None:
    """Who reads may have made the pipe non-blocking; a write to a full one fails instead of waiting."""
    command = [sys.executable, "-c", FULL_FOR_A_MOMENT]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # it would hide the error
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_of_what_libraries_print_the_known_lines_are_held_back_and_others_have_no_controls(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with capture_library_output(re.compile(b"Corrupt JPEG")) as words:
        os.write(2, b"name: \x1b[2Jcaf\xe9\nCorrupt JPEG data: bad\nanother thread")
    assert words == ["Corrupt JPEG data: bad"]
    assert capfd.readouterr().err == "name: \\x1b[2Jcaf\\xe9\nanother thread"
    with capture_library_output(re.compile(b"Corrupt JPEG")) as words:
        pass
    assert not words and not capfd.readouterr().err
