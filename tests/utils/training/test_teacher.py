"""The teacher: its choice and digest, its classes and cells, and the losses that it changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.models.detector import DetectionModel
from tessera.models.heads.anchor_loss import scaled_gains
from tessera.models.heads.criterion import LossSettings, Taught
from tessera.utils.boxes import complete_iou
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
@pytest.mark.parametrize("student_head", ["DetectFree", "Detect"])
def test_classes_go_by_name_and_scores_to_the_predictions_of_their_cells(student_head: str, teacher_cfg: str) -> None:
    """Anchor by anchor where both have as many, else the best of them to the anchor most like its box."""
    torch.manual_seed(0)
    world = World()
    model = DetectionModel(teacher_cfg, names=("dog", "bird", "cat")).eval()
    network = network_of(fused_copy(model, world.accelerator), 96, world.accelerator)
    network = dataclasses.replace(network, class_confidences=(0.4, 0.3, 0.1))  # .1 becomes .25, by factor 3 of the odds
    head = made(student_head, nc=2).head
    teacher = Teacher(network, ("cat", "cow"), head)
    pixels, criterion = images(2), head.criterion(SETTINGS)
    rows = torch.tensor([[1.0, -2, 0, 0, 96, 64]])
    nothing = torch.zeros(2, 2, dtype=torch.int64)
    batch = Batch(pixels, rows, torch.arange(2), nothing, nothing.double(), unlabelled=torch.tensor([[True, False]]))
    assignment = criterion.assign(rows, 2, SIZE_HW, batch.unlabelled)
    taught = teacher(assignment, batch, pixels).taught
    assert taught is not None and taught.known.tolist() == [True, False]
    cells = sum(SIZE_HW[0] // s * (SIZE_HW[1] // s) for s in (8, 16, 32))
    assert taught.probabilities.shape == (2, head.rows_per_cell * cells, 2)
    assert not taught.probabilities[0].any() and not taught.probabilities[..., 1].any()
    decoded, first, found = network(pixels[1:])[0], 0, []
    each = len(decoded) // cells
    for level, stride in enumerate((8, 16, 32)):
        count = SIZE_HW[0] // stride * (SIZE_HW[1] // stride)
        own = torch.zeros(head.rows_per_cell, count, 5)
        for number, row in enumerate(decoded[first : first + each * count].tolist()):
            anchor, cell = divmod(number, count)
            score = row[-1] * (row[4] if network.has_objectness else 1)
            score = 3 * score / (1 + 2 * score)
            if each != head.rows_per_cell:
                shapes = [(1.0, 1.0)] if head.priors is None else (head.priors[level] * stride).tolist()
                ratios = [max(row[2] / w, w / row[2], row[3] / h, h / row[3]) for w, h in shapes]
                anchor = ratios.index(min(ratios))
                if score <= own[:, cell, 4].max():
                    continue  # another one of the cell is better
                own[:, cell] = 0
            own[anchor, cell] = torch.tensor([*row[:4], score])
        found.append(own.flatten(0, 1))
        first += each * count
    expected = torch.cat(found)
    torch.testing.assert_close(taught.probabilities[1, :, 0], expected[:, 4])
    torch.testing.assert_close(taught.boxes[1], expected[:, :4])
    labelled = dataclasses.replace(batch, targets=rows[:0])
    assert teacher(assignment, labelled, pixels) is assignment, "images that label all classes are not computed"


def taught_of(probabilities: Tensor, known: Sequence[bool] = (True,) * 4) -> Taught:
    own = torch.tensor(known)
    generator = torch.Generator().manual_seed(2)
    boxes = torch.rand(*probabilities.shape[:2], 4, generator=generator) * 40 + 20
    return Taught(probabilities * own, own, boxes)


def gradients(model: DetectionModel, raw: list[Tensor], taught: Taught | None, rows: list[list[float]]) -> list[Tensor]:
    outputs = [output.detach().requires_grad_() for output in raw]
    criterion = model.head.criterion(SETTINGS)
    assignment = criterion.assign(torch.tensor(rows), 2, SIZE_HW, UNLABELLED[: len(rows) - 2])
    if taught is not None:
        assignment = assignment.with_teacher(taught)
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
    taught = taught_of(probabilities, [True, True, True, False])
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
    offsets, objectness, classes = gradients(model, raw, taught_of(probabilities), [*OBJECTS, REGION])
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
    partly = gradients(model, raw, taught_of(probabilities, [True, True, True, False]), [*OBJECTS, REGION])
    assert not partly[1][1, free].any()


@pytest.mark.parametrize("name", ["Detect", "DetectFree", "DetectYOLOX", "DetectYOLOv9"])
def test_an_object_of_weight_0_is_an_ignored_region_for_the_teacher_too(name: str) -> None:
    model = made(name).train()
    raw = model(images(2))
    cells = sum(model.head.rows_per_level(SIZE_HW))
    taught = taught_of(torch.rand(2, cells, 4, generator=torch.Generator().manual_seed(0)))
    region = gradients(model, raw, taught, [*OBJECTS, REGION, [1.0, -1, 30, 20, 80, 60]])
    weighted = [[*row, 1.0] for row in (*OBJECTS, REGION)]
    found = gradients(model, raw, taught, [*weighted, [1.0, 0, 30, 20, 80, 60, 0]])
    torch.testing.assert_close(found, region, rtol=1e-4, atol=1e-7)


def test_anchors_are_taught_objectness_and_classes() -> None:
    """Of levels, with the squares of the scores among the positives; not in ignored regions or at unknown classes."""
    model = made("Detect").train()
    raw = model(images(2))
    counts = [level[0, ..., 0].numel() for level in raw]
    probabilities = torch.rand(2, sum(counts), 4, generator=torch.Generator().manual_seed(0)).clamp(max=0.9)
    taught = taught_of(probabilities)
    criterion = model.head.criterion(SETTINGS)
    positives = criterion.assign(torch.tensor(OBJECTS), 2, SIZE_HW).counts[:, 0]
    found, plain = gradients(model, raw, taught, [*OBJECTS, REGION]), gradients(model, raw, None, OBJECTS)
    unknown = gradients(model, raw, taught_of(probabilities, [True, True, True, False]), [*OBJECTS, REGION])
    ignored = gradients(model, raw, taught, [*OBJECTS, REGION, [1.0, -1, 0, 0, 96, 64]])
    assert positives.count_nonzero() >= 2
    for level, scores in enumerate(probabilities[1].split(counts)):
        own, before, output = found[level], plain[level], raw[level].detach()
        free = ~before[1, ..., :4].any(-1)
        s = scores.view(*free.shape, 4)[free][:, 2:]
        q = s.sum(1).clamp(max=1)
        divisor = positives[level] + q.square().sum()
        assert divisor > 1
        scale = positives[level].clamp(min=1) / divisor
        torch.testing.assert_close(own[0, ..., 4], before[0, ..., 4])
        torch.testing.assert_close(own[1, ~free][:, 4], before[1, ~free][:, 4])
        rest = [0, 1, 2, 3, 5, 6, 7, 8]
        torch.testing.assert_close(own[0][..., rest], before[0][..., rest] * scale)
        torch.testing.assert_close(own[1, ~free][:, rest], before[1, ~free][:, rest] * scale)
        wanted = taught.boxes[1].split(counts)[level].view(*free.shape, 4)[free]
        logits = output.clone().requires_grad_()
        found_boxes = model.head.decode([*raw[:level], logits, *raw[level + 1 :]]).split(counts, 1)[level]
        iou = complete_iou(found_boxes[1].view(*free.shape, -1)[free][:, :4], wanted)
        (of_boxes,) = torch.autograd.grad((q.square() * (1 - iou)).sum() * SETTINGS.box / divisor, logits)
        torch.testing.assert_close(own[1, free][:, :4], of_boxes[1, free][:, :4])
        sigma = output[1, free].sigmoid()
        torch.testing.assert_close(own[1, free][:, 4], before[1, free][:, 4] / sigma[:, 4] * (sigma[:, 4] - q))
        truth = torch.cat((torch.zeros(len(q), 2), s / q[:, None]), 1)
        gain = scaled_gains(SETTINGS, nc=4, nl=3)[2] / 4
        torch.testing.assert_close(own[1, free][:, 5:], gain * q[:, None].square() * (sigma[:, 5:] - truth) / divisor)
        assert not unknown[level][1, free].any() and not ignored[level][1, free].any()
        torch.testing.assert_close(unknown[level][0], before[0])


def test_the_choice_of_a_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, plain, world = partly_labelled(), make_index([(40, 80)]), World()
    file = tmp_path / "old.pt"
    file.write_bytes(b"weights")

    free = made("DetectFree").head.criterion(SETTINGS)

    def choose(given: str, known: tuple[str, ...] = NAMES, of: DatasetIndex = index) -> str:
        return choose_teacher(given, str(file), known, of, free, world)

    chosen = choose(AUTO)
    assert chosen.startswith(f"{file}#") and choose(str(file)) == chosen == choose(chosen)
    monkeypatch.chdir(tmp_path)
    assert choose("old.pt") == chosen, "whatever the working directory of a resume"
    assert choose(AUTO, known=("square",)) == NO_TEACHER, "which is labelled everywhere"
    assert choose(AUTO, of=plain) == choose(NO_TEACHER) == NO_TEACHER
    with monkeypatch.context() as own:
        own.setattr(type(free), "takes_teacher", False)
        assert choose(AUTO) == NO_TEACHER
        with pytest.raises(UserError, match="the loss of this model's head takes no teacher"):
            choose(str(file))
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
    taught = taught_of(torch.rand(2, raw[1].shape[1], 4))
    found, masked = (gradients(model, raw, own, [*OBJECTS, REGION]) for own in (taught, None))
    boxes = masked[0][1].any(1)
    assert not torch.equal(found[1][1, ~boxes, 2], masked[1][1, ~boxes, 2])
    torch.testing.assert_close(found[3], masked[3])
