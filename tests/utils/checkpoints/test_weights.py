"""Files of `--weights`: lookup, downloads from a misbehaving server, loading, impossible values."""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.deploy.foreign import download
from tessera.deploy.foreign import published as table
from tessera.deploy.foreign.download import NetworkLimits
from tessera.deploy.foreign.published import PUBLISHED
from tessera.deploy.foreign.safetensors_file import save_safetensors
from tessera.models.model_yaml import MODELS_DIR
from tessera.utils.checkpoints import format
from tessera.utils.checkpoints.format import load_any_checkpoint, save_checkpoint
from tessera.utils.checkpoints.weights import EXPORTED, Weights, load_weights, resolve_weights
from tessera.utils.errors import UserError
from tessera.utils.evaluation.network import open_model
from tessera.utils.ranks.world import World
from tests.deploy.exporting.made import ANCHORED, NAMES, checkpoint
from tests.file_server import FileServer
from tests.utils.checkpoints.made_state import assert_equal, full, make_state, train
from tests.utils.machine.stand_in import StandIn

HTML = b"<!DOCTYPE html>\n<html><head><title>Log in to the network</title></head></html>"


def saved() -> bytes:
    """A small file as torch.save makes it."""
    file = io.BytesIO()
    torch.save({"model": {"weight": torch.arange(50_000.0)}}, file)
    return file.getvalue()


BODY = saved()
DIGEST = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "fetch", lambda *a, **k: pytest.fail("nothing may be downloaded"))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """A server of BODY under every published name, and a table that knows its address, size and digest."""
    monkeypatch.setattr(download, "LIMITS", NetworkLimits(pause_s=0.01, timeout_s=30.0))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with FileServer(BODY).running() as server:
        known = tuple(replace(w, folder=server.folder, size=len(BODY), sha256=DIGEST) for w in PUBLISHED)
        monkeypatch.setattr(table, "PUBLISHED", known)
        yield server


@pytest.fixture
def unpinned(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> FileServer:
    """The same with a table that knows no digest, and the size in tenths of a megabyte, as of YOLOv9's."""
    sizes = {"v9-t.pt": None}  # not even its size is known
    known = tuple(replace(w, size=sizes.get(w.name, round(len(BODY), -5)), sha256="") for w in table.PUBLISHED)
    monkeypatch.setattr(table, "PUBLISHED", known)
    return server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "weights"


def test_existing_files(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, offline: None) -> None:
    (tmp_path / "best.pt").write_bytes(b"x")
    assert resolve_weights(str(tmp_path / "best.pt")) == tmp_path / "best.pt"
    monkeypatch.chdir(tmp_path)
    assert resolve_weights("best.pt").samefile(tmp_path / "best.pt")
    cache.mkdir(parents=True)
    (cache / "v9-c.pt").write_bytes(b"x")  # whose digest is not known
    (cache / "ours.pt").write_bytes(b"x")
    assert resolve_weights("v9-c.pt") == resolve_weights("v9-c") == cache / "v9-c.pt"
    assert resolve_weights("ours.pt") == cache / "ours.pt"
    (tmp_path / "yolov5s.pt").write_bytes(b"mine")  # a file of the user's own comes first
    for name in ("yolov5s.pt", "yolov5s", "yolov5s.pth"):
        assert resolve_weights(name).samefile(tmp_path / "yolov5s.pt")
    (tmp_path / "yolox-s.pth").write_bytes(b"mine")  # as it is spelled
    assert resolve_weights("yolox-s.pth").samefile(tmp_path / "yolox-s.pth")


def test_every_name_is_downloaded_once_into_the_cache(server: FileServer, tmp_path: Path, cache: Path) -> None:
    for weights in PUBLISHED:
        for name in (weights.name, weights.stem, Path(weights.cfg).stem, f"{Path(weights.cfg).stem}.pt"):
            assert resolve_weights(name) == cache / weights.name
    assert server.asked == [f"/{weights.name}" for weights in PUBLISHED]
    assert list((tmp_path / "work").iterdir()) == []
    assert {path.name for path in cache.iterdir()} == {weights.name for weights in PUBLISHED}


def test_a_download_is_reported_in_one_line(server: FileServer, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    resolve_weights("yolox_s")
    place = server.folder.removeprefix("http://").rstrip("/")
    assert caplog.messages == [
        f"yolox_s.pth: 0.2 MB from {place}, Apache-2.0, SHA-256 {DIGEST}, cached as {cache / 'yolox_s.pth'}."
    ]
    caplog.clear()
    resolve_weights("yolox_s")
    assert caplog.messages == []
    resolve_weights("yolov5n.pt")
    (line,) = caplog.messages
    assert ", AGPL-3.0, SHA-256 " in line and "Check its terms" in line and "--list-weights" in line


@pytest.mark.parametrize(
    "body",
    [HTML, b"", b"\x80\x02}q\x00." * 9, BODY[:-1000], BODY + b"x", BODY[:9000] + b"!" + BODY[9001:]],
    ids=["web page", "empty", "pickle", "shorter", "longer", "other"],
)
@pytest.mark.parametrize("length", [True, False])
def test_what_is_not_the_published_file_is_refused(server: FileServer, cache: Path, body: bytes, length: bool) -> None:
    server.body, server.length = body, length
    found = f"the server sent {len(body):,} bytes that begin with .*, SHA-256 {hashlib.sha256(body).hexdigest()}"
    message = rf"^Cannot use http://127.*/yolox_m\.pth: {found}, expected SHA-256 {DIGEST}\. Nothing was saved"
    with pytest.raises(UserError, match=message) as caught:
        resolve_weights("yolox_m.pth")
    assert str(caught.value).isprintable()
    assert not (cache / "yolox_m.pth").exists()
    server.body = BODY
    assert resolve_weights("yolox_m.pth").read_bytes() == BODY  # from its beginning
    assert server.seen == [None, None]


def test_a_truncated_file_is_refused_where_megabytes_alone_are_known(
    unpinned: FileServer, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unpinned.body, unpinned.length = BODY[:-1000], False
    with pytest.raises(UserError, match=r"bytes that begin .*, expected a checkpoint of about 0\.2 MB\. Noth"):
        resolve_weights("v9-c")
    assert not (cache / "v9-c.pt").exists()
    unpinned.body = BODY
    caplog.set_level(logging.INFO)
    assert resolve_weights("v9-c").read_bytes() == BODY
    (line,) = caplog.messages
    assert f"MIT, SHA-256 {DIGEST} (not pinned: no digest of this file is known), cached as" in line
    assert resolve_weights("v9-t").read_bytes() == BODY


def test_a_cached_file_with_another_digest_is_refused(server: FileServer, cache: Path) -> None:
    cache.mkdir(parents=True)
    path = cache / "yolox_l.pth"
    path.write_bytes(BODY)
    assert resolve_weights("yolox_l") == path  # put there by hand
    path.write_bytes(BODY[::-1])
    with pytest.raises(UserError, match=rf"yolox_l\.pth is not the published file: .* expected '{DIGEST}'\. Delete it"):
        resolve_weights("yolox_l")
    assert resolve_weights(str(path)) == path and server.asked == []  # where this very file is meant
    path.unlink()
    assert resolve_weights("yolox_l").read_bytes() == BODY


def test_the_published_file_itself(shared: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size and digest are the table's."""
    server.body = (shared / "weights" / "yolov5n.pt").read_bytes()
    monkeypatch.setattr(table, "PUBLISHED", tuple(replace(w, folder=server.folder) for w in PUBLISHED))
    assert resolve_weights("yolov5n").read_bytes() == server.body
    with pytest.raises(UserError, match="expected SHA-256 "):
        resolve_weights("yolov5s")


def test_a_start_comes_with_the_program(offline: None) -> None:
    assert resolve_weights("tessera-n") == resolve_weights("tessera-n.pt") == MODELS_DIR / "tessera-n.pt"


OWN = r"tessera-s{}: no such file; tried .* No weights of tessera-s are .* --cfg tessera-s\.yaml and without"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("yolov5ss.pt", r"tried \S+/yolov5ss\.pt and \S+/cache/weights/yolov5ss\.pt\. Published ones of YOLOv5: "),
        ("yolov5z.pt", r"yolov5z\.pt: no such .* Published ones of YOLOv5: yolov5n\.pt, .*yolov5x6\.pt\. Exp"),
        ("runs/bst.pt", r"Did you mean 'best\.pt'"),
        ("runs/last.pt", r"runs/last\.pt: no such file; tried \S+ Did you mean 'best\.pt'"),  # never itself
        ("nowhere/yolov5s.pt", "no such file"),  # a path is meant, not the published name
        ("", "--weights is empty, expected a checkpoint"),
        ("tessera-s.pt", OWN.format(r"\.pt")),
        ("tessera-s", OWN.format("")),
        ("tessera-s.yaml", OWN.format(r"\.yaml")),
        ("runs", "found a folder, expected a checkpoint file"),
        ("exp", r"found a folder, .* Its best checkpoint is --weights exp/weights/best\.pt\.$"),
        ("yolov5n", "yolov5n: found a folder"),
        ("imagenet", r"imagenet: the backbone of a classifier, which only train\.py accepts"),
    ],
)
def test_names_of_nothing(name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs", "exp/weights", "yolov5n"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("runs/best.pt", "exp/weights/best.pt"):
        (tmp_path / file).write_bytes(b"x")
    (tmp_path / "runs/last.pt").symlink_to("gone")
    with pytest.raises(UserError, match=text):
        resolve_weights(name)


YOLOX = "Published ones of YOLOX: yolox_nano.pth, yolox_tiny.pth, yolox_s.pth, yolox_m.pth, yolox_l.pth, yolox_x.pth."
YOLOV9 = "Published ones of YOLOv9: v9-t.pt, v9-s.pt, v9-m.pt, v9-c.pt."


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("yolox", YOLOX),
        ("yolox_darknet.pth", YOLOX),
        ("YOLOX_S.PTH", "Did you mean 'yolox_s.pth'?"),
        ("yoloxs", "Did you mean 'yolox_s.pth'?"),
        ("yolov9t", "Did you mean 'v9-t.pt'?"),
        ("V9-C.pt", "Did you mean 'v9-c.pt'?"),
        ("v9-e", YOLOV9),
        ("yolov9", YOLOV9),
        ("yolov5-s", "Did you mean 'yolov5s.pt'?"),
        ("yolov8n.pt", ""),  # of a family that is not known here
    ],
)
def test_suggestions_are_of_the_same_family(
    typed: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for other in ("yolov5x.pt", "mine.pt"):  # the user's own
        (tmp_path / other).write_bytes(b"x")
    with pytest.raises(UserError) as caught:
        resolve_weights(typed)
    hint = str(caught.value).partition(f"weights/{typed}.")[2].partition("Expected a checkpoint")[0].strip()
    assert hint == text


# Loading


def test_weights_of_a_checkpoint(tmp_path: Path) -> None:
    state = make_state()
    train(state, 2)
    state.progress.epoch, state.progress.batch_in_epoch = 3, 0
    save_checkpoint(tmp_path / "best.pt", full(state, config={"data": "shapes.yaml"}))
    weights = load_weights(tmp_path / "best.pt")
    assert_equal(dict(weights.state_dict), dict(state.ema.model.state_dict()))
    assert weights.names == ("class0", "class1") and weights.model_yaml == state.model.yaml
    assert weights.source == "best.pt (after 3 epochs)" and weights.data == "shapes.yaml"
    with pytest.raises(UserError, match="no such checkpoint"):
        load_weights(tmp_path / "none.pt")


@pytest.mark.parametrize("suffix", sorted(EXPORTED))
def test_an_exported_file_is_nothing_to_train_on(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"best{suffix}"
    path.write_bytes(b"an export")
    with pytest.raises(UserError, match=r"an exported file, .* exported from, .*best\.pt"):
        load_weights(path)


NAN = float("nan")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("good") / "best.pt", ANCHORED)


def with_number(good: Path, path: Path, number: float) -> tuple[Path, str]:
    """The same with a number in a tensor, which is named too."""
    state = load_any_checkpoint(good)
    ema = {name: tensor.clone() for name, tensor in state["ema"].items()}
    name = [name for name, tensor in ema.items() if tensor.is_floating_point()][5]
    ema[name].view(-1)[-1] = number
    if path.suffix == ".pt":
        save_checkpoint(path, {**state, "ema": ema})
    else:
        save_safetensors(path, Weights(ema, state["model_yaml"], tuple(state["names"]), "best.pt"), {})
    return path, name


@pytest.mark.parametrize("number", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_first_tensor_that_is_not_finite_is_named(good: Path, tmp_path: Path, suffix: str, number: float) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    path, name = with_number(good, tmp_path / f"bad{suffix}", number)
    with pytest.raises(UserError, match=rf"bad\{suffix}: damaged: '{name}' has values that are not finite"):
        load_weights(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"imgsz": 10**9}, "its size is 1000000000 pixels, expected 32 to 8192"),
        ({"imgsz": 0}, "its size is 0 pixels"),
        ({"names": ["x" * 300, "b", "c"]}, "names a class 'x.*, expected text of at most 200 letters"),
        ({"thresholds": {"confidence": NAN, "class_confidences": []}}, "its confidence is nan, expected 0 to 1"),
        ({"thresholds": {"confidence": 0.5, "class_confidences": [0.5, 7.0, 0.5]}}, "its confidence is 7, expected 0"),
        ({"thresholds": {"confidence": 0.5, "class_confidences": [0.5]}}, "1 confidence for 3 classes"),
    ],
    ids=str,
)
def test_impossible_descriptions(good: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    save_checkpoint(tmp_path / "bad.pt", {**load_any_checkpoint(good), **change})
    with pytest.raises(UserError, match=rf"bad\.pt: damaged: .*{said}"):
        load_weights(tmp_path / "bad.pt")


@pytest.mark.parametrize("key", ["format", "trained_imgsz", "names"])
def test_a_header_of_any_length_is_a_short_message(good: Path, tmp_path: Path, key: str) -> None:
    module = pytest.importorskip("safetensors.torch")
    save_safetensors(tmp_path / "good.safetensors", load_weights(good), {})
    with module.safe_open(tmp_path / "good.safetensors", "pt") as file:
        described = {**file.metadata(), key: f'"{"x" * 100_000}"'}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    module.save_file(tensors, tmp_path / "bad.safetensors", described)
    with pytest.raises(UserError, match=r"bad\.safetensors: ") as caught:
        load_weights(tmp_path / "bad.safetensors")
    assert len(str(caught.value)) < 700


def test_memory_that_ends_while_a_model_is_opened(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_weights(good).names == NAMES

    def no_memory_there(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    def no_memory_here(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("tessera.utils.evaluation.network.fused_copy", no_memory_there)
    with pytest.raises(UserError, match=r"out of memory on stand-in: the model of best\.pt .*Use a smaller model"):
        open_model(str(good), World(accelerator=StandIn()))
    monkeypatch.setattr(format, "read_archive", no_memory_here)
    with pytest.raises(UserError, match=r"out of memory on cpu: the model of .*best\.pt.*Use a smaller model"):
        load_weights(good)
