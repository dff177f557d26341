"""Export a trained detector to ONNX, OpenVINO, TorchScript and other formats.

    uv run export.py --weights runs/train/exp/weights/best.pt            # best.onnx: image in, boxes out
    uv run export.py --weights yolov5n.pt --conf-thres 0.4 --imgsz 1280
    uv run export.py --weights best.pt --raw --imgsz 384 640             # the bare network, at one size
    uv run export.py --weights last.pt --include pt --half               # weights alone, in float16
    uv run export.py --weights best.pt --include onnx openvino --output models
    uv run export.py --weights best.pt --int8                            # 8-bit quantisation

Files are written beside the checkpoint (of a bare name: to the working directory) or to --output. best.onnx contains
resize, padding, network and NMS; docs/deploy.md shows how to run it.

From Python: `tessera.export(weights="best.pt", include=["onnx"])` takes the same flags.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tessera.deploy.exporting.flags import ExportConfig
from tessera.utils.environment import Launch
from tessera.utils.flags.program import called
from tessera.utils.flags.signature import documented
from tessera.utils.startup import check_command_line

if __name__ == "__main__":
    check_command_line(ExportConfig)

from tessera.deploy.exporting.formats import FORMATS, chosen
from tessera.deploy.exporting.job import ExportJob
from tessera.deploy.exporting.verify import Verified, verify
from tessera.deploy.runtime.exported import size_of
from tessera.utils.checkpoints.run_directory import newest_best_checkpoint
from tessera.utils.checkpoints.weights import own_head
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.ranks.failures import run_command
from tessera.utils.ranks.launch import open_world
from tessera.utils.ranks.world import World
from tessera.utils.report.console import setup_logging

log = logging.getLogger(__name__)


def export(config: ExportConfig, world: World) -> Verified:
    """Write the formats of config.include and verify each beside the checkpoint.

    Raises:
        UserError: a mistake in the flags, or the detections of a file differ from those of the checkpoint.
    """
    setup_logging(world.rank, world.size)
    own_head(config.head)
    formats = chosen(config.include)
    for one in formats:
        one.require(config)
    if not config.weights:
        config = replace(config, weights=newest_best_checkpoint())
    suffix = Path(config.weights).suffix
    if suffix not in ("", ".pt", ".pth"):
        raise UserError(
            f"--weights {config.weights}: found a {suffix} file, expected the .pt checkpoint, such as "
            "runs/train/exp/weights/best.pt."
        )
    job = ExportJob.read(config)
    index, class_of = job.images("val")
    make_output(job.folder)
    written = {}
    for one in formats:
        earlier = ", in place of an earlier one" if job.file(one.suffix).exists() else ""
        written[one.name] = path = one.export(job)
        log.info(f"{one.name}: {path} ({size_of(path) / 1e6:.1f} MB{earlier})")
    return verify(job, written, world, index, class_of)


def make_output(folder: Path) -> None:
    """Create the output folder and check that it is writable."""
    is_of_files = folder.suffix and any(one.suffix.endswith(folder.suffix) for one in FORMATS)
    if is_of_files and not folder.is_dir():
        raise ConfigError(
            f"--output {folder}: found the name of a file, expected a folder. Files are named after the checkpoint."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{folder}: exports cannot be written there ({error.strerror}). Give another folder with --output, or "
            "change its permissions."
        ) from error


def join(given: dict[str, Any]) -> Verified:
    config, launch = ExportConfig(**given), Launch.from_environment()
    if launch.size > 1:
        raise ConfigError(f"{called('export.py')} runs as one process. Start it without a launcher.")
    with open_world(config.device, launch=launch) as world:
        return export(config, world)


@documented(ExportConfig)
def run(**kwargs: Any) -> list[Path]:
    """Export from Python; keyword arguments are the flags. Returns the files.

    Raises:
        UserError: a mistake in the flags, the weights or the data.
    """
    return list(join(ExportConfig.named(kwargs)).files.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return run_command(ExportConfig, sys.argv[1:] if argv is None else argv, join)


if __name__ == "__main__":
    sys.exit(main())
