"""Runtimes of exported files: ONNX Runtime, OpenVINO, TorchScript, ncnn and LiteRT.

An opener raises a UserError where the runtime or its device is missing or the file is another program's, and any
exception where the file is damaged.
"""

from __future__ import annotations

import re
import threading
import warnings
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.deploy.runtime.exported import (
    METADATA,
    Description,
    MissingDevice,
    exported_detector,
    exported_network,
    parse_metadata,
    runtime_errors,
)
from tessera.utils.checkpoints.weights import EXPORTED
from tessera.utils.errors import UserError, did_you_mean
from tessera.utils.evaluation.network import MAX_CONCURRENT, ImageDetector, Network
from tessera.utils.files import open_plain, reachable_path
from tessera.utils.flags.program import called
from tessera.utils.machine.accelerator import Accelerator, explain_out_of_memory_loading
from tessera.utils.machine.host import capture_library_output
from tessera.utils.machine.optional_packages import import_extra

PRECISION = "f32"  # OpenVINO's default is bfloat16 on some processors, with other boxes
SECTION = "tessera"  # section of an OpenVINO model's rt_info with the metadata
PROGRAMS = {".torchscript"}  # loading one runs its code
_LONGEST = 1 << 28  # bytes of an .xml, without weights
_LOADING = threading.Lock()  # what is captured belongs to the whole process
_NOTHING = re.compile(b"(?!)")  # no line of a library is expected
# The binding of OpenVINO builds its type tables in the first call that needs them and may release the GIL meanwhile:
# two threads in their first call could deadlock.
_FIRST_CALL = threading.Lock()


def open_exported(name: str | Path, accelerator: Accelerator, *, trust_file: bool = False) -> Network | ImageDetector:
    """Open an exported file in its runtime, with as many threads as torch.

    A program is refused without `trust_file`, before anything of it is read.

    Raises:
        UserError: the file is missing, damaged, another program's, or a program that is not trusted; or its runtime or
            device is missing.
    """
    path = reachable_path(name, "--weights")
    if not path.is_file():
        beside = [found.name for found in path.parent.glob("*")] if path.parent.is_dir() else []
        raise UserError(f"--weights {name}: no such file.{did_you_mean(path.name, beside)} Expected an exported file.")
    suffix = path.suffix.lower()
    if suffix in PROGRAMS and not trust_file:
        raise UserError(
            f"--weights {name}: a {suffix} file is a program; loading it can run anything with your rights. Give "
            "--trust-file (Python: trust_file=True) if you trust its author, else use the checkpoint or a file of "
            f"{called('export.py')} --include onnx, which holds no code."
        )
    if suffix in (".param", ".tflite") and not accelerator.is_host:
        raise MissingDevice(f"--weights {name}: this format runs on the CPU only. Give --device cpu.")
    with (
        _LOADING,
        runtime_errors(EXPORTED[suffix], path, "load"),
        explain_out_of_memory_loading(path, accelerator),
        capture_library_output(_NOTHING),
    ):
        return _OPENERS[suffix](path, accelerator)


class _Session:
    """A file in ONNX Runtime; `open_with` opens an `InferenceSession` with a number of threads per run."""

    def __init__(self, open_with: Callable[[int], Any], is_host: bool) -> None:
        self._open_with, self._threads = open_with, torch.get_num_threads() if is_host else 1
        self.opened = open_with(self._threads)
        self._pool: ThreadPoolExecutor | None = None

    def enable_concurrency(self) -> int:
        """As Model: small networks are hardly faster on two threads than on one."""
        concurrent = min(self._threads, MAX_CONCURRENT)
        if concurrent > 1 and self._pool is None:
            self.opened = self._open_with(self._threads // concurrent)
            self._pool = ThreadPoolExecutor(concurrent, "ONNX Runtime")
        return concurrent

    def rows(self, name: str, images: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(self.opened.run(None, {name: images})[0])

    def rows_concurrently(self, name: str, images: NDArray[Any]) -> NDArray[Any]:
        """Return the rows, image by image after `enable_concurrency`."""
        if self._pool is None or len(images) == 1:
            return self.rows(name, images)
        return np.concatenate([*self._pool.map(partial(self.rows, name), np.split(images, len(images)))])

    def detect(self, inputs: dict[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        """Return boxes, scores and classes of an image; the file may take a batch."""
        if "images" not in inputs:
            found: Sequence[NDArray[Any]] = self.opened.run(["boxes", "scores", "classes"], inputs)
            return found
        inputs["images"] = inputs["images"][None]
        *found, counts = self.opened.run(["boxes", "scores", "classes", "counts"], inputs)
        return [part[0, : counts[0]] for part in found]


def open_onnx(path: Path, accelerator: Accelerator) -> Network | ImageDetector:
    """Open an ONNX file; without its provider a MissingDevice is raised."""
    library = import_extra("onnxruntime", "export", str(path))
    library.set_default_logger_severity(4)
    providers = accelerator.onnx_providers
    _require(providers[0], library.get_available_providers(), path)

    def open_with(threads: int) -> Any:
        options = library.SessionOptions()
        options.log_severity_level = 4  # its log has names of the file raw; its exceptions say the same
        options.intra_op_num_threads = threads
        # Spinning threads would occupy the cores that decoding and NMS need between two images.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        by_provider = [accelerator.onnx_options, *({} for _ in providers[1:])]
        return library.InferenceSession(str(path), options, providers=list(providers), provider_options=by_provider)

    session = _Session(open_with, accelerator.is_host)
    opened = session.opened
    _require(providers[0], opened.get_providers(), path)
    inputs = "; ".join(f"{value.name} {value.type} {value.shape}" for value in opened.get_inputs())
    strings = dict(opened.get_modelmeta().custom_metadata_map)
    description = Description.read(strings, path, f"its inputs: {inputs}")
    runtime, concurrency = f"ONNX Runtime, {opened.get_providers()[0]}", session.enable_concurrency
    if not description.whole:
        first = opened.get_inputs()[0]
        batch = first.shape[0] if isinstance(first.shape[0], int) else None
        predict = partial(session.rows_concurrently if batch is None else session.rows, first.name)
        return exported_network(description, runtime, accelerator, predict, batch, concurrency)
    # Files of earlier exports have defaults for the thresholds.
    named = [*opened.get_inputs(), *opened.get_overridable_initializers()]
    ranks = {value.name: len(value.shape) for value in named}
    return exported_detector(
        description, runtime, session.detect, ranks, "images" if "images" in ranks else "image", concurrency
    )


def _require(wanted: str, found: Sequence[str], path: Path) -> None:
    if wanted not in found:
        package = "onnxruntime-gpu in place of onnxruntime" if wanted.startswith("CUDA") else "an onnxruntime with it"
        raise MissingDevice(
            f"{path}: the requested device needs {wanted}, but ONNX Runtime has {', '.join(found)}. Install {package}, "
            "or give --device cpu."
        )


def open_openvino(path: Path, accelerator: Accelerator) -> Network | ImageDetector:
    """Open an OpenVINO file, .xml with its weights, .bin, beside it."""
    openvino = import_extra("openvino", "openvino", str(path))
    with _FIRST_CALL:  # from NumPy's types to OpenVINO's, and back
        np.array(openvino.Tensor(np.zeros(1, np.float32), shared_memory=True).data)
    core, device = openvino.Core(), accelerator.openvino_device
    if device not in core.available_devices:
        raise MissingDevice(
            f"{path}: OpenVINO has {', '.join(core.available_devices)} here, not the requested device. Give "
            "--device cpu."
        )
    if not path.with_suffix(".bin").is_file():
        raise UserError(f"{path}: its weights, {path.with_suffix('.bin').name}, are not beside it. Copy both files.")
    with open_plain(path, _LONGEST) as file:
        start = file.read(1 << 12)
    if b"<net" not in start:  # OpenVINO would try each reader that it has, which takes minutes
        raise UserError(f"{path}: found no <net> at its start, expected an OpenVINO file. Export it again.")
    model = core.read_model(path)
    compiled = core.compile_model(
        model, device, {"INFERENCE_PRECISION_HINT": PRECISION, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    )
    own = threading.local()  # a request serves one thread at a time

    def compute(inputs: dict[str, Any]) -> dict[str, NDArray[Any]]:
        if not hasattr(own, "request"):
            own.request = compiled.create_infer_request()
        found = own.request.infer(inputs, share_inputs=True)
        return {output.get_any_name(): np.array(value) for output, value in found.items()}

    def detect(inputs: dict[str, Any]) -> list[NDArray[Any]]:
        found = compute(inputs)
        return [found[name] for name in ("boxes", "scores", "classes")]

    found = model.get_rt_info([SECTION]).value if model.has_rt_info([SECTION]) else {}  # {}: another program's
    strings = {str(key): str(getattr(value, "value", value)) for key, value in found.items()}
    description = Description.read(strings, path)
    devices = compiled.get_property("EXECUTION_DEVICES")
    runtime = f"OpenVINO, {', '.join(devices) if isinstance(devices, list) else devices}"
    if description.whole:
        ranks = {value.get_any_name(): len(value.get_partial_shape()) for value in compiled.inputs}
        return exported_detector(description, runtime, detect, ranks)
    taken, given = compiled.input(0).get_any_name(), compiled.output(0).get_any_name()
    first = compiled.input(0).get_partial_shape()[0]
    batch = None if first.is_dynamic else first.get_length()
    return exported_network(description, runtime, accelerator, lambda images: compute({taken: images})[given], batch)


def open_torchscript(path: Path, accelerator: Accelerator) -> Network:
    """Open a TorchScript file, which is a program: loading one can run anything."""
    extra = {METADATA: ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated
        module: Any = torch.jit.load(path, accelerator.device, _extra_files=extra).eval()
    description = Description.read(parse_metadata(extra[METADATA]), path)

    @torch.no_grad()
    def compute(images: NDArray[np.float32]) -> NDArray[Any]:
        found = module(torch.from_numpy(images).to(accelerator.device))
        return np.asarray((found[0] if isinstance(found, (tuple, list)) else found).float().cpu().numpy())

    return exported_network(description, f"TorchScript, {accelerator.device}", accelerator, compute)


def open_ncnn(path: Path, accelerator: Accelerator) -> Network:
    """Open an ncnn file, .ncnn.param with .ncnn.bin and .ncnn.json beside it."""
    weights, metadata = path.with_suffix(".bin"), path.with_suffix(".json")
    for other in (weights, metadata):
        if not other.is_file():
            raise UserError(f"{path}: {other.name} is not beside it. Copy all files of the export.")
    description = Description.read(parse_metadata(metadata.read_bytes()), path)
    ncnn = import_extra("ncnn", "ncnn", str(path))
    net = ncnn.Net()
    net.opt.num_threads = torch.get_num_threads()
    net.opt.use_vulkan_compute = False
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
    net.opt.use_bf16_storage = False
    if net.load_param(str(path)) or net.load_model(str(weights)):
        raise UserError(f"{path}: ncnn cannot load it. Export it again.")

    def predict(images: NDArray[np.float32]) -> NDArray[Any]:
        with net.create_extractor() as extractor:
            extractor.input("in0", ncnn.Mat(images[0]).clone())  # pnnx's names
            code, found = extractor.extract("out0")
        if code:
            raise UserError(f"{path}: ncnn cannot compute it (code {code}). Export it again.")
        rows = np.array(found)
        return rows.reshape(1, -1, rows.shape[-1])

    return exported_network(description, "ncnn, cpu", accelerator, predict, batch=1)


def open_litert(path: Path, accelerator: Accelerator) -> Network:
    """Open a LiteRT file with an appended archive of metadata."""
    try:
        with zipfile.ZipFile(path) as archive:
            strings = parse_metadata(archive.read(METADATA))
    except (zipfile.BadZipFile, NotImplementedError, KeyError, ValueError, OSError):
        strings = {}
    description = Description.read(strings, path)
    module = import_extra("ai_edge_litert.interpreter", "litert", str(path))
    interpreter = module.Interpreter(model_path=str(path), num_threads=torch.get_num_threads())
    interpreter.allocate_tensors()
    (taken,), (given, *_) = interpreter.get_input_details(), interpreter.get_output_details()
    one_caller = threading.Lock()

    def predict(images: NDArray[np.float32]) -> NDArray[Any]:
        with one_caller:
            interpreter.set_tensor(taken["index"], images)
            interpreter.invoke()
            return np.array(interpreter.get_tensor(given["index"]))

    return exported_network(description, "LiteRT, cpu", accelerator, predict, batch=int(taken["shape"][0]))


_OPENERS: dict[str, Callable[[Path, Accelerator], Network | ImageDetector]] = {
    ".onnx": open_onnx,
    ".xml": open_openvino,
    ".torchscript": open_torchscript,
    ".param": open_ncnn,
    ".tflite": open_litert,
}
