"""The one place where environment variables are read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from utils.errors import ConfigError
from utils.files import user_path
from utils.text import shown

REPO = Path(__file__).resolve().parent.parent
_MAX_PIXELS = 1 << 28


def datasets_dir() -> Path:
    """Folder that datasets are looked up in and downloaded to (TESSERA_DATASETS)."""
    return user_path(os.environ.get("TESSERA_DATASETS") or REPO / "datasets", "TESSERA_DATASETS")


def cache_dir() -> Path:
    """Folder for indexes and image caches (TESSERA_CACHE)."""
    return user_path(os.environ.get("TESSERA_CACHE") or "~/.cache/tessera", "TESSERA_CACHE")


def max_pixels() -> int:
    """How many pixels a picture may have (TESSERA_MAX_PIXELS).

    Raises:
        ConfigError: the variable is no positive integer.
    """
    text = os.environ.get("TESSERA_MAX_PIXELS") or str(_MAX_PIXELS)
    if re.fullmatch("0*[1-9][0-9]{0,17}", text):
        return int(text)
    raise ConfigError(f"TESSERA_MAX_PIXELS: found {shown(text)}, expected a number of pixels such as {_MAX_PIXELS}.")


def bound_opencv() -> None:
    """Let OpenCV itself refuse what is larger, in formats whose headers only it reads; call before it is imported."""
    os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(max_pixels()))


def forbid_update_checks() -> None:
    """Keep Albumentations from asking a server for its newest version when it is imported."""
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")


def make_cublas_deterministic() -> None:
    """Let cuBLAS use buffers of a fixed size, as torch demands for deterministic kernels; call before its first use."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def peer_timeout_s() -> float:
    """Seconds of silence after which a rank counts as lost (TESSERA_PEER_TIMEOUT)."""
    return float(os.environ.get("TESSERA_PEER_TIMEOUT") or 60)


def control_timeout_s() -> float:
    """Seconds that ranks wait for one another in a control message (TESSERA_CONTROL_TIMEOUT)."""
    return float(os.environ.get("TESSERA_CONTROL_TIMEOUT") or 1800)


@dataclass(frozen=True)
class Launch:
    """The place of this process in a distributed job, as its launcher gives it.

    Attributes:
        rank, local_rank: this process among all, and on its node.
        size, local_size: how many processes there are, in all and on this node.
        address, port: where rank 0 listens for the rendezvous; None with a single process.
        launcher: "torchrun", "slurm" or "plain".
        has_store: torchrun itself keeps a store at the address, which outlives the ranks.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    address: str | None = None
    port: int | None = None
    launcher: str = "plain"
    has_store: bool = False

    @classmethod
    def from_environment(cls, local_rank_flag: int = -1, env: Mapping[str, str] | None = None) -> Launch:
        """Read torchrun's variables, else SLURM's, else stand alone.

        Args:
            local_rank_flag: `--local-rank` of torch.distributed.launch; the environment wins over it.
            env: the variables; `os.environ` where None.
        """
        env = os.environ if env is None else env
        if "RANK" in env and "WORLD_SIZE" in env:
            size = int(env["WORLD_SIZE"])
            return cls(
                rank=int(env["RANK"]),
                local_rank=int(env.get("LOCAL_RANK", max(local_rank_flag, 0))),
                size=size,
                local_size=int(env.get("LOCAL_WORLD_SIZE", size)),
                address=env.get("MASTER_ADDR", "127.0.0.1"),
                port=int(env.get("MASTER_PORT", "29500")),
                launcher="torchrun",
                has_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        # An interactive `srun --pty bash` sets these with one task, which is a plain start.
        if int(env.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in env:
            return cls(
                rank=int(env["SLURM_PROCID"]),
                local_rank=int(env["SLURM_LOCALID"]),
                size=int(env["SLURM_NTASKS"]),
                local_size=_slurm_tasks_on_node(env),
                address=env.get("MASTER_ADDR") or first_slurm_host(_slurm_nodes(env)),
                # One port a job, so that two jobs on one node do not join each other.
                port=int(env.get("MASTER_PORT") or 20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000),
                launcher="slurm",
            )
        return cls()


def _slurm_nodes(env: Mapping[str, str]) -> str:
    """The nodes of this step, or of the job where SLURM gives only those."""
    return env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"


def _slurm_tasks_on_node(env: Mapping[str, str]) -> int:
    """Tasks on this node from SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE, written like "2(x3),1"."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or env["SLURM_NTASKS"]
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM_TASKS_PER_NODE: found '{text}', expected a list such as '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    node = int(env.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else counts[0]


def first_slurm_host(nodelist: str) -> str:
    """First host of a SLURM node list: "gpu[03-05,9],cpu1" gives "gpu03"."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?", nodelist)
    if match is None:
        raise ValueError(f"SLURM_JOB_NODELIST: cannot read '{nodelist}'")
    return match[1] + (match[2] or "")
