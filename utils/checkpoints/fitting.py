"""Which weights of a checkpoint fit a model, and what is to be said of the others."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from tessera.data.source.index import SINGLE_CLASS
from tessera.utils.errors import UserError
from tessera.utils.text import first_of, one_line, shown

log = logging.getLogger(__name__)

_OTHER = "for the weights are of another architecture"
_LEAST_SHARE = 0.05  # of the numbers in a model's layers: what fits by chance is less
_ORDINARY_SHARE = 0.5


def intersect_weights(
    model_state: Mapping[str, Tensor],
    checkpoint_state: Mapping[str, Tensor],
    *,
    source: str = "the checkpoint",
    exclude: Iterable[str] = (),
) -> tuple[dict[str, Tensor], str]:
    """The tensors of a checkpoint that fit a model by name and shape.

    Another number of classes changes the head's convolutions: the ordinary case of fine-tuning, reported and no error.
    A warning is logged where weights of another architecture start less than half of the model.

    Args:
        model_state, checkpoint_state: state dictionaries.
        source: names the checkpoint in messages.
        exclude: regular expressions; a tensor whose name contains a match stays as the model has it.

    Returns:
        The fitting tensors, for `load_state_dict(…, strict=False)`, and a report in one line.

    Raises:
        UserError: no layer's weights fit, or so few that it is by chance: the architecture is another one.
    """
    patterns = [re.compile(pattern) for pattern in exclude]
    own, offered = (
        {name: tensor for name, tensor in state.items() if not any(p.search(name) for p in patterns)}
        for state in (model_state, checkpoint_state)
    )
    fitting = {k: t for k, t in offered.items() if k in own and t.shape == own[k].shape}
    different = differences(own, offered)
    share, other = share_of_layers(own, fitting), _why_not_all(own, offered) == _OTHER
    if share == 0 or (other and share < _LEAST_SHARE):
        among = f"{share:.1%} of the layers' weights" if share else "no layer's weights"
        raise UserError(
            f"{source}: an architecture that does not fit the weights: {len(fitting)} of {len(model_state)} tensors "
            f"fit, and {among} among them ({different}). Give the --cfg that belongs to the weights, or no --cfg."
        )
    if other and share < _ORDINARY_SHARE:
        log.warning(
            f"{source}: only {share:.0%} of the model's layers start from these weights, for they are of another "
            "architecture. Give the --cfg that belongs to them, or no --cfg, where that is not meant."
        )
    report = f"{len(fitting)} of {len(model_state)} tensors taken"
    if len(own) < len(model_state):
        report += f"; {len(model_state) - len(own)} left out as asked"
    if different:
        report += f"; the rest starts anew, {_why_not_all(own, offered)}: {different}"
    return fitting, report


def share_of_layers(model_state: Mapping[str, Tensor], fitting: Iterable[str]) -> float:
    """The part of the numbers in a model's layers that some of its tensors have, 0 to 1.

    Counters, norms and a head's anchors have the same shape in several sizes of a family: they do not show a fit.

    Args:
        model_state: a state dictionary.
        fitting: names in it.
    """
    numbers = {k: t.numel() for k, t in model_state.items() if k.endswith(".weight") and t.ndim >= 2}
    return sum(numbers.get(name, 0) for name in fitting) / max(1, sum(numbers.values()))


def _why_not_all(own: Mapping[str, Tensor], offered: Mapping[str, Tensor]) -> str:
    """What is other in a checkpoint that fits a model in part: the number of classes, the head, or more than that."""
    fitting = {name for name in own if name in offered and own[name].shape == offered[name].shape}
    unfit = (own.keys() | offered.keys()) - fitting
    head = max((name for name in own if name.startswith("model.")), key=_layer, default="")
    if not head or any(_layer(name) not in (_layer(head), -1) for name in unfit):
        return _OTHER
    return "as with other classes" if own.keys() == offered.keys() else "for the weights have another kind of head"


def _layer(name: str) -> int:
    """The number of the layer that a tensor such as "model.24.m.0.weight" belongs to; -1 where it belongs to none."""
    found = re.match(r"model\.(\d+)\.", name)
    return int(found[1]) if found else -1


def warn_of_moved_classes(source: str, before: Sequence[str], now: Sequence[str]) -> None:
    """Warn where a model for the classes `now` starts with what weights have learned of others, `before`: of which."""
    moved = moved_classes(before, now) if len(before) == len(now) else ""
    if moved:
        log.warning(
            f"{source}: the data has the classes in another order ({moved}): what was learned of one class is "
            "taken for another. Put them in the checkpoint's order where that is not meant."
        )
    elif renamed := renamed_classes(before, now):
        log.info(
            f"{source}: the data has as many classes, but others ({renamed}): what was learned of one is the "
            "start of the other."
        )


def names_say_nothing(names: Sequence[str]) -> bool:
    """Whether classes have no names but their numbers, or the one of all objects under --single-cls."""
    return list(names) in ([str(number) for number in range(len(names))], [SINGLE_CLASS])


def renamed_classes(before: Sequence[str], now: Sequence[str]) -> str:
    """Classes of one number and another name, such as "2 is 'car' in the checkpoint and 'cow' in the data".

    "" where that are less than half of them, where the numbers of classes differ, or where names are but numbers.
    """
    if len(before) != len(now) or names_say_nothing(before):
        return ""
    pairs = enumerate(zip(before, now, strict=True))
    renamed = [
        f"{number} is {shown(old)} in the checkpoint and {shown(new)} in the data"
        for number, (old, new) in pairs
        if old.strip().casefold() != new.strip().casefold()
    ]
    return first_of(renamed, 3) if 2 * len(renamed) > len(now) else ""


def moved_classes(
    before: Sequence[str], now: Sequence[str], owners: tuple[str, str] = ("the checkpoint", "the data")
) -> str:
    """Classes that two lists of names give another number, such as "'cat' is 0 in the checkpoint and 1 in the data".

    A class that one of them names differently has not moved. "" where there are none.
    """
    places = {name.strip().casefold(): number for number, name in enumerate(now)}
    moved = [
        f"{shown(name)} is {number} in {owners[0]} and {place} in {owners[1]}"
        for number, name in enumerate(before)
        if (place := places.get(name.strip().casefold(), number)) != number
    ]
    return first_of(moved, 3)


def differences(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], most: int = 4) -> str:
    """Tensors of a model that a checkpoint lacks or has in another shape, and surplus ones; "" where there are none."""
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
