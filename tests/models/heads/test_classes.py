"""Transfer of class outputs by name, for every head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tessera.utils.checkpoints.initial_model import build_model, freeze_bn_of_first_layers, pretraining_of
from tessera.utils.checkpoints.weights import Weights
from tessera.utils.config import TrainConfig, load_hyp
from tests.models.heads.made_models import SIZE_HW, each_head, images, made

CONFIG, HYP = TrainConfig(weights="best.pt"), load_hyp("hyp.known.yaml")
BEFORE = ("ant", "bee", "cow", "dog")


@pytest.fixture
def weights(name: str) -> Weights:
    """Weights of which no two numbers are alike."""
    model = made(name, nc=len(BEFORE))
    rng = torch.Generator().manual_seed(3)
    state = {
        k: t + 0.02 * torch.rand(t.shape, generator=rng) if t.is_floating_point() else t
        for k, t in model.state_dict().items()
    }
    return Weights(state, model.yaml, BEFORE, "best.pt")


def rows(weights: Weights, names: tuple[str, ...]) -> tuple[list[Tensor], bool]:
    """What a model for `names` that starts from weights predicts: all but the classes, then each class."""
    model = build_model(CONFIG, HYP, names, weights).eval()
    first = 5 if model.head.has_objectness else 4
    with torch.no_grad():
        decoded, raw = model(images(1))
    several = [decoded]
    if len(raw) == 4:  # one-to-one branches too
        boxes, logits = raw[2:]
        several.append(torch.cat((boxes[..., :4], logits), -1))
    return [t for rows in several for t in (rows[..., :first], *rows[..., first:].unbind(-1))], len(several) > 1


@each_head
def test_a_class_that_is_known_is_predicted_as_before_whatever_its_number(weights: Weights) -> None:
    known, _ = rows(weights, BEFORE)
    found, several = rows(weights, ("Dog", "fox", "bee"))
    branches = 2 if several else 1
    assert len(known) == 5 * branches and len(found) == 4 * branches
    for branch in range(branches):
        others, _, bee, _, dog = known[5 * branch : 5 * branch + 5]
        other, first, new, last = found[4 * branch : 4 * branch + 4]
        torch.testing.assert_close(other, others, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(first, dog, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last, bee, rtol=1e-4, atol=1e-5)
        assert not any(torch.allclose(new, one) for one in (bee, dog)), "its outputs are those of a fresh head"


@each_head
def test_how_much_is_known_decides_what_follows(weights: Weights, caplog: pytest.LogCaptureFixture) -> None:
    """All classes in any order or number are the case "known", and no layer is other than it was trained."""
    total = len(weights.state_dict)
    layers = 1 + max(int(name.split(".")[1]) for name in weights.state_dict)
    for names, start, report in (
        (("dog", "ant"), "known", "2 of 2 classes known by name (dog, ant)"),
        (("dog", "fox"), "new", "1 of 2 classes known by name (dog), 1 reinitialised"),
        (("fox", "hen", "pig", "rat"), "new", "0 of 4 classes known by name, 4 reinitialised"),
        (("item",), "new", "0 of 1 classes known by name, 1 reinitialised"),
    ):
        caplog.clear()
        with caplog.at_level("INFO"):
            model = build_model(CONFIG, HYP, names, weights)
        partial = 2 * len(model.head.class_layers()) if start == "new" else 0
        loaded = f"Loaded {total - partial} of {total} tensors from best.pt"
        assert caplog.messages == [f"{loaded}; class layer: {report}"]
        assert pretraining_of(CONFIG, names, weights) == start
        assert freeze_bn_of_first_layers(model, CONFIG, HYP, weights).fixed_norms == layers - (start == "new")


def losses_and_gradients(weights: Weights, names: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """In float64: of a step of a model for `names` that starts from weights, without those of its class layers."""
    model = build_model(CONFIG, HYP, names, weights).double().train()
    criterion = model.head.criterion(HYP, imgsz=96)
    objects = (("bee", 10, 10, 40, 50), ("cow", 30, 5, 90, 60), ("ant", 3, 3, 20, 30), ("dog", 0, 0, 30, 30))
    targets = torch.tensor([[number % 2, names.index(name), *box] for number, (name, *box) in enumerate(objects)])
    loss, parts = criterion(model(images(2).double()), criterion.assign(targets.float(), 2, SIZE_HW))
    loss.backward()
    of_classes = {f"model.{len(model.model) - 1}.{layer}" for layer in model.head.class_layers()}
    parameters = [(name, p.grad) for name, p in model.named_parameters() if name.rpartition(".")[0] not in of_classes]
    return parts.detach(), {name: grad for name, grad in parameters if grad is not None}


@each_head
def test_the_order_of_names_changes_a_step_by_rounding_alone(weights: Weights) -> None:
    losses, gradients = losses_and_gradients(weights, BEFORE)
    others, their_gradients = losses_and_gradients(weights, ("dog", "ant", "cow", "bee"))
    torch.testing.assert_close(others, losses, rtol=1e-9, atol=0)
    assert gradients.keys() == their_gradients.keys() and len(gradients) > 50
    for name, gradient in gradients.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(their_gradients[name], gradient, rtol=0, atol=1e-9 * largest)
