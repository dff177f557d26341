"""The one place where environment variables are read; `Launch`, the place of this process in its job, among them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tessera.utils.errors import ConfigError
from tessera.utils.files import user_path
from tessera.utils.flags.program import BASE
from tessera.utils.text import shown

_MAX_PIXELS = 1 << 28
_PORTS = 2**16 - 1
_MOST_SECONDS = 1e7  # as milliseconds it still fits into 64 bits many times over


def datasets_dir() -> Path:
    """Folder that datasets are looked up in and downloaded to (TESSERA_DATASETS)."""
    return user_path(os.environ.get("TESSERA_DATASETS") or BASE / "datasets", "TESSERA_DATASETS")


def cache_dir() -> Path:
    """Folder for indexes, image caches and matplotlib's list of fonts (TESSERA_CACHE)."""
    return user_path(os.environ.get("TESSERA_CACHE") or "~/.cache/tessera", "TESSERA_CACHE")


def max_pixels() -> int:
    """How many pixels a picture may have (TESSERA_MAX_PIXELS)."""
    text = os.environ.get("TESSERA_MAX_PIXELS") or str(_MAX_PIXELS)
    if re.fullmatch("0*[1-9][0-9]{0,17}", text):
        return int(text)
    raise ConfigError(f"TESSERA_MAX_PIXELS: found {shown(text)}, expected a number of pixels such as {_MAX_PIXELS}.")


def bound_opencv() -> None:
    """Let OpenCV itself refuse what is larger, in formats whose headers only it reads; call before it is imported."""
    os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(max_pixels()))


def quieten_opencv() -> bool:
    """Let OpenCV and its FFmpeg print nothing: what a video lacks is reported by file; call before it is imported.

    Return whether the user left OpenCV's own level to us; where it is imported already, it has to be told too.
    """
    is_ours = "OPENCV_LOG_LEVEL" not in os.environ
    os.environ.setdefault("OPENCV_LOG_LEVEL", "FATAL")
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # AV_LOG_QUIET
    return is_ours


def keep_font_list() -> None:
    """Let matplotlib keep its list of fonts in our cache, not in the home folder; call before it is imported."""
    os.environ.setdefault("MPLCONFIGDIR", str(cache_dir() / "matplotlib"))


def forbid_update_checks() -> None:
    """Keep Albumentations from asking a server for its newest version when it is imported."""
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")


def forbid_telemetry() -> None:
    """Keep ONNX Runtime from reporting its use to a server, and from files in the home folder; before it is imported.

    Its packages for Linux and macOS do so from 1.29 on, once they are imported; its own switch comes too late.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def make_cublas_deterministic() -> None:
    """Let cuBLAS use buffers of a fixed size, as torch demands for deterministic kernels; call before its first use."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def quieten_torch() -> None:
    """Let torch's C++ code log errors only, no lost connections with their stacks; call before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def spin_briefly() -> None:
    """Let OpenMP's threads sleep soon where they wait for each other; call before torch is imported.

    By default they spin for milliseconds, also where the one that they wait for has no processor: a training beside
    another job, or beside its own loader workers, would take many times as long. What the user has set is kept.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


@contextmanager
def connecting_over_loopback(on: bool) -> Iterator[None]:
    """Let gloo take Linux's loopback interface for groups that are made inside, unless the user names another.

    Else it looks up the host's own name, and warns where it cannot.
    """
    mine = on and "GLOO_SOCKET_IFNAME" not in os.environ
    if mine:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        if mine:  # a job that this process joins or starts later may have other hosts
            del os.environ["GLOO_SOCKET_IFNAME"]


def peer_timeout_s() -> float:
    """Seconds of silence after which a rank, or a stopped loader worker, counts as lost (TESSERA_PEER_TIMEOUT)."""
    return _seconds("TESSERA_PEER_TIMEOUT", 60)


def loader_timeout_s() -> float:
    """Seconds that a rank waits for a batch of its loader workers (TESSERA_LOADER_TIMEOUT)."""
    return _seconds("TESSERA_LOADER_TIMEOUT", 600)


def control_timeout_s() -> float:
    """Seconds that ranks wait for one another in a control message (TESSERA_CONTROL_TIMEOUT)."""
    return _seconds("TESSERA_CONTROL_TIMEOUT", 1800)


def join_timeout_s() -> float:
    """Seconds that ranks wait for all of them to start (TESSERA_JOIN_TIMEOUT)."""
    return _seconds("TESSERA_JOIN_TIMEOUT", 600)


def lock_timeout_s() -> float:
    """Seconds that a start waits for another process that writes its run directory (TESSERA_LOCK_TIMEOUT)."""
    return _seconds("TESSERA_LOCK_TIMEOUT", 60)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < _MOST_SECONDS:
        raise ConfigError(f"{name}={shown(text)}: expected seconds, more than 0 and less than {_MOST_SECONDS:,.0f}.")
    return value


@dataclass(frozen=True)
class Launch:
    """The place of this process in a distributed job, as its launcher gives it."""

    rank: int = 0
    local_rank: int = 0  # on its node
    size: int = 1
    local_size: int = 1
    address: str | None = None  # where rank 0 listens for the rendezvous; None with a single process
    port: int | None = None
    launcher: str = "plain"  # or "torchrun", "slurm"
    has_store: bool = False  # torchrun itself keeps a store at the address, which outlives the ranks

    @property
    def may_have_own_flags(self) -> bool:
        """Whether its command line may be another than rank 0's: srun gives one to all, torchrun to all of a node."""
        return self.launcher == "torchrun" and (self.local_rank == 0 or not self.has_store)

    @classmethod
    def from_environment(cls, local_rank_flag: int = -1) -> Launch:
        """Read torchrun's variables, which win over its flag `--local-rank`, else SLURM's, else stand alone."""
        env = os.environ
        if "RANK" in env and "WORLD_SIZE" in env:
            size = _integer("WORLD_SIZE", 1, low=1)
            return cls(
                rank=_integer("RANK", 0, high=size - 1),
                local_rank=_integer("LOCAL_RANK", max(local_rank_flag, 0)),
                size=size,
                local_size=_integer("LOCAL_WORLD_SIZE", size, low=1),
                address=env.get("MASTER_ADDR", "127.0.0.1"),
                port=_integer("MASTER_PORT", 29500, high=_PORTS),
                launcher="torchrun",
                has_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        # An interactive `srun --pty bash` sets these with one task, which is a plain start.
        size = _integer("SLURM_NTASKS", 1, low=1)
        if size > 1 and "SLURM_PROCID" in env:
            return cls(
                rank=_integer("SLURM_PROCID", 0, high=size - 1),
                local_rank=_integer("SLURM_LOCALID", 0),
                size=size,
                local_size=_slurm_tasks_on_node(),
                address=env.get("MASTER_ADDR") or first_slurm_host(),
                # One port a job, so that two jobs on one node do not join each other.
                port=_integer("MASTER_PORT", 20000 + _integer("SLURM_JOB_ID", 0) % 20000, high=_PORTS),
                launcher="slurm",
            )
        return cls()


def _integer(name: str, default: int, *, low: int = 0, high: int = 2**31) -> int:
    """Value of a launcher's variable."""
    text = os.environ.get(name) or str(default)
    if not re.fullmatch(r"-?[0-9]{1,18}", text) or not low <= int(text) <= high:
        raise ConfigError(f"{name}={shown(text)}: expected a number from {low} to {high}, as a launcher sets it.")
    return int(text)


def _slurm_tasks_on_node() -> int:
    """Tasks on this node from SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE, written like "2(x3),1"."""
    env = os.environ
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or env["SLURM_NTASKS"]
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"SLURM_TASKS_PER_NODE: found {shown(text)}, expected a list such as '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _integer("SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else counts[0]


def first_slurm_host() -> str:
    """First host of this step, or of the job where SLURM gives only its nodes: "gpu[03-05,9],cpu1" gives "gpu03"."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?", nodes)
    if match is None:
        raise ConfigError(f"SLURM_JOB_NODELIST: cannot read {shown(nodes)}")
    return match[1] + (match[2] or "")
