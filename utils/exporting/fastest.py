"""A checkpoint in the runtime that computes it fastest on this machine: measured once, and remembered.

ONNX Runtime and OpenVINO compute the bare network that export.py writes with `--raw`. One of them is taken only where
it finds what torch finds, by the comparison that ends an export. What is timed for `auto` is what the command does:
batches of its own split from pixels to matches, or drawn pictures from pixels to boxes.
"""

from __future__ import annotations

import collections
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, cast

import torch

from tessera.data.feed.images import ImageStore
from tessera.data.feed.loader import build_val_loader
from tessera.utils.engine.precision import Precision
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.evaluation.evaluate import first_images
from tessera.utils.evaluation.measurement import Measurement, Settings
from tessera.utils.exporting.network_cache import (
    EXPORTS,
    exported,
    folder,
    job_of,
    on_this_host,
    packages,
    place,
    state_of,
)
from tessera.utils.exporting.parity.samples import gather
from tessera.utils.exporting.parity.trial import ROUNDS
from tessera.utils.exporting.parity.verify import Judge
from tessera.utils.files import kept
from tessera.utils.machine.extras import import_extra
from tessera.utils.machine.host import processor, threads_apart
from tessera.utils.pixels import Pixels
from tessera.utils.ranks.world import World
from tessera.utils.runtime.checkpoint import TorchNetwork
from tessera.utils.runtime.exported import ExportedNetwork
from tessera.utils.runtime.open_model import OpenModel, open_exported
from tessera.utils.runtime.pipeline import Pipeline
from tessera.utils.text import first_line
from tessera.utils.types import DatasetIndex

log = logging.getLogger(__name__)

WORTH_MEASURING = 1000  # pictures: for fewer, to export and to compare takes longer than it saves
WORTH_CHANGING = 0.9  # of torch's time
_TITLES = {"torch": "torch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
_ROUNDS = 3  # of all runtimes by turns
_IMAGES, _BATCH = 48, 32  # of a validation, that each computes in a round at least, and of a batch at most


class Use(NamedTuple):
    """What a network is to compute.

    Attributes:
        imgsz: long side of the pictures in pixels.
        pictures: that are to come, about.
        batch: of a validation; 0 = pictures come one by one.
        several: threads may then compute several at once; else each has all of them.
        split: that is validated.
    """

    imgsz: int
    pictures: float
    batch: int = 0
    several: bool = True
    split: DatasetIndex | None = None


class Choice(NamedTuple):
    """What was found.

    Attributes:
        runtime: the fastest.
        ms: a picture, by runtime: from pixels to boxes, or of a validation to matches; None where it does not find
            what torch finds.
    """

    runtime: str
    ms: dict[str, float | None]

    def __str__(self) -> str:
        taken = self.ms[self.runtime]
        others = [
            f"{_TITLES[name]} {'differs' if ms is None else f'{ms:.1f}'}"
            for name, ms in self.ms.items()
            if name != self.runtime
        ]
        return f"computed by {_TITLES[self.runtime]}: {taken:.1f} ms a picture{''.join(f', {one}' for one in others)}"


def in_runtime(network: OpenModel, asked: str, weights: str, world: World, use: Use) -> OpenModel:
    """The same network, computed by the runtime asked for; every rank.

    Args:
        network: as `open_model` gives it.
        asked: as `--runtime`: torch, onnxruntime or openvino; auto = the fastest where that was measured on this
            machine before, or where so many pictures come that measuring pays; else torch.
        weights: the file that the network was read from.
        world: this rank.
        use: what it is to compute.

    Raises:
        UserError: the runtime asked for is not installed, cannot compute the network, or finds something else.
    """
    if not isinstance(network, TorchNetwork):
        if asked in EXPORTS:
            raise ConfigError(
                f"--runtime {asked}: {network.source} is an exported file, and has a runtime of its own. Leave "
                "--runtime out, or give the checkpoint."
            )
        return network
    is_able = world.accelerator.is_host and network.computes_as_exported
    if not is_able and asked in EXPORTS:
        raise ConfigError(
            f"--runtime {asked}: computes in float32 on the CPU, one size at a time. Give --device cpu, without "
            "--augment and --half; or --runtime torch."
        )
    if asked == "torch" or not is_able:
        return network
    made = world.from_main(lambda: _made(network, asked, weights, world, use))
    if made is None:
        return network
    try:
        found, failure = _computed_by(network, on_this_host(made, world), world), ""
    except UserError as error:  # of one host, that lacks the package
        found, failure = network, str(error)
    failures = [one for one in world.all_gather(failure) if one]
    if not failures:
        return found
    if asked != "auto":
        raise UserError(f"--runtime {asked}: {failures[0]}")
    log.warning(f"{failures[0]} So torch computes.")
    return network


def _made(network: TorchNetwork, asked: str, weights: str, world: World, use: Use) -> Path | None:
    """The file of the fastest runtime, in the cache; None where torch is to compute. Rank 0."""
    try:
        choice = _choice(network, asked, weights, world, use)
        if choice is None:
            return None
        log.info(f"{network.source}: {choice} (--runtime)")
        return None if choice.runtime == "torch" else exported(EXPORTS[choice.runtime], job_of(network, weights))
    except UserError as error:
        if asked != "auto":
            raise
        log.warning(f"{error} So torch computes.")
        return None


def _choice(network: TorchNetwork, asked: str, weights: str, world: World, use: Use) -> Choice | None:
    """What is remembered, or else measured; None where it is not worth it."""
    if asked == "auto":
        names = [name for name in EXPORTS if all(map(find_spec, packages(name)))]
        if not names:
            return None
    else:
        names, use = [asked], Use(use.imgsz, math.inf)  # that it finds the same is what counts
        for package in packages(asked):
            import_extra(package, EXPORTS[asked].extra, f"--runtime {asked}")
    given = {"asked": asked, "use": use._replace(pictures=0, split=None)}
    is_worth_it = asked != "auto" or use.pictures >= WORTH_MEASURING
    if not is_worth_it and not any(folder().glob("*.json")):
        return None  # of any weights, so that these need not be read again
    state = state_of(weights, names, threads=torch.get_num_threads(), processor=processor(), **given)
    path = place(state).with_suffix(".json")
    if not is_worth_it and not path.is_file():
        return None
    measured = kept(path, state, lambda: json.dumps(_measured(network, asked, weights, names, world, use)).encode())
    ms = json.loads(measured)
    if asked != "auto":
        return Choice(asked, ms)
    fastest = min((name for name in names if ms[name] is not None), key=ms.__getitem__, default="torch")
    return Choice(fastest if ms[fastest] < WORTH_CHANGING * ms["torch"] else "torch", ms)


def _measured(
    network: TorchNetwork, asked: str, weights: str, names: Sequence[str], world: World, use: Use
) -> dict[str, float | None]:
    """Milliseconds a picture, of torch and of those of `names`; None where it cannot be, or what is found differs.

    Raises:
        UserError: the one that was asked for cannot be; or the disk is at fault, and nothing may be remembered.
    """
    titles = ", ".join(_TITLES[name] for name in ("torch", *names))
    what = "which computes it fastest" if asked == "auto" else "whether both find the same"
    log.info(f"{network.source}: measuring once {what}: {titles} …")
    samples, job = gather(None, use.imgsz), replace(job_of(network, weights), imgsz=use.imgsz)
    judge, sound = Judge(job, samples, world, None), {"torch": network}
    for name in names:
        try:
            path = exported(EXPORTS[name], job)
            row = judge.file(path)
            why = row.failures or row.unverified
            sound |= {} if why else {name: _computed_by(network, path, world)}
        except (UserError, RuntimeError) as error:  # torch's exporter raises the latter
            if isinstance(error.__cause__, OSError):
                raise
            why = first_line(error)
        why = why.rstrip(".")
        if why and asked != "auto":
            raise UserError(
                f"--runtime {asked}: does not compute {network.source} as torch does: {why}. Take --runtime torch."
            )
        if why:
            log.warning(f"{_TITLES[name]}: {why}. It is not used.")
    return {**dict.fromkeys(names), **_times(sound, samples.pictures, use)}


def _times(networks: Mapping[str, TorchNetwork], pictures: Sequence[Pixels], use: Use) -> dict[str, float]:
    """Milliseconds a picture of each, by turns; of the round least disturbed."""
    best = dict.fromkeys(networks, math.inf)
    if use.split is not None:
        passed = _validation(use.split, use, networks["torch"].stride)
    else:
        passed = partial(_one_by_one, pictures, use)
    for _ in range(_ROUNDS):
        for name, network in networks.items():
            started = time.perf_counter()
            count = passed(network)
            best[name] = min(best[name], 1000 * (time.perf_counter() - started) / count)
    return best


def _validation(index: DatasetIndex, use: Use, stride: int) -> Callable[[TorchNetwork], int]:
    """Measures some batches of a split, decoded once for all networks; returns how many images they have."""
    alone, batch_size = World(), min(use.batch, _BATCH)
    precision = Precision(alone.accelerator, torch.float32)
    with (
        ImageStore(index, use.imgsz, "area") as store,
        build_val_loader(store, alone, batch_size=batch_size, stride=stride, workers=0) as loader,
    ):
        batches = list(first_images(iter(loader), _IMAGES))  # of the largest; the first may be small
    images = sum(map(len, batches))

    def passed(network: TorchNetwork) -> int:
        Measurement(network, index, alone, Settings(), precision, None).add(batches)
        return images

    return passed


def _one_by_one(pictures: Sequence[Pixels], use: Use, network: TorchNetwork) -> int:
    """Computes pictures as they come from files or streams; returns how many."""
    at_once = network.compute_apart() if use.several else 1
    pipeline, rules = Pipeline(network, use.imgsz), ROUNDS[0].rules(network)
    if at_once > 1:
        with threads_apart(at_once, "measuring") as pool:
            collections.deque(pool.map(pipeline, pictures, itertools.repeat(rules)), 0)
    else:
        for picture in pictures:
            pipeline(picture, rules)
    return len(pictures)


def _computed_by(network: TorchNetwork, path: Path, world: World) -> TorchNetwork:
    return network.computed_by(cast(ExportedNetwork, open_exported(path, world.accelerator)))
