"""What a format is, and which are known; `--include` names them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tessera.utils.errors import ConfigError, UserError, did_you_mean
from tessera.utils.exporting.job import VARIANTS, ExportJob
from tessera.utils.exporting.network_files import (
    write_litert,
    write_ncnn,
    write_pt2,
    write_safetensors,
    write_small_pt,
    write_torchscript,
)
from tessera.utils.exporting.onnx_file import write_onnx, write_openvino
from tessera.utils.exporting.parity.file_content import files_of
from tessera.utils.files import atomic_write
from tessera.utils.flags.export import ExportConfig
from tessera.utils.machine.optional_packages import explain_failures, import_extra
from tessera.utils.text import shown


@dataclass(frozen=True)
class Format:
    """A kind of file that a checkpoint can be exported to.

    What is written is opened again and compared with the network (parity/verify.py), so its suffix must be one that
    `open_model` or `load_weights` knows.

    Attributes:
        name: in `--include`.
        suffix: that the name of the checkpoint, with its variants, gets.
        variants: the flags of `VARIANTS` that it follows.
        write: writes the file, and those that belong to it, to a path in an empty folder.
        extra: of pyproject.toml, that installs its packages; "" where it needs none.
        packages: modules that must be there.
        quantiser: the module that must be there for `--int8`.
    """

    name: str
    suffix: str
    variants: tuple[str, ...]
    write: Callable[[ExportJob, Path], None]
    extra: str = ""
    packages: tuple[str, ...] = ()
    quantiser: str = ""

    def require(self, config: ExportConfig) -> None:
        """Check what can be checked before any work.

        Raises:
            UserError: a flag that this format does not follow, or a package is missing.
        """
        for flag in VARIANTS:
            if getattr(config, flag) and flag not in self.variants:
                flags = f"--include {self.name} --{flag}"
                raise ConfigError(f"{flags}: {self.name} has no such variant. Leave --{flag} out, or {self.name}.")
        for package in self.packages:
            import_extra(package, self.extra, f"--include {self.name}")
        if config.int8:
            import_extra(self.quantiser, self.extra, "--int8")

    def export(self, job: ExportJob) -> Path:
        """Write the file beside what is there, then put it in place whole; after those that belong to it.

        Raises:
            UserError: it cannot be written, or a library fails.
        """
        path = job.file(self.suffix)
        try:
            with tempfile.TemporaryDirectory() as folder:
                staged = Path(folder) / path.name
                modules = (*self.packages, self.quantiser) if job.config.int8 else self.packages
                with explain_failures(f"--include {self.name}", modules, self.extra):
                    self.write(job, staged)
                for made, target in reversed([*zip(files_of(staged), files_of(path), strict=True)]):
                    with made.open("rb") as source, atomic_write(target) as file:
                        shutil.copyfileobj(source, file)
        except OSError as error:
            raise UserError(
                f"{path}: cannot write the export: {error.strerror or error}. Make room there and in the folder for "
                "temporary files (TMPDIR), and both writable."
            ) from error
        return path


_BARE, _OPENVINO = ("raw", "end2end"), ("raw", "half", "int8", "end2end")
FORMATS = (
    # Read by ONNX Runtime, OpenVINO, TensorRT, Triton and others.
    Format("onnx", ".onnx", VARIANTS, write_onnx, "export", ("onnx", "onnx_ir", "onnxscript"), "onnxruntime"),
    # Intel's processors and graphics.
    Format("openvino", ".xml", _OPENVINO, write_openvino, "openvino", ("onnx", "onnxscript", "openvino"), "nncf"),
    # The bare network, for programs that load such files; torch itself recommends torch.export.
    Format("torchscript", ".torchscript", _BARE, write_torchscript),
    # The bare network as a program of torch.export: exact, and loaded without Tessera.
    Format("pt2", ".pt2", _BARE, write_pt2),
    # Weights and what a model needs to be built from them, without a line of code: `--weights best.safetensors`.
    Format("safetensors", ".safetensors", ("half",), write_safetensors, "safetensors", ("safetensors",)),
    # Phones and small boards. The network takes one size, as that of LiteRT: square, or `--raw --imgsz H W`.
    Format("ncnn", ".ncnn.param", _BARE, write_ncnn, "ncnn", ("pnnx",)),
    # Phones; once TensorFlow Lite.
    Format("litert", ".tflite", _BARE, write_litert, "litert", ("litert_torch",)),
    # The weights, without the optimizer, and all that detection and fine-tuning need; never the checkpoint's own name.
    Format("pt", "-weights.pt", ("half",), write_small_pt),
)


def chosen(names: Sequence[str]) -> list[Format]:
    """The formats that `--include` names, each once, in its order; commas between names do too.

    Raises:
        ConfigError: a name is unknown.
    """
    by_name = {one.name: one for one in FORMATS}
    known = ", ".join(by_name)
    words = " ".join(names).lower().replace(",", " ").split()
    for word in words:
        if word not in by_name:
            raise ConfigError(f"--include {shown(word)}: no such format.{did_you_mean(word, by_name)} Known: {known}.")
    if not words:
        raise ConfigError(f"--include: found nothing, expected formats among {known}.")
    return [by_name[word] for word in dict.fromkeys(words)]
