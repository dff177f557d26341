"""The flags of compare.py."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.utils.errors import ConfigError
from tessera.utils.flags.measuring import MeasuringConfig
from tessera.utils.flags.options import option
from tessera.utils.flags.program import called
from tessera.utils.flags.requirement import Requirement, parsed_requirement

_SIDE = "runs, checkpoints or exported files of one kind, such as the same training with other seeds"


@dataclass(frozen=True)
class CompareConfig(MeasuringConfig):
    """Compare detector A with detector B on the same images."""

    program = "compare.py"
    weights_fields = ("a", "b")

    models: tuple[str, ...] = option(
        (), "A and B: each a run's folder, a checkpoint (--list-weights), or a file of export.py", positional="MODEL"
    )
    a: tuple[str, ...] = option((), f"side A, where it is several: {_SIDE}", many=True)
    b: tuple[str, ...] = option((), "side B, likewise; differences are B − A", many=True)
    require: tuple[str, ...] = option(
        (), 'end with 1 where a difference does not meet this, such as "map >= -0.01" "ms <= 1"', many=True
    )
    project: str = option("runs/compare", "folder of runs")

    def __post_init__(self) -> None:
        super().__post_init__()
        program = called(self.program)
        if self.models:
            count = len(self.models)
            if self.a or self.b or count != 2:
                beside = " beside --a and --b" if self.a or self.b else ""
                raise ConfigError(
                    f"{program}: found {count} MODEL{'S' * (count > 1)}{beside}, expected two, A and B; several of a "
                    "side are given as --a a1.pt a2.pt --b b1.pt b2.pt."
                )
            for side, model in zip(("a", "b"), self.models, strict=True):
                object.__setattr__(self, side, (model,))
            object.__setattr__(self, "models", ())
        if not (self.a and self.b):
            missing = "nothing to compare" if not (self.a or self.b) else f"no --{'b' if self.a else 'a'}"
            raise ConfigError(f"{program}: {missing}. Give two models: {program} A B, or --a A --b B.")
        _ = self.requirements

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """`--require`, read.

        Raises:
            ConfigError: one has another form.
        """
        return tuple(map(parsed_requirement, self.require))
