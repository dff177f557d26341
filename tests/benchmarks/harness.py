"""Interleaved timing of rivals, so that other load of the machine falls on all of them alike."""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tessera.utils.machine.host import cpuinfo
from tessera.utils.types import DatasetIndex

# Instructions for matrices that runtimes choose their kernels by, as Linux names them.
_INSTRUCTIONS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


class Rate(float):
    """The median of some rounds, in images a second, with the slowest and the fastest of them."""

    slowest: float
    fastest: float

    @classmethod
    def of(cls, found: Sequence[float]) -> Rate:
        made = cls(statistics.median(found))
        made.slowest, made.fastest = min(found), max(found)
        return made


def rounds(rivals: Mapping[str, Callable[[], int]], count: int = 7) -> dict[str, Rate]:
    """Images (or what the rivals return the number of) per second of each, over `count` alternating rounds."""
    for rival in rivals.values():
        rival()  # caches, allocators, kernels
    rates: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(count):
        for name, rival in rivals.items():
            started = time.perf_counter()
            done = rival()
            rates[name].append(done / (time.perf_counter() - started))
    return {name: Rate.of(found) for name, found in rates.items()}


def show(rates: Mapping[str, Rate], baseline: str, unit: str = "images/s") -> None:
    """Print every rival, its ratio to the baseline, its spread, and the machine."""
    print(machine())
    for name, rate in rates.items():
        spread = f"({1000 / rate.fastest:.2f} to {1000 / rate.slowest:.2f} ms)"
        print(f"  {name:<44}{rate:10.1f} {unit:<12}{1000 / rate:9.2f} ms   {rate / rates[baseline]:5.2f} x   {spread}")


def machine() -> str:
    """The machine in a line."""
    said = cpuinfo()
    instructions = [one for one in _INSTRUCTIONS if one in said.get("flags", "").split()]
    model = f"{said.get('model name', platform.machine())} ({', '.join(instructions)})"
    if torch.cuda.is_available():
        model += f", {torch.cuda.get_device_name()}"
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    return f"{model}, {cores} cores, {threads} threads, torch {torch.__version__}"


def parser(what: str | None, **flags: Any) -> argparse.ArgumentParser:
    """The flags of a benchmark, by their defaults, or default and meaning; a list takes several, and False is off."""
    made = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, given in flags.items():
        default, about = given if isinstance(given, tuple) else (given, _USUAL.get(name))
        how: dict[str, Any] = {"action": "store_true"}
        if default is not False:
            first = default[0] if isinstance(default, list) else default
            how = {"type": type(first), "default": default, "nargs": "+" if isinstance(default, list) else None}
        made.add_argument(f"--{name.replace('_', '-')}", help=about, **how)
    return made


_USUAL = {
    "data": "dataset YAML (figures in the docs: coco128.yaml)",
    "imgsz": "side of an image in pixels",
    "batch": "images of a batch",
    "rounds": "interleaved, of all rivals",
    "steps": "of a round, after which the device is waited for",
}


def repeated(index: DatasetIndex, times: int) -> DatasetIndex:
    """The same images `times` over, each time as others: more than what a loader keeps."""

    def offsets(one: np.ndarray) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(np.tile(np.diff(one), times))]) if len(one) else one

    flat = ("path_bytes", "sizes_hw", "classes", "boxes_xyxy", "segment_points")
    arrays = {name: np.concatenate([getattr(index, name)] * times) for name in flat}
    starts = {name: offsets(getattr(index, name)) for name in ("path_offsets", "box_offsets", "segment_offsets")}
    return dataclasses.replace(index, **arrays, **starts, stored_hash="")


class OwnProcess:
    """A rival in its own process, so that its memory and threads do not influence the others.

    Args:
        make: makes the rival there; a function of a module.
        arguments: for it.
    """

    def __init__(self, make: Callable[..., Callable[[], int]], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, make, arguments), daemon=True)
        self._process.start()

    def __call__(self) -> int:
        self._here.send(True)
        return int(self._here.recv())

    def close(self) -> None:
        self._here.send(False)
        self._process.join()


def _serve(pipe: Connection, make: Callable[..., Callable[[], int]], arguments: tuple[object, ...]) -> None:
    rival = make(*arguments)
    with suppress(EOFError):  # the benchmark has ended
        while pipe.recv():
            pipe.send(rival())


def indexed(data: str, split: str = "train") -> DatasetIndex:
    return build_index(load_spec(data), split)
