"""The bare network as an ONNX graph: what torch's exporter makes of the fused model, its head ready for inference.

Legend: B images, A predictions of an image, C classes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tessera.models.detector import DetectionModel
from tessera.utils.exporting.graph import Value

log = logging.getLogger(__name__)

OPSET = 18  # of the standard operators, where no other is asked for
MOST_CELLS = 2**12  # of a side, of the largest stride
_EXAMPLE_HW = 5, 4  # cells; unequal, and none that a model would treat as special


class Network(nn.Module):
    """A model from images to predictions that programs without it can use.

    Args:
        model: fused, in evaluation mode.
        half: whether its weights and features are float16; decoding stays float32.
        joined: multiply classes by objectness where the head has one: `predictions`. Else rows are as decoded.
    """

    def __init__(self, model: DetectionModel, *, half: bool = False, joined: bool = True) -> None:
        super().__init__()
        self.model, self.half_precision = model, half
        self.joined = joined and model.head.has_objectness

    def forward(self, images: Tensor) -> Tensor:
        """float32 (B, 3, H, W) RGB in 0 … 1 to float32 (B, A, 4 + C): cx, cy, w, h in pixels, scores of the classes."""
        decoded: Tensor = self.model(images.half() if self.half_precision else images)[0]
        if self.joined:
            decoded = torch.cat((decoded[..., :4], decoded[..., 4:5] * decoded[..., 5:]), -1)
        return decoded


def inference_copy(model: DetectionModel, *, half: bool = False) -> DetectionModel:
    """A copy on the CPU for evaluation, with BatchNorm folded into the convolutions.

    Args:
        model: the raw model, its head's `keep_inference` done.
        half: weights in float16; buffers such as anchors, which decoding takes, stay float32.
    """
    copied = DetectionModel(model.yaml, names=model.names)
    copied.head.keep_inference(end2end=not model.head.needs_suppression)
    copied.load_state_dict(model.state_dict())
    copied = copied.eval().fuse()
    for parameter in copied.parameters():
        parameter.requires_grad_(False)
    if half:
        for module in copied.modules():
            if module is not copied.head:
                for name, buffer in module.named_buffers(recurse=False):
                    if buffer.is_floating_point():
                        setattr(module, name, buffer.half())
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.half()
    return copied


def export_network(
    network: Network, size_hw: tuple[int, int] | None = None, *, output: str = "predictions", opset: int = OPSET
) -> Value:
    """The network as a model of onnx_ir, with the input `images` and one output.

    Args:
        network: what to export.
        size_hw: height and width in pixels, multiples of the stride; None = any. The number of images is free.
        output: name of the output.
        opset: of the standard operators.
    """
    import onnx_ir as ir

    stride = network.model.stride
    height, width = size_hw or tuple(stride * cells for cells in _EXAMPLE_HW)
    free: dict[int, object] = {0: torch.export.Dim("batch", min=1)}
    if size_hw is None:
        for axis, name in ((2, "height_cells"), (3, "width_cells")):
            free[axis] = stride * torch.export.Dim(name, min=1, max=MOST_CELLS)
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            network.eval(),
            (torch.zeros(2, network.model.channels, height, width),),
            dynamo=True,
            input_names=["images"],
            output_names=[output],
            dynamic_shapes=(free,),
            opset_version=opset,
            verbose=False,
        )
    assert program is not None
    made: Value = ir.from_proto(program.model_proto)
    _forget_origins(made)
    (images,), (predictions,) = made.graph.inputs, made.graph.outputs
    images.shape = ir.Shape(["batch", 3, *(size_hw or ("height", "width"))])  # without the exporter's own names
    numbers = network.model.nc + (5 if network.model.head.has_objectness and not network.joined else 4)
    predictions.shape = ir.Shape(["batch", "rows" if size_hw is None else predictions.shape[1], numbers])
    return made


def _forget_origins(model: Value) -> None:
    """Leave out what the exporter notes of each node: it is larger than the graph, and holds paths of this machine."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.doc_string = model.graph.doc_string = None
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's own progress, and what older versions remark of shapes."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.fx.experimental.symbolic_shapes")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
