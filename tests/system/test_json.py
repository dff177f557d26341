"""`--json`: one object on stdout, with the keys of docs/json.md, of every command, failure and number of ranks."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tessera
from tessera.commands import compare, detect, export, train, val
from tests.system.launch import ROOT, environment, run_python, torchrun
from tests.system.tiny import flags, make_data

PAGE = (ROOT / "docs" / "json.md").read_text()
KINDS = ("missing", "spurious", "shifted", "wrong class", "duplicate")
Answered = Callable[..., dict[str, Any]]


def documented(*sections: str) -> set[str]:
    """The keys of sections, as in `keys`."""
    texts = [PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0] for section in sections]
    cells = re.findall(r"^\| (`.*?`) \|", "\n".join(texts), flags=re.MULTILINE)
    return {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)} - {"error.kind"}


def keys(value: Any, name: str = "", *, whole: Mapping[str, Any]) -> set[str]:
    """Names of all values, such as `metrics.classes[].ap`; those in `whole` as they are."""
    if name in whole:
        return {name}
    if isinstance(value, dict) and value:
        return {key for k, v in value.items() for key in keys(v, f"{name}.{k}".lstrip("."), whole=whole)}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {key for item in value for key in keys(item, f"{name}[]", whole=whole)}
    return {name}


def said_by(out: str, command: str) -> dict[str, Any]:
    assert out.count("\n") == 1 and out.endswith("\n"), out
    found: dict[str, Any] = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert list(found)[:5] == ["schema", "version", "exit_code", "error", "seconds"]
    assert (found["schema"], found["version"]) == (f"tessera.{command}/1", tessera.__version__)
    return found


@pytest.fixture
def answered(capfd: pytest.CaptureFixture[str]) -> Answered:
    def run(main: Callable[[list[str]], int], *args: str) -> dict[str, Any]:
        capfd.readouterr()
        code = main([*args, "--json"])
        print("after")
        out, err = capfd.readouterr()
        assert out.endswith("after\n"), "stdout is given back"
        found = said_by(out.removesuffix("after\n"), main.__module__.rpartition(".")[2])
        assert found["exit_code"] == code and (found["error"] or {"message": ""})["message"] in err
        return found

    return run


class Trained(NamedTuple):
    run: Path
    data: Path
    out: str

    @property
    def best(self) -> str:
        return str(self.run / "weights" / "best.pt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("json")
    data = make_data(folder, train=8, val=4)
    ended = run_python(ROOT / "train.py", *flags(data, folder / "runs", "--epochs", "1", "--json"))
    assert ended.code == 0, ended.said
    return Trained(folder / "runs" / "exp", data, ended.out)


def where(folder: Path) -> tuple[str, ...]:
    return "--device", "cpu", "--project", str(folder)


def test_train(trained: Trained) -> None:
    run = trained.run
    found = said_by(trained.out, "train")
    checked = {key for key in documented("train.py") if key.startswith("checked.")}
    wanted = documented("Every command", "Metrics", "train.py") - checked - {"metrics", "flags"}
    assert keys(found, whole={}) == wanted - kinds()
    assert (found["run"], found["epochs"], found["best_epoch"], found["stopped_early"]) == (str(run), 1, 0, False)
    assert [Path(path).name for path in found["checkpoints"]] == ["best.pt", "last.pt"]
    assert {"results.csv", "errors.jsonl", "weights/"} <= set(found["files"])


def kinds() -> set[str]:
    return {"flags", "failed", "locked", "rank", "interrupted", "bug"}


def test_what_check_data_found(trained: Trained, answered: Answered, tmp_path: Path) -> None:
    data = trained.data
    found = answered(train.main, "--check-data", "--data", str(data))
    wanted = {key for key in documented("train.py") if key.startswith("checked.")}
    lists = {"checked.near_duplicates": [], "checked.drifts": [], "checked.unusual_images": []}
    assert {key for key in keys(found, whole=lists) if key.startswith("checked")} == wanted
    copy = Path(shutil.copytree(data.parent / "shapes", tmp_path / "shapes"))
    (tmp_path / "bad.yaml").write_text(data.read_text().replace(str(data.parent), str(tmp_path)))
    next((copy / "labels" / "val").glob("*.txt")).write_text("99 0.5 0.5 0.1 0.1\n")
    found = answered(train.main, "--check-data", "--data", str(tmp_path / "bad.yaml"))
    assert found["error"]["kind"] == "failed" and found["exit_code"] == 1
    assert "99" in found["checked"]["errors"][0]
    next((copy / "labels" / "val").glob("*.txt")).write_text("0 0.5 0.5 0.1\n")
    found = answered(train.main, "--check-data", "--data", str(tmp_path / "bad.yaml"))
    assert found["error"] is None and found["exit_code"] == 3 and found["checked"]["problems"]


def test_val(trained: Trained, answered: Answered, tmp_path: Path) -> None:
    data, best = trained.data, trained.best
    found = answered(val.main, "--weights", best, "--noreport", "--workers", "0", "--find-errors", *where(tmp_path))
    wanted = documented("Every command", "Metrics", "val.py") - kinds() - {"metrics", "label_errors"}
    assert keys(found, whole={}) == wanted
    suspected = found["label_errors"]
    listed = [json.loads(line)["kind"] for line in Path(suspected["file"]).read_text().splitlines()]
    assert {row["kind"]: row["suspects"] for row in suspected["kinds"]} == {kind: listed.count(kind) for kind in KINDS}
    assert all(row["likely"] <= row["suspects"] for row in suspected["kinds"]) and suspected["page"] is None
    assert (found["weights"], found["data"], found["run"]) == (best, str(data), str(tmp_path / "exp"))
    low, high = found["interval"]["map"]
    assert low <= high and found["metrics"]["images"] == 4 and "errors.jsonl" in found["files"]


def test_detect(trained: Trained, answered: Answered, tmp_path: Path) -> None:
    images = Path(shutil.copytree(trained.data.parent / "shapes" / "images" / "val", tmp_path / "images"))
    (images / "broken.jpg").write_bytes(b"\xff\xd8\xff broken")
    sure = ("--conf", "0.0001", "--max-det", "3")
    found = answered(detect.main, "--weights", trained.best, "--source", str(images), *sure, *where(tmp_path / "runs"))
    assert keys(found, whole={"classes": {}}) == documented("Every command", "detect.py") - kinds()
    assert found["exit_code"] == 3 and found["error"] is None and "broken.jpg" in found["unreadable"][0]
    assert found["images"] == 4 and found["detections"] == sum(found["classes"].values()) > 0
    assert len(found["files"]) == 4


def test_compare(trained: Trained, answered: Answered, tmp_path: Path) -> None:
    run = trained.run
    given = (str(run), str(run), "--workers", "0", "--require", "map > 0.01", *where(tmp_path))
    found = answered(compare.main, *given)
    kept = json.loads((tmp_path / "exp" / "compare.json").read_text())
    assert {key: found[key] for key in kept} == kept and found["error"] is None
    assert {*found} - {*kept} == {"exit_code", "error", "seconds"}
    page = (ROOT / "docs" / "compare.md").read_text().partition("## compare.json")[2]
    rows = re.findall(r"^\| (`.*?`) \|", page, flags=re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {*kept}


def test_export(trained: Trained, answered: Answered, tmp_path: Path) -> None:
    data, best = trained.data, trained.best
    given = ("--weights", best, "--include", "pt", "--data", str(data), "--output", str(tmp_path))
    found = answered(export.main, *given)
    wanted = documented("Every command", "export.py") - kinds() - {"run", "files"}
    assert keys(found, whole={"network": {}}) == wanted
    (file,) = found["files"]
    assert file["status"] == "verified" and Path(file["file"]).is_file() and file["drop"] == 0
    assert {"format", "file", *found["network"]} == {*file}


@pytest.mark.parametrize("command", ["train", "val", "detect", "export", "compare"])
def test_a_wrong_flag_is_an_object_too(command: str) -> None:
    ended = run_python("-m", "tessera", command, "--json", "--epoches", "3")
    found = said_by(ended.out, command)
    assert ended.code == found["exit_code"] == 2 and found["error"]["kind"] == "flags"
    assert ended.err == f"error: {found['error']['message']}\n"


def test_ctrl_c_is_an_object_too(tmp_path: Path) -> None:
    program = "from tessera.utils.flags.val import ValConfig\nfrom tessera.utils.startup import check_command_line\n"
    program += "import sys, time\ncheck_command_line(ValConfig)\nprint('importing', file=sys.stderr, flush=True)\n"
    command = [sys.executable, "-c", f"{program}print('not there')\ntime.sleep(60)", "--json"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), **pipes) as process:
        assert process.stderr is not None and process.stderr.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    found = said_by(out, "val")
    assert process.returncode == found["exit_code"] == 130 and found["error"]["kind"] == "interrupted"


@pytest.mark.slow
def test_of_two_ranks_one_prints(trained: Trained, tmp_path: Path) -> None:
    best = ("--weights", trained.best, "--workers", "0", "--json")
    ended = torchrun(ROOT / "val.py", *best, *where(tmp_path))
    found = said_by(ended.out, "val")
    assert ended.code == found["exit_code"] == 0 and found["metrics"]["images"] == 4
    assert found["label_errors"] is None
    ended = torchrun(ROOT / "val.py", *best, "--data", str(tmp_path / "none.yaml"), *where(tmp_path))
    found = said_by(ended.out, "val")
    assert ended.code == 1 and found["exit_code"] in (1, 2) and "none.yaml" in found["error"]["message"]


@pytest.mark.slow
def test_what_libraries_print_is_not_on_stdout(trained: Trained, tmp_path: Path) -> None:
    """Some exporters' converters print: here a process that the command starts does, behind its last line."""
    (tmp_path / "sitecustomize.py").write_text("import os, atexit\natexit.register(os.system, 'echo noise')\n")
    given = ("--weights", trained.best, "--noreport", "--workers", "0", *where(tmp_path))
    ended = run_python(ROOT / "val.py", *given, "--json", env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert said_by(ended.out, "val")["exit_code"] == ended.code == 0 and "noise" in ended.err
