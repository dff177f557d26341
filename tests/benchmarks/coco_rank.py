"""train.py that writes down what each optimizer step really does, one line of JSON a step; see `coco_scale`.

SEEN in the environment is the file, to which the rank's number is added; after STEPS steps rank 0 is asked to stop.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tessera.commands import train
from tessera.utils.engine.step import StepResult, TrainStep
from tessera.utils.types import Batch

RANK, STEPS = os.environ["RANK"], int(os.environ["STEPS"])
seen: list[dict[str, Any]] = []
norms: list[float] = []


def recorded(batches: Iterable[Batch], found: dict[str, Any]) -> Iterator[Batch]:
    """The batches, with their images written down: those that are trained on, and how many were read for them."""
    for batch in batches:
        found["batch_at"].append(time.time())
        found["images"].append(batch.indices.tolist())
        found["read"].append(len(batch.loaded))
        yield batch


def biases(model: nn.Module) -> Tensor:
    """All biases: they begin near 0 and move at once, so that a small share of their way is no rounding error."""
    return torch.cat([value.detach().double().flatten() for key, value in model.state_dict().items() if "bias" in key])


def digest(model: nn.Module) -> str:
    """Of parameters and buffers, bit by bit."""
    state = hashlib.blake2b(digest_size=8)
    for value in model.state_dict().values():
        state.update(value.cpu().numpy().tobytes())
    return state.hexdigest()


def watched(
    self: TrainStep, batches: Iterable[Batch], window: int, asked: Callable[[], bool], step: Any = TrainStep.__call__
) -> StepResult:
    """As a step, with what it does written down."""
    state = self._state
    found: dict[str, Any] = {"epoch": state.progress.epoch, "batch": state.progress.step_in_epoch, "window": window}
    found |= {"images": [], "read": [], "batch_at": []}
    before = biases(state.ema.model)
    result: StepResult = step(self, recorded(batches, found), window, asked)
    way = biases(state.model) - before
    groups = state.optimizer.param_groups
    found |= {
        "rates": [group["lr"] for group in groups],
        "momentum": groups[0]["momentum"],
        "weight_decay": [group["weight_decay"] for group in groups],
        "norm": norms[-1],
        "updates": state.ema.updates,
        "ema_moved": float((biases(state.ema.model) - before) @ way / (way @ way)),
        "digest": digest(state.model),
        "step": state.progress.step,
        "done_at": time.time(),
    }
    seen.append(found)
    if len(seen) == STEPS and RANK == "0":
        os.kill(os.getpid(), signal.SIGUSR1)
    return result


def clip(*given: Any, real: Any = nn.utils.clip_grad_norm_, **named: Any) -> Tensor:
    """As torch's, with the norm before it written down."""
    norm: Tensor = real(*given, **named)
    norms.append(float(norm))
    return norm


if __name__ == "__main__":
    TrainStep.__call__ = watched  # type: ignore[method-assign, assignment]
    nn.utils.clip_grad_norm_ = clip
    code = train.main()
    peaks = [resource.getrusage(who).ru_maxrss >> 10 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    Path(f"{os.environ['SEEN']}.{RANK}").write_text("\n".join(map(json.dumps, [*seen, peaks])))
    sys.exit(code)
