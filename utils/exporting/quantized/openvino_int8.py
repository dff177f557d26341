"""`best-int8.xml`: the graph of best.xml with its convolutions in 8 bits, by NNCF's post-training quantisation.

NNCF sees the part from the network's images to the head's last convolutions, which it must not touch, and nothing of
the rest: it does not read the branches that the suppression has.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tessera.utils.exporting.job import ExportJob
from tessera.utils.exporting.quantized.calibration import calibration_inputs, quantized_weights
from tessera.utils.exporting.quiet import quiet
from tessera.utils.machine.extras import import_extra

_CONVOLUTIONS = ("Convolution", "GroupConvolution")


def quantize_openvino(model: Any, job: ExportJob) -> None:
    """Bring the convolutions of a model to 8 bits, in place.

    Args:
        model: of OpenVINO, float32.
        job: what it was made of.
    """
    openvino = import_extra("openvino", "openvino", "--int8")
    nncf = import_extra("nncf", "openvino", "--int8")
    weights = quantized_weights(job)
    network, last = _network(openvino, model.clone(), weights)
    inputs = list(calibration_inputs(job))
    with quiet("nncf"):
        quantized = nncf.quantize(
            network,
            nncf.Dataset(inputs),
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=len(inputs),
            ignored_scope=nncf.IgnoredScope(names=last),
        )
    _put_back(model, quantized, weights)


def _network(openvino: Any, model: Any, weights: Collection[str]) -> tuple[Any, list[str]]:
    """From the images to the predictions' logits, as a model of its own; and the names of the last convolutions."""
    first, last = _ends(model, weights)
    source = first.input_value(0)
    images = openvino.op.Parameter(source.get_element_type(), source.get_partial_shape())
    images.set_friendly_name("network_images")
    first.input(0).replace_source_output(images.output(0))
    return openvino.Model([node.output(0) for node in last], [images], "network"), [n.get_friendly_name() for n in last]


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
    convolutions = [node for node in model.get_ordered_ops() if node.get_type_name() in _CONVOLUTIONS]
    return convolutions[0], [node for node in convolutions if not _weights_of(node) & set(weights)]


def _weights_of(node: Any) -> set[str]:
    """Names of the constants that a convolution's weights come from, over the operators between them."""
    waiting, names = [node.input_value(1).get_node()], set()
    while waiting:
        source = waiting.pop()
        names.add(source.get_friendly_name())
        waiting += [value.get_node() for value in source.input_values()]
    return names
