"""`best-int8.xml`: the graph of best.xml with its convolutions in 8 bits, by NNCF's post-training quantisation.

NNCF sees the part from the first convolution to the head's last ones, which it must not touch, and nothing of the rest:
it does not read the branches that the suppression has. SiLU stays float32, so that OpenVINO computes it with the
convolution before, and so do the layers that sensitivity.py finds.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch

from tessera.models.layers.blocks import Conv
from tessera.utils.exporting.job import ExportJob
from tessera.utils.exporting.raw_network import quiet
from tessera.utils.machine.optional_packages import import_extra

_CONVOLUTIONS = ("Convolution", "GroupConvolution")


def quantize_openvino(model: Any, job: ExportJob) -> None:
    """Bring the convolutions of a model of OpenVINO, float32, to 8 bits, in place."""
    openvino = import_extra("openvino", "openvino", "--int8")
    passes = import_extra("openvino.passes", "openvino", "--int8")
    nncf = import_extra("nncf", "openvino", "--int8")
    body, weights = job.body_weights, job.quantized_weights
    network = _network(openvino, model.clone(), body)
    manager = passes.Manager()
    manager.register_pass(passes.ConstantFolding())  # biases become what NNCF corrects: the ONNX reader reshapes them
    manager.run_passes(network)
    in_float = [node for node in _convolutions(network) if not _weights_of(node) & weights]
    in_float += [node for sigmoid in network.get_ordered_ops() for node in _silu(sigmoid)]
    inputs = _read_first(job)
    with quiet("nncf"):
        quantized = nncf.quantize(
            network,
            nncf.Dataset(inputs),
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=len(inputs),
            ignored_scope=nncf.IgnoredScope(names=[node.get_friendly_name() for node in in_float]),
        )
    _put_back(model, quantized, body)


def _read_first(job: ExportJob) -> list[Any]:
    """What the first convolution reads of each picture: its image, or that cut up by `Focus`."""
    layer, read = copy.deepcopy(job.model.model[0]).eval(), []
    first = next(module for module in layer.modules() if isinstance(module, Conv))
    first.register_forward_pre_hook(lambda _, given: read.append(given[0].numpy()))
    with torch.no_grad():
        for image in job.calibration_images():
            layer(image)
    return read


def _network(openvino: Any, model: Any, weights: Collection[str]) -> Any:
    """From what the first convolution reads to the predictions' logits, as a model of its own."""
    first, last = _ends(model, weights)
    source = first.input_value(0)
    images = openvino.op.Parameter(source.get_element_type(), source.get_partial_shape())
    images.set_friendly_name("network_images")
    first.input(0).replace_source_output(images.output(0))
    return openvino.Model([node.output(0) for node in last], [images], "network")


def _silu(node: Any) -> list[Any]:
    """The nodes of SiLU, where this is the first of them."""
    readers = [reader.get_node() for reader in node.output(0).get_target_inputs()] if node.get_output_size() else []
    if node.get_type_name() != "Sigmoid" or [reader.get_type_name() for reader in readers] != ["Multiply"]:
        return []
    (product,) = readers
    is_silu = node.input_value(0) in (product.input_value(0), product.input_value(1))
    return [node, product] if is_silu else []


def _put_back(model: Any, quantized: Any, weights: Collection[str]) -> None:
    """Let a whole model take its logits from a quantised network."""
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
    """The first convolution of a network, and those that give its predictions."""
    convolutions = _convolutions(model)
    return convolutions[0], [node for node in convolutions if not _weights_of(node) & set(weights)]


def _convolutions(model: Any) -> list[Any]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() in _CONVOLUTIONS]


def _weights_of(node: Any) -> set[str]:
    """Names of the constants that a convolution's weights come from, over the operators between them."""
    waiting, names = [node.input_value(1).get_node()], set()
    while waiting:
        source = waiting.pop()
        names.add(source.get_friendly_name())
        waiting += [value.get_node() for value in source.input_values()]
    return names
