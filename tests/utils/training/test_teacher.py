"""The teacher: its choice and digest, its classes and cells, and the losses that it changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.models.detector import DetectionModel
from tessera.models.heads.criterion import LossSettings, Taught
from tessera.utils.config import AUTO, NO_TEACHER, load_hyp
from tessera.utils.errors import UserError
from tessera.utils.evaluation.network import fused_copy, network_of
from tessera.utils.ranks.world import World
from tessera.utils.training import teacher as teacher_module
from tessera.utils.training.teacher import Teacher, choose_teacher, open_teacher
from tessera.utils.types import Batch, DatasetIndex
from tests.data.made_index import NAMES, make_index
from tests.models.heads.made_models import ONCE, SIZE_HW, images, made

SETTINGS = LossSettings.of(load_hyp("hyp.scratch-low.yaml"), imgsz=96)
OBJECTS = [[0.0, 0, 10, 10, 40, 50], [1, 1, 3, 3, 20, 30]]
REGION = [1.0, -2, 0, 0, 96, 64]  # image 1 does not label classes 2 and 3
UNLABELLED = torch.tensor([[False, False, True, True]])


def partly_labelled() -> DatasetIndex:
    index = make_index([(40, 80)] * 2)
    return dataclasses.replace(
        index, unlabelled_sets=np.array([[True, False, True]]), set_of_image=np.array([-1, 0], np.int32)
    )


@pytest.mark.parametrize("teacher_cfg", ["yolov5n.yaml", "tessera-n.yaml", "yolox-nano.yaml"])
def test_classes_go_by_name_and_cells_take_the_best_of_their_predictions(teacher_cfg: str) -> None:
    torch.manual_seed(0)
    world = World()
    model = DetectionModel(teacher_cfg, names=("dog", "bird", "cat")).eval()
    network = network_of(fused_copy(model, world.accelerator), 96, world.accelerator)
    student = made("DetectFree", nc=2)
    teacher = Teacher(network, ("cat", "cow"), student.head)
    pixels, criterion = images(2), student.head.criterion(SETTINGS)
    rows = torch.tensor([[1.0, -2, 0, 0, 96, 64]])
    nothing = torch.zeros(2, 2, dtype=torch.int64)
    batch = Batch(pixels, rows, torch.arange(2), nothing, nothing.double(), unlabelled=torch.tensor([[True, True]]))
    assignment = criterion.assign(rows, 2, SIZE_HW, batch.unlabelled)
    taught = teacher(assignment, batch, pixels).taught
    assert taught is not None and taught.known.tolist() == [True, False]
    cells = sum(SIZE_HW[0] // s * (SIZE_HW[1] // s) for s in (8, 16, 32))
    assert taught.probabilities.shape == (2, cells, 2)
    assert not taught.probabilities[0].any() and not taught.probabilities[..., 1].any()
    decoded, first, scores = network(pixels[1:])[0], 0, []
    each = len(decoded) // cells
    for stride in (8, 16, 32):
        count = SIZE_HW[0] // stride * (SIZE_HW[1] // stride)
        for cell in range(count):
            own = decoded[[first + anchor * count + cell for anchor in range(each)]]
            scores.append(float((own[:, -1] * (own[:, 4] if network.has_objectness else 1)).max()))
        first += each * count
    torch.testing.assert_close(taught.probabilities[1, :, 0], torch.tensor(scores))
    labelled = dataclasses.replace(batch, targets=rows[:0])
    assert teacher(assignment, labelled, pixels) is assignment, "images that label all classes are not computed"


def gradients(model: DetectionModel, raw: list[Tensor], taught: Taught | None, rows: list[list[float]]) -> list[Tensor]:
    outputs = [output.detach().requires_grad_() for output in raw]
    criterion = model.head.criterion(SETTINGS)
    assignment = dataclasses.replace(
        criterion.assign(torch.tensor(rows), 2, SIZE_HW, UNLABELLED[: len(rows) - 2]), taught=taught
    )
    loss, _ = criterion(outputs, assignment)
    return list(torch.autograd.grad(loss, outputs))


def divided_by_the_taught_too(model: DetectionModel, raw: list[Tensor], scores: Tensor) -> Tensor:
    """The divisor of the loss without a teacher, relative to that with the squares of its scores."""
    criterion = model.head.criterion(SETTINGS)
    plain = criterion.totals(raw, criterion.assign(torch.tensor(OBJECTS), 2, SIZE_HW))[0, -1].detach()
    return plain.clamp(min=1) / (plain + scores.square().sum()).clamp(min=1)


@pytest.mark.parametrize("name", ["DetectFree", "DetectYOLOv9"])
def test_scores_of_the_teacher_are_the_class_targets(name: str) -> None:
    """Of classes that it knows, where the image does not label them and no object is assigned."""
    model = made(name).train()
    raw = model(images(2))
    cells = raw[1].shape[1]
    probabilities = torch.rand(2, cells, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1, 1, 1, 0])
    taught = Taught(probabilities, torch.tensor([True, True, True, False]))
    boxes, found = gradients(model, raw, taught, [*OBJECTS, REGION])
    plain_boxes, plain = gradients(model, raw, None, OBJECTS)
    _, masked = gradients(model, raw, None, [*OBJECTS, REGION])
    free = ~plain_boxes[1].any(1)  # cells without an object
    scale = divided_by_the_taught_too(model, raw, probabilities[1, free, 2])
    torch.testing.assert_close(boxes, plain_boxes * scale)
    found = found / scale
    torch.testing.assert_close(found[0], plain[0])
    torch.testing.assert_close(found[1, ~free], plain[1, ~free])
    torch.testing.assert_close(found[1][:, [0, 1, 3]], masked[1][:, [0, 1, 3]])
    sigma = raw[1][1, free, 2].detach().sigmoid()
    torch.testing.assert_close(found[1, free, 2], plain[1, free, 2] / sigma * (sigma - probabilities[1, free, 2]))


def test_objectness_is_taught_by_the_best_class() -> None:
    """It has no loss where a class without labels is unknown to the teacher."""
    model = made("DetectYOLOX").train()
    raw = model(images(2))
    cells = raw[1].shape[1]
    probabilities = torch.rand(2, cells, 4, generator=torch.Generator().manual_seed(0)).clamp(max=0.9)
    offsets, objectness, classes = gradients(
        model, raw, Taught(probabilities, torch.ones(4, dtype=torch.bool)), [*OBJECTS, REGION]
    )
    plain = gradients(model, raw, None, OBJECTS)
    free = ~plain[0][1].any(1)
    q = probabilities[1, free, 2:].amax(1)
    scale = divided_by_the_taught_too(model, raw, probabilities[1, free, 2:])
    torch.testing.assert_close(offsets, plain[0] * scale)
    objectness, classes = objectness / scale, classes / scale
    sigma = raw[1][1, free, 0].detach().sigmoid()
    unit = plain[1][1, free, 0] / sigma
    torch.testing.assert_close(objectness[1, free, 0], unit * (sigma - q))
    truth = torch.cat((torch.zeros(len(q), 2), probabilities[1, free, 2:] / q[:, None]), 1)
    wanted = q[:, None] * (raw[2][1, free].detach().sigmoid() - truth)
    torch.testing.assert_close(classes[1, free], wanted * unit[:1] * SETTINGS.cls / SETTINGS.obj)
    known = torch.tensor([True, True, True, False])
    partly = gradients(model, raw, Taught(probabilities * known, known), [*OBJECTS, REGION])
    assert not partly[1][1, free].any()


def test_the_choice_of_a_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, plain, world = partly_labelled(), make_index([(40, 80)]), World()
    free = made("DetectFree").head.criterion(SETTINGS)
    file = tmp_path / "old.pt"
    file.write_bytes(b"weights")

    def choose(given: str, known: tuple[str, ...] = NAMES, of: DatasetIndex = index, criterion: object = free) -> str:
        return choose_teacher(given, str(file), known, of, criterion, world)  # type: ignore[arg-type]

    chosen = choose(AUTO)
    assert chosen.startswith(f"{file}#") and choose(str(file)) == chosen == choose(chosen)
    monkeypatch.chdir(tmp_path)
    assert choose("old.pt") == chosen, "whatever the working directory of a resume"
    assert choose(AUTO, known=("square",)) == NO_TEACHER, "which is labelled everywhere"
    assert choose(AUTO, of=plain) == choose(NO_TEACHER) == NO_TEACHER
    anchors = made("Detect").head.criterion(SETTINGS)
    assert choose(AUTO, criterion=anchors) == NO_TEACHER
    with pytest.raises(UserError, match="the loss of this model's head takes no teacher"):
        choose(str(file), criterion=anchors)
    with pytest.raises(UserError, match=r"--teacher nothing.pt: no such file"):
        choose("nothing.pt")
    with pytest.raises(UserError, match="all images label all classes"):
        choose(str(file), of=plain)
    file.write_bytes(b"others")
    with pytest.raises(UserError, match="found another file than at the start of the run"):
        choose(chosen)


def test_a_teacher_has_the_model_s_strides_and_knows_a_class_without_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    world, head, chosen = World(), made("DetectFree").head, "old.pt#0123456789abcdef"
    offered = [DetectionModel("tessera-n.yaml", names=("square",)), DetectionModel("yolov5n6.yaml", names=NAMES)]
    monkeypatch.setattr(teacher_module, "resolve_weights", Path)
    monkeypatch.setattr(teacher_module, "load_weights", lambda _: None)
    monkeypatch.setattr(teacher_module, "model_of_weights", lambda *_: offered.pop(0))
    with pytest.raises(UserError, match=r"expected a detector that knows a class .*'circle'"):
        open_teacher(chosen, partly_labelled(), head, world)
    with pytest.raises(UserError, match="found strides of 8, 16, 32, 64 px, expected 8, 16, 32"):
        open_teacher(chosen, partly_labelled(), head, world)


def test_branches_that_predict_an_object_once_are_not_taught() -> None:
    """The teacher's scores are of many cells for an object."""
    model = made(ONCE).train()
    raw = model(images(2))
    taught = Taught(torch.rand(2, raw[1].shape[1], 4), torch.ones(4, dtype=torch.bool))
    found, masked = (gradients(model, raw, own, [*OBJECTS, REGION]) for own in (taught, None))
    boxes = masked[0][1].any(1)
    assert not torch.equal(found[1][1, ~boxes, 2], masked[1][1, ~boxes, 2])
    torch.testing.assert_close(found[3], masked[3])
