"""The wheel with the lowest and the highest versions that it allows, each in an environment of its own.

    python -m tests.compat            # minutes; downloads what uv's cache lacks
    python -m tests.compat --extras   # the lowest versions of each extra but litert, by its tests

The oldest Python of pyproject.toml gets `--resolution lowest-direct`, the newest one at hand the highest versions. From
an empty folder each trains on one rank and on two, validates, predicts, exports with its proof and compares. The exit
code is 0, 1 after the output of the first command that failed, or 77 after the reason why it cannot be tried here.
"""

from __future__ import annotations

import os
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests.system.launch import PART_FAILED, ROOT, Outcome, run_command

EXTRAS = ("export", "safetensors")
# Extras whose lowest versions go together, and the tests of what they are for. The extra litert needs a newer torch.
JOBS = {
    ("wandb", "mlflow"): ("tests/analysis/test_trackers.py",),
    # torch 2.6 itself starts a process when it is imported.
    ("track",): ("tests/deploy/inference/test_tracking.py", "-k", "not importing_the_packages"),
    ("albumentations",): ("tests/data/augment/test_colours.py",),
    ("export", "openvino", "ncnn", "safetensors", "tune", "pretrained"): (
        "tests/deploy/exporting/test_quantisation.py",
        "tests/deploy/exporting/test_formats.py",
        "tests/deploy/runtime/test_runtimes.py",
        "tests/utils/checkpoints/test_weights.py",
        "tests/deploy/foreign/test_efficientnet_lite.py",
        "tests/analysis/test_search.py",
    ),
}
PYTEST = ("-m", "pytest", "-p", "no:xdist", "-rs", "-o", "addopts=--strict-markers --import-mode=importlib -q")
NEWEST = 20  # the last minor version of Python 3 that is looked for
NOT_TRIED = 77  # exit code where an interpreter or the package index is missing
IMAGES = ("results.png", "train_batch0.jpg", "val_batch0_pred.jpg", "PR_curve.png", "report.html")
_SMALL = ("--imgsz", "64", "--workers", "1", "--loggers", "none", "--device", "cpu")
_LIMIT_S = 1800  # of a command, an installation with its downloads among them


class CompatError(Exception):
    """A command failed."""


def main() -> int:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    oldest = int(required.removeprefix(">=3."))
    of_extras, lowest = "--extras" in sys.argv, interpreter(oldest)
    highest = "" if of_extras else next(filter(None, map(interpreter, range(NEWEST, oldest, -1))), "")
    if not (lowest and (highest or of_extras)):
        newer = "" if of_extras else " and a newer one"
        print(f"Not tried: needs Python 3.{oldest}{newer}; found {lowest or highest or 'none'}.")
        return NOT_TRIED
    try:
        with tempfile.TemporaryDirectory(prefix="tessera-compat-") as folder:
            environment = Path(folder) / "environment"
            if of_extras:
                for extras, tests in JOBS.items():
                    install(extras, lowest, "lowest-direct", environment, "pytest", "hypothesis")
                    print(ran(str(environment / "bin" / "python"), *PYTEST, *tests).out, flush=True)
                return 0
            wheel = build(Path(folder))
            for python, resolution in ((lowest, "lowest-direct"), (highest, "highest")):
                install(EXTRAS, python, resolution, environment, "--no-deps", str(wheel))
                use(environment / "bin", Path(folder) / f"{resolution}-project")
                print(f"{python}, {resolution}: every command works", flush=True)
    except CompatError as error:
        if "Failed to fetch" in str(error):
            print(f"Not tried: no package index can be reached.\n{error}")
            return NOT_TRIED
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
    """Build the wheel from a source archive, which leftovers of earlier builds are not in, and return its path."""
    ran("uv", "build", "--quiet", "--out-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(extras: Sequence[str], python: str, resolution: str, environment: Path, *more: str) -> None:
    """Make an environment with what the project depends on, in the versions of `resolution`, and print them.

    `more` is installed after it, such as the wheel.
    """
    ran("uv", "venv", "--quiet", "--clear", "--python", python, str(environment))
    where = ("--python", str(environment / "bin" / "python"))
    required = (str(ROOT / "pyproject.toml"), *(word for extra in extras for word in ("--extra", extra)))
    ran("uv", "pip", "install", "--quiet", *where, "--resolution", resolution, "-r", *required)
    ran("uv", "pip", "install", "--quiet", *where, *more)
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
    if missing := [name for name in IMAGES if not (run / name).is_file()]:
        raise CompatError(f"{run}: without {', '.join(missing)}")
    image = min((project / "datasets" / "shapes" / "images" / "val").iterdir())
    ran(tessera, "val", "--weights", best, "--device", "cpu", "--workers", "1", cwd=project)
    ran(tessera, "detect", "--weights", best, "--source", str(image), "--device", "cpu", cwd=project)
    ran(tessera, "export", "--weights", best, "--include", "onnx", "torchscript", "--device", "cpu", cwd=project)
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
