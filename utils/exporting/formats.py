"""What a format is, and which are known; `--include` names them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tessera.utils.errors import ConfigError, did_you_mean
from tessera.utils.exporting.subject import Subject
from tessera.utils.machine.extras import import_extra
from tessera.utils.text import shown

VARIANTS = ("raw", "half", "int8", "end2end", "batched")  # flags that not every format can follow


class Format(ABC):
    """A kind of file that a checkpoint can be exported to.

    Attributes:
        name: in `--include`.
        suffix: of the file.
        extra: of pyproject.toml, that installs its packages; "" where it needs none.
        packages: modules that must be there.
        variants: the flags of `VARIANTS` that it follows.
    """

    name: ClassVar[str]
    suffix: ClassVar[str]
    extra: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()
    variants: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def write(self, subject: Subject, path: Path) -> Path:
        """Write the file, whole or not at all.

        Args:
            subject: what is exported.
            path: the file to write, `Subject.file(suffix)`.

        Returns:
            The file or folder that was written.

        Raises:
            UserError: it cannot be.
        """

    def require(self, subject: Subject) -> None:
        """Check what can be checked before any work.

        Raises:
            ConfigError: a flag that this format does not follow.
            UserError: a package is missing.
        """
        asked = [flag for flag in VARIANTS if getattr(subject.config, flag) and flag not in self.variants]
        if asked:
            raise ConfigError(
                f"--include {self.name} --{asked[0]}: {self.name} has no such variant. Leave --{asked[0]} out, or "
                f"{self.name}."
            )
        for package in self.packages:
            import_extra(package, self.extra, f"--include {self.name}")


def chosen(names: Sequence[str], known: Sequence[Format]) -> list[Format]:
    """The formats that `--include` names, each once, in its order; commas between names do too.

    Raises:
        ConfigError: a name is unknown.
    """
    by_name = {one.name: one for one in known}
    words = [word for name in names for word in name.lower().replace(",", " ").split()]
    for word in words:
        if word not in by_name:
            raise ConfigError(
                f"--include {shown(word)}: no such format.{did_you_mean(word, by_name)} Known: {', '.join(by_name)}."
            )
    if not words:
        raise ConfigError(f"--include: found nothing, expected formats among {', '.join(by_name)}.")
    return [by_name[word] for word in dict.fromkeys(words)]
