"""Weight files that are damaged, something else, or ask for something to be run: one message each; nothing is run."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.utils.checkpoints.foreign.made import STEM, Tensors, refusal
from tests.utils.checkpoints.foreign.test_yolov5_hostile import Marking, archive


@pytest.fixture(scope="module")
def whole(small: Tensors) -> bytes:
    file = io.BytesIO()
    torch.save({"start_epoch": 300, "model": small}, file)
    return file.getvalue()


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.3, 0.9, 0.999, 1.0])
def test_cut_files(share: float, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "yolox_s.pth"
    path.write_bytes(whole[: min(int(len(whole) * share), len(whole) - 1)])
    assert "damaged" in refusal(path)


def repacked(whole: bytes, path: Path, change: Callable[[str, bytes], bytes], method: int = zipfile.ZIP_STORED) -> Path:
    """The same archive, its members changed and packed."""
    with zipfile.ZipFile(io.BytesIO(whole)) as source, zipfile.ZipFile(path, "w", method) as target:
        for name in source.namelist():
            target.writestr(name, change(name, source.read(name)))
    return path


def test_a_member_is_cut(whole: bytes, tmp_path: Path) -> None:
    path = repacked(whole, tmp_path / "cut.pth", lambda n, b: b[:-4] if n.endswith("/data/0") else b)
    assert "damaged" in refusal(path) and "expected" in refusal(path)


def test_a_member_is_missing(whole: bytes, tmp_path: Path) -> None:
    path = repacked(whole, tmp_path / "cut.pth", lambda n, b: b"" if n.endswith("/data/9") else b)
    assert "damaged" in refusal(path)


def test_a_wrong_bit(whole: bytes, tmp_path: Path) -> None:
    flipped = bytearray(whole)
    with zipfile.ZipFile(io.BytesIO(whole)) as source:
        largest = max(source.infolist(), key=lambda info: info.file_size)
    flipped[largest.header_offset + 1000] ^= 4
    (tmp_path / "bit.pth").write_bytes(flipped)
    assert "damaged" in refusal(tmp_path / "bit.pth") and "checksum" in refusal(tmp_path / "bit.pth")


def test_compressed_members(whole: bytes, tmp_path: Path) -> None:
    path = repacked(whole, tmp_path / "packed.pth", lambda _, b: b, zipfile.ZIP_DEFLATED)
    assert "compressed" in refusal(path)


def tensor_pickle(numel: int, size: int, stride: int) -> bytes:
    """{"model": {the stem: a tensor}}, its numbers at will."""
    tensor = (
        f"ctorch._utils\n_rebuild_tensor_v2\n((S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nL{numel}L\ntQ"
        f"I0\n(L{size}L\nI12\nI3\nI3\nt(I{stride}\nI9\nI3\nI1\ntI00\nNtR"
    )
    return f"}}S'model'\n}}S'{STEM}'\n{tensor}ss.".encode()


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize(
    ("numel", "size", "stride"), [(2**40, 2**32, 108), (2**62, 8, 108), (864, 8, -108), (864, 9, 108), (864, -8, 108)]
)
def test_tensors_of_numbers_that_the_file_does_not_have(numel: int, size: int, stride: int, tmp_path: Path) -> None:
    path = archive(tmp_path / "x.pth", tensor_pickle(numel, size, stride), {"0": bytes(864 * 4)})
    assert "damaged" in refusal(path) or "refused" in refusal(path)


def test_the_hand_made_tensor_is_right(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.pth", tensor_pickle(864, 8, 108), {"0": bytes(864 * 4)})
    assert "a file of YOLOX" in refusal(path)


def pretenders(folder: Path) -> dict[str, Path]:
    """Other things by the name of a weight file."""
    (folder / "page.pth").write_text("<!DOCTYPE html><html><body>rate limit</body></html>")
    (folder / "empty.pth").write_bytes(b"")
    (folder / "folder.pth").mkdir()
    os.mkfifo(folder / "fifo.pth")
    (folder / "model.pth").write_bytes(b"\x08\x07\x12\x07pytorch\x1a\x032.0" + bytes(range(256)))  # as ONNX begins
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (folder / "safe.pth").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    torch.save({"model": {STEM: torch.zeros(3)}}, folder / "old.pth", _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(folder / "photos.pth", "w") as file:
        file.writestr("photo.txt", "x")
    return {path.stem: path for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["page", "empty", "folder", "fifo", "model", "safe", "old", "photos"])
def test_other_files_by_that_name(name: str, tmp_path: Path) -> None:
    path = pretenders(tmp_path)[name]
    text = refusal(path)
    assert "expected" in text.lower() or "Take another" in text or "damaged" in text, text


def calls(mark: Path) -> dict[str, tuple[object, int, str]]:
    """An object whose unpickling leaves a mark, the protocol that writes it, and what the message names."""
    touch, code = f"touch {mark}", f"open({str(mark)!r}, 'w')"
    return {
        "os.system": (Marking(os.system, touch), 2, "system"),
        "os.system by STACK_GLOBAL": (Marking(os.system, touch), 4, "system"),
        "eval": (Marking(builtins.eval, code), 2, "eval"),
        "exec": (Marking(builtins.exec, code), 4, "exec"),
        "getattr": (Marking(getattr, dict, "fromkeys"), 4, "getattr"),
        "torch.hub": (Marking(torch.hub.load, "x/y", "z"), 2, "torch.hub.load"),
        "torch.load": (Marking(torch.load, "x.pt"), 4, "torch.serialization.load"),
    }


@pytest.mark.parametrize("case", [*calls(Path("x"))])
@pytest.mark.parametrize("place", ["beside the tensors", "among the tensors", "before them"])
def test_calls_in_a_file_of_the_familys_form_are_refused_and_not_run(
    case: str, place: str, small: Tensors, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    call, protocol, named = calls(mark)[case]
    content: dict[str, Any] = {
        "beside the tensors": {"model": {STEM: small[STEM]}, "optimizer": call},
        "among the tensors": {"model": {STEM: small[STEM], "head": call}},
        "before them": {"a": call, "model": {STEM: small[STEM]}},
    }[place]
    path = tmp_path / "yolox_s.pth"
    torch.save(content, path, pickle_protocol=protocol)
    text = refusal(path)
    assert "refused" in text and named in text and "Nothing of it was run" in text, text
    assert not mark.exists() and [*tmp_path.iterdir()] == [path]


def test_the_marks_work(tmp_path: Path) -> None:
    """Python's own unpickling does leave them: that they are not there is worth something."""
    mark = tmp_path / "mark"
    for case in ("os.system", "os.system by STACK_GLOBAL", "eval", "exec"):
        call, protocol, _ = calls(mark)[case]
        pickle.loads(pickle.dumps(call, protocol))
        deadline = time.monotonic() + 60
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        mark.unlink()
