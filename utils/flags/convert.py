"""The flags of convert.py."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.utils.errors import ConfigError
from tessera.utils.flags.options import Options, option

TARGETS = ("coco", "voc", "yolo")


@dataclass(frozen=True)
class ConvertConfig(Options):
    """Write the labels of a dataset in another format, with links to its pictures."""

    program = "convert.py"

    data: str = option("", "dataset YAML")
    to: str = option("", "format to write: coco, voc or yolo", choices=("", *TARGETS))
    out: str = option("", "new folder for labels, links to the pictures, and a YAML that trains")
    copy_images: bool = option(False, "copy the pictures instead of linking them", kind=bool)

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag in ("data", "to", "out"):
            if not getattr(self, flag):
                raise ConfigError(f"--{flag}: none given. Give --data my.yaml --to {'|'.join(TARGETS)} --out FOLDER.")
