"""Unpickler for untrusted .pt files: it imports and calls nothing; known classes become inert objects.

It interprets the opcodes of a pickle without importing or calling anything. A global becomes an inert token. A call of
it becomes an inert `InertObject`. Only tensors become real, as checked slices of storages. A global outside a short
list is refused by name.

`pickle.Unpickler` with a restricted `find_class` and `torch.load(weights_only=True)` are no alternative: both hash a
dict's key unchecked, and 200,000 nested tuples as a key overflow the C stack and kill the process. The memo of the
former is an array that one opcode of five bytes grows by gigabytes (CPython issue 115952). The latter corrupted memory
before torch 2.10 (CVE-2026-24747).
"""

from __future__ import annotations

import math
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera.utils.errors import UserError
from tessera.utils.text import one_line, shown

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
_ORDERED_DICT, _DEFAULT_DICT = "collections.OrderedDict", "collections.defaultdict"
_SETS = {"builtins.set", "__builtin__.set"}
_BUILDERS = {_TENSOR, _PARAMETER, _ORDERED_DICT, _DEFAULT_DICT} | _SETS
# Further globals in files of other programs; they become inert objects.
_INERT = {
    "torch.Size",
    "torch.device",
    *(f"torch.{name}" for name in ("float16", "float32", "float64", "bfloat16", "int64", "int32", "uint8", "bool")),
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    "numpy.dtype",
    "numpy.ndarray",
    "_codecs.encode",
    "typing.Any",
    # Types of a configuration's values; __builtin__ in pickles for Python 2, as torch writes.
    *(f"builtins.{name}" for name in ("dict", "list", "tuple", "str", "int", "float", "bool")),
    *(f"__builtin__.{name}" for name in ("dict", "list", "tuple", "unicode", "long", "float", "bool")),
    *(f"pathlib.{name}Path" for name in ("", "Pure", "Posix", "Windows", "PurePosix", "PureWindows")),
}
_KNOWN = _BUILDERS | _STORAGES.keys() | _INERT
# Classes of the packages of YOLOv5, YOLOX, YOLOv9, omegaconf and torch; no name begins with a double underscore.
_INERT_CLASSES = re.compile(
    r"(models|utils|yolox|yolo|omegaconf|torch\.nn\.modules|torch\.nn\.parameter)(\.(?!__)[A-Za-z_]\w*)+\Z", re.ASCII
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
# Opcodes that push their argument.
_LITERALS = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    )
)


@dataclass(frozen=True, eq=False)
class Global:
    """Name in a pickle; nothing is imported."""

    name: str


@dataclass(eq=False)
class InertObject:
    """Inert stand-in for an object of class `name` or a result of function `name`: its arguments and state."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, eq=False)
class Storage:
    """Storage in a pickle; its bytes are read when a tensor needs them."""

    key: str
    dtype: torch.dtype
    numel: int


class DamagedFile(Exception):
    """A file that breaks a rule of its format; the text says which."""


class RestrictedUnpickler:
    """Interpreter of pickle opcodes; its results are plain values, tensors, inert objects and globals.

    `load` returns all elements of a storage, (numel,); `source` names the file in errors.
    """

    def __init__(self, load: Callable[[Storage], Tensor], source: str) -> None:
        self._load = load
        self._source = source
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
                stack.append(_CONSTANTS[opcode])
            case _ if opcode in _EMPTY:
                stack.append(_EMPTY[opcode]())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode[-1])
                stack.append(tuple(stack.pop() for _ in range(count))[::-1])
            case "TUPLE":
                items = self._pop_mark()
                self._stack.append(tuple(items))
            case "LIST":
                items = self._pop_mark()
                self._stack.append(items)
            case "APPEND" | "APPENDS":
                items = self._pop_mark() if opcode == "APPENDS" else [stack.pop()]
                self._top(list).extend(items)
            case "DICT":
                items = self._pop_mark()
                self._stack.append(_pairs(items))
            case "SETITEM" | "SETITEMS":
                items = self._pop_mark() if opcode == "SETITEMS" else [stack.pop(-2), stack.pop()]
                self._top(dict).update(_pairs(items))
            case "ADDITEMS":
                items = self._pop_mark()
                self._top(set).update(map(_key, items))
            case "MARK":
                self._below_marks.append(stack)
                self._stack = []
            case "POP":
                stack.pop()
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

    def _global(self, name: str) -> Global:
        if name not in _KNOWN and not _INERT_CLASSES.match(name):
            raise UserError(
                f"{self._source}: refused: its pickle names {shown(name)}, which no checkpoint needs. No code was run. "
                "Use a file from a source that you trust."
            )
        return Global(name)

    def _make(self, target: Any, args: Any) -> Any:
        if not isinstance(target, Global) or not isinstance(args, tuple):
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
        return InertObject(target.name, args)

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any) -> Tensor:
        """Return a view of a storage; raise an error for elements outside it, or repeated ones."""
        if not isinstance(storage, Storage) or not isinstance(size, tuple) or not isinstance(stride, tuple):
            raise TypeError("a tensor without storage, size or stride")
        numbers = (offset, *size, *stride)
        if len(size) != len(stride) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise ValueError(f"a tensor of size {size}, stride {stride} at {offset}")
        elements = math.prod(size)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if elements else offset - 1
        if last >= storage.numel or elements > storage.numel:
            raise ValueError(f"a tensor of size {size}, stride {stride} at {offset} in {storage.numel} elements")
        flat = self._load(storage)
        if not elements and math.prod(filter(None, size)) >= 2**62:  # torch cannot make these
            raise ValueError(f"an empty tensor of size {size}")
        return flat.as_strided(size, stride, offset) if elements else flat.new_empty(size)


def _storage(reference: Any) -> Storage:
    match reference:
        case ("storage", Global(name), str(key), str(), int(numel)) if name in _STORAGES and numel >= 0:
            return Storage(key, _STORAGES[name], numel)
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
