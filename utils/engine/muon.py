"""Muon: orthogonalised momentum for matrices and convolution kernels, AdamW for all else.

Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024),
https://kellerjordan.github.io/posts/muon.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

MIN_SIZE = 16  # rows and columns of a matrix
RMS = 3.0  # root mean square of a matrix's update, in learning rates, if all gradients agree
# a, b, c of each iteration: x becomes (a + b xxᵀ + c (xxᵀ)²) x. They bring singular values from .01 to 1 as near to 1
# as three iterations can, within .27 (N. Amsel et al., "The Polar Express", 2025, arXiv 2505.16932).
POLYNOMIALS = (8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526)


class Muon(torch.optim.AdamW):
    """AdamW, except that the weights that are matrices follow Muon.

    A kernel (out, in, h, w) is a matrix (out, in · h · w). Its update is the orthogonalised Nesterov momentum, with an
    RMS of `RMS` learning rates times the norm of the momentum over the usual norm of a gradient: as in AdamW, a step is
    small where gradients contradict each other. It decays as in AdamW. The state has the momentum, `exp_avg`, and the
    mean of the gradients' squared norms, `norm_sq` ().
    """

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the parameters, unless `found_inf`, float () on their device, is set and not 0."""
        pairs = ((p, group) for group in self.param_groups for p in group["params"])
        matrices = [(p, group) for p, group in pairs if p.grad is not None and is_matrix(p)]
        matrices.sort(key=lambda pair: _shape(pair[0]))
        if matrices:
            self._step_matrices([p for p, _ in matrices], [group for _, group in matrices])
        for parameter, _ in matrices:
            parameter.grad = None  # AdamW leaves it alone
        super().step()

    def _step_matrices(self, parameters: list[Tensor], groups: list[dict[str, Any]]) -> None:
        """Update matrices sorted by shape. All computations are on one flat tensor: a GPU launches few kernels."""
        for parameter in parameters:
            if not self.state[parameter]:
                numbers = {name: parameter.new_zeros(()) for name in ("step", "norm_sq")}
                self.state[parameter].update(numbers, exp_avg=torch.zeros_like(parameter))
        states = [self.state[p] for p in parameters]
        momenta, steps, squares = ([state[name] for state in states] for name in ("exp_avg", "step", "norm_sq"))
        gradients, before, weights = map(_flat, ([cast(Tensor, p.grad) for p in parameters], momenta, parameters))
        beta, beta_sq = groups[0]["betas"]
        shapes, sizes = [_shape(p) for p in parameters], [p.numel() for p in parameters]
        after = before.lerp(gradients, 1 - beta)
        steps_after, squares_before = torch.stack(steps).to(weights.device) + 1, torch.stack(squares)
        norms = torch.stack(torch._foreach_norm(gradients.split(sizes)))
        squares_after = squares_before.lerp(norms.square(), 1 - beta_sq)
        usual = (squares_after / (1 - beta_sq**steps_after)).sqrt() * (1 - beta ** (steps_after + 1))
        updates = orthogonalize(gradients.lerp(after, beta), shapes, usual)
        torch._foreach_mul_(updates.split(sizes), [RMS * max(shape) ** 0.5 for shape in shapes])
        decays = torch._foreach_mul(weights.split(sizes), [group["weight_decay"] for group in groups])
        torch._foreach_add_(updates.split(sizes), decays)
        torch._foreach_mul_(updates.split(sizes), [-group["lr"] for group in groups])
        skipped = getattr(self, "found_inf", torch.zeros((), device=weights.device)) != 0
        for tensors, old, new in ((momenta, before, after), (parameters, weights, updates.add_(weights))):
            values = torch.where(skipped, old, new).split(sizes)
            torch._foreach_copy_(tensors, [_like(v, t) for v, t in zip(values, tensors, strict=True)])
        torch._foreach_copy_(steps, [*(steps_after - skipped.to(steps_after.dtype))])
        torch._foreach_copy_(squares, [*torch.where(skipped, squares_before, squares_after)])


def is_matrix(parameter: Tensor) -> bool:
    """Whether Muon updates a parameter: at least MIN_SIZE rows and columns, and not a depth-wise kernel."""
    return parameter.ndim > 1 and parameter.shape[1] > 1 and min(_shape(parameter)) >= MIN_SIZE


def orthogonalize(flat: Tensor, shapes: Sequence[tuple[int, int]], norms: Tensor) -> Tensor:
    """Orthogonalise matrices: bring their singular values near their norm over `norms`, and keep their vectors.

    An iteration multiplies a matrix x by p(xxᵀ). These factors commute with the Gram matrix xxᵀ of the first x, so that
    all iterations run on it, and their product is applied once. Of xxᵀ and xᵀx the smaller is taken.

    Args:
        flat: all elements of all matrices, one after another.
        shapes: rows and columns of each; equal shapes are neighbours.
        norms: (matrices) Frobenius norms of matrices that get singular values near 1.

    Returns:
        The matrices as in `flat`.
    """
    counts = Counter(shapes)
    parts = flat.split([n * rows * columns for (rows, columns), n in counts.items()])
    stacks = [part.view(-1, *shape) for part, shape in zip(parts, counts, strict=True)]
    is_wide = [rows <= columns for rows, columns in counts]
    grams = [x @ x.mT if wide else x.mT @ x for x, wide in zip(stacks, is_wide, strict=True)]
    norms_of = norms.split([*counts.values()])
    products: dict[int, Tensor] = {}
    for size in dict.fromkeys(gram.shape[1] for gram in grams):  # equal sizes together
        places = [i for i, gram in enumerate(grams) if gram.shape[1] == size]
        factors = _factors(torch.cat([grams[i] for i in places]), torch.cat([norms_of[i] for i in places]))
        for i, factor in zip(places, factors.split([len(grams[i]) for i in places]), strict=True):
            products[i] = (factor @ stacks[i] if is_wide[i] else stacks[i] @ factor).flatten()
    return torch.cat([products[i] for i in range(len(stacks))])


def _factors(grams: Tensor, norms: Tensor) -> Tensor:
    """Return what the matrices with these Gram matrices, (B, n, n), are multiplied by."""
    grams = grams / grams.diagonal(dim1=1, dim2=2).sum(1).clamp(min=1e-30)[:, None, None]
    factor = product = _polynomial(grams, *POLYNOMIALS[0])
    for coefficients in POLYNOMIALS[1:]:
        grams = factor @ grams @ factor
        factor = _polynomial(grams, *coefficients)
        product = factor @ product
    return product / norms.clamp(min=1e-15)[:, None, None]


def _polynomial(grams: Tensor, a: float, b: float, c: float) -> Tensor:
    result = torch.baddbmm(grams, grams, grams, beta=b, alpha=c)
    result.diagonal(dim1=1, dim2=2).add_(a)
    return result


def _shape(parameter: Tensor) -> tuple[int, int]:
    return len(parameter), math.prod(parameter.shape[1:])


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors into one, in the order of their memory if that is channels last."""
    return torch.cat([t.movedim(1, -1).flatten() for t in tensors])


def _like(flat: Tensor, tensor: Tensor) -> Tensor:
    return flat.view(tensor.movedim(1, -1).shape).movedim(-1, 1)
