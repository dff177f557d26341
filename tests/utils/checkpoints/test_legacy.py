"""Original YOLOv5 checkpoints are read without running anything of them."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import pickle
import struct
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from utils.checkpoints.inert_pickle import Damaged, Machine, Record
from utils.checkpoints.legacy import LegacyCheckpoint, is_legacy, load_legacy
from utils.errors import UserError


def archive(path: Path, pickled: bytes, storages: dict[str, bytes] | None = None, compression: int = 0) -> Path:
    """A checkpoint file with this pickle, laid out as torch.save does."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        for key, content in (storages or {}).items():
            file.writestr(f"archive/data/{key}", content)
        file.writestr("archive/version", "3\n")
    return path


@pytest.fixture
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that writes a checkpoint as YOLOv5 does: whole modules of packages that are not ours."""
    common, yolo = types.ModuleType("models.common"), types.ModuleType("models.yolo")

    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, bias=False)
            self.bn = nn.BatchNorm2d(4)
            self.act = nn.SiLU()

    class Detect(nn.Module):
        def __init__(self, nc: int) -> None:
            super().__init__()
            self.stride = torch.tensor([8.0, 16.0])
            self.register_buffer("anchors", torch.arange(8.0).view(2, 2, 2))
            self.register_buffer("scratch", torch.zeros(5), persistent=False)
            self.m = nn.ModuleList(nn.Conv2d(4, 2 * (nc + 5), 1) for _ in range(2))

    class Model(nn.Module):
        def __init__(self, nc: int) -> None:
            super().__init__()
            self.model = nn.Sequential(Conv(), Detect(nc))
            self.stride = self.model[1].stride
            self.yaml = {"nc": nc, "backbone": [[-1, 1, "Conv", [4, 3]]], "head": [[-1, 1, "Detect", ["nc"]]]}
            self.names = [f"class{i}" for i in range(nc)]
            self.nc = nc
            self.hyp = {"lr0": 0.01, "odd": np.float64(1.5), "path": Path("x")}

    for module, classes in ((common, (Conv,)), (yolo, (Detect, Model))):
        for cls in classes:
            cls.__module__, cls.__qualname__ = module.__name__, cls.__name__
            setattr(module, cls.__name__, cls)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def write(name: str = "original.pt", half: bool = True, nc: int = 3, **extra: Any) -> tuple[Path, nn.Module]:
        torch.manual_seed(0)
        model = Model(nc)
        model = model.half() if half else model
        torch.save({"epoch": 7, "model": model, "ema": None, **extra}, tmp_path / name)
        return tmp_path / name, model

    return write


def test_official_file(shared: Path) -> None:
    path = shared / "weights/yolov5n.pt"
    assert is_legacy(path)
    checkpoint = load_legacy(path)
    state = checkpoint.state_dict
    assert len(state) == 349
    assert {t.dtype for t in state.values()} == {torch.float32, torch.int64}
    learned = {k: t for k, t in state.items() if k.endswith(("weight", "bias"))}
    assert sum(t.numel() for t in learned.values()) == 1_872_157
    assert state["model.0.conv.weight"].shape == (16, 3, 6, 6)
    assert state["model.24.m.2.weight"].shape == (255, 256, 1, 1)
    assert state["model.9.cv2.bn.num_batches_tracked"].shape == ()
    assert all(t.isfinite().all() for t in state.values())
    assert checkpoint.nc == len(checkpoint.names) == 80
    assert checkpoint.names[0] == "person" and checkpoint.names[79] == "toothbrush"
    assert checkpoint.stride == (8.0, 16.0, 32.0)
    assert checkpoint.anchors is not None and checkpoint.anchors.shape == (3, 3, 2)
    pixels = checkpoint.anchors * torch.tensor(checkpoint.stride).view(3, 1, 1)
    assert pixels[0].tolist() == [[10, 13], [16, 30], [33, 23]]
    assert checkpoint.model_yaml["width_multiple"] == 0.25 and len(checkpoint.model_yaml["head"]) == 15
    assert checkpoint.epoch == -1
    assert checkpoint.hyp is not None and checkpoint.hyp["lr0"] == 0.01


@pytest.mark.parametrize("half", [True, False])
def test_reads_what_torch_wrote(original: Any, half: bool) -> None:
    path, model = original(half=half)
    checkpoint = load_legacy(path)
    expected = {k: v.float() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    assert list(checkpoint.state_dict) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.state_dict[name], tensor) and checkpoint.state_dict[name].dtype == tensor.dtype
    assert checkpoint.names == ("class0", "class1", "class2") and checkpoint.nc == 3 and checkpoint.epoch == 7
    assert checkpoint.stride == (8.0, 16.0)
    assert torch.equal(checkpoint.anchors, torch.arange(8.0).view(2, 2, 2))
    assert checkpoint.hyp == {"lr0": 0.01}
    assert checkpoint.model_yaml == model.yaml


def test_prefers_the_ema_and_reads_unfinished_runs(original: Any) -> None:
    """A last.pt in mid-run carries an optimizer's state, NumPy values and the command's options."""
    _, ema = original("other.pt")
    with torch.no_grad():
        ema.model[0].conv.weight.fill_(2)
    optimizer = {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    path, _ = original(
        ema=ema,
        updates=12,
        optimizer=optimizer,
        best_fitness=np.array([0.25]),
        scalar=np.float64(0.5),
        opt={"save_dir": Path("runs/train/exp"), "epochs": 3},
        state=nn.Linear(2, 2).state_dict(),
        device=torch.device("cpu"),
        dtype=torch.float16,
    )
    state = load_legacy(path).state_dict
    assert (state["model.0.conv.weight"] == 2).all() and state["model.0.conv.weight"].dtype == torch.float32


def test_names_as_a_dict(original: Any, tmp_path: Path) -> None:
    path, model = original()
    model.names = {2: "c", 0: "a", 1: "b"}
    torch.save({"model": model}, path)
    assert load_legacy(path).names == ("a", "b", "c")
    model.names = {0: "a", 2: "c"}
    torch.save({"model": model}, path)
    with pytest.raises(UserError, match="without a gap"):
        load_legacy(path)


def test_tensors_own_their_memory(original: Any) -> None:
    path, model = original(half=False)
    model.model[1].m[1].weight = model.model[1].m[0].weight
    torch.save({"model": model}, path)
    state = load_legacy(path).state_dict
    state["model.1.m.0.weight"].fill_(9)
    assert not (state["model.1.m.1.weight"] == 9).any()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_all_protocols(original: Any, protocol: int) -> None:
    path, model = original()
    torch.save({"model": model}, path, pickle_protocol=protocol)
    assert is_legacy(path)
    assert torch.equal(load_legacy(path).state_dict["model.0.bn.weight"], model.model[0].bn.weight.float())


def test_plain_checkpoints_are_not_legacy(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(2)}, "cfg": "models.yolo Model"}, tmp_path / "ours.pt")
    assert not is_legacy(tmp_path / "ours.pt")
    assert not is_legacy(tmp_path / "missing.pt")
    (tmp_path / "text.pt").write_text("hello")
    assert not is_legacy(tmp_path / "text.pt")
    with pytest.raises(UserError, match=r"ours\.pt: not a YOLOv5 checkpoint: .* found a dict with model, cfg"):
        load_legacy(tmp_path / "ours.pt")


# Hostile files. Each tries to leave a mark; none may, and what it asked for must be named.


class Marking:
    """Unpickles to a call of `function` with `args`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def hostile_pickles(mark: Path) -> dict[str, tuple[bytes, str]]:
    touch = f"touch {mark}"
    code = f"open({str(mark)!r}, 'w')"
    posix = os.system.__module__

    def line(text: str) -> bytes:
        return text.encode() + b"\n"

    in_model = {"epoch": 1, "model": {"weight": Marking(os.system, touch)}}
    return {
        "os.system": (pickle.dumps(Marking(os.system, touch), 2), f"{posix}.system"),
        "nested": (pickle.dumps(in_model, 2), f"{posix}.system"),
        "protocol 4": (pickle.dumps(in_model, 4), f"{posix}.system"),
        "protocol 0": (b"cos\nsystem\n(S" + line(repr(touch)) + b"tR.", "os.system"),
        "eval": (pickle.dumps(Marking(builtins.eval, code), 2), "__builtin__.eval"),
        "exec": (pickle.dumps(Marking(builtins.exec, code), 4), "builtins.exec"),
        "getattr": (pickle.dumps(Marking(getattr, dict, "fromkeys"), 2), "__builtin__.getattr"),
        "subprocess": (pickle.dumps(Marking(subprocess.Popen, touch), 4), "subprocess.Popen"),
        "instance opcode": (b"(S" + line(repr(touch)) + b"ios\nsystem\n.", "INST"),
        "object opcode": (b"(cos\nsystem\nS" + line(repr(touch)) + b"o.", "os.system"),
        "torch.load": (pickle.dumps(Marking(torch.load, "x.pt"), 2), "torch.serialization.load"),
        "torch.hub": (pickle.dumps(Marking(torch.hub.load, "x", "y"), 2), "torch.hub.load"),
        "numpy": (b"cnumpy.testing._private.utils\nrunstring\n(S" + line(repr(code)) + b"}tR.", "runstring"),
        "function of torch._utils": (b"ctorch._utils\n_import_dotted_name\n(S'os.system'\ntR.", "_import_dotted_name"),
        "dunder of a record": (b"cmodels.yolo\n__class__\n.", "models.yolo.__class__"),
        "path through a record": (b"\x80\x04\x8c\x0bmodels.yolo\x8c\x1aModel.__init__.__globals__\x93.", "__globals__"),
        "extension registry": (b"\x80\x02\x82\x01.", "EXT1"),
        "module that is a prefix": (b"cmodelsx\nrun\n(tR.", "modelsx.run"),
        "package and space": (b"cmodels\nx y\n(tR.", "models.x y"),
        "package and newline": (b"\x80\x04\x8c\x06models\x8c\x02x\n\x93.", r"models.x\n"),
        "functools": (b"cfunctools\npartial\n(tR.", "functools.partial"),
        "keyword instantiation": (b"\x80\x04cmodels.yolo\nModel\n)}\x92.", "NEWOBJ_EX"),
        "space in a name": (b"cos\nsystem x\n.", "os.system x"),
    }


@pytest.mark.parametrize("case", list(hostile_pickles(Path("x"))))
def test_hostile_pickles_are_refused_and_named(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "mark"
    pickled, named = hostile_pickles(mark)[case]

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("an unpickler that runs code was used")

    path = archive(tmp_path / "hostile.pt", pickled)
    for name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "pickle._Unpickler", "torch.load"):
        monkeypatch.setattr(name, forbidden)
    with pytest.raises(UserError) as caught:
        load_legacy(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: refused") and named in message and "run" in message
    assert not mark.exists()


@pytest.mark.parametrize("case", ["os.system", "eval", "protocol 4", "instance opcode"])
def test_hostile_files_take_the_named_refusal(case: str, tmp_path: Path) -> None:
    """They are sent to the reader that names what they asked for, not to a loader that says less."""
    assert is_legacy(archive(tmp_path / "hostile.pt", hostile_pickles(tmp_path / "mark")[case][0]))


def test_the_tests_marks_work(tmp_path: Path) -> None:
    """The same bytes do leave their mark on an ordinary unpickler: the refusals above are worth something."""
    mark = tmp_path / "mark"
    for case in ("os.system", "eval", "protocol 0"):
        pickle.loads(hostile_pickles(mark)[case][0])
        assert mark.exists()
        mark.unlink()


def test_records_are_inert(tmp_path: Path) -> None:
    """Calls of, and state for, permitted names are only written down."""
    pickled = b"cmodels.yolo\nModel\n(S'a'\ntR}S'k'\nI1\nsb."
    record = Machine(None, "x.pt").run(pickled)  # type: ignore[arg-type]
    assert isinstance(record, Record)
    assert (record.name, record.args, record.state) == ("models.yolo.Model", ("a",), {"k": 1})


@pytest.mark.parametrize(
    ("pickled", "complaint"),
    [
        (b"ccollections\nOrderedDict\n}S'__class__'\nI1\nsb.", "state for a Global"),
        (b"]}b.", "state for a list"),
        (b"I5\n(tR.", "a call of a int"),
        (b"cmodels.yolo\nModel\n]R.", "a call of a Global"),
        (b"}]I1\nsb.", "a key that is a list"),
        (b"S'x'\nQ.", "persistent id that is no storage"),
        (b"(S'storage'\ncmodels.yolo\nModel\nS'0'\nS'cpu'\nI4\ntQ.", "persistent id that is no storage"),
        (b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI-4\ntQ.", "persistent id that is no storage"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(I1\nI0\n(t(tI00\nNtR.", "without storage"),
        (b"ctorch._utils\n_rebuild_parameter\n(I1\nI00\nNtR.", "parameter that is no tensor"),
        (b"I1\na.", "malformed"),
        (b"R.", "malformed"),
        (b"h\x05.", "malformed"),
        (b"t.", "malformed"),
        (b"}}S'a'\n", "malformed"),
        (b"", "malformed"),
        (b"\x80\x04\x8c\x02os\x93.", "malformed"),
        (b"\x80\x04]](a\x93.", "malformed"),
        (b"\xff.", "malformed"),
    ],
)
def test_malformed_pickles(pickled: bytes, complaint: str, tmp_path: Path) -> None:
    path = archive(tmp_path / "odd.pt", pickled)
    with pytest.raises(UserError, match=complaint) as caught:
        load_legacy(path)
    assert str(caught.value).startswith(f"{path}: damaged")


def tensor_pickle(size: tuple[int, ...], stride: tuple[int, ...], offset: int, numel: int, key: str = "0") -> bytes:
    """{"model": Model with one parameter "w"}, protocol 0, with these numbers in the tensor."""

    def ints(values: tuple[int, ...]) -> str:
        return "(" + "".join(f"I{v}\n" for v in values) + "t"

    tensor = (
        f"ctorch._utils\n_rebuild_tensor_v2\n((S'storage'\nctorch\nFloatStorage\nS'{key}'\nS'cpu'\nI{numel}\ntQ"
        f"I{offset}\n{ints(size)}{ints(stride)}I00\nNtR"
    )
    rest = "S'yaml'\n}sS'stride'\n" + tensor + "s"
    return f"}}S'model'\ncmodels.yolo\nModel\n(tR}}S'_parameters'\n}}S'w'\n{tensor}ss{rest}bs.".encode()


FOUR = {"0": struct.pack("<4f", 1, 2, 3, 4)}


def test_the_hand_made_tensor_is_right(tmp_path: Path) -> None:
    checkpoint = load_legacy(archive(tmp_path / "fine.pt", tensor_pickle((2,), (2,), 1, 4), FOUR))
    assert isinstance(checkpoint, LegacyCheckpoint)
    assert checkpoint.state_dict["w"].tolist() == [2, 4]


@pytest.mark.parametrize(
    ("size", "stride", "offset", "numel", "complaint"),
    [
        ((5,), (1,), 0, 4, "in 4 elements"),
        ((4,), (1,), 1, 4, "in 4 elements"),
        ((2, 2), (3, 1), 0, 4, "in 4 elements"),
        ((4,), (-1,), 3, 4, "stride"),
        ((-1,), (1,), 0, 4, "size"),
        ((1,), (1,), -1, 4, "at -1"),
        ((2,), (1, 1), 0, 4, "stride"),
        ((1000000,), (0,), 0, 4, "in 4 elements"),
        ((2**40, 0), (1, 1), 9, 4, "in 4 elements"),
        ((2**70,), (1,), 0, 4, "size"),
        ((4,), (1,), 0, 5, "has 16 bytes, expected 20"),
        ((2,), (1,), 0, 2, "has 16 bytes, expected 8"),
    ],
)
def test_tensors_outside_their_storage(
    size: tuple[int, ...], stride: tuple[int, ...], offset: int, numel: int, complaint: str, tmp_path: Path
) -> None:
    path = archive(tmp_path / "odd.pt", tensor_pickle(size, stride, offset, numel), FOUR)
    with pytest.raises(UserError, match=complaint):
        load_legacy(path)


def test_storages_come_from_the_archive_only(tmp_path: Path) -> None:
    for key in ("missing", "../version", "/etc/passwd"):
        path = archive(tmp_path / "odd.pt", tensor_pickle((4,), (1,), 0, 4, key), FOUR)
        with pytest.raises(UserError, match="is missing"):
            load_legacy(path)


def test_compressed_archives_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "bomb.pt", b"}" + b"0}" * 1000 + b".", compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match="compressed"):
        load_legacy(path)


def test_modules_inside_each_other(tmp_path: Path) -> None:
    """A module that is its own child, and values that unfold to 2**60 items."""
    own_child = b"}S'model'\ncmodels.yolo\nModel\n(tRp1\n}S'yaml'\n}sS'_modules'\n}S'm'\ng1\nssbs."
    with pytest.raises(UserError, match="modules contain each other"):
        load_legacy(archive(tmp_path / "a.pt", own_child))
    doubling = b"(lp0\n" + b"".join(b"(g%d\ng%d\nlp%d\n" % (k, k, k + 1) for k in range(45))
    laughs = b"}S'model'\ncmodels.yolo\nModel\n(tR}S'yaml'\n}S'x'\n(" + doubling + b"tssbs."
    with pytest.raises(UserError, match="values contain each other"):
        load_legacy(archive(tmp_path / "b.pt", laughs))


def test_deeply_nested_names_do_not_crash(tmp_path: Path) -> None:
    deep = b"\x80\x02" + b"(" * 3 + b"]" + b"\x85" * 200_000 + b"."
    with pytest.raises(UserError):
        load_legacy(archive(tmp_path / "deep.pt", deep))


def test_nested_tuples_as_a_key_do_not_overflow_the_stack(tmp_path: Path) -> None:
    """Hashing them ends the process where `pickle.Unpickler` or torch.load reads this file, stubs or not."""
    deep = b"\x80\x02}N" + b"\x85" * 200_000 + b"K\x01s."
    with pytest.raises(UserError, match="a key that is a tuple"):
        load_legacy(archive(tmp_path / "key.pt", deep))
    with pytest.raises(UserError, match="a key that is a tuple"):
        load_legacy(archive(tmp_path / "item.pt", b"\x80\x04\x8f(N" + b"\x85" * 200_000 + b"\x90."))


def test_a_nested_value_is_not_printed(tmp_path: Path) -> None:
    """Its text would nest as deeply as it does."""
    deep = b"N" + b"\x85" * 200_000
    model = b"\x80\x02}X\x05\x00\x00\x00modelcmodels.yolo\nModel\n)R}(X\x04\x00\x00\x00yaml}X\x02\x00\x00\x00nc" + deep
    with pytest.raises(UserError, match="the number of classes is a tuple"):
        load_legacy(archive(tmp_path / "nc.pt", model + b"ubs."))


def test_a_memo_takes_no_more_memory_than_the_file(tmp_path: Path) -> None:
    """In `pickle.Unpickler` the memo is an array, which this index would make 32 GiB long."""
    assert Machine(None, "x.pt").run(b"\x80\x02Nr\xff\xff\xff\x7f.") is None  # type: ignore[arg-type]


def test_files_that_are_something_else(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.pt: no such file"):
        load_legacy(tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("<html>rate limit</html>")
    with pytest.raises(UserError, match=r"text\.pt: not a checkpoint"):
        load_legacy(tmp_path / "text.pt")
    torch.save({"a": torch.zeros(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"torch before 1\.6"):
        load_legacy(tmp_path / "old.pt")
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as file:
        file.writestr("photo.txt", "x")
    with pytest.raises(UserError, match="found 0"):
        load_legacy(tmp_path / "zip.pt")
    torch.jit.script(nn.Linear(1, 1)).save(str(tmp_path / "script.pt"))
    with pytest.raises(UserError, match="TorchScript"):
        load_legacy(tmp_path / "script.pt")


def test_flipped_bytes_never_escape(original: Any, tmp_path: Path) -> None:
    """A damaged file is an error for the user, or still readable; never another exception."""
    path, _ = original()
    whole = path.read_bytes()
    entry = zipfile.ZipFile(io.BytesIO(whole)).getinfo("original/data.pkl")
    start = entry.header_offset
    rng = np.random.default_rng(0)
    readable = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for position in rng.integers(start, start + entry.file_size, 3):
            damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            load_legacy(path)
            readable += 1
        except UserError:
            pass
    assert readable < 150


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_safe(pickled: bytes) -> None:
    """The machine ends, on any bytes, with a value or an error of its own."""
    with contextlib.suppress(UserError, Damaged):
        Machine(None, "x.pt").run(pickled)  # type: ignore[arg-type]
