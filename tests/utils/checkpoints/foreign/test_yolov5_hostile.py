"""Hostile YOLOv5 checkpoints: each tries to leave a mark; none may, and what it asked for must be named."""

from __future__ import annotations

import builtins
import contextlib
import os
import pickle
import struct
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.utils.checkpoints.foreign.yolov5 import LegacyCheckpoint, is_legacy, load_legacy
from tessera.utils.checkpoints.inert_pickle import Damaged, Machine, Record
from tessera.utils.errors import UserError


def archive(path: Path, pickled: bytes, storages: dict[str, bytes] | None = None, compression: int = 0) -> Path:
    """A checkpoint file with this pickle, laid out as torch.save does."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        for key, content in (storages or {}).items():
            file.writestr(f"archive/data/{key}", content)
        file.writestr("archive/version", "3\n")
    return path


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
        ((0, 2**62, 2**62), (1, 1, 1), 0, 4, "an empty tensor"),
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


@pytest.mark.parametrize("name", ["collections\nOrderedDict", "builtins\nset"])
def test_a_tensor_is_no_list_of_items(name: str, tmp_path: Path) -> None:
    """It would unfold into an object for each row: gigabytes, of a file of megabytes."""
    whole = tensor_pickle((4, 1), (1, 1), 0, 4).decode()
    tensor = whole[whole.index("ctorch._utils") : whole.index("NtR") + len("NtR")]
    path = archive(tmp_path / "odd.pt", f"c{name}\n({tensor}tR.".encode(), FOUR)
    with pytest.raises(UserError, match="the items of a Tensor"):
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


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_safe(pickled: bytes) -> None:
    """The machine ends, on any bytes, with a value or an error of its own."""
    with contextlib.suppress(UserError, Damaged):
        Machine(None, "x.pt").run(pickled)  # type: ignore[arg-type]
