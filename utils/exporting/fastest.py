"""A checkpoint in the runtime that computes it fastest on this machine: measured once, and remembered.

ONNX Runtime and OpenVINO compute the bare network that export.py writes with `--raw`. One of them is taken only where
it finds what torch finds, by the comparison that ends an export.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import logging
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from tessera import __version__
from tessera.utils.checkpoints.resolve import resolve_weights
from tessera.utils.environment import cache_dir
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.exporting.formats import FORMATS, Format
from tessera.utils.exporting.job import ExportJob
from tessera.utils.exporting.parity.samples import gather
from tessera.utils.exporting.parity.trial import ROUNDS
from tessera.utils.exporting.parity.verify import Judge
from tessera.utils.files import kept, sha256
from tessera.utils.flags.export import ExportConfig
from tessera.utils.flags.program import git_revision
from tessera.utils.machine.host import processor
from tessera.utils.pixels import Pixels
from tessera.utils.ranks.world import World, torch_distributed_zero_first
from tessera.utils.runtime.checkpoint import TorchNetwork
from tessera.utils.runtime.exported import ExportedDetector, ExportedNetwork
from tessera.utils.runtime.open_model import open_exported
from tessera.utils.runtime.pipeline import Pipeline
from tessera.utils.text import first_line

log = logging.getLogger(__name__)

Opened = TorchNetwork | ExportedDetector | ExportedNetwork

WORTH_MEASURING = 1000  # pictures: for fewer, to export and to compare takes longer than it saves
WORTH_CHANGING = 0.9  # of torch's time
_FORMATS = {one.name: one for one in FORMATS}
_RUNTIMES = {"onnxruntime": _FORMATS["onnx"], "openvino": _FORMATS["openvino"]}
_TITLES = {"torch": "torch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
_ROUNDS = 3  # of all runtimes by turns
_KEPT = 16  # networks in the cache


class Use(NamedTuple):
    """What a network is to compute.

    Attributes:
        imgsz: long side of the pictures in pixels.
        pictures: that are to come, about.
        batch: that it is given at once.
        several: threads may compute several at once; else each has all of them.
    """

    imgsz: int
    pictures: float
    batch: int = 1
    several: bool = True


class Choice(NamedTuple):
    """What was found.

    Attributes:
        runtime: the fastest.
        ms: a picture, by runtime: from pixels to boxes, or of a batch the network alone; None where it does not find
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


def in_runtime(network: Opened, asked: str, weights: str, world: World, use: Use) -> Opened:
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
        if asked in _RUNTIMES:
            raise ConfigError(
                f"--runtime {asked}: {network.source} is an exported file, and has a runtime of its own. Leave "
                "--runtime out, or give the checkpoint."
            )
        return network
    is_able = world.accelerator.is_host and network.computes_as_exported
    if not is_able and asked in _RUNTIMES:
        raise ConfigError(
            f"--runtime {asked}: computes in float32 on the CPU, one size at a time. Give --device cpu, without "
            "--augment and --half; or --runtime torch."
        )
    if asked == "torch" or not is_able:
        return network
    choice = world.from_main(lambda: _choice(network, asked, weights, world, use))
    if choice is None:
        return network
    log.info(f"{network.source}: {choice} (--runtime)")
    if choice.runtime == "torch":
        return network
    with torch_distributed_zero_first(world.local_rank, world):
        path = _exported(_RUNTIMES[choice.runtime], _job(network, weights))
    return _computed_by(network, path, world)


def _choice(network: TorchNetwork, asked: str, weights: str, world: World, use: Use) -> Choice | None:
    """What is remembered, or else measured; None where it is not worth it."""
    if asked == "auto":
        names = [name for name in _RUNTIMES if all(map(find_spec, _packages(name)))]
        if not names:
            return None
    else:
        names, use = [asked], Use(use.imgsz, math.inf)  # that it finds the same is what counts
        _RUNTIMES[asked].require(ExportConfig(raw=True))
    given = {"asked": asked, "use": use._replace(pictures=0)}
    state = _state(weights, names, threads=torch.get_num_threads(), processor=processor(), **given)
    path = _folder() / f"{_digest(state)}.json"
    if asked == "auto" and use.pictures < WORTH_MEASURING and not path.is_file():
        return None
    measured = kept(path, state, lambda: json.dumps(_measured(network, weights, names, world, use)).encode())
    ms = json.loads(measured)
    if asked != "auto":
        if ms[asked] is None:
            raise UserError(
                f"--runtime {asked}: does not compute {network.source} as torch does; the first attempt "
                "said more. Take --runtime torch."
            )
        return Choice(asked, ms)
    fastest = min((name for name in names if ms[name] is not None), key=ms.__getitem__, default="torch")
    return Choice(fastest if ms[fastest] < WORTH_CHANGING * ms["torch"] else "torch", ms)


def _measured(
    network: TorchNetwork, weights: str, names: Sequence[str], world: World, use: Use
) -> dict[str, float | None]:
    """Milliseconds a picture, of torch and of those of `names`; None where it cannot be, or what is found differs."""
    log.info(f"{network.source}: measuring once which runtime computes it fastest: {', '.join(('torch', *names))} …")
    samples, job = gather(None, use.imgsz), replace(_job(network, weights), imgsz=use.imgsz)
    judge, sound = Judge(job, samples, world, None), {"torch": network}
    for name in names:
        try:
            path = _exported(_RUNTIMES[name], job)
            row = judge.file(path)
            why = row.failures or row.unverified
            sound |= {} if why else {name: _computed_by(network, path, world)}
        except (UserError, RuntimeError) as error:  # torch's exporter raises the latter
            why = first_line(error)
        if why:
            log.warning(f"{_TITLES[name]}: {why}. It is not used.")
    return {**dict.fromkeys(names), **_times(sound, samples.pictures, use)}


def _times(networks: Mapping[str, TorchNetwork], pictures: Sequence[Pixels], use: Use) -> dict[str, float]:
    """Milliseconds a picture of each, by turns; of the round least disturbed."""
    best = dict.fromkeys(networks, math.inf)
    images = torch.rand(use.batch, 3, use.imgsz, use.imgsz)
    for _ in range(_ROUNDS):
        for name, network in networks.items():
            at_once = network.compute_apart() if use.several else 1
            pipeline, rules = Pipeline(network, use.imgsz), ROUNDS[0].rules(network)
            started = time.perf_counter()
            if use.batch > 1:
                network(images)
            elif at_once > 1:
                with ThreadPoolExecutor(at_once) as pool:
                    collections.deque(pool.map(pipeline, pictures, itertools.repeat(rules)), 0)
            else:
                for picture in pictures:
                    pipeline(picture, rules)
            count = use.batch if use.batch > 1 else len(pictures)
            best[name] = min(best[name], 1000 * (time.perf_counter() - started) / count)
    return best


def _computed_by(network: TorchNetwork, path: Path, world: World) -> TorchNetwork:
    return network.computed_by(cast(ExportedNetwork, open_exported(path, world.accelerator)))


def _job(network: TorchNetwork, weights: str) -> ExportJob:
    """The export of the bare network for images of any size, into the cache."""
    job = ExportJob.read(ExportConfig(weights=weights, raw=True, end2end=not network.needs_suppression))
    folder = _folder() / _digest(_state(weights, list(_RUNTIMES), end2end=job.config.end2end))
    return replace(job, config=replace(job.config, output=str(folder)))


def _exported(one: Format, job: ExportJob) -> Path:
    """The network's file in the cache, made where it is not there."""
    path = job.file(one.suffix)
    if not path.is_file():
        _forget_oldest()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{path.parent}: cannot be made ({error.strerror}). Set TESSERA_CACHE to a folder that can be written."
            ) from error
        one.export(job)
    return path


def _state(weights: str, names: Sequence[str], **others: Any) -> bytes:
    """All that the result depends on."""
    packages = {package: _version(package) for name in names for package in _packages(name)}
    program = f"{__version__} {git_revision()}"
    said = {
        "weights": sha256(resolve_weights(weights)),
        "program": program,
        "torch": torch.__version__,
        **packages,
        **others,
    }
    return json.dumps(said, sort_keys=True).encode()


def _packages(runtime: str) -> tuple[str, ...]:
    """Modules that must be there."""
    return (*_RUNTIMES[runtime].packages, *(["onnxruntime"] if runtime == "onnxruntime" else []))


def _version(package: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def _digest(state: bytes) -> str:
    return hashlib.blake2b(state, digest_size=16).hexdigest()


def _folder() -> Path:
    return cache_dir() / "runtimes"


def _forget_oldest() -> None:
    """Make room in the cache for one more network."""
    folders = sorted((path for path in _folder().glob("*") if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in folders[: 1 - _KEPT]:
        shutil.rmtree(path, ignore_errors=True)
