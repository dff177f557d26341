"""Signatures of the Python API (`tessera.train(...)`), made from the flags of the commands."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

from tessera.utils.flags.options import COMPATIBILITY, GROUPS, Options, flags_of, keyword_of

F = TypeVar("F", bound=Callable[..., Any])
_TEXT = ("name", "metric", "loggers", "license", "include", "require")  # not paths
_TYPES = {
    "conf_thres": "float | str",
    "device": "str | int",
    "head": "str | type[Any]",
    "imgsz": "int | Sequence[int]",
    "hyp": "str | Path | Mapping[str, Any] | Sequence[str | Path]",
    "data": "str | Path | Mapping[str, Any]",
    "transforms": "str | Callable[..., Any] | Sequence[str | Callable[..., Any] | tuple[Callable[..., Any], str]]",
    "source": "str | Path | int | Sequence[str | Path]",
    "optimizer": "str | Callable[..., Any]",
    "callbacks": "str | Callable[..., Any] | Sequence[str | Callable[..., Any]]",
    "classes": "int | str | Sequence[int | str]",
}


def parameters_of(config: type[Options]) -> list[inspect.Parameter]:
    """Return the keyword arguments of a command in the order of --help, without those of launchers."""
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=_type(f))
        for f in _ordered(config)
        if not f.metadata["positional"]
        for name in dict.fromkeys(map(keyword_of, flags_of(f)))
    ]


def _ordered(config: type[Options]) -> list[dataclasses.Field[Any]]:
    fields = {f.name: f for f in dataclasses.fields(config)}
    return [
        fields[name] for group, names in GROUPS.items() if group != COMPATIBILITY for name in names if name in fields
    ]


def _type(f: dataclasses.Field[Any]) -> str:
    if f.name in _TYPES:
        return _TYPES[f.name]
    m = f.metadata
    text = "Literal[" + ", ".join(f'"{choice}"' for choice in m["choices"]) + "]" if m["choices"] else ""
    text = text or ("str | Path" if m["kind"] is str and f.name not in _TEXT else m["kind"].__name__)
    if m["many"]:
        text += f" | Sequence[{text}]"
    return text + " | bool" if m["bare"] is not None else text


def documented(config: type[Options]) -> Callable[[F], F]:
    """Return a decorator that gives a function the signature of a command, and lists its arguments in the docstring.

    `tessera/__init__.pyi` has the same for editors and type checkers; `python -m tests.api_stub` writes it.
    """

    def document(function: F) -> F:
        own = inspect.signature(function)
        positional = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        function.__signature__ = own.replace(parameters=positional + parameters_of(config))  # type: ignore[attr-defined]
        lines = [f"{f.name}: {f.metadata['help'].replace('%%', '%')}." for f in _ordered(config)]
        lines = [textwrap.fill(line, 112, initial_indent=" " * 8, subsequent_indent=" " * 12) for line in lines]
        summary, _, rest = (function.__doc__ or "").partition("\n")
        function.__doc__ = "\n".join([summary, "", "    Args:", *lines, rest])
        return function

    return document
