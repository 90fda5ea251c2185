"""Products of matrices and vectors, and distances between points."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from composer.lowering.operators.entry import Operator, Operators
from composer.lowering.operators.guards import are_known, is_wide, may_add, only_for
from composer.lowering.operators.layouts import lying_as_in_eager
from composer.lowering.operators.reductions import cascade, is_row_of_norm

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    written_out = {
        aten.addmm.default: Operator(addmm),
        aten.baddbmm.default: Operator(functools.partial(alone, torch.bmm)),
        aten.addbmm.default: Operator(addbmm),
        aten._trilinear.default: Operator(trilinear),
        aten._cdist_forward.default: Operator(cdist),
    }
    return lying_as_in_eager(written_out) | {
        aten.addmv.default: Operator(add_matrix_vector),
        aten.dot.default: Operator(dot),
        aten.mm.default: Operator(row_by_column),
        aten.bmm.default: Operator(row_by_column),
        aten._cdist_backward.default: Operator(cdist_backward),
    }


def dot(a: torch.Tensor, b: torch.Tensor) -> Any:
    """``aten.dot``; the products of many float32 numbers are summed by :func:`cascade`.

    Engines' products of matrices lose digits in long sums, as eager's do, but eager's dot product
    does not.
    """
    return cascade(a * b, None)


def row_by_column(a: torch.Tensor, b: torch.Tensor) -> Any:
    """A product of long matrices with one row and one column, which is that of :func:`dot`.

    An ``einsum`` over all dimensions is one.
    """
    outer = (a.shape[-2], b.shape[-1])
    if not are_known(outer) or outer != (1, 1) or is_row_of_norm(a.shape[-1]):
        return NotImplemented
    return cascade(a * b.transpose(-2, -1), [-1], keepdim=True)


def add_matrix_vector(
    x: torch.Tensor, matrix: torch.Tensor, vector: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor:
    """``aten.addmv``; ``x`` is not read if ``beta`` is zero, since it may then hold NaN."""
    if not x.dtype.is_floating_point:
        alpha, beta = int(alpha), int(beta)
    product = _times(alpha, torch.mv(matrix, vector))
    return product if beta == 0 else product + _times(beta, x)


def _times(factor: Any, x: torch.Tensor) -> torch.Tensor:
    return x if factor == 1 else x * factor


def addmm(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    """``aten.addmm``, where ``beta`` is zero or the inner dimension is empty."""
    if not isinstance(a.shape[1], int) or a.shape[1]:
        return alone(torch.mm, x, a, b, beta=beta, alpha=alpha)
    if beta == 0:
        return x.new_zeros(a.shape[0], b.shape[1])
    return (x * beta).expand(a.shape[0], b.shape[1]).clone()


def addbmm(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    """``aten.addbmm`` for integers, and for all dtypes if ``beta`` is zero.

    The exporter's translation sums as floats, so integers are summed in their own dtype here.
    """
    if x.dtype.is_floating_point or x.dtype is torch.bool:
        return alone(lambda *both: torch.bmm(*both).sum(0), x, a, b, beta=beta, alpha=alpha)
    added = torch.bmm(a, b).sum(0, dtype=x.dtype) * int(alpha)
    return added + x * int(beta) if int(beta) else added


def alone(
    product: Callable[..., torch.Tensor],
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
) -> Any:
    """``alpha`` times the product, if ``beta`` is the number zero; else ``NotImplemented``.

    Engines would add zero times ``x``, which is NaN where ``x`` is NaN. Models do pass
    uninitialized memory as ``x`` in this case.
    """
    if not isinstance(beta, int | float) or beta != 0:
        return NotImplemented
    return _times(alpha, product(a, b))


def trilinear(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    expand_a: Sequence[int],
    expand_b: Sequence[int],
    expand_c: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Any:
    """The sum over ``sumdim`` of the product of all three, computed in their own dtype."""
    for dim in expand_a:
        a = a.unsqueeze(dim)
    for dim in expand_b:
        b = b.unsqueeze(dim)
    for dim in expand_c:
        c = c.unsqueeze(dim)
    return (a * b * c).sum(list(sumdim), dtype=a.dtype)


def cdist(a: torch.Tensor, b: torch.Tensor, p: float, compute_mode: int | None) -> Any:
    """The norms of all differences, unless these have too many elements."""
    difference = a.unsqueeze(-2) - b.unsqueeze(-3)
    if not may_add(difference.numel()):
        return NotImplemented
    if p == 0:  # vector_norm would count NaN as one; eager gives NaN here
        differs = torch.where(difference != difference, difference, 1.0)
        return torch.where(difference == 0, 0.0, differs).sum(-1)
    return torch.linalg.vector_norm(difference, p, -1)


@only_for(is_wide)
def cdist_backward(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, p: float, distances: torch.Tensor
) -> Any:
    """The gradient of Euclidean distances with respect to ``a``; zero between equal points."""
    if p != 2 or a.shape[:-2] != b.shape[:-2]:
        return NotImplemented
    if not may_add(a.numel() * b.shape[-2]):
        return NotImplemented
    slopes = torch.where(distances == 0, 0.0, grad / distances)
    return ((a.unsqueeze(-2) - b.unsqueeze(-3)) * slopes.unsqueeze(-1)).sum(-2)
