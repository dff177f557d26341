"""ONNX graph of the whole detector: resize, letterbox, network, confidence thresholds, NMS, boxes in image pixels.

Its equals in Python are `letterbox_image` of deploy/runtime/pipeline.py and models/nms.py. Integers stay below 2^31 for
sides up to 65,000 px: some runtimes compute int64 in 32 bits.

The Resize operator differs between runtimes in antialiasing, and from OpenCV in rounding. Here integers decide which
pixels contribute, so that every runtime computes the same as OpenCV: INTER_AREA when shrinking, INTER_LINEAR when
enlarging.

Legend: B images, A predictions of an image, C classes, D detections; n sizes before, d sizes after a resize, K pixels
that contribute to one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tessera.deploy.exporting.network import RawNetwork, Value, network_graph
from tessera.utils.image_size import ImageSize
from tessera.utils.types import FILL


def whole_graph(network: RawNetwork, imgsz: ImageSize, *, batched: bool, opset: int) -> Value:
    """Return a model of onnx_ir: `image` uint8 (H, W, 3) RGB to `boxes`, `scores`, `classes` in pixels of the image.

    The inputs `conf`, `iou` and `max_det` have no default: of those, JavaScript's ONNX Runtime, OpenVINO, OpenCV and
    TensorRT would use the default whatever is given. A network without NMS has no `iou`.

    `network` is not joined. With `batched` the input is `images` (B, H, W, 3) of one size, outputs are (B, n, …), and
    `counts` (B,) are the numbers of detections.
    """
    import onnx_ir as ir

    model = network_graph(network, None, output="decoded", opset=opset)
    graph = model.graph
    (images,), (decoded,) = graph.inputs, graph.outputs
    head = network.model.head
    limits = Limits(
        typed_value("conf", np.float32, [1]),
        typed_value("iou", np.float32, [1]) if head.needs_nms else None,
        typed_value("max_det", np.int64, [1]),
    )

    before = Nodes("before")
    images.name = "letterboxed"
    given = typed_value("images" if batched else "image", np.uint8, [*["batch"] * batched, "height", "width", 3])
    pixels = given if batched else before.Unsqueeze(given, [0])
    placed = preprocess(before, pixels, imgsz, network.model.stride)
    ir.convenience.replace_all_uses_with(images, placed.images)

    after = Nodes("after")
    found = detect(after, decoded, limits, has_objectness=head.has_objectness)
    found = found._replace(boxes=to_image_pixels(after, found.boxes, placed))
    n: list[int | str] = ["batch", "n"] if batched else ["n"]
    counts: list[Value] = []
    if batched:
        count = after.Slice(after.Shape(given), [0], [1])
        boxes, scores, classes, *counts = batch_detections(after, found, limits.max_det, count)
    else:
        boxes, scores, classes = (after.Slice(part, [0], limits.max_det) for part in found[:3])

    graph.insert_before(graph[0], before.nodes)
    graph.extend(after.nodes)
    graph.inputs[:] = [given, *(limit for limit in limits if limit is not None)]
    graph.outputs[:] = [
        typed_value("boxes", np.float32, [*n, 4], boxes),
        typed_value("scores", np.float32, n, scores),
        typed_value("classes", np.int64, n, classes),
        *(typed_value("counts", np.int64, ["batch"], each) for each in counts),
    ]
    for value in (*before.initializers, *after.initializers):
        graph.register_initializer(value)
    graph.name = "detector"
    return model


class Nodes:
    """A list of nodes that grows by calls: `nodes.Add(a, b)` appends a node and returns its output or outputs.

    Inputs are values of onnx_ir, None, or NumPy arrays and numbers, which become initializers: Python integers int64,
    other numbers float32. A branch shares constants and counter of its `parent`; `prefix` begins all names.
    """

    def __init__(self, prefix: str, parent: Nodes | None = None) -> None:
        self.nodes: list[Any] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Any] = parent._constants if parent else {}
        self._counter: Iterator[int] = parent._counter if parent else itertools.count(1)
        self._prefix = prefix

    @property
    def initializers(self) -> list[Any]:
        return list(self._constants.values())

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        if not kind[0].isupper():
            raise AttributeError(kind)

        def add(*inputs: Value, outputs: int = 1, **attributes: Any) -> Any:
            import onnx_ir as ir

            made = [ir.Value(name=self._name()) for _ in range(outputs)]
            values = [self._value(value) for value in inputs]
            self.nodes.append(ir.node(kind, values, attributes, outputs=made, name=self._name()))
            return made[0] if outputs == 1 else tuple(made)

        return add

    def cast(self, value: Value, dtype: type[np.generic]) -> Value:
        import onnx_ir as ir

        return self.Cast(value, to=int(ir.DataType.from_numpy(np.dtype(dtype))))

    def if_images(self, condition: Value, *branches: Callable[[Nodes], Value]) -> Value:
        """Return the uint8 (B, 3, H, W) of an If node.

        Each branch, where the condition holds and where not, writes into the nodes it receives and returns its output.
        """
        import onnx_ir as ir

        graphs = {}
        for name, write in zip(("then", "else"), branches, strict=True):
            branch = Nodes(self._prefix, self)
            output = write(branch)
            output.dtype, output.shape = ir.DataType.UINT8, ir.Shape([None] * 4)  # OpenCV requires them
            title = f"{self._prefix}_{name}{self._name()}"
            graphs[f"{name}_branch"] = ir.Graph([], [output], nodes=branch.nodes, name=title)
        return self.If(condition, **graphs)

    def _name(self) -> str:
        return f"{self._prefix}_{next(self._counter)}"

    def _value(self, value: Value) -> Any:
        import onnx_ir as ir

        if value is None or isinstance(value, ir.Value):
            return value
        array = np.asarray(value)
        if not isinstance(value, (np.ndarray, np.generic)):
            array = array.astype(np.int64 if array.dtype.kind in "iu" else np.float32)
        key = str(array.dtype), array.shape, array.tobytes()
        if key not in self._constants:
            name = self._name()
            made = ir.Value(name=name, const_value=ir.tensor(array, name=name))
            made.dtype, made.shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
            self._constants[key] = made
        return self._constants[key]


def typed_value(name: str, dtype: type[np.generic], shape: Sequence[int | str | None], value: Value = None) -> Any:
    """Return a graph input, or `value` as a graph output; dynamic sizes are strings in `shape`."""
    import onnx_ir as ir

    value = ir.Value() if value is None else value
    value.name, value.dtype, value.shape = name, ir.DataType.from_numpy(np.dtype(dtype)), ir.Shape(list(shape))
    return value


class Letterboxed(NamedTuple):
    """Letterboxed images and their placement."""

    images: Value  # float32 (B, 3, H', W') in 0 … 1
    before: Size  # before and after resizing
    after: Size
    left: Value  # int64 (1,)
    top: Value


def preprocess(g: Nodes, images: Value, imgsz: ImageSize, stride: int) -> Letterboxed:
    """Resize images of one size, uint8 (B, H, W, 3) RGB, to the size `imgsz`, pad and scale them."""
    shape = g.Shape(images)
    before = Size(g.Slice(shape, [1], [2]), g.Slice(shape, [2], [3]))
    ratio = _fit_ratio(g, before, imgsz)
    after = Size(*(_loaded(g, side, ratio) for side in before))
    resized = g.if_images(
        g.Greater(ratio.of, ratio.to),
        lambda branch: shrink(branch, images, before, after),
        lambda branch: branch.if_images(
            branch.Less(ratio.of, ratio.to),
            lambda inner: enlarge(inner, images, before, after),
            lambda inner: inner.Transpose(images, perm=[0, 3, 1, 2]),
        ),
    )
    padded = Size(*(_padded(g, side, ratio, stride) for side in before))
    spare = Size(*(g.Sub(whole, side) for whole, side in zip(padded, after, strict=True)))
    top, left = (g.Div(side, [2]) for side in spare)
    margins = g.Concat([0, 0], top, left, [0, 0], g.Sub(spare.height, top), g.Sub(spare.width, left), axis=0)
    letterboxed = g.Pad(resized, margins, np.array(FILL, np.uint8))
    return Letterboxed(g.Div(g.cast(letterboxed, np.float32), 255.0), before, after, left, top)


class _Ratio(NamedTuple):
    """Factor of lengths by which an image is resized, int64 (1,): `to` / `of`."""

    to: Value
    twice: Value  # 2 · to
    of: Value


def _fit_ratio(g: Nodes, before: Size, imgsz: ImageSize) -> _Ratio:
    """Return what `fit_ratios` of data/feed/image_sizes.py does."""
    if isinstance(imgsz, int):
        return _Ratio([imgsz], [2 * imgsz], g.Max(*before))
    by_height = g.LessOrEqual(g.Mul(before.width, [imgsz.height]), g.Mul(before.height, [imgsz.width]))
    to = g.Where(by_height, [imgsz.height], [imgsz.width])
    return _Ratio(to, g.Mul(to, [2]), g.Where(by_height, before.height, before.width))


def _loaded(g: Nodes, side: Value, ratio: _Ratio) -> Value:
    """Return side · ratio, half to even, at least 1."""
    twice = g.Mul(ratio.of, [2])
    scaled = g.Add(g.Mul(side, ratio.twice), ratio.of)
    up = g.Div(scaled, twice)
    is_half = g.Equal(g.Mul(up, twice), scaled)
    is_odd = g.Equal(g.Mod(up, [2]), [1])
    return g.Max(g.Sub(up, g.cast(g.And(is_half, is_odd), np.int64)), [1])


def _padded(g: Nodes, side: Value, ratio: _Ratio, stride: int) -> Value:
    """Return ceil(side · ratio / stride + 1/2) · stride."""
    unit = g.Mul(ratio.of, [stride])
    twice = g.Mul(unit, [2])
    cells = g.Div(g.Add(g.Mul(side, ratio.twice), g.Sub(g.Mul(unit, [3]), [1])), twice)
    return g.Mul(cells, [stride])


class Size(NamedTuple):
    """Height and width, int64 (1,) each."""

    height: Value
    width: Value


def shrink(g: Nodes, images: Value, before: Size, after: Size) -> Value:
    """Shrink uint8 (B, H, W, 3) to uint8 (B, 3, h, w) by area means.

    Where both ratios are whole, OpenCV adds the pixels and divides once. Half rounds to even, with 2×2 up. Otherwise
    it averages along the rows first. Here the columns are first: values within 1e-6 of a half may round differently.
    """
    ratio = Size(g.Div(before.height, after.height), g.Div(before.width, after.width))
    whole = g.And(
        g.Equal(g.Mul(ratio.height, after.height), before.height),
        g.Equal(g.Mul(ratio.width, after.width), before.width),
    )
    rows = g.Reshape(images, [0, 0, -1])
    rows = _averaged(g, rows, before.height, after.height, whole)
    pixels = g.Reshape(rows, g.Concat([0, 0], before.width, [3], axis=0))
    columns = g.Reshape(g.Transpose(pixels, perm=[0, 2, 3, 1]), g.Concat([0], before.width, [-1], axis=0))
    columns = _averaged(g, columns, before.width, after.width, whole)
    pixels = g.Reshape(columns, g.Concat([0, 0, 3], after.height, axis=0))
    area = g.cast(g.Mul(ratio.height, ratio.width), np.float32)
    two = g.And(g.Equal(ratio.height, [2]), g.Equal(ratio.width, [2]))
    factor = g.Where(whole, g.Div([1.0], area), [1.0])
    up = g.Where(g.And(whole, two), [0.125], [0.0])  # rounds halves up: 2×2 means are quarters of a level
    rounded = g.cast(g.Round(g.Add(g.Mul(pixels, factor), up)), np.uint8)
    return g.Transpose(rounded, perm=[0, 2, 3, 1])


def _averaged(g: Nodes, rows: Value, n: Value, d: Value, whole: Value) -> Value:
    """Average (B, n, m) to float32 (B, d, m) over equal parts of n; sum where `whole`."""
    part = _range(g, d)
    start, end = g.Mul(part, n), g.Mul(g.Add(part, [1]), n)  # in units of 1 / d
    first = g.Div(start, d)
    last = g.Div(g.Sub(end, [1]), d)
    count = g.Add(g.ReduceMax(g.Sub(last, first), keepdims=1), [1])
    source = g.Add(g.Unsqueeze(first, [1]), g.Unsqueeze(_range(g, count), [0]))  # (d, K)
    low = g.Max(g.Mul(source, d), g.Unsqueeze(start, [1]))
    high = g.Min(g.Mul(g.Add(source, [1]), d), g.Unsqueeze(end, [1]))
    covered = g.Max(g.Sub(high, low), [0])
    covered = g.Where(g.Greater(g.Mul(covered, [1000]), d), covered, [0])  # as OpenCV ignores less
    weights = g.Div(g.cast(covered, np.float32), g.cast(g.Where(whole, d, n), np.float32))
    taken = g.cast(g.Gather(rows, g.Min(source, g.Sub(n, [1])), axis=1), np.float32)  # (B, d, K, m)
    return g.Squeeze(g.MatMul(g.Unsqueeze(weights, [1]), taken), [2])


def enlarge(g: Nodes, images: Value, before: Size, after: Size) -> Value:
    """Enlarge uint8 (B, H, W, 3) to uint8 (B, 3, h, w) linearly between pixel centres, in OpenCV's fixed point.

    Weights are multiples of 1/2048. The sum along a row loses 4 bits, its product with the column weight 16 bits, and
    the sum of both rows is rounded from quarters.
    """
    low, high, of_low, of_high = _neighbours(g, before.width, after.width, at_border=False)
    sides = []
    for index, weight in ((low, of_low), (high, of_high)):
        values = g.Reshape(g.cast(g.Gather(images, index, axis=2), np.float32), [0, 0, -1])
        sides.append(g.Mul(values, g.Reshape(g.Expand(g.Unsqueeze(weight, [1]), [1, 3]), [-1])))
    row = g.cast(g.Floor(g.Mul(g.Add(*sides), 1 / 16)), np.int32)  # (B, H, w · 3)
    low, high, of_low, of_high = _neighbours(g, before.height, after.height, at_border=True)
    parts = []
    for index, weight in ((low, of_low), (high, of_high)):
        product = g.Mul(g.Gather(row, index, axis=1), g.Unsqueeze(g.cast(weight, np.int32), [1]))
        parts.append(g.Div(product, np.array(1 << 16, np.int32)))
    total = g.Div(g.Add(g.Add(*parts), np.array(2, np.int32)), np.array(4, np.int32))
    pixels = g.Reshape(g.cast(total, np.uint8), g.Concat([0, 0], after.width, [3], axis=0))
    return g.Transpose(pixels, perm=[0, 3, 1, 2])


def _neighbours(g: Nodes, n: Value, d: Value, *, at_border: bool) -> tuple[Value, Value, Value, Value]:
    """Return the two neighbours of each of d pixels, int64 (d,), and their weights in 1/2048, float32 (d,).

    `at_border`: split the weight between two equal neighbours at the border too, as OpenCV does in columns.
    """
    centre = g.Sub(g.Mul(g.Add(g.Mul(_range(g, d), [2]), [1]), n), d)  # in units of 1 / 2d
    place = g.Div(g.cast(centre, np.float32), g.cast(g.Mul(d, [2]), np.float32))
    floor = g.Floor(place)
    fraction = g.Sub(place, floor)
    low = g.cast(floor, np.int64)
    end = g.Sub(n, [1])
    if not at_border:
        fraction = g.Where(g.Or(g.Less(low, [0]), g.GreaterOrEqual(low, end)), [0.0], fraction)
    indices = [g.Min(g.Max(index, [0]), end) for index in (low, g.Add(low, [1]))]
    weights = [g.Round(g.Mul(part, [2048.0])) for part in (g.Sub([1.0], fraction), fraction)]
    return indices[0], indices[1], weights[0], weights[1]


def _range(g: Nodes, end: Value) -> Value:
    """Return int64 0 … end − 1; `end` is int64 (1,)."""
    return g.Range(0, g.Squeeze(end, [0]), 1)


class Limits(NamedTuple):
    """Thresholds: conf, iou float32 (1,), max_det int64 (1,); without iou there is no NMS."""

    conf: Value
    iou: Value | None
    max_det: Value


class DetectionValues(NamedTuple):
    """Detections of all images, descending by score."""

    boxes: Value  # float32 (D, 4), xyxy in the network's pixels
    scores: Value  # float32 (D,)
    classes: Value  # int64 (D,), the class and the image of each
    images: Value


def detect(g: Nodes, decoded: Value, limits: Limits, *, has_objectness: bool) -> DetectionValues:
    """Return every class above `conf` of every prediction, after NMS; `max_det` for each class of each image.

    `decoded` is float32 (B, A, 5 + C), cx, cy, w, h, objectness, class probabilities; or (B, A, 4 + C) without
    objectness. Most predictions are removed first, by an upper bound of their scores, which makes the rest cheap.
    """
    first_class = 5 if has_objectness else 4  # no class probability exceeds 1
    bound = _columns(g, decoded, 4, 5) if has_objectness else g.ReduceMax(_columns(g, decoded, 4), [2])
    best = g.ReduceMax(bound, [0, 2], keepdims=0)
    passing = g.Squeeze(g.NonZero(g.Greater(best, limits.conf)), [0])
    rows = g.Gather(decoded, passing, axis=1)
    scores = _columns(g, rows, first_class)
    if has_objectness:
        scores = g.Mul(scores, _columns(g, rows, 4, 5))
    centres, half = _columns(g, rows, 0, 2), g.Div(_columns(g, rows, 2, 4), 2.0)
    boxes = g.Concat(g.Sub(centres, half), g.Add(centres, half), axis=2)
    scores = g.Transpose(scores, perm=[0, 2, 1])
    if limits.iou is not None:
        chosen = g.NonMaxSuppression(boxes, scores, limits.max_det, limits.iou, limits.conf)
    else:
        chosen = g.Transpose(g.NonZero(g.Greater(scores, limits.conf)), perm=[1, 0])
    images, classes, places = (g.Squeeze(part, [1]) for part in g.Split(chosen, axis=1, num_outputs=3, outputs=3))
    _, of_classes, of_rows = g.Split(g.Shape(scores), axis=0, num_outputs=3, outputs=3)
    row = g.Add(g.Mul(images, of_classes), classes)
    values = g.Gather(g.Reshape(scores, [-1]), g.Add(g.Mul(row, of_rows), places))
    more = g.Concat(values, [-1.0], axis=0)  # a sentinel, as OpenCV cannot sort nothing
    _, order = g.TopK(more, g.Shape(more), axis=0, outputs=2)
    order = g.Slice(order, [0], g.Shape(values))
    images, classes, places, values = (g.Gather(part, order) for part in (images, classes, places, values))
    boxes = g.Gather(g.Reshape(boxes, [-1, 4]), g.Add(g.Mul(images, of_rows), places))
    return DetectionValues(boxes, values, classes, images)


def batch_detections(g: Nodes, found: DetectionValues, most: Value, count: Value) -> tuple[Value, Value, Value, Value]:
    """Return the best detections of each image in a batch; `most` and the batch size `count` are int64 (1,).

    Returns:
        Boxes (B, n, 4), scores (B, n), classes (B, n) and counts, int64 (B,), of the detections of each image. Rows
        beyond the count are padding: boxes and scores 0, classes −1.
    """
    numbers = g.Range(0, g.Squeeze(count, [0]), 1)
    owned = g.cast(g.Equal(g.Unsqueeze(found.images, [1]), g.Unsqueeze(numbers, [0])), np.int64)  # (D, B)
    place = g.Sub(g.ReduceSum(g.Mul(g.CumSum(owned, 0), owned), [1], keepdims=0), [1])
    passing = g.Squeeze(g.NonZero(g.Less(place, most)), [0])
    boxes, scores, classes, images = (g.Gather(part, passing, axis=0) for part in found)
    counts = g.Min(g.ReduceSum(owned, [0], keepdims=0), most)
    where = g.Concat(g.Unsqueeze(images, [1]), g.Unsqueeze(g.Gather(place, passing, axis=0), [1]), axis=1)
    shape = g.Concat(count, g.ReduceMax(counts, keepdims=1), axis=0)
    return (
        g.ScatterND(g.Expand(0.0, g.Concat(shape, [4], axis=0)), where, boxes),
        g.ScatterND(g.Expand(0.0, shape), where, scores),
        g.ScatterND(g.Expand(-1, shape), where, classes),
        counts,
    )


def to_image_pixels(g: Nodes, boxes: Value, placed: Letterboxed) -> Value:
    """Return boxes (D, 4) in pixels of the images, clipped to them, as `undo_letterbox` of models/nms.py."""
    size = g.Concat(placed.before.width, placed.before.height, axis=0)
    size = g.cast(g.Concat(size, size, axis=0), np.float32)
    after = g.Concat(placed.after.width, placed.after.height, axis=0)
    scale = g.Div(g.cast(g.Concat(after, after, axis=0), np.float32), size)
    corner = g.cast(g.Concat(placed.left, placed.top, placed.left, placed.top, axis=0), np.float32)
    return g.Min(g.Max(g.Div(g.Sub(boxes, corner), scale), 0.0), size)


def _columns(g: Nodes, rows: Value, start: int, end: int = 2**31 - 1) -> Value:
    return g.Slice(rows, [start], [end], [2])
