"""The package as it is installed, without a clone around it: its files as a wheel has them, on sys.path."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WHAT_IT_SAYS = """
from tessera.utils.config import HYPS_DIR
from tessera.utils.environment import datasets_dir
from tessera.utils.flags.program import HOME, called, git_revision, installed_by, started
print(HOME.name, HYPS_DIR.relative_to(HOME), datasets_dir().resolve(), git_revision())
print(called("val.py"), "|", started("detect.py"), "|", installed_by("export"))
"""
THE_CODE = "from tessera.utils.ranks.consistency import code_version; print(code_version())"


def python(folder: Path, path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python in a folder, with `path` on sys.path and TESSERA_DATASETS not set."""
    environment = {name: value for name, value in os.environ.items() if name != "TESSERA_DATASETS"}
    environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "tessera", folder / "tessera", ignore=shutil.ignore_patterns("__pycache__"))
    about = folder / "a_name-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: a-name\nVersion: 1.0\n")
    (about / "top_level.txt").write_text("tessera\n")
    return folder


def test_its_own_files_are_inside_and_datasets_go_to_the_working_directory(site: Path, tmp_path: Path) -> None:
    found = python(tmp_path, site, "-c", WHAT_IT_SAYS)
    first, second = found.stdout.splitlines()
    assert first == f"tessera data/hyps {tmp_path.resolve() / 'datasets'} None", found.stderr
    assert second == "tessera val | tessera detect | pip install 'a-name[export]'"


def test_its_code_is_that_of_the_clone(site: Path, tmp_path: Path) -> None:
    installed, cloned = (python(tmp_path, path, "-c", THE_CODE).stdout for path in (site, ROOT))
    assert installed == cloned != ""


def test_commands_call_themselves_as_they_were_started(site: Path, tmp_path: Path) -> None:
    assert python(tmp_path, site, "-m", "tessera", "export", "--help").stdout.startswith("usage: tessera export [-h]")
    assert python(tmp_path, site, "-m", "tessera", "-h").stdout.startswith(
        "usage: tessera {train,val,detect,export,compare}"
    )
    wrong = python(tmp_path, site, "-m", "tessera", "val", "--imgs", "-1", "--wieghts", "x")
    said = "error: tessera val: unknown argument '--wieghts'. Did you mean '--weights'? See tessera val --help.\n"
    assert (wrong.returncode, wrong.stderr) == (2, said)


def test_measuring_and_detecting_need_no_pandas_and_no_tensorboard(site: Path, tmp_path: Path) -> None:
    """What a training alone uses is not imported."""
    trainings = "{'pandas', 'tensorboard', 'tessera.utils.training.start'}"
    program = f"import sys, tessera; tessera.val, tessera.detect; print(sorted({trainings} & sys.modules.keys()))"
    assert python(tmp_path, site, "-c", program).stdout == "[]\n"


@pytest.mark.parametrize("said", ["libGL.so.1: cannot open shared object file", "No module named 'cv2'"])
def test_opencv_that_does_not_load_is_one_message(said: str, site: Path, tmp_path: Path) -> None:
    """As opencv-python on a server without libraries of a desktop, or neither of the two packages."""
    (tmp_path / "cv2.py").write_text(f"raise ImportError({said!r})\n")
    found = python(tmp_path, site, "-m", "tessera", "detect", "--source", "pictures")
    assert found.returncode == 1
    assert found.stderr.startswith(f"error: OpenCV does not load here ({said}). ") and found.stderr.count("\n") == 1
    assert "opencv-python-headless" in found.stderr
