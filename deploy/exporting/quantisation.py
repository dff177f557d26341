"""Post-training quantisation to 8 bits: sensitive layers, rounding of weights, ONNX Runtime and OpenVINO.

Convolutions are quantised, and in ONNX files (QDQ form) the operators between them. Weights have a scale per channel,
activations one per tensor, from their range on the calibration images. SiLU, resize, decoding, scores, NMS and the
sensitive layers stay float32.

Legend: G groups, O outputs of a group, K inputs of an output (channels of a group × kernel), L positions in an image.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.deploy.exporting.network import RawNetwork, quiet
from tessera.models.detector import DetectionModel
from tessera.models.layers.blocks import Conv
from tessera.utils.machine.optional_packages import import_extra

SENSITIVITY_IMAGES, ROUNDING_IMAGES = 4, 16
MAX_EFFECT = 0.035  # relative change of the scores (root mean square) that 8 bits in one layer may cause
_STEPS = 127  # of a weight, each side of 0
_DAMPING = 0.01  # of the mean square of the inputs, added to that of each: some are always 0

# Operators of ONNX that are quantised.
QUANTIZED_OPERATORS = frozenset({"Conv", "Clip", "Mul", "Sigmoid", "Concat", "Add", "MaxPool", "Resize"})
_CONTRIBUTED, _SILU = "com.microsoft", "QuickGelu"  # domain of ONNX Runtime's own operators, and one of them
SILU_LOW = -8.0  # SiLU is −0.003 there; lower values would only coarsen the quantisation steps
_WARNINGS, _ERRORS = 2, 3  # log severities of ONNX Runtime; the first is its default

_CONVOLUTIONS = ("Convolution", "GroupConvolution")  # of OpenVINO


def sensitive_layers(model: DetectionModel, images: Iterable[Tensor]) -> tuple[int, ...]:
    """Return the numbers of the layers, as the model YAML counts them, that stay float32.

    The first is always among them: with three input channels it is slower in 8 bits.
    """
    return (0, *(layer for layer, effect in layer_effects(model, images).items() if layer and effect > MAX_EFFECT))


def layer_effects(model: DetectionModel, images: Iterable[Tensor]) -> dict[int, float]:
    """Return the relative change of the scores (root mean square) by 8 bits in each layer.

    `images` are float32 (1, 3, H, W) each.
    """
    network, inputs = RawNetwork(model), tuple(images)
    found: dict[int, float] = {}
    with torch.no_grad():
        exact = [network(image)[..., 4:] for image in inputs]
        size = sum(float(scores.square().sum()) for scores in exact)
        for number in range(len(network.model.model)):
            quantized = copy.deepcopy(network)
            convolutions = [one for one in quantized.model.model[number].modules() if isinstance(one, Conv)]
            if convolutions and size:
                _compute_in_8_bits(convolutions)
                rounded = (quantized(image)[..., 4:] for image in inputs)
                change = sum(float((one - two).square().sum()) for one, two in zip(exact, rounded, strict=True))
                found[number] = (change / size) ** 0.5
    return found


def _compute_in_8_bits(convolutions: Iterable[Conv]) -> None:
    for module in convolutions:
        weight = module.conv.weight.data
        steps = weight.abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-12) / _STEPS  # of each output
        module.conv.weight.data = (weight / steps).round() * steps
        module.register_forward_pre_hook(lambda _, given: (_rounded(given[0]),))
        module.register_forward_hook(lambda _, given, made: _rounded(made))


def _rounded(values: Tensor) -> Tensor:
    """Round to 256 steps from the smallest to the largest value, 0 among them."""
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    step = (high - low) / 255 or 1.0
    return torch.fake_quantize_per_tensor_affine(values, step, round(-low / step), 0, 255)


@torch.no_grad()
def round_weights(network: nn.Module, names: Collection[str], images: Iterable[Tensor]) -> None:
    """Round convolution weights to 255 symmetric steps per output, in place.

    It takes 4 K² bytes of memory per group: 70 MB for 1.9 million weights, 3 GB for 86 million. BatchNorm of `network`
    is folded. `names` are parameter names, of which unknown ones are ignored; `images` are float32 (1, 3, H, W) each.
    """
    convolutions = [module for name, module in network.named_modules() if f"{name}.weight" in names]
    assert convolutions, names
    moments: dict[nn.Module, Tensor] = {}

    def observe(convolution: Any, given: tuple[Tensor]) -> None:
        columns = F.unfold(
            given[0], convolution.kernel_size, convolution.dilation, convolution.padding, convolution.stride
        )
        parts = columns.unflatten(1, (convolution.groups, -1))[0]  # (G, K, L)
        moments[convolution] = moments.get(convolution, torch.zeros(())) + parts @ parts.mT

    hooks = [convolution.register_forward_pre_hook(observe) for convolution in convolutions]
    for image in images:
        network(image)
    for hook in hooks:
        hook.remove()
    for convolution, moment in moments.items():
        weight: Any = convolution.weight
        parts = weight.reshape(len(moment), -1, moment.shape[-1])
        rounded = [round_together(part, one) for part, one in zip(parts, moment, strict=True)]
        weight.copy_(torch.stack(rounded).reshape(weight.shape))


def round_together(weights: Tensor, moment: Tensor) -> Tensor:
    """Return weights (O, K) rounded to steps at a small mean square error of the outputs.

    Weights of inputs with the largest mean square are rounded first. The largest weight of each output stays.
    `moment` (K, K) are the sums of products of two inputs.
    """
    order = moment.diagonal().argsort(descending=True)
    left, product = weights[:, order].double(), moment[order][:, order].double()
    step = left.abs().amax(1).clamp(min=1e-12) / _STEPS
    largest = left.abs() >= step[:, None] * (_STEPS - 1e-6)
    exact = left.clone()
    product += torch.eye(len(product)) * (_DAMPING * product.diagonal().mean() + 1e-12)
    spread = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(product)), upper=True)
    for k in range(left.shape[1]):
        nearest = torch.where(largest[:, k], exact[:, k], (left[:, k] / step).round().clamp(-_STEPS, _STEPS) * step)
        lost = (left[:, k] - nearest) / spread[k, k]
        left[:, k:] -= lost[:, None] * spread[k, k:]
        left[:, k] = nearest
    return left[:, order.argsort()].to(weights.dtype)


def quantize_onnx(content: bytes, weights: Collection[str], feeds: Iterator[dict[str, Any]]) -> bytes:
    """Return a float32 ONNX file with quantised convolutions, checked.

    `weights` are the names of those that are quantised, `feeds` the inputs of each calibration run.
    """
    onnx = import_extra("onnx", "export", "--int8")
    ir = import_extra("onnx_ir", "export", "--int8")
    onnxruntime = import_extra("onnxruntime", "export", "--int8")
    quantization = import_extra("onnxruntime.quantization", "export", "--int8")
    model = onnx.load_from_string(content)
    fuse_silu(model, weights)
    onnxruntime.set_default_logger_severity(_ERRORS)  # without advice that does not apply
    with tempfile.TemporaryDirectory() as folder, quiet():
        path = Path(folder) / "int8.onnx"
        quantization.quantize_static(
            model,
            path,
            SimpleNamespace(get_next=lambda: next(feeds, None)),  # a CalibrationDataReader by its one method
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            calibrate_method=quantization.CalibrationMethod.MinMax,
            nodes_to_quantize=quantized_nodes(model.graph, weights),
        )
        sorted_model = ir.load(path)
        sorted_model.graph.sort()  # the quantiser appends nodes that branches of an If read
        sorted_model.metadata_props.pop("onnx.infer", None)  # added by the quantiser
        made = ir.to_proto(sorted_model)
    onnxruntime.set_default_logger_severity(_WARNINGS)
    quantized: bytes = made.SerializeToString()
    onnx.checker.check_model(quantized)
    return quantized


def fuse_silu(model: Any, weights: Collection[str]) -> None:
    """Fuse SiLU after the convolutions with these weights into one operator, in place.

    The operator is ONNX Runtime's own, and OpenVINO knows it. Separate `Sigmoid` and `Mul` would be quantised, or take
    twice the time in float. The clip at `SILU_LOW` limits the range of the convolution; the quantiser removes it.
    """
    onnx = import_extra("onnx", "export", "--int8")
    graph = model.graph
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    given = {node.output[0] for node in graph.node if node.op_type == "Conv" and set(node.input) & set(weights)}
    low = onnx.numpy_helper.from_array(np.float32(SILU_LOW), "silu_low")
    for node in graph.node:
        after = readers.get(node.output[0], []) if node.op_type == "Sigmoid" and node.input[0] in given else []
        if len(after) == 1 and after[0].op_type == "Mul" and set(after[0].input) == {node.input[0], node.output[0]}:
            (cut,), (silu,) = node.output, after[0].output
            node.CopyFrom(onnx.helper.make_node("Clip", [node.input[0], low.name], [cut], node.name))
            joined = onnx.helper.make_node(_SILU, [cut], [silu], after[0].name, domain=_CONTRIBUTED, alpha=1.0)
            after[0].CopyFrom(joined)
    graph.initializer.append(low)
    model.opset_import.append(onnx.helper.make_opsetid(_CONTRIBUTED, 1))


def quantized_nodes(graph: Any, weights: Collection[str]) -> list[str]:
    """Return the names of the convolutions with these weights and of the operators between them."""
    names: list[str] = []
    values: set[str] = set()
    for node in graph.node:
        read = weights if node.op_type == "Conv" else values if node.op_type in (*QUANTIZED_OPERATORS, _SILU) else ()
        if any(name in read for name in node.input):
            values.update(node.output)
            if node.op_type in QUANTIZED_OPERATORS:
                names.append(node.name)
    return names


def quantize_openvino(
    model: Any, first: nn.Module, images: Iterable[Tensor], body: Collection[str], weights: frozenset[str]
) -> None:
    """Quantise the convolutions of a float32 OpenVINO model in place by NNCF.

    NNCF receives the part from the first convolution to the prediction layers, since it cannot read the branches
    around it. SiLU stays float32, so that OpenVINO fuses it with the convolution.

    `first` is the first layer, `body` all convolution weights but those of the prediction layers, `weights` those that
    are quantised.
    """
    openvino = import_extra("openvino", "openvino", "--int8")
    passes = import_extra("openvino.passes", "openvino", "--int8")
    nncf = import_extra("nncf", "openvino", "--int8")
    network = _extract_network(openvino, model.clone(), body)
    manager = passes.Manager()
    manager.register_pass(passes.ConstantFolding())  # the ONNX reader reshapes biases, which NNCF would not correct
    manager.run_passes(network)
    in_float = [node.get_friendly_name() for node in _convolutions(network) if not _weights_of(node) & weights]
    inputs = _first_inputs(first, images)
    with quiet():
        quantized = nncf.quantize(
            network,
            nncf.Dataset(inputs),
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=len(inputs),
            ignored_scope=nncf.IgnoredScope(in_float, types=["Sigmoid", "Multiply"], validate=False),  # types of SiLU
        )
    _insert_network(model, quantized, body)


def _first_inputs(layer: nn.Module, images: Iterable[Tensor]) -> list[Any]:
    """Return the input of the first convolution for each image: the image, or the output of `Focus`."""
    layer, read = copy.deepcopy(layer).eval(), []
    first = next(module for module in layer.modules() if isinstance(module, Conv))
    first.register_forward_pre_hook(lambda _, given: read.append(given[0].numpy()))
    with torch.no_grad():
        for image in images:
            layer(image)
    return read


def _extract_network(openvino: Any, model: Any, weights: Collection[str]) -> Any:
    """Return the part from the first convolution to the logits as a model of its own."""
    first, last = _ends(model, weights)
    source = first.input_value(0)
    images = openvino.op.Parameter(source.get_element_type(), source.get_partial_shape())
    images.set_friendly_name("network_images")
    first.input(0).replace_source_output(images.output(0))
    return openvino.Model([node.output(0) for node in last], [images], "network")


def _insert_network(model: Any, quantized: Any, weights: Collection[str]) -> None:
    """Connect a whole model to its quantised part."""
    first, last = _ends(model, weights)
    (images,) = quantized.get_parameters()
    source = first.input_value(0)
    for reader in list(images.output(0).get_target_inputs()):
        reader.replace_source_output(source)
    for node, result in zip(last, quantized.get_results(), strict=True):
        logits = result.input_value(0)
        for reader in list(node.output(0).get_target_inputs()):
            reader.replace_source_output(logits)
    model.validate_nodes_and_infer_types()


def _ends(model: Any, weights: Collection[str]) -> tuple[Any, list[Any]]:
    """Return the first convolution and the prediction layers."""
    convolutions = _convolutions(model)
    return convolutions[0], [node for node in convolutions if not _weights_of(node) & set(weights)]


def _convolutions(model: Any) -> list[Any]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() in _CONVOLUTIONS]


def _weights_of(node: Any) -> set[str]:
    """Return the names of the nodes that a convolution's weights come from."""
    sources = [node.input_value(1).get_node()]
    for source in sources:
        sources += [value.get_node() for value in source.input_values()]
    return {source.get_friendly_name() for source in sources}
