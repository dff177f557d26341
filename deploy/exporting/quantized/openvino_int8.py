"""8-bit OpenVINO files: convolutions quantised by NNCF's post-training quantisation.

NNCF receives the part from the first convolution to the prediction layers, since it cannot read the branches around
it. SiLU stays float32, so that OpenVINO fuses it with the convolution, and so do the layers of sensitivity.py.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch

from tessera.deploy.exporting.job import ExportJob
from tessera.deploy.exporting.raw_network import quiet
from tessera.models.layers.blocks import Conv
from tessera.utils.machine.optional_packages import import_extra

_CONVOLUTIONS = ("Convolution", "GroupConvolution")


def quantize_openvino(model: Any, job: ExportJob) -> None:
    """Quantise the convolutions of a float32 OpenVINO model in place."""
    openvino = import_extra("openvino", "openvino", "--int8")
    passes = import_extra("openvino.passes", "openvino", "--int8")
    nncf = import_extra("nncf", "openvino", "--int8")
    body, weights = job.convolution_weights, job.quantized_weights
    network = _extract_network(openvino, model.clone(), body)
    manager = passes.Manager()
    manager.register_pass(passes.ConstantFolding())  # the ONNX reader reshapes biases, which NNCF would not correct
    manager.run_passes(network)
    in_float = [node for node in _convolutions(network) if not _weights_of(node) & weights]
    in_float += [node for sigmoid in network.get_ordered_ops() for node in _silu(sigmoid)]
    inputs = _first_inputs(job)
    with quiet("nncf"):
        quantized = nncf.quantize(
            network,
            nncf.Dataset(inputs),
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=len(inputs),
            ignored_scope=nncf.IgnoredScope(names=[node.get_friendly_name() for node in in_float]),
        )
    _insert_network(model, quantized, body)


def _first_inputs(job: ExportJob) -> list[Any]:
    """Return the input of the first convolution for each image: the image, or the output of `Focus`."""
    layer, read = copy.deepcopy(job.model.model[0]).eval(), []
    first = next(module for module in layer.modules() if isinstance(module, Conv))
    first.register_forward_pre_hook(lambda _, given: read.append(given[0].numpy()))
    with torch.no_grad():
        for image in job.calibration_images():
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


def _silu(node: Any) -> list[Any]:
    """Return the nodes of the SiLU that begins with this node; [] = none."""
    readers = [reader.get_node() for reader in node.output(0).get_target_inputs()] if node.get_output_size() else []
    if node.get_type_name() != "Sigmoid" or [reader.get_type_name() for reader in readers] != ["Multiply"]:
        return []
    (product,) = readers
    is_silu = node.input_value(0) in (product.input_value(0), product.input_value(1))
    return [node, product] if is_silu else []


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
    waiting, names = [node.input_value(1).get_node()], set()
    while waiting:
        source = waiting.pop()
        names.add(source.get_friendly_name())
        waiting += [value.get_node() for value in source.input_values()]
    return names
