"""Reading of .pt files, of this and other programs, without running code: one pickle, and the storages of its tensors.

The opcodes of the pickle are interpreted here. A global becomes an inert name, and a call of it an inert record. Only
tensors become real, as checked slices of storages. A global outside a short list is refused by name.

`torch.load(weights_only=True)` is no alternative: before torch 2.10 a file could corrupt memory and run code with it
(CVE-2026-24747), and it lacks the opcodes of pickle protocols 3 to 5. In it and in `pickle.Unpickler`, a dict's key of
200,000 nested tuples overflows the C stack and ends the process.
"""

from __future__ import annotations

import math
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.utils.errors import UserError
from tessera.utils.text import one_line, shown


class DamagedFile(Exception):
    """A file that breaks a rule of its format; the text says which."""


# Errors of damaged archives, and of archives that zipfile cannot read.
ARCHIVE_ERRORS = (
    *(DamagedFile, zipfile.BadZipFile, NotImplementedError, EOFError, UnicodeDecodeError, struct.error),
    *(OSError, OverflowError),  # from seeking to a damaged offset
)
_DTYPES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}
_STORAGES = {f"torch.{name}Storage": dtype for name, dtype in _DTYPES.items()}
_TENSOR, _PARAMETER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
_ORDERED_DICT, _DEFAULT_DICT = "collections.OrderedDict", "collections.defaultdict"
_SETS = {"builtins.set", "__builtin__.set"}
_KNOWN = {*_STORAGES, *_SETS, _TENSOR, _PARAMETER, _ORDERED_DICT, _DEFAULT_DICT}
# Globals in files of YOLOv5, YOLOX, YOLOv9 and omegaconf; no name of a class begins with a double underscore.
_INERT = re.compile(
    r"""(models|utils|yolox|yolo|omegaconf|torch\.nn\.modules|torch\.nn\.parameter)(\.(?!__)[A-Za-z_]\w*)+
    | torch\.(Size|device|float16|float32|float64|bfloat16|int64|int32|uint8|bool)
    | numpy\.(dtype|ndarray|_?core\.multiarray\.(_reconstruct|scalar))
    | (builtins|__builtin__)\.(dict|list|tuple|str|unicode|int|long|float|bool)
    | pathlib\.(Pure)?(Posix|Windows)?Path | typing\.Any | _codecs\.encode""",
    re.ASCII | re.VERBOSE,
)
_LITERALS = {  # opcodes that push their argument
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "BINFLOAT", "STRING", "SHORT_BINSTRING"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}


@dataclass(eq=False)
class InertObject:
    """Inert stand-in for an object of class `name` or a result of function `name`."""

    name: str
    state: Any = None


@dataclass(frozen=True, eq=False)
class _Global:
    """Name in a pickle; nothing is imported."""

    name: str


@dataclass(frozen=True, eq=False)
class _Storage:
    """Storage in a pickle; its bytes are read when a tensor needs them."""

    key: str
    dtype: torch.dtype
    numel: int


def read_archive(path: Path) -> tuple[Any, int]:
    """Return the object in a checkpoint file, and the length of its pickle in bytes.

    The object consists of plain values, tensors and inert objects. Its tensors take at most the size of the file.

    Raises:
        UserError: a compressed member, something else than a checkpoint, or a pickle that names what none needs.
        One of ARCHIVE_ERRORS: the file is damaged, or no archive.
    """
    with zipfile.ZipFile(path) as archive:  # compares each member that is read with its checksum
        members = {info.filename: info for info in archive.infolist()}
        if any(name.endswith("/constants.pkl") for name in members):
            raise UserError(f"{path}: a TorchScript export, which cannot be trained. Expected a checkpoint.")
        if any(m.compress_type or m.flag_bits & 0x1 or m.compress_size != m.file_size for m in archive.infolist()):
            raise UserError(
                f"{path}: refused: compressed or encrypted members, which torch.save never writes. Copy the original "
                "file again."
            )
        if sum(member.file_size for member in archive.infolist()) > path.stat().st_size:
            raise DamagedFile("its members are larger than the file")
        if len(members) < len(archive.infolist()):
            raise DamagedFile("two of its members have the same name")
        pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise UserError(f"{path}: not a checkpoint: expected one data.pkl in the archive, found {len(pickles)}.")
        folder, pickled = pickles[0].removesuffix(".pkl"), archive.read(pickles[0])

        def read(key: str) -> bytes:
            if f"{folder}/{key}" not in members:
                raise DamagedFile(f"storage {shown(key)} is missing")
            return archive.read(f"{folder}/{key}")

        return RestrictedUnpickler(read, str(path)).run(pickled), len(pickled)


class RestrictedUnpickler:
    """Interpreter of pickle opcodes; its results are plain values, tensors, inert objects and names.

    `read` returns the bytes of a storage by its key; `source` names the file in errors.
    """

    def __init__(self, read: Callable[[str], bytes], source: str) -> None:
        self._read, self._source = read, source
        self._storages: dict[str, Tensor] = {}
        self._stack: list[Any] = []
        self._below_marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, pickled: bytes) -> Any:
        """Return the object that the pickle describes.

        Raises:
            UserError: a refused global, or an opcode that no checkpoint needs.
            DamagedFile: the pickle is malformed.
        """
        try:
            for opcode, argument, position in pickletools.genops(pickled):
                if opcode.name == "STOP":
                    return self._stack.pop()
                self._step(opcode.name, argument, position)
        except UserError:
            raise
        except (ValueError, IndexError, KeyError, TypeError, RecursionError) as error:
            raise DamagedFile(f"its pickle is malformed ({one_line(str(error), 150)})") from error
        raise DamagedFile("its pickle has no end")

    def _step(self, opcode: str, argument: Any, position: int | None) -> None:
        stack = self._stack
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case _ if opcode in _LITERALS:
                stack.append(argument)
            case _ if opcode in _CONSTANTS:
                stack.append(_CONSTANTS[opcode]())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(stack.pop() for _ in range(int(opcode[-1])))[::-1])
            case "MARK":
                self._below_marks.append(stack)
                self._stack = []
            case "TUPLE":
                items = self._pop_mark()
                self._stack.append(tuple(items))
            case "APPEND" | "APPENDS":
                items = self._pop_mark() if opcode == "APPENDS" else [stack.pop()]
                self._top(list).extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._pop_mark() if opcode == "SETITEMS" else [stack.pop(-2), stack.pop()]
                self._top(dict).update(_pairs(items))
            case "ADDITEMS":
                items = self._pop_mark()
                self._top(set).update(map(_key, items))
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL":
                stack.append(self._global(str(argument).replace(" ", ".", 1)))  # "module name", of pickletools
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                if not isinstance(name, str) or not isinstance(module, str):
                    raise TypeError("a global without a name")
                stack.append(self._global(f"{module}.{name}"))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE" | "NEWOBJ":
                args, target = stack.pop(), stack.pop()
                stack.append(self._make(target, args))
            case "BUILD":
                state, built = stack.pop(), stack[-1]
                if isinstance(built, InertObject):
                    built.state = state
                elif not isinstance(built, dict):  # attributes of an ordered dict are ignored
                    raise ValueError(f"at byte {position}, state for a {type(built).__name__}")
            case _:
                raise UserError(
                    f"{self._source}: refused: its pickle uses the opcode {opcode} (byte {position}), which no "
                    "checkpoint needs. No code was run."
                )

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._below_marks.pop()
        return items

    def _top(self, kind: type) -> Any:
        top = self._stack[-1]
        if type(top) is not kind:
            raise TypeError(f"items for a {type(top).__name__}, expected a {kind.__name__}")
        return top

    def _global(self, name: str) -> _Global:
        if name not in _KNOWN and not _INERT.fullmatch(name):
            raise UserError(
                f"{self._source}: refused: its pickle names {shown(name)}, which no checkpoint needs. No code was run. "
                "Use a file from a source that you trust."
            )
        return _Global(name)

    def _make(self, target: Any, args: Any) -> Any:
        if not isinstance(target, _Global) or not isinstance(args, tuple):
            raise TypeError(f"a call of type {type(target).__name__}")
        if target.name == _TENSOR:
            return self._tensor(*args[:4])
        if target.name == _PARAMETER:
            if not isinstance(args[0], Tensor):
                raise TypeError("a parameter that is no tensor")
            return args[0]
        if target.name == _ORDERED_DICT:
            return _pairs([item for pair in _items(args[0]) for item in _items(pair)]) if args else {}
        if target.name == _DEFAULT_DICT:  # its items follow; its factory is ignored
            return {}
        if target.name in _SETS:
            return set(map(_key, _items(args[0]))) if args else set()
        return InertObject(target.name)

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any) -> Tensor:
        """Return a view of a storage; raise an error for elements outside it, or repeated ones."""
        if not isinstance(storage, _Storage) or not isinstance(size, tuple) or not isinstance(stride, tuple):
            raise TypeError("a tensor without storage, size or stride")
        numbers = (offset, *size, *stride)
        if len(size) != len(stride) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise ValueError(f"a tensor of size {size}, stride {stride} at {offset}")
        elements = math.prod(size)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if elements else offset - 1
        if last >= storage.numel or elements > storage.numel:
            raise ValueError(f"a tensor of size {size}, stride {stride} at {offset} in {storage.numel} elements")
        flat = self._elements(storage)
        if not elements and math.prod(filter(None, size)) >= 2**62:  # torch cannot make these
            raise ValueError(f"an empty tensor of size {size}")
        return flat.as_strided(size, stride, offset) if elements else flat.new_empty(size)

    def _elements(self, storage: _Storage) -> Tensor:
        """Return all elements of a storage, (numel,)."""
        if storage.key not in self._storages:
            content = bytearray(self._read(storage.key))
            expected = storage.numel * storage.dtype.itemsize
            if len(content) != expected:
                raise DamagedFile(f"storage {shown(storage.key)} has {len(content)} bytes, expected {expected}")
            empty = torch.empty(0, dtype=storage.dtype)
            self._storages[storage.key] = torch.frombuffer(content, dtype=storage.dtype) if content else empty
        flat = self._storages[storage.key]
        if flat.dtype != storage.dtype or flat.numel() != storage.numel:
            raise DamagedFile(f"storage {shown(storage.key)} is described in two ways")
        return flat


def _storage(reference: Any) -> _Storage:
    match reference:
        case ("storage", _Global(name), str(key), str(), int(numel)) if name in _STORAGES and numel >= 0:
            return _Storage(key, _STORAGES[name], numel)
    raise ValueError("a persistent id that is no storage")


def _key(value: Any) -> str | int | float | None:
    """Return `value` if it may be the key of a dict or an item of a set; a tuple's hash could recurse without end."""
    if value is not None and not isinstance(value, (str, int, float)):
        raise TypeError(f"a key that is a {type(value).__name__}")
    return value


def _items(values: Any) -> list[Any] | tuple[Any, ...]:
    """Return `values` if they are a list or a tuple; a tensor would unfold into an object per row."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"the items of a {type(values).__name__}")
    return values


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return {_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)}


def pickled_module(content: Any) -> InertObject | None:
    """Return the module in a file of YOLOv5, the EMA's first; None if there is none."""
    candidates = [content.get("ema"), content.get("model")] if isinstance(content, Mapping) else [content]
    return next((part for part in candidates if isinstance(part, InertObject) and isinstance(part.state, dict)), None)
