"""Registry of export formats, the values of `--include`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tessera.deploy.exporting.flags import ExportConfig
from tessera.deploy.exporting.job import VARIANTS, ExportJob
from tessera.deploy.exporting.network_writers import (
    write_litert,
    write_ncnn,
    write_pt2,
    write_safetensors,
    write_small_pt,
    write_torchscript,
)
from tessera.deploy.exporting.onnx_file import write_onnx, write_openvino
from tessera.deploy.exporting.parity.file_content import files_of
from tessera.utils.errors import ConfigError, UserError, did_you_mean
from tessera.utils.files import atomic_write
from tessera.utils.machine.optional_packages import explain_library_errors, import_extra
from tessera.utils.text import shown


@dataclass(frozen=True)
class Format:
    """An export format.

    `open_model` or `load_weights` must know its suffix, since parity/verify.py opens each written file again.
    """

    name: str  # value of `--include`
    suffix: str  # of the file name
    variants: tuple[str, ...]  # supported flags among `VARIANTS`
    write: Callable[[ExportJob, Path], None]  # writes the file and its companions to a path in an empty folder
    extra: str = ""  # extra of pyproject.toml that installs the packages; "" = none
    packages: tuple[str, ...] = ()  # required modules
    quantiser: str = ""  # module required by `--int8`

    def require(self, config: ExportConfig) -> None:
        """Raise a UserError where a flag is not supported or a package is missing."""
        for flag in VARIANTS:
            if getattr(config, flag) and flag not in self.variants:
                flags = f"--include {self.name} --{flag}"
                raise ConfigError(f"{flags}: {self.name} has no such variant. Remove --{flag} or {self.name}.")
        for package in self.packages:
            import_extra(package, self.extra, f"--include {self.name}")
        if config.int8:
            import_extra(self.quantiser, self.extra, "--int8")

    def export(self, job: ExportJob) -> Path:
        """Write the file and its companions atomically; a UserError where that or a library fails."""
        path = job.file(self.suffix)
        try:
            with tempfile.TemporaryDirectory() as folder:
                staged = Path(folder) / path.name
                modules = (*self.packages, self.quantiser) if job.config.int8 else self.packages
                with explain_library_errors(f"--include {self.name}", modules, self.extra):
                    self.write(job, staged)
                for made, target in reversed([*zip(files_of(staged), files_of(path), strict=True)]):
                    with made.open("rb") as source, atomic_write(target) as file:
                        shutil.copyfileobj(source, file)
        except OSError as error:
            raise UserError(
                f"{path}: cannot write the export: {error.strerror or error}. Free space there and in the temporary "
                "folder (TMPDIR), and make both writable."
            ) from error
        return path


_BARE, _OPENVINO = ("raw", "end2end"), ("raw", "half", "int8", "end2end")
FORMATS = (
    Format("onnx", ".onnx", VARIANTS, write_onnx, "export", ("onnx", "onnx_ir", "onnxscript"), "onnxruntime"),
    Format("openvino", ".xml", _OPENVINO, write_openvino, "openvino", ("onnx", "onnxscript", "openvino"), "nncf"),
    Format("torchscript", ".torchscript", _BARE, write_torchscript),
    Format("pt2", ".pt2", _BARE, write_pt2),
    Format("safetensors", ".safetensors", ("half",), write_safetensors, "safetensors", ("safetensors",)),
    # ncnn and LiteRT networks take one size: square, or `--raw --imgsz H W`.
    Format("ncnn", ".ncnn.param", _BARE, write_ncnn, "ncnn", ("pnnx",)),
    Format("litert", ".tflite", _BARE, write_litert, "litert", ("litert_torch",)),
    # Without the optimizer; the suffix keeps it from replacing the checkpoint.
    Format("pt", "-weights.pt", ("half",), write_small_pt),
)


def chosen(names: Sequence[str]) -> list[Format]:
    """Return the formats of `--include` without duplicates; commas may separate names too."""
    by_name = {one.name: one for one in FORMATS}
    known = ", ".join(by_name)
    words = " ".join(names).lower().replace(",", " ").split()
    for word in words:
        if word not in by_name:
            raise ConfigError(f"--include {shown(word)}: no such format.{did_you_mean(word, by_name)} Known: {known}.")
    if not words:
        raise ConfigError(f"--include: found nothing, expected formats among {known}.")
    return [by_name[word] for word in dict.fromkeys(words)]
