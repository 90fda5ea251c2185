"""Random operators, written so that the draw itself reads no computed tensor.

Torch runs the random operators; engines do not. If one reads a tensor, even only for its size, the
graph is cut before it. The forward of BERT would be cut once for each dropout.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from composer import _torch
from composer.lowering.operators.creation import options_of
from composer.lowering.operators.entry import Function, Operator, Operators, stays
from composer.lowering.operators.guards import are_known

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    return {
        aten.native_dropout.default: Operator(dropout),
        aten.rrelu_with_noise_functional.default: Operator(rrelu),
        aten.new_empty.default: Operator(new_empty),
        aten.new_empty_strided.default: Operator(new_empty_strided),
        aten.empty_like.default: _sized_as(aten.empty.memory_format, lambda memory: memory),
        aten.rand_like.default: _sized_as(aten.rand.default, aten.uniform.default),
        aten.randn_like.default: _sized_as(aten.randn.default, aten.normal_functional.default),
        aten.randint_like.default: _sized_as(aten.randint.default, aten.random.to),
        # The code of a graph cannot name ``aten.random.from``, as ``from`` is a keyword.
        aten.randint_like.low_dtype: _sized_as(aten.randint.low, stays),
    }


def _sized_as(make: Function, fill: Function) -> Operator:
    return Operator(functools.partial(sized_as, make, fill))


def dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """Dropout as a mask that is drawn without ``x``, and a product of ``x`` with it.

    If ``x`` is not in row-major order, the order in which numbers are drawn depends on the
    processor. Only ``native_dropout`` itself then draws the same mask as eager. It is called on
    uninitialized memory, whose values are not used. This inner call passes ``train=None``, which
    torch treats as true; this function leaves such a call as it is.
    """
    if not train or p == 0 or not _is_known(x):
        return NotImplemented
    if _is_drawn_by_rows(x):
        kept = aten.bernoulli.p(new_empty(x, x.shape, dtype=torch.bool), 1 - p)
    else:
        kept = aten.native_dropout.default(_permuted_empty(x), p, None)[1]
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return x * kept * scale, kept


def rrelu(
    x: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    """``rrelu`` outside of training: a leaky ReLU with the mean slope, and no draw."""
    return NotImplemented if training else (aten.leaky_relu(x, (lower + upper) / 2), noise)


def new_empty(x: torch.Tensor, size: Any, **options: Any) -> torch.Tensor:
    """``aten.new_empty`` as ``aten.empty``, which does not read ``x``.

    Stochastic depth, for example, draws into such memory.
    """
    result: torch.Tensor = aten.empty.memory_format(size, **options_of(x, options))
    return result


def new_empty_strided(x: torch.Tensor, size: Any, stride: Any, **options: Any) -> Any:
    """``aten.new_empty_strided`` as ``aten.empty``, if the strides are row-major.

    Autograd copies the gradient of a slice into such memory. Symbolic strides are compared as text,
    which adds no guard.
    """
    made = new_empty(x, size, **options)
    is_same = list(map(str, made.stride())) == list(map(str, stride))
    return made if is_same else NotImplemented


def sized_as(
    make: Function,
    fill: Function,
    x: torch.Tensor,
    *bounds: Any,
    memory_format: torch.memory_format | None = None,
    **options: Any,
) -> Any:
    """A tensor with the sizes, dtype, device and strides of ``x``.

    ``make`` makes a row-major tensor, of the bounds, the sizes and the options. ``fill`` fills
    memory in another order, of that memory and the bounds.
    """
    make_by_rows = functools.partial(make, *bounds, x.shape, **options_of(x, options))
    if memory_format is torch.contiguous_format:
        return make_by_rows()
    if memory_format not in (None, torch.preserve_format) or not _is_known(x):
        return NotImplemented
    if _is_drawn_by_rows(x):
        return make_by_rows()
    return fill(_permuted_empty(x, **options), *bounds) if are_known(bounds) else NotImplemented


def _permuted_empty(x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Uninitialized memory with the order of dimensions that a new tensor like ``x`` has."""
    made: torch.Tensor = aten.empty_permuted.default(
        x.shape, _torch.tensors.order_of_memory(x), **options_of(x, options)
    )
    return made


def _is_known(x: torch.Tensor) -> bool:
    """True if ``x`` is row-major, or no size or stride of it depends on data."""
    numbers = (*x.shape, *x.stride())
    return _torch.tensors.is_row_major(x) or not any(map(_torch.symbols.is_unbacked, numbers))


def _is_drawn_by_rows(x: torch.Tensor) -> bool:
    """True if a new tensor like ``x`` is row-major; ``x`` may have gaps or repeat elements."""
    if _torch.tensors.is_row_major(x):
        return True
    pairs = zip(x.shape, x.stride(), strict=True)
    strides = [stride for size, stride in pairs if size != 1 and stride != 0]
    return all(outer > inner for outer, inner in itertools.pairwise(strides))
