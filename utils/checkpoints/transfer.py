"""Transfer of weights: the tensors of a checkpoint that fit a model, and a report of the others."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor

from tessera.utils.errors import UserError
from tessera.utils.text import first_of, one_line

log = logging.getLogger(__name__)

_OTHER = "another architecture"
_LEAST_FRACTION = 0.05  # fraction of a model's weights; what fits by chance is less
_USUAL_FRACTION = 0.5


def intersect_weights(
    model_state: Mapping[str, Tensor],
    checkpoint_state: Mapping[str, Tensor],
    *,
    source: str = "the checkpoint",
    exclude: Iterable[str] = (),
    partial: Collection[str] = (),
) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a checkpoint that fit a model by name and shape, and a report of the others.

    A warning is logged if weights of another architecture initialise less than half of the model.

    Args:
        source: names the checkpoint in messages.
        exclude: regular expressions; tensors with a matching name are not loaded.
        partial: names of tensors that are loaded in part, elsewhere.

    Raises:
        UserError: the weights are of another architecture.
    """
    patterns = [re.compile(pattern) for pattern in exclude]
    own, offered = (
        {k: t for k, t in state.items() if k not in partial and not any(p.search(k) for p in patterns)}
        for state in (model_state, checkpoint_state)
    )
    fitting = {k: t for k, t in offered.items() if k in own and t.shape == own[k].shape}
    different = tensor_differences(own, offered)
    # Counters, norms and anchors are not counted: they have equal shapes in several sizes of a family.
    numbers = {k: t.numel() for k, t in own.items() if k.endswith(".weight") and t.ndim >= 2}
    fraction = sum(numbers.get(k, 0) for k in fitting) / max(1, sum(numbers.values()))  # of the model's weights
    why = _why_not_all(own, offered)
    other = why == _OTHER
    if fraction == 0 or (other and fraction < _LEAST_FRACTION):
        among = f"{fraction:.1%} of the layers' weights" if fraction else "no layer's weights"
        raise UserError(
            f"{source}: the weights do not fit the architecture: {len(fitting)} of {len(model_state)} tensors fit, "
            f"with {among} ({different}). Give the --cfg that belongs to the weights, or no --cfg."
        )
    if other and fraction < _USUAL_FRACTION:
        log.warning(
            f"{source}: only {fraction:.0%} of the model's layers start from these weights, which are of another "
            "architecture. If that is not intended, give the --cfg that belongs to them, or no --cfg."
        )
    report = ""
    if excluded := len(model_state) - len(own) - len(partial):
        report += f"; {excluded} excluded"
    if different:
        lacking = len(own) - len(fitting)
        report += f"; {f'reinitialised {lacking}' if lacking else 'others unused'} ({why}): {different}"
    return fitting, report


def _why_not_all(own: Mapping[str, Tensor], offered: Mapping[str, Tensor]) -> str:
    """Return the reason why a checkpoint fits a model in part: classes, head, or architecture."""
    fitting = {name for name in own if name in offered and own[name].shape == offered[name].shape}
    unfit = (own.keys() | offered.keys()) - fitting
    head = max((name for name in own if name.startswith("model.")), key=_layer, default="")
    if not head or any(_layer(name) not in (_layer(head), -1) for name in unfit):
        return _OTHER
    return "different classes" if own.keys() == offered.keys() else "another kind of head"


def _layer(name: str) -> int:
    """Return 24 for "model.24.m.0.weight"; -1 for a tensor of no layer."""
    found = re.match(r"model\.(\d+)\.", name)
    return int(found[1]) if found else -1


def tensor_differences(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], most: int = 4) -> str:
    """Describe missing, reshaped and surplus tensors of a checkpoint; "" if there are none."""
    lines = [
        f"{name} is {tuple(tensor.shape)}, in the checkpoint {tuple(found[name].shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    lines += [f"{name} is not in the checkpoint" for name in expected if name not in found]
    lines += [
        f"{one_line(name, 60)} of the checkpoint has no place in the model" for name in found if name not in expected
    ]
    return first_of(lines, most, "; ")
