"""The bare network, images to predictions, as a torch module and as an ONNX graph.

Legend: B images, A predictions of an image, C classes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tessera.models.detector import DetectionModel

Value = Any  # of onnx_ir, which is imported where it is needed

MAX_CELLS = 2**12  # of a side, of the largest stride
_EXAMPLE_HW = 5, 4  # cells; unequal, so that the exporter does not take them for one size


class RawNetwork(nn.Module):
    """A fused copy of a model that maps images to predictions.

    Args:
        model: unfused, after its head's `strip_for_inference`.
        half: compute weights and features in float16; decoding stays float32.
        joined: multiply class scores by objectness where the head has one.
    """

    def __init__(self, model: DetectionModel, *, half: bool = False, joined: bool = True) -> None:
        super().__init__()
        self.model, self.half_precision = _inference_copy(model, half=half), half
        self.joined = joined and model.head.has_objectness
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Map float32 (B, 3, H, W) RGB in 0 … 1 to float32 (B, A, 4 + C): cx, cy, w, h in pixels, class scores."""
        decoded: Tensor = self.model(images.half() if self.half_precision else images)[0]
        if self.joined:
            decoded = torch.cat((decoded[..., :4], decoded[..., 4:5] * decoded[..., 5:]), -1)
        return decoded

    def example(self, size_hw: tuple[int, int] | None) -> tuple[Tensor, dict[int, Any]]:
        """Return two images and their dynamic axes: the batch, and without `size_hw` height and width."""
        stride = self.model.stride
        height, width = size_hw or tuple(stride * cells for cells in _EXAMPLE_HW)
        free: dict[int, Any] = {0: torch.export.Dim("batch", min=1)}
        if size_hw is None:
            for axis, name in ((2, "height_cells"), (3, "width_cells")):
                free[axis] = stride * torch.export.Dim(name, min=1, max=MAX_CELLS)
        return torch.zeros(2, self.model.channels, height, width), free


def _inference_copy(model: DetectionModel, *, half: bool) -> DetectionModel:
    copied = DetectionModel(model.yaml, names=model.names)
    copied.head.strip_for_inference(end2end=not model.head.needs_nms)
    copied.load_state_dict(model.state_dict())
    copied = copied.eval().fuse().requires_grad_(False)
    if half:  # but what decoding reads
        anchors = dict(copied.head.named_buffers(recurse=False))
        copied.half()
        for name, buffer in anchors.items():
            setattr(copied.head, name, buffer)
    return copied


def network_graph(network: RawNetwork, size_hw: tuple[int, int] | None, *, output: str, opset: int) -> Value:
    """Return the network as a model of onnx_ir with the input `images` and one output.

    `size_hw` is a multiple of the stride in pixels, None = any. The batch size is dynamic.
    """
    import onnx_ir as ir

    images, free = network.example(size_hw)
    with torch.no_grad(), quiet():
        program = torch.onnx.export(
            network,
            (images,),
            dynamo=True,
            input_names=["images"],
            output_names=[output],
            dynamic_shapes=(free,),
            opset_version=opset,
            verbose=False,
        )
    assert program is not None
    made: Value = ir.from_proto(program.model_proto)
    # The exporter's notes of each node are larger than the graph and hold paths of this machine.
    for noted in (made, made.graph, *made.graph, *(value for node in made.graph for value in node.outputs)):
        noted.metadata_props.clear()
        noted.doc_string = None
    (taken,), (predictions,) = made.graph.inputs, made.graph.outputs
    taken.shape = ir.Shape(["batch", 3, *(size_hw or ("height", "width"))])
    numbers = network.model.nc + (5 if network.model.head.has_objectness and not network.joined else 4)
    predictions.shape = ir.Shape(["batch", "rows" if size_hw is None else predictions.shape[1], numbers])
    return made


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what libraries log below errors."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
