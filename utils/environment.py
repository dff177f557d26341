"""Environment variables, read and set for libraries by this module alone; `Launch`, the ranks of a launcher."""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tessera.utils.errors import ConfigError
from tessera.utils.files import user_path
from tessera.utils.flags.program import BASE
from tessera.utils.text import shown

_MAX_PIXELS = 1 << 28
_PORTS = 2**16 - 1
_MOST_SECONDS = 1e7  # fits into 64 bits also as nanoseconds


def datasets_dir() -> Path:
    """Return the folder of datasets and downloads (TESSERA_DATASETS)."""
    return user_path(os.environ.get("TESSERA_DATASETS") or BASE / "datasets", "TESSERA_DATASETS")


def cache_dir() -> Path:
    """Return the folder of indexes, image caches and matplotlib's font list (TESSERA_CACHE)."""
    return user_path(os.environ.get("TESSERA_CACHE") or "~/.cache/tessera", "TESSERA_CACHE")


def max_pixels() -> int:
    """Return the largest number of pixels of an image (TESSERA_MAX_PIXELS)."""
    text = os.environ.get("TESSERA_MAX_PIXELS") or str(_MAX_PIXELS)
    if re.fullmatch("0*[1-9][0-9]{0,17}", text):
        return int(text)
    raise ConfigError(f"TESSERA_MAX_PIXELS: found {shown(text)}, expected a number of pixels such as {_MAX_PIXELS}.")


def configure_libraries() -> bool:
    """Set variables that libraries read when they are loaded, unless the user has set them.

    Return whether OpenCV's log level was unset.
    """
    is_unset = "OPENCV_LOG_LEVEL" not in os.environ
    for name, value in {
        "OPENCV_IO_MAX_IMAGE_PIXELS": str(max_pixels()),  # for formats whose headers only OpenCV reads
        "OPENCV_LOG_LEVEL": "FATAL",
        "OPENCV_FFMPEG_LOGLEVEL": "-8",  # AV_LOG_QUIET
        "MPLCONFIGDIR": str(cache_dir() / "matplotlib"),  # a list of fonts, by default in the home folder
        "NO_ALBUMENTATIONS_UPDATE": "1",  # a request to a server
        "ORT_DISABLE_TELEMETRY": "1",  # Linux and macOS, from ONNX Runtime 1.29
        # A dump leaves a key in the launcher's store, by which torch aborts the ranks of the next start after 8 min.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        # Non-blocking communicators, the default of torch 2.6 and 2.7.0, hung: pytorch #153960.
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
        # Sums by NVLink switches differ between equal calls (nccl #1497); a detector's gradients hardly gain by them.
        "NCCL_NVLS_ENABLE": "0",
    }.items():
        os.environ.setdefault(name, value)
    return is_unset


def configure_command() -> None:
    """Set variables for a process that runs a command; call before torch is imported.

    torch's C++ log prints errors alone, without stacks of lost connections. Waiting OpenMP threads sleep soon, unless
    the user has set how they wait. By default they spin for milliseconds. Beside another job, or loader workers, that
    makes a step many times slower.
    """
    configure_libraries()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def make_cublas_deterministic() -> None:
    """Set the fixed workspace of cuBLAS that deterministic kernels need; call before its first use."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def over_loopback(on: bool) -> Iterator[None]:
    """Let gloo use the loopback interface, not the host's name, for groups made in the body, if the user set none."""
    on = on and "GLOO_SOCKET_IFNAME" not in os.environ
    if on:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        if on:  # a later job of this process may have other hosts
            del os.environ["GLOO_SOCKET_IFNAME"]


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < _MOST_SECONDS:
        raise ConfigError(f"{name}={shown(text)}: expected seconds, more than 0 and less than {_MOST_SECONDS:,.0f}.")
    return value


# Time limits in seconds.
peer_timeout_s = partial(_seconds, "TESSERA_PEER_TIMEOUT", 60)  # without a heartbeat; then a process counts as lost
loader_timeout_s = partial(_seconds, "TESSERA_LOADER_TIMEOUT", 600)  # for a batch
control_timeout_s = partial(_seconds, "TESSERA_CONTROL_TIMEOUT", 1800)  # for other ranks in a control message
join_timeout_s = partial(_seconds, "TESSERA_JOIN_TIMEOUT", 600)  # for all ranks to start
lock_timeout_s = partial(_seconds, "TESSERA_LOCK_TIMEOUT", 60)  # for the lock on the run directory


@dataclass(frozen=True)
class Launch:
    """Rank and size of this process in a distributed job, as its launcher sets them."""

    rank: int = 0
    local_rank: int = 0  # on its node
    size: int = 1
    address: str = ""  # of the rendezvous, on rank 0's host; "" with a single process
    port: int = 0
    launcher: str = "plain"  # or "torchrun", "srun", "mpirun" …
    has_store: bool = False  # torchrun serves a store at the address, which outlives the ranks
    problem: str = ""  # why this process cannot join the other ones, of which there are signs

    @property
    def may_have_own_flags(self) -> bool:
        """Whether its flags may differ from rank 0's: srun gives the same to all ranks, torchrun to those of a node."""
        return self.launcher == "torchrun" and (self.local_rank == 0 or not self.has_store)

    @property
    def server(self) -> str:
        """Name of the process that serves the job's store."""
        return "torchrun" if self.has_store else "rank 0"

    @classmethod
    def from_environment(cls, local_rank_flag: int = -1) -> Launch:
        """Read torchrun's variables, which take precedence over `--local-rank`, else those of srun, mpirun and others.

        Without any it is one rank.
        """
        env = os.environ
        if "RANK" in env and "WORLD_SIZE" in env:
            size = _integer("WORLD_SIZE", 1, low=1)
            return cls(
                rank=_integer("RANK", 0, high=size - 1),
                local_rank=_integer("LOCAL_RANK", max(local_rank_flag, 0)),
                size=size,
                address=env.get("MASTER_ADDR", "127.0.0.1"),
                port=_integer("MASTER_PORT", 29500, high=_PORTS),
                launcher="torchrun",
                has_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        started = [(_integer(names[1], 1, low=1), names) for names in _LAUNCHERS if names[1] in env]
        if _is_task_of_srun():
            tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
            started.insert(0, (_integer(tasks, 1, low=1), ("srun", tasks, "SLURM_PROCID", "SLURM_LOCALID")))
        # A launcher may start another one's processes: the one with the most has started the ranks.
        size, (launcher, _, *names) = max(started, key=lambda found: found[0], default=(1, ("plain", "")))
        if size == 1:
            found = "" if started else _sign_of_others(local_rank_flag)
            return cls(problem=f"{found} {_ALONE}" if found else "")
        rank, local_rank = (_integer(name, 0, high=size - 1) for name in names)
        problem = ""
        address, port = env.get("MASTER_ADDR"), _integer("MASTER_PORT", 0, high=_PORTS)
        if launcher == "srun":
            address = address or _first_slurm_host()
            # One port per job, so that two jobs on one node do not join each other.
            port = port or 20000 + _integer("SLURM_JOB_ID", 0) % 20000
        elif env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size) and (job := env.get("PMIX_NAMESPACE")):  # on one host
            address, port = address or "127.0.0.1", port or 20000 + zlib.crc32(job.encode()) % 20000
        if not address or not port or names[1] not in env:
            problem = (
                f"process {rank} of {size} of {launcher}, whose processes cannot find each other. Start them with "
                f"torchrun (on one host: torchrun --standalone --nproc-per-node {size} …), or set MASTER_ADDR and "
                f"MASTER_PORT for all: the host of rank 0, and a free port there. {_ALONE}"
            )
        return cls(rank, local_rank, size, address or "", port, launcher, problem=problem)


# Names of launchers, and their variables for the number of processes, the rank, and the rank on its host.
_LAUNCHERS = (
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("mpiexec", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),  # MPICH, Intel MPI
    ("mpirun_rsh", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),  # MVAPICH
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK"),  # LSF
    ("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK"),
)
_ALONE = "For one process alone set WORLD_SIZE=1 and RANK=0."
_SPECIAL_STEPS = 0xFFFFFFF0  # of SLURM, from this id on: the batch script, the shell of salloc


def _is_task_of_srun() -> bool:
    """Return whether srun has started this process; a batch script has the variables of a task but for its step."""
    return "SLURM_PROCID" in os.environ and _integer("SLURM_STEP_ID", _SPECIAL_STEPS, high=2**32) < _SPECIAL_STEPS


def _sign_of_others(local_rank_flag: int) -> str:
    """Return what shows that this process is one of several, which it cannot join, and how to start them; or ""."""
    env = os.environ
    torchrun = "Start it with torchrun, which gives each process RANK, WORLD_SIZE and LOCAL_RANK."
    if "RANK" in env:
        return f"RANK={shown(env['RANK'])} without WORLD_SIZE. {torchrun}"
    most = {"WORLD_SIZE": 1, "LOCAL_RANK": 0, "PMIX_RANK": 0, "SKYPILOT_NUM_NODES": 1}
    numbers = {name: _integer(name, 0) for name in most}
    numbers["--local-rank"], most["--local-rank"] = local_rank_flag, 0
    if name := next((name for name in most if numbers[name] > most[name]), ""):
        return f"{name}={numbers[name]} without RANK: this process is one of several. {torchrun}"
    hosts = {"PET_NNODES": env.get("PET_NNODES", "1").split(":")[-1], "SM_HOSTS": env.get("SM_HOSTS", "")}
    for name, found in hosts.items():
        if "," in found or (found.isdecimal() and found != "1"):
            return f"{name}={shown(env[name])}: each host runs this command on its own. {torchrun}"
    if (tasks := _integer("SLURM_NTASKS", 1, low=1)) > 1:
        return f"SLURM_NTASKS={tasks}, but this process is no task of srun: start it with srun, or srun --ntasks 1."
    return ""


def _integer(name: str, default: int, *, low: int = 0, high: int = 2**31) -> int:
    text = os.environ.get(name) or str(default)
    if not re.fullmatch(r"-?[0-9]{1,18}", text) or not low <= int(text) <= high:
        raise ConfigError(f"{name}={shown(text)}: expected a number from {low} to {high}, as a launcher sets it.")
    return int(text)


def _first_slurm_host() -> str:
    """Return the first host of this step, or of the job: "gpu03" for "gpu[03-05,9],cpu1"."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?", nodes)
    if match is None:
        raise ConfigError(f"SLURM_JOB_NODELIST: cannot read {shown(nodes)}")
    return match[1] + (match[2] or "")
