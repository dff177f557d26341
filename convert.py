"""Write the labels of a dataset in another format: YOLO text, COCO JSON or Pascal VOC.

    uv run convert.py --data my.yaml --to coco --out ../datasets/my-coco
    uv run train.py --data ../datasets/my-coco/my.yaml

Numbers come back exactly where labels are converted there and back. Pictures are linked. What a format has no place
for is said, and kept in conversion.jsonl beside the labels, which convert.py reads (docs/datasets.md). A dataset with
labels that cannot be read is refused, as `train.py --check-data` lists them. Nothing of the source is changed.

From Python: `tessera.convert(data="my.yaml", to="coco", out="my-coco")` takes the names of the flags.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tessera.utils.flags.convert import ConvertConfig
from tessera.utils.startup import check_command_line, end_process

if __name__ == "__main__":
    check_command_line(ConvertConfig)

from tessera.data.conversion.kept import NAME
from tessera.data.conversion.new_folder import new_folder
from tessera.data.conversion.read import read_dataset
from tessera.data.conversion.verify import verify
from tessera.data.conversion.write import write_dataset
from tessera.data.source.place import absolute, require_new
from tessera.data.source.spec import load_spec
from tessera.utils.environment import Launch
from tessera.utils.files import user_path
from tessera.utils.ranks.failures import run_command
from tessera.utils.report.console import print_lines, setup_logging
from tessera.utils.text import counted, first_of

log = logging.getLogger(__name__)

_SHOWN, _NEXT_LINE = 5, "\n  "


class Converted(NamedTuple):
    """What convert.py wrote.

    Attributes:
        yaml: the dataset.
        images, objects: how many; ignored regions are objects too.
        losses: what the labels have no place for → how often.
        notes: what was found beside, a line each.
    """

    yaml: Path
    images: int
    objects: int
    losses: dict[str, int]
    notes: tuple[str, ...]
    exit_code: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return {
            "data": str(self.yaml),
            **{name: getattr(self, name) for name in ("images", "objects", "losses", "notes")},
        }


def convert(config: ConvertConfig) -> Converted:
    """Read the dataset of config.data, write it, and read it again as training would."""
    folder, spec = absolute(user_path(config.out, "--out")), load_spec(config.data)
    require_new(folder, spec, "--out")
    found = read_dataset(spec)
    with new_folder(folder) as part:
        losses = write_dataset(found, part, config.to, copy_images=config.copy_images)
        notes = [*found.notes, *verify(found, part / f"{found.spec.name}.yaml")]
    images = [image for split in found.splits.values() for image in split]
    return Converted(
        folder / f"{found.spec.name}.yaml",
        len(images),
        sum(len(image.objects) for image in images),
        losses,
        tuple(dict.fromkeys(notes)),
    )


def report(converted: Converted, config: ConvertConfig) -> None:
    """What was written, and what is to be known of it."""
    if converted.notes:
        log.warning(f"--data {config.data}:\n  {first_of(converted.notes, _SHOWN, _NEXT_LINE)}")
    for what, count in sorted(converted.losses.items()):
        log.warning(f"{what}: {count:,}{'' if config.to == 'coco' else f'; {NAME} keeps them as they were'}.")
    print_lines(
        f"{counted(converted.images, 'image')} with {counted(converted.objects, 'object')} and ignored "
        f"regions: {converted.yaml}"
    )


def start(given: dict[str, Any]) -> Converted:
    """Do what the flags ask for."""
    config = ConvertConfig(**given)
    setup_logging(0, 1)
    converted = convert(config)
    report(converted, config)
    return converted


def run(**kwargs: Any) -> Converted:
    """Convert from Python; takes the names of the flags.

    Raises:
        UserError: a mistake in the flags or the data, or a folder that cannot be written.
    """
    return start(ConvertConfig.named(kwargs))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code. Of several ranks the first one converts."""
    arguments = sys.argv[1:] if argv is None else argv
    return run_command(ConvertConfig, arguments, lambda given: None if Launch.from_environment().rank else start(given))


if __name__ == "__main__":
    end_process(main())
