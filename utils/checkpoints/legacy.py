"""Safe import of original YOLOv5 checkpoints.

Such a `.pt` is a zip archive with a pickle of a whole module, and unpickling runs whatever code the file asks for.
This reader is another machine for the same opcodes: it has no instruction that imports or calls anything. A global is
an inert token; calling, instantiating or building one makes an inert `Record` of what would have been done; only
tensors are made real, from checked slices of the archive's own bytes. A global outside a short vocabulary is refused
and named.
"""

from __future__ import annotations

import math
import pickletools
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.errors import UserError

_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
_TENSOR, _PARAMETER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
_ORDERED_DICT = "collections.OrderedDict"
_SETS = {"builtins.set", "__builtin__.set"}
_BUILDERS = {_TENSOR, _PARAMETER, _ORDERED_DICT} | _SETS
# What else original files mention; it only ever becomes a record.
_INERT = {
    "torch.Size",
    "torch.device",
    *(f"torch.{name}" for name in ("float16", "float32", "float64", "bfloat16", "int64", "int32", "uint8", "bool")),
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    "numpy.dtype",
    "numpy.ndarray",
    "_codecs.encode",
    *(f"pathlib.{name}Path" for name in ("", "Pure", "Posix", "Windows", "PurePosix", "PureWindows")),
}
# Classes of the original's packages and of torch's: a module, then names without a leading double underscore.
_INERT_CLASSES = re.compile(
    r"(models|utils|torch\.nn\.modules|torch\.nn\.parameter)(\.(?!__)[A-Za-z_]\w*)+\Z", re.ASCII
)
# What a checkpoint of tensors and plain values needs.
_PLAIN = {_TENSOR, _PARAMETER, _ORDERED_DICT, *_STORAGES}
# Opcodes that push the number, text or bytes beside them.
_LITERALS = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    )
)

_OLD_TORCH_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
# Far above any model's; a file whose modules or values contain each other unfolds without end.
_MAX_ENTRIES = 20_000  # modules and tensors
_MAX_PLAIN = 100_000  # plain values
# What zipfile raises over an archive that is damaged or of a kind it does not read.
ZIP_ERRORS = (zipfile.BadZipFile, NotImplementedError, EOFError, UnicodeDecodeError, struct.error)


@dataclass(frozen=True)
class LegacyCheckpoint:
    """What training can use of an original YOLOv5 checkpoint.

    Attributes:
        state_dict: tensors by name ("model.0.conv.weight"), floating ones as float32; the EMA's where the file has one.
        names: class names by index; () where the file has none.
        nc: number of classes.
        model_yaml: the architecture, a plain dict: nc, depth_multiple, width_multiple, anchors, backbone, head.
        stride: pixels per cell of each detection layer.
        anchors: float32 (nl, na, 2) in cells, or None where the head has none.
        epoch: the epoch after which it was written; -1 or None: the training was finished.
        hyp: the hyperparameters that are plain numbers or text, or None.
    """

    state_dict: dict[str, Tensor]
    names: tuple[str, ...]
    nc: int
    model_yaml: dict[str, Any]
    stride: tuple[float, ...]
    anchors: Tensor | None
    epoch: int | None
    hyp: dict[str, float | str] | None


@dataclass(frozen=True, eq=False)
class Global:
    """A name that the pickle mentions; nothing is imported for it."""

    name: str


@dataclass(eq=False)
class Record:
    """What stands for an object of class, or a result of function, `name`: its arguments and its state, as data."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, eq=False)
class _Storage:
    """A storage that the pickle mentions; its bytes are read when a tensor needs them."""

    key: str
    dtype: torch.dtype
    numel: int


class _Damaged(Exception):
    """The file breaks a rule of its own format; the text says which."""


def is_legacy(path: Path) -> bool:
    """Whether `path` is a zip archive whose pickle mentions more than tensors and plain values; runs nothing of it."""
    if not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = archive.read(_pickle_entry(archive, path))
        return any(
            (opcode.name == "GLOBAL" and _dotted(argument) not in _PLAIN) or opcode.name in {"STACK_GLOBAL", "INST"}
            for opcode, argument, _ in pickletools.genops(pickled)
        )
    except (ValueError, *ZIP_ERRORS):
        return False


def load_legacy(path: Path) -> LegacyCheckpoint:
    """Read an original YOLOv5 checkpoint without running anything of it.

    Args:
        path: a `.pt` file as YOLOv5 writes it: a zip archive (torch 1.6 or later) with a pickled dict or module.

    Raises:
        UserError: the file is not such a checkpoint, is damaged, or mentions a global that has no place in one.
    """
    try:
        content = _read(path)
        model = _pick_model(content, path)
        state = model.state
        model_yaml = _plain(state.get("yaml"))
        if not isinstance(model_yaml, dict):
            raise UserError(
                f"{path}: the model inside has no `yaml`, from which to rebuild it. Expected YOLOv5 v4 or later."
            )
        state_dict = {
            name: tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()
            for name, tensor in _bounded(_named_tensors(model), path.stat().st_size)
        }
        names = _names(state.get("names"))
        anchors = [tensor for name, tensor in state_dict.items() if name.endswith(".anchors")]
        epoch = content.get("epoch") if isinstance(content, dict) else None
        hyp = state.get("hyp")
        nc = state.get("nc", model_yaml.get("nc", len(names)))
        if not isinstance(nc, int):
            raise _Damaged(f"the number of classes is {nc!r}")
        return LegacyCheckpoint(
            state_dict=state_dict,
            names=names,
            nc=nc,
            model_yaml=model_yaml,
            stride=_strides(state.get("stride")),
            anchors=anchors[-1] if anchors else None,
            epoch=epoch if isinstance(epoch, int) else None,
            hyp=_plain_items(hyp) if isinstance(hyp, dict) else None,
        )
    except (_Damaged, *ZIP_ERRORS) as error:
        raise UserError(
            f"{path}: damaged, or not written by YOLOv5: {error}. Get the file again from its source."
        ) from error


def _read(path: Path) -> Any:
    """The pickle's top object, of plain values, tensors, records and globals."""
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            old = file.read(len(_OLD_TORCH_MAGIC)) == _OLD_TORCH_MAGIC
        if old:
            raise UserError(
                f"{path}: written in the format of torch before 1.6, which is not read here. Load it where it was made "
                f"and save it again with a later torch, or take the release v6.0 or later of the weights."
            )
        raise UserError(f"{path}: not a checkpoint: expected a zip archive as torch.save writes it.")
    with zipfile.ZipFile(path) as archive:
        entry = _pickle_entry(archive, path)
        storages = _Storages(archive, entry.removesuffix("data.pkl"), path.stat().st_size)
        return _Machine(storages, path).run(archive.read(entry))


def _pickle_entry(archive: zipfile.ZipFile, path: Path) -> str:
    entries = archive.namelist()
    if any(name.endswith("/constants.pkl") for name in entries):
        raise UserError(f"{path}: a TorchScript export, which cannot be trained. Expected a checkpoint.")
    pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise UserError(f"{path}: not a checkpoint: expected one data.pkl in the archive, found {len(pickles)}.")
    if not _is_stored(archive.getinfo(pickles[0])):
        raise UserError(f"{path}: refused: compressed or encrypted inside, as torch.save never does.")
    return pickles[0]


def _is_stored(info: zipfile.ZipInfo) -> bool:
    """Whether an entry's bytes lie in the archive as they are, so that it cannot unfold beyond the file's size."""
    return info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 0x1


class _Storages:
    """The archive's storages, by key, read once; never more bytes in all than the file has."""

    def __init__(self, archive: zipfile.ZipFile, prefix: str, file_size: int) -> None:
        self._archive = archive
        self._prefix = prefix
        self._bytes_left = file_size
        self._read: dict[str, Tensor] = {}
        if f"{prefix}byteorder" in archive.namelist() and archive.read(f"{prefix}byteorder") != b"little":
            raise _Damaged("written on a big-endian machine")

    def load(self, storage: _Storage) -> Tensor:
        """All elements of a storage, (numel,)."""
        if storage.key not in self._read:
            try:
                info = self._archive.getinfo(f"{self._prefix}data/{storage.key}")
            except KeyError as error:
                raise _Damaged(f"storage {storage.key!r} is missing") from error
            expected = storage.numel * storage.dtype.itemsize
            if not _is_stored(info) or info.file_size != expected:
                raise _Damaged(f"storage {storage.key!r} has {info.file_size} bytes, expected {expected}")
            self._bytes_left -= expected
            if self._bytes_left < 0:
                raise _Damaged("its storages overlap")
            content = bytearray(self._archive.read(info))
            self._read[storage.key] = (
                torch.frombuffer(content, dtype=storage.dtype) if content else torch.empty(0, dtype=storage.dtype)
            )
        flat = self._read[storage.key]
        if flat.dtype != storage.dtype or flat.numel() != storage.numel:
            raise _Damaged(f"storage {storage.key!r} is described in two ways")
        return flat


class _Machine:
    """A pickle machine without calls: opcodes in, plain values, tensors, records and globals out."""

    def __init__(self, storages: _Storages, path: Path) -> None:
        self._storages = storages
        self._path = path
        self._stack: list[Any] = []
        self._below_marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, pickled: bytes) -> Any:
        """The object that the pickle describes.

        Raises:
            UserError: it mentions a global outside the vocabulary, or an opcode that only other kinds of pickle need.
            _Damaged: it is no whole, sensible pickle.
        """
        try:
            for opcode, argument, position in pickletools.genops(pickled):
                if opcode.name == "STOP":
                    return self._stack.pop()
                self._step(opcode.name, argument, position)
        except UserError:
            raise
        except (ValueError, IndexError, KeyError, TypeError, RecursionError) as error:
            raise _Damaged(f"its pickle is malformed ({error})") from error
        raise _Damaged("its pickle has no end")

    def _step(self, opcode: str, argument: Any, position: int | None) -> None:
        stack = self._stack
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case "NONE":
                stack.append(None)
            case "NEWTRUE":
                stack.append(True)
            case "NEWFALSE":
                stack.append(False)
            case _ if opcode in _LITERALS:
                stack.append(argument)
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode[-1])
                stack.append(tuple(self._pop() for _ in range(count))[::-1])
            case "TUPLE":
                items = self._pop_mark()
                self._stack.append(tuple(items))
            case "EMPTY_LIST":
                stack.append([])
            case "LIST":
                items = self._pop_mark()
                self._stack.append(items)
            case "APPEND":
                item = self._pop()
                self._top(list).append(item)
            case "APPENDS":
                items = self._pop_mark()
                self._top(list).extend(items)
            case "EMPTY_DICT":
                stack.append({})
            case "DICT":
                items = self._pop_mark()
                self._stack.append(_pairs(items))
            case "SETITEM":
                value, key = self._pop(), self._pop()
                self._top(dict).update(_pairs([key, value]))
            case "SETITEMS":
                items = self._pop_mark()
                self._top(dict).update(_pairs(items))
            case "EMPTY_SET":
                stack.append(set())
            case "ADDITEMS":
                items = self._pop_mark()
                self._top(set).update(map(_key, items))
            case "MARK":
                self._below_marks.append(stack)
                self._stack = []
            case "POP":
                self._pop()
            case "POP_MARK":
                self._pop_mark()
            case "DUP":
                stack.append(stack[-1])
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL":
                stack.append(self._global(_dotted(argument)))
            case "STACK_GLOBAL":
                name, module = self._pop(), self._pop()
                if not isinstance(name, str) or not isinstance(module, str):
                    raise TypeError("a global without a name")
                stack.append(self._global(f"{module}.{name}"))
            case "BINPERSID":
                stack.append(_storage(self._pop()))
            case "REDUCE" | "NEWOBJ":
                args, target = self._pop(), self._pop()
                stack.append(self._make(target, args))
            case "BUILD":
                state = self._pop()
                built = stack[-1]
                if isinstance(built, Record):
                    built.state = state
                elif not isinstance(built, dict):  # an ordered dict's own attributes mean nothing here
                    raise ValueError(f"at byte {position}, state for a {type(built).__name__}")
            case _:
                raise UserError(
                    f"{self._path}: refused: its pickle uses the opcode {opcode} (byte {position}), which no YOLOv5 "
                    f"checkpoint needs. Nothing of it was run."
                )

    def _pop(self) -> Any:
        return self._stack.pop()

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._below_marks.pop()
        return items

    def _top(self, kind: type) -> Any:
        top = self._stack[-1]
        if type(top) is not kind:
            raise TypeError(f"items for a {type(top).__name__}, expected a {kind.__name__}")
        return top

    def _global(self, name: str) -> Global:
        known = name in _BUILDERS or name in _STORAGES or name in _INERT or _INERT_CLASSES.match(name) is not None
        if not known:
            raise UserError(
                f"{self._path}: refused: its pickle asks for {name!r}, which has no place in a YOLOv5 checkpoint. "
                f"Nothing of it was run. Use a file from a source that you trust."
            )
        return Global(name)

    def _make(self, target: Any, args: Any) -> Any:
        if not isinstance(target, Global) or not isinstance(args, tuple):
            raise TypeError(f"a call of a {type(target).__name__}")
        if target.name == _TENSOR:
            return self._tensor(*args[:4])
        if target.name == _PARAMETER:
            if not isinstance(args[0], Tensor):
                raise TypeError("a parameter that is no tensor")
            return args[0]
        if target.name == _ORDERED_DICT:
            return _pairs([item for pair in args[0] for item in pair]) if args else {}
        if target.name in _SETS:
            return set(map(_key, args[0])) if args else set()
        return Record(target.name, args)

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any) -> Tensor:
        """A view of a storage, refused where any of its elements would lie outside, or where elements repeat."""
        if not isinstance(storage, _Storage) or not isinstance(size, tuple) or not isinstance(stride, tuple):
            raise TypeError("a tensor without storage, size or stride")
        numbers = (offset, *size, *stride)
        if len(size) != len(stride) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise ValueError(f"a tensor of size {size}, stride {stride} at {offset}")
        elements = math.prod(size)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if elements else offset - 1
        if last >= storage.numel or elements > storage.numel:
            raise ValueError(f"a tensor of size {size}, stride {stride} at {offset} in {storage.numel} elements")
        flat = self._storages.load(storage)
        return flat.as_strided(size, stride, offset) if elements else flat.new_empty(size)


def _dotted(argument: Any) -> str:
    """'module name', as pickletools gives a GLOBAL's argument, with a dot."""
    return str(argument).replace(" ", ".", 1)


def _storage(reference: Any) -> _Storage:
    match reference:
        case ("storage", Global(name), str(key), str(), int(numel)) if name in _STORAGES and numel >= 0:
            return _Storage(key, _STORAGES[name], numel)
    raise ValueError("a persistent id that is no storage")


def _key(value: Any) -> str | int | float | None:
    """`value`, if it may be the key of a dict or an item of a set (a tuple's hash could nest without end)."""
    if value is not None and not isinstance(value, (str, int, float)):
        raise TypeError(f"a key that is a {type(value).__name__}")
    return value


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return {_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)}


def _pick_model(content: Any, path: Path) -> Record:
    """The module inside: the EMA's, else the trained one; with a dict for a state."""
    candidates = [content.get("ema"), content.get("model")] if isinstance(content, dict) else [content]
    for candidate in candidates:
        if isinstance(candidate, Record) and isinstance(candidate.state, dict):
            return candidate
    found = (
        f"a dict with {', '.join(map(str, content))}" if isinstance(content, dict) else f"a {type(content).__name__}"
    )
    raise UserError(
        f"{path}: not a YOLOv5 checkpoint: expected a pickled module under 'ema' or 'model', found {found}."
    )


def _named_tensors(module: Record) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers in the order of torch's state_dict."""
    pending, seen = [("", module)], 0
    while pending:
        prefix, current = pending.pop()
        parameters, buffers, children = (_part(current, key) for key in ("_parameters", "_buffers", "_modules"))
        seen += 1 + len(parameters) + len(buffers)
        if seen > _MAX_ENTRIES:
            raise _Damaged("its modules contain each other")
        state = current.state
        transient = state.get("_non_persistent_buffers_set", ()) if isinstance(state, dict) else ()
        for name, tensor in [*parameters.items(), *((k, v) for k, v in buffers.items() if k not in transient)]:
            if isinstance(tensor, Tensor):
                yield f"{prefix}{name}", tensor
        pending += [(f"{prefix}{name}.", m) for name, m in reversed([*children.items()]) if isinstance(m, Record)]


def _part(module: Record, key: str) -> Mapping[str, Any]:
    part = module.state.get(key, {}) if isinstance(module.state, dict) else {}
    if not isinstance(part, dict):
        raise _Damaged(f"{key} of a {module.name} is a {type(part).__name__}")
    return part


def _bounded(tensors: Iterator[tuple[str, Tensor]], limit: int) -> Iterator[tuple[str, Tensor]]:
    """`tensors`, as long as they have no more elements together than the file has bytes."""
    elements = 0
    for name, tensor in tensors:
        elements += tensor.numel()
        if elements > limit:
            raise _Damaged("its tensors share their storages")
        yield name, tensor


def _plain(value: Any) -> Any:
    """`value` as new dicts, lists, text and numbers; whatever is nothing of the kind is refused."""
    budget = _MAX_PLAIN

    def copy(part: Any, depth: int) -> Any:
        nonlocal budget
        budget -= 1
        if budget < 0 or depth > 50:
            raise _Damaged("its values contain each other")
        if part is None or isinstance(part, (str, bool, int, float)):
            return part
        if isinstance(part, (list, tuple)):
            return [copy(item, depth + 1) for item in part]
        if isinstance(part, dict):
            return {key: copy(item, depth + 1) for key, item in part.items()}
        raise _Damaged(f"a {getattr(part, 'name', type(part).__name__)} where plain values belong")

    return copy(value, 0)


def _plain_items(values: dict[Any, Any]) -> dict[str, float | str]:
    return {
        key: value for key, value in values.items() if isinstance(key, str) and isinstance(value, (int, float, str))
    }


def _names(names: Any) -> tuple[str, ...]:
    """Class names from a list, or from a dict keyed 0, 1, 2 …"""
    if isinstance(names, dict):
        if sorted(names, key=str) != sorted(range(len(names)), key=str):
            raise _Damaged("the class names are not numbered from 0 without a gap")
        names = [names[index] for index in range(len(names))]
    if names is None:
        return ()
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise _Damaged("the class names are not a list of text")
    return tuple(names)


def _strides(stride: Any) -> tuple[float, ...]:
    if not isinstance(stride, Tensor) or stride.ndim != 1:
        raise _Damaged("the model has no strides")
    return tuple(stride.float().tolist())
