"""The wheel with the lowest and the highest versions that it allows, each in an environment of its own.

    python -m tests.compat          # minutes; downloads what uv's cache lacks

The oldest Python of pyproject.toml gets `--resolution lowest-direct`, the newest one at hand the highest versions. From
an empty folder each trains on one rank and on two, validates, predicts, exports with its proof and compares. The exit
code is 0, 1 after the output of the first command that failed, or 77 after the reason why it cannot be tried here.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from tests.system.launch import PART_FAILED, ROOT, Outcome, run_command

EXTRAS = ("export", "safetensors")
NEWEST = 20  # the last minor version of Python 3 that is looked for
NOT_TRIED = 77  # exit code where an interpreter or the package index is missing
PICTURES = (
    "results.png",
    "labels.jpg",
    "train_batch0.jpg",
    "val_batch0_labels.jpg",
    "val_batch0_pred.jpg",
    "report.html",
)
_SMALL = ("--imgsz", "64", "--workers", "1", "--loggers", "none", "--device", "cpu")
_LIMIT_S = 1800  # of a command, an installation with its downloads among them


class CompatError(Exception):
    """A command failed."""


def main() -> int:
    """Try both environments; return the exit code."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    oldest = int(required.removeprefix(">=3."))
    lowest, highest = interpreter(oldest), next(filter(None, map(interpreter, range(NEWEST, oldest, -1))), "")
    if not (lowest and highest):
        print(f"Not tried: needs Python 3.{oldest} and a newer one; found {lowest or highest or 'neither'}.")
        return NOT_TRIED
    try:
        with tempfile.TemporaryDirectory(prefix="tessera-compat-") as folder:
            wheel = build(Path(folder))
            for python, resolution in ((lowest, "lowest-direct"), (highest, "highest")):
                environment = Path(folder) / resolution
                try:
                    install(wheel, python, resolution, environment)
                except CompatError as error:
                    if "Failed to fetch" not in str(error):
                        raise
                    print(f"Not tried: no package index can be reached.\n{error}")
                    return NOT_TRIED
                use(environment / "bin", Path(folder) / f"{resolution}-project")
                shutil.rmtree(environment)
                print(f"{python}, {resolution}: every command works", flush=True)
    except CompatError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def interpreter(minor: int) -> str:
    """Return the path of an installed Python 3.`minor`, of pyenv too; "" where there is none."""
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin"))
    path = os.pathsep.join([*map(str, of_pyenv), os.environ["PATH"]])
    command = ("uv", "python", "find", "--no-project", "--system", "--no-python-downloads", f"3.{minor}")
    return run_command(command, env={"PATH": path}).out.strip()


def build(folder: Path) -> Path:
    """Build the wheel of this clone and return its path."""
    ran("uv", "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, python: str, resolution: str, environment: Path) -> None:
    """Make an environment with the wheel, whose dependencies have the versions of `resolution`, and print them."""
    ran("uv", "venv", "--quiet", "--python", python, str(environment))
    where = ("--python", str(environment / "bin" / "python"))
    required = (str(ROOT / "pyproject.toml"), *(word for extra in EXTRAS for word in ("--extra", extra)))
    ran("uv", "pip", "install", "--quiet", *where, "--resolution", resolution, "-r", *required)
    ran("uv", "pip", "install", "--quiet", *where, "--no-deps", str(wheel))
    print(" ".join(ran("uv", "pip", "freeze", *where).out.split()), flush=True)


def use(programs: Path, project: Path) -> None:
    """Run each command from an empty folder, with the variables of a user's shell.

    Raises:
        CompatError: a command fails, a part of a run fails, or an image is missing.
    """
    project.mkdir()
    tessera, python = str(programs / "tessera"), str(programs / "python")
    data = ("--data", "shapes.yaml", *_SMALL)
    ran(tessera, "train", *data, "--epochs", "2", cwd=project)
    two = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tessera")
    ran(*two, "train", *data, "--epochs", "1", "--name", "two", cwd=project)
    run, other = (project / "runs" / "train" / name for name in ("exp", "two"))
    best = str(run / "weights" / "best.pt")
    if missing := [name for name in PICTURES if not (run / name).is_file()]:
        raise CompatError(f"{run}: without {', '.join(missing)}")
    image = min((project / "datasets" / "shapes" / "images" / "val").iterdir())
    ran(tessera, "val", "--weights", best, "--device", "cpu", "--workers", "1", cwd=project)
    ran(tessera, "detect", "--weights", best, "--source", str(image), "--device", "cpu", cwd=project)
    ran(tessera, "export", "--weights", best, "--include", "onnx", "torchscript", "pt2", "--device", "cpu", cwd=project)
    ran(tessera, "compare", best, str(other / "weights" / "best.pt"), "--device", "cpu", "--workers", "1", cwd=project)


def ran(*command: str, cwd: Path = ROOT) -> Outcome:
    """Run a command to its end.

    Raises:
        CompatError: its exit code is not 0, or a part of a run failed and the run went on.
    """
    env = {"PYTHONPATH": "", "TESSERA_CACHE": str(cwd / "cache"), "PATH": os.environ["PATH"]} if cwd != ROOT else {}
    done = run_command(command, cwd=cwd, env=env, timeout=_LIMIT_S)
    if done.code or PART_FAILED in done.said:
        raise CompatError(f"{' '.join(command)}\n{done.said}")
    return done


if __name__ == "__main__":
    sys.exit(main())
