"""Damaged, foreign and hostile .pt files: one message each, no code runs, and nothing unfolds beyond the file."""

from __future__ import annotations

import builtins
import contextlib
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.utils.checkpoints.archive import DamagedFile, RestrictedUnpickler
from tessera.utils.checkpoints.format import load_checkpoint, save_checkpoint
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.errors import UserError
from tests.deploy.foreign.made import STEM, Marking, archive, refusal
from tests.deploy.foreign.made import bounded as bounded
from tests.hostile.damages import repacked
from tests.utils.checkpoints.made_state import assert_equal, full, make_state


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "last.pt"
    save_checkpoint(path, full(make_state()))
    return path.read_bytes()


def refused(
    path: Path,
    content: bytes,
    complaint: str = r"last\.pt: (damaged|refused: compressed|not a checkpoint: expected one)",
) -> None:
    """Both readers give one message."""
    path.write_bytes(content)
    for read in (load_checkpoint, load_weights):
        with pytest.raises(UserError, match=complaint):
            read(path)


def test_a_flipped_bit_is_detected_or_changes_nothing(tmp_path: Path, whole: bytes) -> None:
    """It changes nothing in padding and dates; all that is read has a checksum."""
    path = tmp_path / "last.pt"
    path.write_bytes(whole)
    state, directory = load_checkpoint(path), whole.index(b"PK\1\2")
    rng, found = np.random.default_rng(0), 0
    anywhere = rng.integers(0, len(whole), 200).tolist()
    for position in [*anywhere, *rng.integers(directory, len(whole), 50).tolist(), *range(len(whole) - 40, len(whole))]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with contextlib.suppress(UserError):
            assert_equal(state, load_checkpoint(path))
            continue
        found += 1
        refused(path, damaged)
    assert found > 100


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("packed", ["data.pkl", "data/0", "version"])
def test_compressed_members_are_refused_unread(
    tmp_path: Path, whole: bytes, packed: str, method: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = repacked(
        whole, lambda _, member: member, lambda name: method if name.endswith(packed) else zipfile.ZIP_STORED
    )

    def unpacked(*_: object) -> None:
        raise AssertionError("a member was unpacked")

    monkeypatch.setattr(zipfile, "_get_decompressor", unpacked)
    monkeypatch.setattr(torch, "load", unpacked)
    refused(tmp_path / "last.pt", content, "refused: compressed")


# Pickles


def pretenders(folder: Path) -> dict[str, Path]:
    """Other things by the name of a weight file."""
    (folder / "folder.pth").mkdir()
    os.mkfifo(folder / "fifo.pth")
    torch.save({"model": {STEM: torch.zeros(3)}}, folder / "old.pth", _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(folder / "photos.pth", "w") as file:
        file.writestr("photo.txt", "x")
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(folder / "script.pth"))
    return {path.stem: path for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["folder", "fifo", "old", "photos", "script"])
def test_other_files_by_that_name(name: str, tmp_path: Path) -> None:
    text = refusal(pretenders(tmp_path)[name])
    assert "expected" in text.lower() or "Use another" in text or "damaged" in text, text


def hostile_pickles(mark: Path) -> dict[str, tuple[bytes, str]]:
    touch = f"touch {mark}"
    code = f"open({str(mark)!r}, 'w')"
    posix = os.system.__module__

    def line(text: str) -> bytes:
        return text.encode() + b"\n"

    return {
        "os.system": (pickle.dumps(Marking(os.system, touch), 2), f"{posix}.system"),
        "protocol 4": (pickle.dumps({"model": {"weight": Marking(os.system, touch)}}, 4), f"{posix}.system"),
        "protocol 0": (b"cos\nsystem\n(S" + line(repr(touch)) + b"tR.", "os.system"),
        "eval": (pickle.dumps(Marking(builtins.eval, code), 2), "__builtin__.eval"),
        "getattr": (pickle.dumps(Marking(getattr, dict, "fromkeys"), 2), "__builtin__.getattr"),
        "instance opcode": (b"(S" + line(repr(touch)) + b"ios\nsystem\n.", "INST"),
        "numpy": (b"cnumpy.testing._private.utils\nrunstring\n(S" + line(repr(code)) + b"}tR.", "runstring"),
        "function of torch._utils": (b"ctorch._utils\n_import_dotted_name\n(S'os.system'\ntR.", "_import_dotted_name"),
        "dunder of a record": (b"cmodels.yolo\n__class__\n.", "models.yolo.__class__"),
        "path through a record": (b"\x80\x04\x8c\x0bmodels.yolo\x8c\x1aModel.__init__.__globals__\x93.", "__globals__"),
        "extension registry": (b"\x80\x02\x82\x01.", "EXT1"),
        "module that is a prefix": (b"cmodelsx\nrun\n(tR.", "modelsx.run"),
        "package and newline": (b"\x80\x04\x8c\x06models\x8c\x02x\n\x93.", r"models.x\n"),
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
    text = refusal(path)
    assert text.startswith(f"{path}: refused") and named in text and "No code was run" in text
    assert not mark.exists()


def test_the_tests_marks_work(tmp_path: Path) -> None:
    """The same bytes do leave their mark on an ordinary unpickler: the refusals above are worth something."""
    mark = tmp_path / "mark"
    for case in ("os.system", "eval", "protocol 0", "protocol 4"):
        pickle.loads(hostile_pickles(mark)[case][0])
        assert mark.exists()
        mark.unlink()


@pytest.mark.parametrize(
    ("pickled", "complaint"),
    [
        (b"ccollections\nOrderedDict\n}S'__class__'\nI1\nsb.", "state for a _Global"),
        (b"]}b.", "state for a list"),
        (b"I5\n(tR.", "a call of type int"),
        (b"}]I1\nsb.", "a key that is a list"),
        (b"S'x'\nQ.", "persistent id that is no storage"),
        (b"(S'storage'\ncmodels.yolo\nModel\nS'0'\nS'cpu'\nI4\ntQ.", "persistent id that is no storage"),
        (b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI-4\ntQ.", "persistent id that is no storage"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(I1\nI0\n(t(tI00\nNtR.", "without storage"),
        (b"ctorch._utils\n_rebuild_parameter\n(I1\nI00\nNtR.", "parameter that is no tensor"),
        (b"I1\na.", "malformed"),
        (b"", "malformed"),
        (b"\x80\x04\x8c\x02os\x93.", "malformed"),
    ],
)
def test_malformed_pickles(pickled: bytes, complaint: str, tmp_path: Path) -> None:
    path = archive(tmp_path / "odd.pt", pickled)
    text = refusal(path)
    assert text.startswith(f"{path}: damaged") and complaint in text


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
    weights = load_weights(archive(tmp_path / "fine.pt", tensor_pickle((2,), (2,), 1, 4), FOUR))
    assert weights.family == "YOLOv5" and weights.state_dict["w"].tolist() == [2, 4]


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize(
    ("size", "stride", "offset", "numel", "complaint"),
    [
        ((5,), (1,), 0, 4, "in 4 elements"),
        ((2, 2), (3, 1), 0, 4, "in 4 elements"),
        ((4,), (-1,), 3, 4, "stride"),
        ((-1,), (1,), 0, 4, "size"),
        ((1,), (1,), -1, 4, "at -1"),
        ((1000000,), (0,), 0, 4, "in 4 elements"),
        ((2**40, 0), (1, 1), 9, 4, "in 4 elements"),
        ((0, 2**62, 2**62), (1, 1, 1), 0, 4, "an empty tensor"),
        ((2**70,), (1,), 0, 4, "size"),
        ((4,), (1,), 0, 5, "has 16 bytes, expected 20"),
        ((4,), (1,), 0, 10**12, "has 16 bytes, expected 4000000000000"),
    ],
)
def test_tensors_outside_their_storage(
    size: tuple[int, ...], stride: tuple[int, ...], offset: int, numel: int, complaint: str, tmp_path: Path
) -> None:
    assert complaint in refusal(archive(tmp_path / "odd.pt", tensor_pickle(size, stride, offset, numel), FOUR))


@pytest.mark.parametrize("name", ["collections\nOrderedDict", "builtins\nset"])
def test_a_tensor_is_no_list_of_items(name: str, tmp_path: Path) -> None:
    """It would unfold into an object for each row: gigabytes, of a file of megabytes."""
    whole = tensor_pickle((4, 1), (1, 1), 0, 4).decode()
    tensor = whole[whole.index("ctorch._utils") : whole.index("NtR") + len("NtR")]
    assert "the items of a Tensor" in refusal(archive(tmp_path / "odd.pt", f"c{name}\n({tensor}tR.".encode(), FOUR))


@pytest.mark.parametrize("key", ["missing", "../version", "/etc/passwd"])
def test_storages_come_from_the_archive_only(key: str, tmp_path: Path) -> None:
    assert "is missing" in refusal(archive(tmp_path / "odd.pt", tensor_pickle((4,), (1,), 0, 4, key), FOUR))


MODEL = b"}S'model'\ncmodels.yolo\nModel\n(tR"


@pytest.mark.parametrize(
    ("pickled", "complaint"),
    [
        (MODEL + b"p1\n}S'yaml'\n}sS'_modules'\n}S'm'\ng1\nssbs.", "modules contain each other"),
        (
            MODEL
            + b"}S'yaml'\n}S'x'\n(]p0\n"
            + b"".join(b"](g%d\ng%d\nep%d\n" % (k, k, k + 1) for k in range(45))
            + b"tssbs.",
            "values contain each other",
        ),
        (MODEL + b"}S'yaml'\n}S'nc'\nN" + b"\x85" * 200_000 + b"ssbs.", "nested more than 20 deep"),
        (b"\x80\x02" + b"(" * 3 + b"]" + b"\x85" * 200_000 + b".", "found a tuple"),
        # To hash it ends the process where `pickle.Unpickler` or torch.load reads this file, stubs or not.
        (b"\x80\x02}N" + b"\x85" * 200_000 + b"K\x01s.", "a key that is a tuple"),
        (b"\x80\x04\x8f(N" + b"\x85" * 200_000 + b"\x90.", "a key that is a tuple"),
    ],
    ids=["its own child", "2**45 items", "deep", "deep mark", "deep key", "deep item"],
)
def test_values_without_end(pickled: bytes, complaint: str, tmp_path: Path) -> None:
    assert complaint in refusal(archive(tmp_path / "a.pt", pickled))


def test_a_memo_takes_no_more_memory_than_the_file() -> None:
    """In `pickle.Unpickler` the memo is an array, which this index would make 32 GiB long."""
    assert RestrictedUnpickler(None, "x.pt").run(b"\x80\x02Nr\xff\xff\xff\x7f.") is None  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_safe(pickled: bytes) -> None:
    """The machine ends, on any bytes, with a value or an error of its own."""
    with contextlib.suppress(UserError, DamagedFile):
        RestrictedUnpickler(None, "x.pt").run(pickled)  # type: ignore[arg-type]
