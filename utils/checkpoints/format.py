"""Checkpoints: tensors and plain values, written whole or not at all, from which a run goes on bit for bit.

A `.pt` is what torch.save makes of one dictionary with the keys of `KEYS`, read back with `weights_only=True`, so that
no file can run code here. Original YOLOv5 files go through utils/checkpoints/legacy.py and give weights only.
"""

from __future__ import annotations

import errno
import pickle
import random
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from data.source.download import fetch
from utils.checkpoints.legacy import ZIP_ERRORS, is_legacy, load_legacy
from utils.engine.ema import ModelEMA
from utils.engine.stopping import EarlyStopping
from utils.environment import REPO, cache_dir
from utils.errors import UserError, did_you_mean
from utils.files import atomic_write

FORMAT = 1  # the key "version"; raised when a reader of the older format could not go on from the newer one

STATE_KEYS = (
    *("model", "ema", "ema_updates", "optimizer", "scaler"),
    *("epoch", "step", "step_in_epoch", "epoch_losses", "epoch_skipped", "skipped_steps", "class_maps"),
    *("best_fitness", "stopper", "rng"),
)
FACT_KEYS = (
    *("config", "hyp", "model_yaml", "names", "stride", "anchors", "dataset_hash"),
    *("version", "date", "git"),
)
KEYS = STATE_KEYS + FACT_KEYS

OFFICIAL_NAMES = tuple(f"yolov5{size}{p6}.pt" for p6 in ("", "6") for size in "nsmlx")
OFFICIAL_URL = "https://github.com/ultralytics/yolov5/releases/download/v7.0/{name}"

# What reading a damaged or foreign file raises: zipfile's errors, then those of torch and its unpickler.
_UNREADABLE = (
    *ZIP_ERRORS,
    *(pickle.UnpicklingError, RuntimeError, ValueError, LookupError, TypeError, AttributeError),
)


# Files


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint: a temporary file in the same folder, flushed to disk, then renamed over `path`.

    Whatever happens on the way, a kill or a full disk included, `path` stays the previous whole checkpoint.

    Args:
        path: such as weights/last.pt; its folder is made.
        state: exactly the keys of `KEYS`; tensors and plain values only.

    Raises:
        UserError: the file cannot be written; with the reason and what is free.
    """
    assert set(state) == set(KEYS), f"missing {set(KEYS) - set(state)}, unknown {set(state) - set(KEYS)}"
    for key, value in state.items():
        _check_plain(value, key)
    try:
        with atomic_write(path) as file:
            torch.save(dict(state), file)
    except (OSError, RuntimeError) as error:
        # torch's zip writer answers a failing write with a RuntimeError of its own, over the one that says why.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        raise UserError(_unwritable(path, reason)) from error


def load_checkpoint(path: Path, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Read a checkpoint that `save_checkpoint` wrote.

    Args:
        path: the file.
        map_location: device of the tensors.

    Raises:
        UserError: no such file, damaged, an original YOLOv5 file, something else, or of a later version.
    """
    if not path.is_file():
        near = did_you_mean(path.name, (p.name for p in path.parent.glob("*.pt"))) if path.parent.is_dir() else ""
        raise UserError(f"{path}: no such checkpoint.{near} Expected a file such as last.pt in a run's folder weights.")
    if is_legacy(path):
        raise UserError(
            f"{path}: not a checkpoint of this program, from which a run could go on: it holds pickled objects, as an "
            f"original YOLOv5 file does. To start from its weights, give it as --weights."
        )
    try:
        _check_whole(path)
        state = torch.load(path, map_location, weights_only=True)
    except _UNREADABLE as error:
        raise UserError(
            f"{path}: damaged, or not a checkpoint ({_first_line(error)}). Take another, such as best.pt or last.pt "
            f"beside it, or copy the file again."
        ) from error
    missing = [key for key in KEYS if key not in state] if isinstance(state, dict) else list(KEYS)
    if len(missing) == len(KEYS):
        raise UserError(
            f"{path}: not a checkpoint of this program: found {_kind(state)}. Expected a last.pt or best.pt."
        )
    version = state.get("version")
    if isinstance(version, int) and version > FORMAT:
        raise UserError(
            f"{path}: written by a later version of this program (format {version}; this one reads up to {FORMAT}). "
            f"Update the program."
        )
    if missing or not isinstance(version, int):
        raise UserError(
            f"{path}: incomplete, without {', '.join(missing) or 'a version number'}. Take another checkpoint."
        )
    return state


def _check_whole(path: Path) -> None:
    """Compare every entry of a zip archive with its checksum, which torch.load does not.

    Raises:
        zipfile.BadZipFile, or another of `ZIP_ERRORS`: it is no archive, torn or altered.
    """
    with zipfile.ZipFile(path) as archive:
        broken = archive.testzip()
    if broken is not None:
        raise zipfile.BadZipFile(f"the checksum of {broken} is wrong")


def _check_plain(value: Any, where: str) -> None:
    """Assert that reading with weights_only=True will give `value` back."""
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, Tensor):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            assert type(key) in (bool, int, float, str), f"{where}: a key that is a {type(key).__name__}"
            _check_plain(item, f"{where}.{key}")
        return
    assert type(value) in (list, tuple), f"{where} is a {type(value).__name__}, which a checkpoint cannot hold"
    for index, item in enumerate(value):
        _check_plain(item, f"{where}[{index}]")


def _unwritable(path: Path, reason: OSError) -> str:
    text = f"{path}: cannot write the checkpoint: {reason.strerror or reason}."
    if path.exists():
        text += " The previous one is whole and stays."
    if reason.errno in (errno.ENOSPC, errno.EDQUOT) and path.parent.is_dir():
        free = shutil.disk_usage(path.parent).free / 2**20
        text += f" The disk has {free:.0f} MiB free. Make room, or give another --project, and go on with --resume."
    else:
        text += " Give a --project that can be written to, and go on with --resume."
    return text


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _kind(state: Any) -> str:
    if isinstance(state, dict):
        return f"a dictionary with {', '.join(map(repr, [*state][:5])) or 'nothing'}"
    return f"a {type(state).__name__}"


# The state of a run


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        epoch: the epoch to go on with, from 0.
        step: optimizer steps so far, skipped ones included.
        step_in_epoch: global batches of `epoch` that are done; 0 between epochs.
        losses: float32 (3,), box, obj, cls: this rank's part of the sum over those batches.
        epoch_skipped: of those batches, the ones whose gradient was not finite.
        skipped_steps: such steps so far.
        class_maps: AP of each class in the latest validation, which `--image-weights` go by; () before the first.
    """

    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    losses: Tensor = field(default_factory=lambda: torch.zeros(3))
    epoch_skipped: int = 0
    skipped_steps: int = 0
    class_maps: tuple[float, ...] = ()

    def advance(self, batches: int, losses: Tensor) -> None:
        """Count an optimizer step over so many batches, with the sum of their losses."""
        self.step += 1
        self.step_in_epoch += batches
        self.losses = self.losses.to(losses.device) + losses

    def skip(self, batches: int) -> None:
        """A step over so many batches, counted already, was not taken; 0 where it was."""
        self.epoch_skipped += batches
        self.skipped_steps += batches > 0

    def mean_losses(self) -> Tensor:
        """(3,): this rank's part of the mean over the epoch's batches so far; NaN where all were skipped."""
        counted = self.step_in_epoch - self.epoch_skipped
        return self.losses / counted if counted else torch.full_like(self.losses, float("nan"))

    def finish_epoch(self) -> None:
        """Stand at the start of the next epoch."""
        self.epoch += 1
        self.step_in_epoch = self.epoch_skipped = 0
        self.losses = torch.zeros_like(self.losses)


@dataclass
class TrainState:
    """All that changes while training, as one thing that can be saved and gone on from.

    Attributes:
        model: the raw model, not a wrapper of it.
        ema, optimizer, scaler, stopper, progress: as in the training loop; taken up in place.
    """

    model: nn.Module
    ema: ModelEMA[Any]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    stopper: EarlyStopping
    progress: Progress

    def state_dict(self, losses_by_rank: Sequence[Tensor] = ()) -> dict[str, Any]:
        """The values of `STATE_KEYS`: live tensors, not copies.

        Args:
            losses_by_rank: `progress.losses` of every rank; () with a single one.
        """
        progress = self.progress
        return {
            "model": self.model.state_dict(),
            "ema": self.ema.model.state_dict(),
            "ema_updates": self.ema.updates,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": progress.epoch,
            "step": progress.step,
            "step_in_epoch": progress.step_in_epoch,
            "epoch_losses": torch.stack([losses.cpu() for losses in losses_by_rank or [progress.losses]]),
            "epoch_skipped": progress.epoch_skipped,
            "skipped_steps": progress.skipped_steps,
            "class_maps": list(progress.class_maps),
            "best_fitness": self.stopper.best_fitness,
            "stopper": self.stopper.state_dict(),
            "rng": rng_state(),
        }

    def load(self, state: Mapping[str, Any], *, rank: int = 0, size: int = 1) -> None:
        """Take up the state of a checkpoint, in place.

        Args:
            state: what `load_checkpoint` returned; more keys than `STATE_KEYS` are fine.
            rank, size: this rank among all. Each takes up its own part of the epoch's losses, or rank 0 all of it where
                the number of ranks has changed; and only rank 0 the process's generators, which must differ.

        Raises:
            UserError: the weights or the optimizer's state do not fit.
        """
        for name, module in (("model", self.model), ("ema", self.ema.model)):
            different = _differences(module.state_dict(), state[name])
            if different:
                raise UserError(
                    f"The checkpoint does not fit the model ({name}: {_shortened(different)}). A run can go on only "
                    f"with the architecture and the classes that it started with."
                )
            module.load_state_dict(state[name])
        self.ema.updates = state["ema_updates"]
        self._load_optimizer(state["optimizer"])
        if state["scaler"]:  # empty from a run without loss scaling, which this one may have
            self.scaler.load_state_dict(state["scaler"])
        self.stopper.load_state_dict(state["stopper"])
        self.progress.epoch = state["epoch"]
        self.progress.step = state["step"]
        self.progress.step_in_epoch = state["step_in_epoch"]
        self.progress.class_maps = tuple(state["class_maps"])
        self.progress.epoch_skipped = state["epoch_skipped"]
        self.progress.skipped_steps = state["skipped_steps"]
        parts = state["epoch_losses"]
        if len(parts) != size:
            parts = torch.cat((parts.sum(0, keepdim=True), torch.zeros(size - 1, 3)))
        self.progress.losses = parts[rank].clone()
        if rank == 0:
            set_rng_state(state["rng"])

    def _load_optimizer(self, saved: Mapping[str, Any]) -> None:
        """Take up moments and counters. Rates and decay stay this optimizer's: flags given at a resume count."""
        groups = self.optimizer.param_groups
        own = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        # Both Adams have betas, SGD has not; torch compares no more than how many parameters there are.
        other = ["betas" in group for group in saved["param_groups"][:1]] != ["betas" in group for group in own[:1]]
        try:
            if other:
                raise ValueError("SGD and Adam keep different things")
            self.optimizer.load_state_dict(dict(saved))
        except ValueError as error:
            raise UserError(
                f"The optimizer's state in the checkpoint does not fit ({_first_line(error)}). A run can go on only "
                f"with the --optimizer and the --freeze that it started with."
            ) from error
        for group, values in zip(self.optimizer.param_groups, own, strict=True):
            group.update(values)


class Detector(Protocol):
    """What a checkpoint tells of a model beside its weights: `yaml`, `names`, and a `head` with stride and anchors."""

    yaml: Any
    names: Any

    @property
    def head(self) -> Any:
        """The last layer."""


def run_facts(
    model: Detector, config: Mapping[str, Any], hyp: Mapping[str, Any], dataset_hash: str, git: str | None = None
) -> dict[str, Any]:
    """The values of `FACT_KEYS`: what a reader of a checkpoint wants to know of its run. `date` is now, in UTC.

    Args:
        model: the raw model.
        config, hyp: plain values, as `TrainConfig.as_dict` and `Hyp.as_dict` give them.
        dataset_hash: digest of the training index.
        git: from `git_revision`, asked for once a run.
    """
    anchors = getattr(model.head, "anchors", None)
    return {
        "config": dict(config),
        "hyp": dict(hyp),
        "model_yaml": model.yaml,
        "names": list(model.names),
        "stride": [float(stride) for stride in model.head.stride],
        "anchors": None if anchors is None else anchors.detach().float().cpu().clone(),
        "dataset_hash": dataset_hash,
        "version": FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git": git,
    }


def git_revision(folder: Path = REPO) -> str | None:
    """Commit of the program, with "-dirty" where files differ from it; None outside a git checkout or without git."""
    if not (folder / ".git").exists():  # a repository further up would be another project's
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def rng_state() -> dict[str, Any]:
    """State of this process's generators (Python, NumPy, torch, this process's CUDA device) as plain values."""
    algorithm, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 - the process-level generator
    return {
        "python": random.getstate(),
        "numpy": (str(algorithm), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put this process's generators where `rng_state` found them."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    algorithm, keys, *rest = state["numpy"]
    np.random.set_state((algorithm, np.array(keys, np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


# Weights to start from


class Weights(NamedTuple):
    """Weights to start from, and what they bring.

    Attributes:
        state_dict: float32 tensors by name; the EMA's.
        model_yaml: the architecture, plain.
        names: class names by index; () where an original file has none.
        source: what they are, for the log: "best.pt (epoch 12)".
    """

    state_dict: dict[str, Tensor]
    model_yaml: dict[str, Any]
    names: tuple[str, ...]
    source: str


def load_weights(path: Path) -> Weights:
    """Read the weights of a checkpoint: ours, or an original YOLOv5 file, of which nothing is run.

    Raises:
        UserError: as of `load_checkpoint` and `load_legacy`.
    """
    if is_legacy(path):
        original = load_legacy(path)
        described = {"name": path.stem, **original.model_yaml}
        return Weights(original.state_dict, described, original.names, f"{path.name} (original YOLOv5)")
    state = load_checkpoint(path)
    done = f"after {state['epoch']} epochs" if not state["step_in_epoch"] else f"in epoch {state['epoch']}"
    return Weights(state["ema"], state["model_yaml"], tuple(state["names"]), f"{path.name} ({done})")


def intersect_weights(
    model_state: Mapping[str, Tensor],
    checkpoint_state: Mapping[str, Tensor],
    *,
    source: str = "the checkpoint",
    exclude: Iterable[str] = (),
) -> tuple[dict[str, Tensor], str]:
    """The tensors of a checkpoint that fit a model by name and shape.

    Another number of classes changes the head's convolutions: the ordinary case of fine-tuning, reported and no error.

    Args:
        model_state, checkpoint_state: state dictionaries.
        source: names the checkpoint in the error.
        exclude: regular expressions; a tensor whose name one of them matches somewhere is left as the model has it.

    Returns:
        The fitting tensors, to be given to `load_state_dict(…, strict=False)`, and a report in one line.

    Raises:
        UserError: not a single layer's weights fit: the architecture is another one.
    """
    patterns = [re.compile(pattern) for pattern in exclude]
    wanted, offered = (
        {name: tensor for name, tensor in state.items() if not any(p.search(name) for p in patterns)}
        for state in (model_state, checkpoint_state)
    )
    fitting = {k: t for k, t in offered.items() if k in wanted and t.shape == wanted[k].shape}
    different = _differences(wanted, offered)
    # Counters and a head's anchors have the same shape in every size of a family: they do not show a fit.
    if not any(name.endswith(".weight") and tensor.ndim >= 2 for name, tensor in fitting.items()):
        raise UserError(
            f"{source}: an architecture that does not fit the weights: {len(fitting)} of {len(model_state)} tensors "
            f"fit, and no layer's weights among them ({_shortened(different)}). Give the --cfg that belongs to the "
            f"weights, or no --cfg."
        )
    report = f"{len(fitting)} of {len(model_state)} tensors fitted"
    if len(wanted) < len(model_state):
        report += f"; {len(model_state) - len(wanted)} left out as asked"
    if different:
        report += f"; did not fit: {_shortened(different)}"
    return fitting, report


def _differences(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """Tensors of a model that a checkpoint lacks or has in another shape, and those it has too many."""
    lines = [
        f"{name} is {tuple(tensor.shape)}, in the checkpoint {tuple(found[name].shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    lines += [f"{name} is not in the checkpoint" for name in expected if name not in found]
    lines += [f"{name} of the checkpoint has no place in the model" for name in found if name not in expected]
    return lines


def _shortened(lines: list[str], most: int = 4) -> str:
    more = f"; and {len(lines) - most} more" if len(lines) > most else ""
    return "; ".join(lines[:most]) + more


def resolve_weights(name: str, *, progress: bool = True) -> Path:
    """Find the file that `--weights` means; download an official one that is nowhere.

    Args:
        name: a path, or the bare name of an official YOLOv5 checkpoint such as "yolov5s.pt", which is looked for in the
            working directory, then in the cache folder, then downloaded to the cache folder.
        progress: show a bar while downloading.

    Raises:
        UserError: there is no such file; with the places that were tried.
    """
    given = Path(name).expanduser()
    cached = cache_dir() / "weights" / given.name
    bare = given.name == name
    for candidate in (given, cached) if bare else (given,):
        if candidate.is_file():
            return candidate
    if bare and name in OFFICIAL_NAMES:
        return fetch(OFFICIAL_URL.format(name=name), cached, progress=progress)
    tried = f"{given.absolute()}" + (f" and {cached}" if bare else "")
    beside = (path.name for path in given.parent.glob("*.pt")) if given.parent.is_dir() else ()
    hint = did_you_mean(given.name, [*beside, *(OFFICIAL_NAMES if bare else ())])
    raise UserError(
        f"--weights {name}: no such file; tried {tried}.{hint} Expected a checkpoint, or one of the official names "
        f"{', '.join(OFFICIAL_NAMES)}."
    )
