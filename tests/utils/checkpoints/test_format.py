"""Checkpoints: whole or not at all, plain, bit-equal; weights from anywhere, told what fitted."""

from __future__ import annotations

import copy
import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from utils.checkpoints import format as module
from utils.checkpoints.format import (
    FORMAT,
    KEYS,
    OFFICIAL_NAMES,
    STATE_KEYS,
    Progress,
    TrainState,
    git_revision,
    intersect_weights,
    load_checkpoint,
    load_weights,
    resolve_weights,
    rng_state,
    run_facts,
    save_checkpoint,
    set_rng_state,
)
from utils.engine.ema import ModelEMA
from utils.engine.stopping import EarlyStopping
from utils.errors import UserError


class Net(nn.Module):
    """A small model with what a checkpoint asks of a detector."""

    def __init__(self, nc: int = 2, width: int = 4) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Conv2d(width, nc, 1))
        self.register_buffer("anchors", torch.rand(2, 3, 2))
        self.yaml = {"nc": nc, "backbone": [[-1, 1, "Conv", [width, 3]]]}
        self.names = tuple(f"class{i}" for i in range(nc))

    @property
    def head(self) -> Any:
        return SimpleNamespace(stride=torch.tensor([8.0, 16.0]), anchors=self.anchors)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def make_state(seed: int = 0, optimizer: str = "SGD", **net: int) -> TrainState:
    torch.manual_seed(seed)
    model = Net(**net)
    built: torch.optim.Optimizer
    if optimizer == "SGD":
        built = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    else:
        built = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], 0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainState(model, ModelEMA(model), built, scaler, EarlyStopping(10), Progress())


def train(state: TrainState, steps: int) -> None:
    """Steps whose data come from the process-level generators, so that their state matters too."""
    for _ in range(steps):
        x = torch.rand(2, 3, 8, 8) * random.random() + float(np.random.rand())  # noqa: NPY002
        state.optimizer.zero_grad()
        state.model(x).square().mean().backward()
        state.optimizer.step()
        state.ema.update(state.model)
        state.progress.advance(1, torch.rand(3))
    state.stopper.update(state.progress.epoch, state.progress.step / 100)
    state.progress.class_maps = (random.random(), 0.5)


def full(state: TrainState, **facts: Any) -> dict[str, Any]:
    return {**state.state_dict(), **run_facts(state.model, {"epochs": 3, "freeze": [0]}, {"lr0": 0.01}, "abc"), **facts}


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}[{i}]")
    else:
        assert type(a) is type(b) and (a == b or a != a), where


# Round trip


def test_keys_are_those_of_the_format() -> None:
    expected = (
        "model ema ema_updates optimizer scaler epoch step step_in_epoch epoch_losses epoch_skipped "
        "skipped_steps class_maps best_fitness stopper rng config hyp model_yaml names stride anchors dataset_hash "
        "version date git"
    )
    assert " ".join(KEYS) == expected


def test_round_trip_is_bit_equal(tmp_path: Path) -> None:
    state = make_state()
    train(state, 3)
    saved = full(state, git="0123-dirty")
    save_checkpoint(tmp_path / "weights/last.pt", saved)
    loaded = load_checkpoint(tmp_path / "weights/last.pt")
    assert_equal(dict(saved), loaded)
    assert loaded["names"] == ["class0", "class1"] and loaded["stride"] == [8.0, 16.0] and loaded["version"] == FORMAT
    assert loaded["anchors"].shape == (2, 3, 2) and loaded["config"] == {"epochs": 3, "freeze": [0]}
    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["last.pt"]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_going_on_is_exact(tmp_path: Path, optimizer: str) -> None:
    straight = make_state(optimizer=optimizer)
    train(straight, 4)
    save_checkpoint(tmp_path / "last.pt", full(straight))
    train(straight, 5)

    resumed = make_state(seed=99, optimizer=optimizer)
    train(resumed, 2)
    resumed.load(load_checkpoint(tmp_path / "last.pt"))
    assert resumed.progress.step == 4 and len(resumed.progress.class_maps) == 2
    assert resumed.ema.updates == 4 and resumed.stopper.best_fitness == 0.04
    train(resumed, 5)
    assert_equal(straight.state_dict(), resumed.state_dict())


def test_a_later_save_does_not_change_what_was_loaded(tmp_path: Path) -> None:
    state = make_state()
    save_checkpoint(tmp_path / "last.pt", full(state))
    loaded = load_checkpoint(tmp_path / "last.pt")
    before = copy.deepcopy(loaded["model"])
    train(state, 1)
    save_checkpoint(tmp_path / "last.pt", full(state))
    assert_equal(before, loaded["model"])


def test_loads_in_a_fresh_process(tmp_path: Path) -> None:
    """Without a class of ours in the file: torch alone reads it."""
    state = make_state(optimizer="AdamW")
    train(state, 2)
    save_checkpoint(tmp_path / "last.pt", full(state))
    code = (
        "import sys, torch; s = torch.load(sys.argv[1], weights_only=True); "
        "assert not [m for m in sys.modules if m.split('.')[0] in ('utils', 'models', 'data')]; "
        "print(len(s), float(s['ema']['model.0.weight'].double().sum()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "last.pt")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    count, total = done.stdout.split()
    assert int(count) == len(KEYS)
    assert float(total) == float(state.ema.model.state_dict()["model.0.weight"].double().sum())


def test_generators() -> None:
    state = rng_state()
    drawn = (random.random(), np.random.rand(), torch.rand(3))  # noqa: NPY002
    np.random.randn()  # noqa: NPY002 - leaves a cached value behind
    middle = rng_state()
    more = (np.random.randn(), random.gauss(0, 1))  # noqa: NPY002
    set_rng_state(state)
    again = (random.random(), np.random.rand(), torch.rand(3))  # noqa: NPY002
    assert drawn[:2] == again[:2] and torch.equal(drawn[2], again[2])
    set_rng_state(middle)
    assert (np.random.randn(), random.gauss(0, 1)) == more  # noqa: NPY002


def test_other_ranks_keep_their_generators(tmp_path: Path) -> None:
    state = make_state()
    train(state, 1)
    save_checkpoint(tmp_path / "last.pt", full(state))
    state = make_state()
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    state.load(load_checkpoint(tmp_path / "last.pt"), rank=1, size=2)
    assert torch.equal(torch.rand(4), expected)
    assert state.progress.losses.tolist() == [0, 0, 0]  # rank 0 goes on with the sum over all ranks


def test_loss_scaling_may_be_switched_on(tmp_path: Path) -> None:
    """A run on the CPU has no scaler state; on a GPU with fp16 it starts afresh, and the other way round."""
    state = make_state()
    saved = full(state)
    enabled = make_state()
    enabled.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=True)
    enabled.load(saved)
    assert enabled.scaler.get_scale() == 256.0
    other = full(enabled)
    assert other["scaler"]
    save_checkpoint(tmp_path / "a.pt", other)
    state.load(load_checkpoint(tmp_path / "a.pt"))
    again = make_state()
    again.scaler = torch.amp.GradScaler("cpu", enabled=True)
    again.load(load_checkpoint(tmp_path / "a.pt"))
    assert again.scaler.get_scale() == 256.0


def test_progress_counts_and_starts_over_each_epoch() -> None:
    progress = Progress()
    progress.advance(4, torch.tensor([1.0, 2.0, 3.0]))
    progress.advance(2, torch.tensor([1.0, 0.0, 1.0]))
    assert (progress.epoch, progress.step, progress.step_in_epoch) == (0, 2, 6)
    assert progress.losses.tolist() == [2, 2, 4]
    progress.finish_epoch()
    assert (progress.epoch, progress.step, progress.step_in_epoch) == (1, 2, 0)
    assert progress.losses.tolist() == [0, 0, 0]


def test_resumed_losses_are_not_the_checkpoints_own(tmp_path: Path) -> None:
    """Two runs that go on from one loaded checkpoint do not write into each other."""
    state = make_state()
    train(state, 1)
    saved = full(state)
    before = saved["epoch_losses"].clone()
    other = make_state()
    other.load(saved)
    other.progress.losses += 1
    assert torch.equal(saved["epoch_losses"], before)


def test_going_on_with_another_model_is_refused() -> None:
    saved = full(make_state(nc=2))
    with pytest.raises(UserError, match=r"model\.2\.weight is \(3, 4, 1, 1\), in the checkpoint \(2, 4, 1, 1\)"):
        make_state(nc=3).load(saved)
    saved["model"] = {**saved["model"], "model.9.weight": torch.zeros(1)}
    with pytest.raises(UserError, match=r"model\.9\.weight of the checkpoint has no place"):
        make_state(nc=2).load(saved)


def one_group(name: str, weight_decay: float = 0.0) -> TrainState:
    """As `build_optimizer` makes them: the same groups whatever the optimizer."""
    state = make_state()
    made = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[name]
    state.optimizer = made(state.model.parameters(), lr=0.01, weight_decay=weight_decay)
    return state


@pytest.mark.parametrize(("before", "after"), [("SGD", "AdamW"), ("Adam", "SGD")])
def test_going_on_with_another_optimizer_is_refused(before: str, after: str) -> None:
    started = one_group(before)
    train(started, 2)
    with pytest.raises(UserError, match="--optimizer"):
        one_group(after).load(full(started))


def test_going_on_with_other_frozen_layers_is_refused() -> None:
    started, other = one_group("SGD"), one_group("SGD")
    other.optimizer = torch.optim.SGD([*other.model.parameters()][1:], lr=0.01)
    with pytest.raises(UserError, match="--freeze"):
        other.load(full(started))


def test_decay_is_that_of_the_flags_given_now() -> None:
    """A resume with another --hyp or --batch-size must not keep the checkpoint's."""
    started = one_group("AdamW", weight_decay=0.1)
    train(started, 2)
    other = one_group("AdamW", weight_decay=0.2)
    other.load(full(started))
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.2
    assert len(other.optimizer.state) == len(started.optimizer.state) > 0


# Writing: whole or not at all


def forked(work: Callable[[], None]) -> int:
    """Start a child process that does `work` and nothing of pytest's; its exit code tells whether that went well."""
    process = os.fork()
    if process == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return process


def test_what_cannot_be_read_back_is_not_written(tmp_path: Path) -> None:
    state = full(make_state())
    for key, value, where in (
        ("config", {"project": Path("x")}, "config.project is a PosixPath"),
        ("hyp", {"lr0": np.float64(1)}, "hyp.lr0 is a float64"),
        ("names", [{1, 2}], r"names\[0\] is a set"),
        ("model_yaml", {(1, 2): 3}, "model_yaml: a key that is a tuple"),
    ):
        with pytest.raises(AssertionError, match=where):
            save_checkpoint(tmp_path / "last.pt", {**state, key: value})
    with pytest.raises(AssertionError, match=r"missing \{'git'\}"):
        save_checkpoint(tmp_path / "last.pt", {k: v for k, v in state.items() if k != "git"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    path = tmp_path / "last.pt"
    state = make_state()
    save_checkpoint(path, full(state))
    before = path.read_bytes()
    train(state, 1)

    real = torch.save

    def full_disk(value: Any, file: Any) -> None:
        writes = 0

        class Full:
            def write(self, content: Any) -> int:
                nonlocal writes
                if writes == after:
                    raise OSError(errno.ENOSPC, "No space left on device")
                writes += 1
                return file.write(content)

            def flush(self) -> None:
                file.flush()

        real(value, Full())

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(UserError) as caught:
        save_checkpoint(path, full(state))
    message = str(caught.value)
    assert message.startswith(f"{path}: cannot write the checkpoint: No space left on device.")
    assert "The previous one is whole" in message and "MiB free" in message and "--resume" in message
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_a_file_size_limit_of_the_system(tmp_path: Path) -> None:
    """The real thing: the kernel refuses the write, in another process since the limit lasts."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, full(make_state()))
    before = path.read_bytes()

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        with pytest.raises(UserError, match=r"File too large.* The previous one is whole"):
            save_checkpoint(path, state)

    state = full(make_state(width=64))
    assert os.waitstatus_to_exitcode(os.waitpid(forked(limited), 0)[1]) == 0
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_defects_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the system says of the file is the user's matter."""

    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        save_checkpoint(tmp_path / "last.pt", full(make_state()))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into any folder")
def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir(mode=0o500)
    with pytest.raises(UserError, match="Permission denied"):
        save_checkpoint(tmp_path / "weights/last.pt", full(make_state()))


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("")
    with pytest.raises(UserError, match=r"weights/last\.pt: cannot write the checkpoint: .*--project"):
        save_checkpoint(tmp_path / "weights/last.pt", full(make_state()))


def test_killed_while_saving(tmp_path: Path) -> None:
    """kill -9 at any moment of a loop of saves: what lies there is always a whole checkpoint."""
    path = tmp_path / "last.pt"
    state = full(make_state())
    content = [torch.full((300_000,), float(step)) for step in range(50)]

    def save_again_and_again() -> None:
        for step in range(10_000):
            save_checkpoint(path, {**state, "step": step % 50, "model": {"w": content[step % 50]}})
            os.write(writing, b".")

    for round_ in range(8):
        reading, writing = os.pipe()
        process = forked(save_again_and_again)
        os.close(writing)
        for _ in range(2 + round_):
            assert os.read(reading, 1) == b"."
        time.sleep(0.001 * round_)
        os.kill(process, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
        os.close(reading)
        loaded = load_checkpoint(path)
        assert loaded["step"] >= 1 and (loaded["model"]["w"] == loaded["step"]).all()


# Reading


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "last.pt"
    save_checkpoint(path, full(make_state()))
    return path.read_bytes()


@pytest.mark.parametrize("share", [0, 0.001, 0.3, 0.9, 0.999])
def test_a_torn_file(tmp_path: Path, whole: bytes, share: float) -> None:
    path = tmp_path / "last.pt"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(UserError, match=r"last\.pt: damaged, or not a checkpoint .* Take another"):
        load_checkpoint(path)


def test_flipped_bytes(tmp_path: Path, whole: bytes) -> None:
    """Never another exception than the user's, never silently other numbers in the tensors."""
    path = tmp_path / "last.pt"
    path.write_bytes(whole)
    original = load_checkpoint(path)
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for position in rng.integers(0, len(whole), 2):
            damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            loaded = load_checkpoint(path)
        except UserError:
            refused += 1
        else:
            assert_equal(original["model"], loaded["model"])
            assert_equal(original["ema"], loaded["ema"])
    assert refused > 0


def test_missing_files(tmp_path: Path, whole: bytes) -> None:
    (tmp_path / "last.pt").write_bytes(whole)
    with pytest.raises(UserError, match=r"lst\.pt: no such checkpoint\. Did you mean 'last\.pt'\?"):
        load_checkpoint(tmp_path / "lst.pt")
    with pytest.raises(UserError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "nowhere/last.pt")


def test_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "page.pt").write_text("<html>not found</html>")
    with pytest.raises(UserError, match=r"page\.pt: damaged, or not a checkpoint"):
        load_checkpoint(tmp_path / "page.pt")
    torch.save({"state_dict": {}, "lr": 1}, tmp_path / "other.pt")
    with pytest.raises(
        UserError, match=r"not a checkpoint of this program: found a dictionary with 'state_dict', 'lr'"
    ):
        load_checkpoint(tmp_path / "other.pt")
    torch.save(torch.zeros(2), tmp_path / "tensor.pt")
    with pytest.raises(UserError, match="found a Tensor"):
        load_checkpoint(tmp_path / "tensor.pt")


def test_hostile_files_run_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    class Hostile:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {mark}",)

    torch.save({**full(make_state()), "config": Hostile()}, tmp_path / "last.pt")
    torch.save({"model": Hostile()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name, complaint in (("last.pt", "pickled objects"), ("old.pt", "damaged, or not a checkpoint")):
        with pytest.raises(UserError, match=complaint):
            load_checkpoint(tmp_path / name)
    with pytest.raises(UserError, match=r"asks for '\w+\.system'"):
        load_weights(tmp_path / "last.pt")
    assert not mark.exists()


def test_versions(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    state = full(make_state())
    torch.save({**state, "version": FORMAT + 1, "new": 1}, path)
    with pytest.raises(UserError, match="later version"):
        load_checkpoint(path)
    torch.save({k: v for k, v in state.items() if k not in ("rng", "stopper")}, path)
    with pytest.raises(UserError, match="incomplete, without stopper, rng"):
        load_checkpoint(path)


# Weights


def test_weights_of_ours(tmp_path: Path) -> None:
    state = make_state()
    train(state, 2)
    state.progress.epoch, state.progress.step_in_epoch = 3, 0
    save_checkpoint(tmp_path / "best.pt", full(state))
    weights = load_weights(tmp_path / "best.pt")
    assert_equal(dict(weights.state_dict), dict(state.ema.model.state_dict()))
    assert weights.names == ("class0", "class1") and weights.model_yaml == state.model.yaml
    assert weights.source == "best.pt (after 3 epochs)"
    with pytest.raises(UserError, match="no such checkpoint"):
        load_weights(tmp_path / "none.pt")


def test_official_weights_are_weights_only(shared: Path) -> None:
    path = shared / "weights/yolov5n.pt"
    weights = load_weights(path)
    assert (
        len(weights.state_dict) == 349 and weights.names[0] == "person" and weights.source.endswith("(original YOLOv5)")
    )
    with pytest.raises(UserError, match="give it as --weights"):
        load_checkpoint(path)


def test_everything_fits() -> None:
    model, other = Net(), Net()
    fitting, report = intersect_weights(model.state_dict(), other.state_dict())
    assert report == "10 of 10 tensors fitted"
    model.load_state_dict(fitting)
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))


def test_other_classes_fit_but_for_the_head() -> None:
    fitting, report = intersect_weights(Net(nc=3).state_dict(), Net(nc=2).state_dict())
    assert len(fitting) == 8 and "model.2.weight" not in fitting
    assert report.startswith("8 of 10 tensors fitted; did not fit: ")
    assert "model.2.weight is (3, 4, 1, 1), in the checkpoint (2, 4, 1, 1)" in report


def test_long_reports_are_cut() -> None:
    state = Net().state_dict()
    other = {f"x.{name}": tensor for name, tensor in state.items() if not name.startswith("model.0")}
    other["model.0.weight"] = state["model.0.weight"]
    fitting, report = intersect_weights(state, other)
    assert list(fitting) == ["model.0.weight"]
    assert report.startswith("1 of 10 tensors fitted; did not fit: ") and report.endswith("; and 13 more")


def test_excluded_tensors_stay() -> None:
    fitting, report = intersect_weights(Net().state_dict(), Net().state_dict(), exclude=[r"anchors$"])
    assert "anchors" not in fitting
    assert report == "9 of 10 tensors fitted; 1 left out as asked"


def test_another_architecture_is_an_error() -> None:
    """Anchors and batch counters have one shape in every width; they do not make it fit."""
    with pytest.raises(UserError, match=r"best\.pt: an architecture that does not fit the weights: 3 of 10 .* --cfg"):
        intersect_weights(Net(width=8).state_dict(), Net(width=4).state_dict(), source="best.pt")
    with pytest.raises(UserError, match="0 of 10"):
        intersect_weights(Net().state_dict(), {})


def test_resolving_existing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fetch", lambda *a, **k: pytest.fail("nothing may be downloaded"))
    (tmp_path / "best.pt").write_bytes(b"x")
    assert resolve_weights(str(tmp_path / "best.pt")) == tmp_path / "best.pt"
    monkeypatch.chdir(tmp_path)
    assert resolve_weights("best.pt").samefile(tmp_path / "best.pt")
    cached = tmp_path / "cache/weights/yolov5s.pt"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"x")
    assert resolve_weights("yolov5s.pt") == cached
    (tmp_path / "yolov5s.pt").write_bytes(b"mine")  # a file of the user's own comes first
    assert resolve_weights("yolov5s.pt").samefile(tmp_path / "yolov5s.pt")


def test_official_names_are_downloaded_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fake(url: str, target: Path, *, progress: bool) -> Path:
        asked.append(url)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"x")
        return target

    monkeypatch.setattr(module, "fetch", fake)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert len(OFFICIAL_NAMES) == 10
    for name in OFFICIAL_NAMES:
        assert resolve_weights(name) == tmp_path / "cache/weights" / name
    assert asked == [f"https://github.com/ultralytics/yolov5/releases/download/v7.0/{n}" for n in OFFICIAL_NAMES]
    assert resolve_weights("yolov5x6.pt") and len(asked) == 10
    assert list((tmp_path / "work").iterdir()) == []


def test_unresolvable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fetch", lambda *a, **k: pytest.fail("nothing may be downloaded"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        resolve_weights("yolov5ss.pt")
    message = str(caught.value)
    assert message.startswith("--weights yolov5ss.pt: no such file; tried ")
    assert str(tmp_path / "yolov5ss.pt") in message and str(tmp_path / "cache/weights/yolov5ss.pt") in message
    assert "Did you mean 'yolov5s.pt'?" in message
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/best.pt").write_bytes(b"x")
    with pytest.raises(UserError, match=r"Did you mean 'best\.pt'"):
        resolve_weights("runs/bst.pt")
    with pytest.raises(UserError, match="no such file"):
        resolve_weights("nowhere/yolov5s.pt")  # a path is meant, not the official name


# The program's own version


def test_git_revision(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None
    (tmp_path / ".git").mkdir()
    assert git_revision(tmp_path) is None  # not a repository after all
    (tmp_path / ".git").rmdir()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    if subprocess.run([*git, "init", "-q"], check=False, capture_output=True).returncode:
        pytest.skip("needs git")
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    revision = git_revision(tmp_path)
    assert revision is not None and len(revision) == 40
    (tmp_path / "file").write_text("2")
    assert git_revision(tmp_path) == f"{revision}-dirty"


def test_git_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    assert git_revision(tmp_path) is None


def test_facts_and_state_share_no_key() -> None:
    state = make_state()
    assert set(state.state_dict()) == set(STATE_KEYS)
    assert set(run_facts(state.model, {}, {}, "")) == set(KEYS) - set(STATE_KEYS)
