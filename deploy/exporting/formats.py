"""Export formats, the values of `--include`, and their writers.

ONNX and OpenVINO files hold the whole detector, or with `--raw` the bare network; the others the bare network, or the
weights alone.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tessera.deploy.exporting.detector_graph import whole_graph
from tessera.deploy.exporting.flags import ExportConfig
from tessera.deploy.exporting.job import VARIANTS, ExportJob, describe
from tessera.deploy.exporting.network import RawNetwork, network_graph
from tessera.deploy.exporting.quantisation import ROUNDING_IMAGES, quantize_onnx, quantize_openvino, round_weights
from tessera.deploy.foreign.safetensors_file import save_safetensors
from tessera.deploy.runtime.exported import METADATA, files_of
from tessera.deploy.runtime.runtimes import SECTION
from tessera.utils.checkpoints.format import describe_metrics, describe_run, save_checkpoint
from tessera.utils.errors import ConfigError, UserError, did_you_mean
from tessera.utils.files import atomic_write
from tessera.utils.flags.program import program_version
from tessera.utils.flags.version import __version__
from tessera.utils.image_size import size_hw_of
from tessera.utils.machine.optional_packages import explain_library_errors, import_extra
from tessera.utils.text import shown, strict_json

# What a viewer of an ONNX file shows.
_USAGE = """\
import numpy as np, onnxruntime
from PIL import Image
session = onnxruntime.InferenceSession("best.onnx")
image = np.asarray(Image.open("photo.jpg").convert("RGB"))
rules = {"conf": np.array([0.4], np.float32), "iou": np.array([0.45], np.float32), "max_det": np.array([300], np.int64)}
boxes, scores, classes = session.run(None, {"image": image, **rules})
"""
_USAGE_BATCHED = "images uint8 (B, H, W, 3) RGB of one size; counts (B,) are the numbers of detections."
_USAGE_RAW = "images float32 (B, 3, H, W) RGB in 0 … 1; predictions: cx, cy, w, h in pixels, then the classes' scores."


def write_onnx(job: ExportJob, path: Path) -> None:
    content = onnx_bytes(job, half=job.config.half)
    path.write_bytes(quantize_onnx(content, job.quantized_weights, _feeds(job)) if job.config.int8 else content)


def write_openvino(job: ExportJob, path: Path) -> None:
    """As `Format.write`; with `--half` weights are stored as float16 and computed in float32."""
    openvino = import_extra("openvino", "openvino", "--include openvino")
    model = openvino_model(onnx_bytes(job))
    if job.config.int8:
        images = job.calibration_images()
        quantize_openvino(model, job.model.model[0], images, job.convolution_weights, job.quantized_weights)
    openvino.save_model(model, path, compress_to_fp16=job.config.half)


def openvino_model(content: bytes) -> Any:
    """Convert the content of an ONNX file, with its metadata, to an OpenVINO model."""
    onnx = import_extra("onnx", "export", "openvino")
    openvino = import_extra("openvino", "openvino", "openvino")
    model = openvino.Core().read_model(content)
    for entry in onnx.load_from_string(content).metadata_props:
        model.set_rt_info(entry.value, [SECTION, entry.key])
    return model


def onnx_bytes(job: ExportJob, *, half: bool = False) -> bytes:
    """Return the checked content of a file in float32 or float16.

    With `--int8` weights are rounded to 8-bit steps, but stored as float32.
    """
    import onnx
    import onnx_ir as ir

    config = job.config
    network = RawNetwork(job.model, half=half, joined=config.raw)
    if config.int8:
        round_weights(network, job.quantized_weights, job.calibration_images(ROUNDING_IMAGES))
    if config.raw:
        made = network_graph(network, job.size_hw, output="predictions", opset=config.opset)
    else:
        made = whole_graph(network, job.imgsz, batched=config.batched, opset=config.opset)
    made.producer_name, made.producer_version = "tessera", __version__
    made.doc_string = _USAGE_RAW if config.raw else _USAGE_BATCHED if config.batched else _USAGE
    made.metadata_props.update(describe(job, whole=not config.raw))
    content: bytes = ir.to_proto(made).SerializeToString()
    onnx.checker.check_model(content, full_check=True)
    return content


def _feeds(job: ExportJob) -> Iterator[dict[str, Any]]:
    """Yield the inputs of each calibration run of an ONNX file."""
    if job.config.raw:
        yield from ({"images": image.numpy()} for image in job.calibration_images())
        return
    limits = {"conf": np.array([job.conf], np.float32), "max_det": np.array([job.config.max_det], np.int64)}
    if job.model.head.needs_nms:
        limits["iou"] = np.array([job.config.iou_thres], np.float32)
    for image in job.raw_calibration_images():
        yield {**limits, **({"images": image[None]} if job.config.batched else {"image": image})}


def write_torchscript(job: ExportJob, path: Path) -> None:
    network = RawNetwork(job.model)
    images, _ = network.example(job.size_hw)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated, and that Python's numbers are traced
        traced = torch.jit.trace(network, images, check_trace=False)
        torch.jit.save(traced, path, _extra_files={METADATA: strict_json(describe(job, whole=False))})


def write_ncnn(job: ExportJob, path: Path) -> None:
    """As `Format.write`: .ncnn.param and .ncnn.bin, converted by pnnx, and .ncnn.json with the metadata."""
    pnnx = import_extra("pnnx", "ncnn", "--include ncnn")
    network, images, metadata = _of_one_size(job)
    with tempfile.TemporaryDirectory() as folder:  # pnnx writes other files too
        with torch.no_grad():
            pnnx.export(network, f"{folder}/best.pt", (images,), check_trace=False, fp16=False, optlevel=2)
        for suffix in (".bin", ".param"):
            made = Path(folder) / f"best.ncnn{suffix}"
            if not made.is_file():
                raise UserError(f"--include ncnn: pnnx cannot convert {job.path.name}. Use --include onnx.")
            path.with_suffix(suffix).write_bytes(made.read_bytes())
    path.with_suffix(".json").write_text(strict_json(metadata), encoding="utf-8")


def write_litert(job: ExportJob, path: Path) -> None:
    """As `Format.write`, converted by litert-torch."""
    litert_torch = import_extra("litert_torch", "litert", "--include litert")
    network, images, metadata = _of_one_size(job)
    with torch.no_grad():
        litert_torch.convert(network, (images,)).export(str(path))
    with zipfile.ZipFile(path, "a") as archive:  # appended, where readers of the network ignore it
        archive.writestr(METADATA, strict_json(metadata))


def _of_one_size(job: ExportJob) -> tuple[RawNetwork, torch.Tensor, dict[str, str]]:
    height, width = size_hw_of(job.imgsz)
    metadata = {**describe(job, whole=False), "size_hw": strict_json([height, width])}
    return RawNetwork(job.model), torch.rand(1, job.model.channels, height, width), metadata


def write_safetensors(job: ExportJob, path: Path) -> None:
    save_safetensors(path, job.weights, describe(job, whole=False), half=job.config.half)


def write_small_pt(job: ExportJob, path: Path) -> None:
    """As `Format.write`: a checkpoint without the optimizer, with `--half` in float16."""
    content: dict[str, Any] = dict(job.weights.checkpoint or {})
    if not content:  # another program's; its file name tells the licence of the weights
        run = describe_run(job.model, {"weights": job.path.name}, {}, job.imgsz, "")
        state = {"ema": dict(job.weights.state_dict), "epoch": 0, "imgsz": job.weights.imgsz}
        content = {**run, **program_version(), **describe_metrics(None), **state}
    if job.config.half:
        floats = {name: tensor for name, tensor in content["ema"].items() if tensor.is_floating_point()}
        content["ema"] = {**content["ema"], **{name: tensor.half() for name, tensor in floats.items()}}
    save_checkpoint(path, content)


@dataclass(frozen=True)
class Format:
    """An export format.

    `open_model` or `load_weights` must know its suffix, since verify.py opens each written file again.
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
    Format("safetensors", ".safetensors", ("half",), write_safetensors, "safetensors", ("safetensors",)),
    # ncnn and LiteRT networks take one size: that of `--imgsz`.
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
        if word == "pt2":  # of earlier versions
            raise ConfigError("--include pt2: no longer written. Use --include torchscript or onnx.")
        if word not in by_name:
            raise ConfigError(f"--include {shown(word)}: no such format.{did_you_mean(word, by_name)} Known: {known}.")
    if not words:
        raise ConfigError(f"--include: found nothing, expected formats among {known}.")
    return [by_name[word] for word in dict.fromkeys(words)]
