"""Reductions, scans and scatters written out, where torchlib's translation misses the call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from composer import _torch
from composer.lowering.operators.limits import MOST_ADDED

aten = torch.ops.aten

_OVER_ONE_ELEMENT = (
    *(aten.prod.dim_int, aten.logsumexp.default),
    *(aten.argmax.default, aten.argmin.default, aten.sort.default, aten.topk.default),
    aten.scatter.value,
)
"""Operators that take a dimension of a tensor without any, which those of ONNX do not."""

_TRUTHS = (aten.any.dim, aten.any.dims, aten.all.dim, aten.all.dims)

_LONGEST = 64
"""Elements along a scanned dimension, each of which becomes a few nodes."""


_FEW = 256
"""How many numbers may be added up one after the other in float32."""

_MANY, _AT_ONCE = 2**16, 2**7
"""From how many elements on ONNX Runtime's plain sums (1.31) in float32 lose digits (the fourth,
of four million), and how many are added up at once then. Eager's sums are cascades."""


def reductions() -> dict[Any, Callable[..., Any]]:
    """The table of this module's decompositions."""
    return {each: functools.partial(over_one_element, each) for each in _OVER_ONE_ELEMENT} | {
        **{each: functools.partial(truth_along, each) for each in _TRUTHS},
        aten.mean.default: mean,
        aten.mean.dim: mean_along,
        aten.sum.default: total,
        aten.sum.dim_IntList: total,
        aten.amax.default: functools.partial(extreme, aten.amax.default, True),
        aten.amin.default: functools.partial(extreme, aten.amin.default, False),
        aten.max.default: functools.partial(extreme_of_all, True),
        aten.min.default: functools.partial(extreme_of_all, False),
        aten.max.dim: functools.partial(extreme_along, aten.max.dim, True),
        aten.min.dim: functools.partial(extreme_along, aten.min.dim, False),
        aten.linalg_vector_norm.default: vector_norm,
        aten.cumsum.default: cumsum,
        aten._log_softmax.default: log_softmax,
        aten.sort.stable: stable_sort,
        aten.median.default: median,
        aten.median.dim: median_along,
        aten.cumprod.default: cumprod,
        aten.logcumsumexp.default: logcumsumexp,
        aten.cummax.default: functools.partial(running, torch.ge),
        aten.cummin.default: functools.partial(running, torch.le),
        aten.index_reduce.default: index_reduce,
        aten.scatter.src: functools.partial(scatter_part, aten.scatter.src),
        aten.scatter_add.default: functools.partial(scatter_part, aten.scatter_add.default),
        aten.scatter_reduce.two: scatter_reduce,
        aten.scatter.reduce: scatter,
        aten.scatter.value_reduce: scatter,
        aten.put.default: put,
        aten.squeeze.dim: squeeze,
        aten.squeeze.default: squeeze_ones,
        aten._trilinear.default: trilinear,
        aten._cdist_forward.default: cdist,
        aten.addmm.default: addmm,
        aten.baddbmm.default: functools.partial(alone, torch.bmm),
        aten.addbmm.default: addbmm,
    }


def spreads() -> dict[Any, Callable[..., Any]]:
    """Variances and errors of many elements; ``NotImplemented`` leaves a call to the exporter's."""
    return {
        aten.var.correction: variance,
        aten.std.correction: deviation,
        aten.var_mean.correction: variance_and_mean,
        aten.mse_loss.default: mean_square_error,
    }


def over_one_element(operator: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The same over a vector of one element, for a tensor without dimensions."""
    if x.dim():
        return NotImplemented
    leaves, rebuild = _torch.tensors.flatten((x, args, kwargs))
    vector, args, kwargs = rebuild([_as_vector(leaf) for leaf in leaves])
    leaves, rebuild = _torch.tensors.flatten(operator(vector, *args, **kwargs))
    return rebuild([leaf.reshape(()) if leaf.numel() == 1 else leaf for leaf in leaves])


def truth_along(
    operator: Any, x: torch.Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False
) -> Any:
    """Along no dimensions each element's own, where ONNX would reduce them all; bytes of bytes."""
    if x.dtype == torch.uint8:
        return operator(x != 0, dim, keepdim).to(torch.uint8)
    if isinstance(dim, Sequence) and not dim:
        return x != 0
    return over_one_element(operator, x, dim, keepdim)


def mean_along(
    x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, **kwargs: Any
) -> Any:
    """By its numbers along every dimension: OpenVINO reads no mean without axes."""
    if dim or not x.dim():
        return mean(x, dim, keepdim, **kwargs)
    return aten.mean.dim(x, [*range(x.dim())], keepdim, **kwargs)


def mean(
    x: torch.Tensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """In the dtype that is asked for: torchlib casts the result. Of many elements by their sum."""
    if dtype is not None and dtype is not x.dtype:
        return aten.mean.dim(x.to(dtype), dim, keepdim)
    summed = cascade(x, dim, keepdim)
    if summed is not NotImplemented:
        return summed / count_of(x, dim)
    return NotImplemented if x.dim() else x.clone()


def cascade(x: torch.Tensor, dims: Sequence[int] | None, keepdim: bool = False) -> Any:
    """The sum of many numbers in float32, by sums of some of them at a time."""
    places = sorted(dim % x.dim() for dim in dims or range(x.dim())) if x.dim() else []
    if x.dtype is not torch.float32 or x.device.type != "cpu":
        return NotImplemented
    if not all(isinstance(x.shape[dim], int) for dim in places):
        return NotImplemented
    if math.prod(x.shape[dim] for dim in places) < _MANY:
        return NotImplemented
    for dim in reversed(places):
        x = _sum_along(x, dim)
    return x if keepdim else x.squeeze(places)


def _sum_along(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Along one dimension, which stays."""
    size = x.shape[dim]
    if size <= 2 * _AT_ONCE:
        return torch.sum(x, [dim], keepdim=True)
    parts, rest = divmod(size, _AT_ONCE)
    whole = x.narrow(dim, 0, size - rest) if rest else x
    shape = (*x.shape[:dim], parts, _AT_ONCE, *x.shape[dim + 1 :])
    found = _sum_along(whole.reshape(shape).sum(dim + 1), dim)
    return (
        found + torch.sum(x.narrow(dim, size - rest, rest), [dim], keepdim=True) if rest else found
    )


def count_of(x: torch.Tensor, dims: Sequence[int] | None) -> int:
    """How many elements each result of a reduction is of."""
    return math.prod(x.shape[dim] for dim in dims or range(x.dim()))


def mean_square_error(x: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> Any:
    """Of many elements, written out."""
    difference = x - target
    squares = difference * difference
    summed = cascade(squares, None) if reduction else NotImplemented
    if summed is NotImplemented:
        return NotImplemented
    return summed / count_of(squares, None) if reduction == 1 else summed


def variance(
    x: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """Of many elements, or of no more than the correction: torchlib divides by what is negative."""
    found = variance_and_mean(x, dim, correction=correction, keepdim=keepdim)
    return found if found is NotImplemented else found[0]


def deviation(
    x: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """The root of it."""
    found = variance(x, dim, correction=correction, keepdim=keepdim)
    return found if found is NotImplemented else torch.sqrt(found)


def variance_and_mean(
    x: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """Both, the mean from a cascade of sums."""
    correction = 1 if correction is None else correction
    dims = [each % x.dim() for each in dim or range(x.dim())] if x.dim() else []
    if not dims or not all(isinstance(x.shape[each], int) for each in dims):
        return NotImplemented
    count = count_of(x, dims)
    if x.dtype is not torch.float32 or not (count >= _MANY or 0 < count < correction):
        return NotImplemented
    mean = torch.mean(x, dims, keepdim=True)
    squares = torch.square(x - mean)
    spread = torch.sum(squares, dims, keepdim=keepdim) / float(max(0, count - correction))
    return spread, mean if keepdim else mean.squeeze(dims)


def log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    """In float64: of a row with NaN or an infinity ONNX Runtime (1.31) gives numbers there."""
    if x.dtype is not torch.float64 or not x.dim() or x.shape[dim] == 0:
        return NotImplemented
    x = x.contiguous()  # as eager gives it
    shifted = x - torch.amax(x, dim, keepdim=True)
    return shifted - torch.log(torch.exp(shifted).sum(dim, keepdim=True))


def cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Of many floats in float64, as eager's kernel for the CPU does it."""
    dtype = dtype or x.dtype
    if not x.dim() or (isinstance(x.shape[dim], int) and x.shape[dim] <= _FEW):
        return NotImplemented
    if dtype not in (torch.float32, torch.float16, torch.bfloat16) or x.device.type != "cpu":
        return NotImplemented
    return torch.cumsum(x.to(dtype).double(), dim).to(dtype)


def total(
    x: torch.Tensor,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Integers by a product with ones: ONNX Runtime (1.31) sums them in float64, and ends there.

    Its products wrap, as torch's sums do. What has no more than 16 bits adds up in float64. On a
    GPU neither torch nor the engines have such products.
    """
    if not x.dim():
        return over_one_element(aten.sum.dim_IntList, x, dims, keepdim, dtype=dtype)
    is_long = x.dtype in (torch.int32, torch.int64) and x.device.type == "cpu"
    if not is_long or (dtype and dtype.is_floating_point):
        return cascade(x, dims, keepdim) if dtype in (None, x.dtype) else NotImplemented
    summed = sorted(dim % x.dim() for dim in dims or range(x.dim()))
    kept = [dim for dim in range(x.dim()) if dim not in summed]
    rows, count = (math.prod(x.shape[dim] for dim in each) for each in (kept, summed))
    table = x.to(torch.int64).permute(*kept, *summed).reshape(rows, count)
    ones = torch.ones(count, 1, dtype=torch.int64, device=x.device)
    shape = [1 if dim in summed else size for dim, size in enumerate(x.shape)]
    sums = torch.mm(table, ones).reshape(shape if keepdim else [x.shape[dim] for dim in kept])
    return sums if dtype is None else sums.to(dtype)


def _as_vector(value: Any) -> Any:
    is_number = isinstance(value, torch.Tensor) and not value.dim()
    return value.reshape(1) if is_number else value


def extreme(
    operator: Any, largest: bool, x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False
) -> Any:
    """Name all dimensions where none is named; int64 by sorting, see :func:`extreme_along`."""
    if not x.dim():
        return x.clone()
    if x.dtype is torch.bool:
        return (aten.any.dims if largest else aten.all.dims)(x, dim or range(x.dim()), keepdim)
    if x.dtype is torch.int64:
        return _extreme_long(largest, x, dim or range(x.dim()), keepdim)
    return NotImplemented if dim else operator(x, list(range(x.dim())), keepdim)


def _extreme_long(largest: bool, x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> Any:
    for dim in dims:
        x = torch.topk(x, 1, dim, largest).values
    return x if keepdim else x.squeeze([*dims])


def extreme_of_all(largest: bool, x: torch.Tensor) -> Any:
    """Of int64, by sorting; of truth values whether any is true, or all are."""
    if x.dtype is torch.bool:
        return torch.any(x) if largest else torch.all(x)
    if x.dtype is not torch.int64 or not x.dim():
        return NotImplemented
    return torch.topk(x.reshape(-1), 1, 0, largest).values.reshape(())


def extreme_along(
    operator: Any, largest: bool, x: torch.Tensor, dim: int, keepdim: bool = False
) -> Any:
    """Of int64, by sorting: ONNX Runtime's TopK (1.31) compares all 64 bits, its ReduceMax 32."""
    if not x.dim():
        return over_one_element(operator, x, dim)
    if x.dtype is torch.bool:  # ONNX orders none; the backward of a product asks for the first zero
        values, places = operator(x.to(torch.int32), dim, keepdim)
        return values.to(torch.bool), places
    if x.dtype is not torch.int64:
        return NotImplemented
    values, places = torch.topk(x, 1, dim, largest)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def vector_norm(
    x: torch.Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Name all dimensions where none is named; in float64, name the root that is drawn.

    The translation writes it as float32. What is not zero is counted: NaN is not, and OpenVINO's
    sign (2026.4), by which the translation counts, says that it is.
    """
    if not x.dim():
        return over_one_element(aten.linalg_vector_norm.default, x, ord, [0], dtype=dtype)
    dims = dim or list(range(x.dim()))
    if abs(ord) == math.inf:
        largest = (torch.amax if ord > 0 else torch.amin)(torch.abs(x), dims, keepdim)
        return largest if dtype is None else largest.to(dtype)
    if ord == 0:
        return torch.sum((x != 0).to(dtype or x.dtype), dims, keepdim)
    if (dtype or x.dtype) is torch.float64 and ord not in (1, 2):
        powers = torch.pow(torch.abs(x.to(torch.float64)), ord)
        return torch.pow(torch.sum(powers, dims, keepdim), 1 / ord)
    if (dtype or x.dtype) is x.dtype and ord in (1, 2):
        powers = torch.abs(x) if ord == 1 else x * x
        summed = cascade(powers, dims, keepdim)
        if summed is not NotImplemented:
            return summed if ord == 1 else torch.sqrt(summed)
    if dim:
        return NotImplemented
    return aten.linalg_vector_norm.default(x, ord, dims, keepdim, dtype=dtype)


def stable_sort(
    x: torch.Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> Any:
    """ONNX's TopK takes the lower index first among equals: it is stable in both directions."""
    return aten.sort.default(x, dim, descending)


def median(x: torch.Tensor) -> Any:
    """The lower median of all elements; NaN if one of them is."""
    if not x.dtype.is_floating_point or not isinstance(x.numel(), int) or not x.numel():
        return NotImplemented
    flat = x.reshape(-1)
    ordered = torch.sort(flat).values
    return torch.where(torch.isnan(flat).any(), torch.nan, ordered[(x.numel() - 1) // 2])


def median_along(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """The lower median, and where it is; of several equal elements eager names any, too."""
    if not x.dim():
        return over_one_element(aten.median.dim, x, dim)
    if not x.dtype.is_floating_point or not isinstance(x.shape[dim], int):
        return NotImplemented
    ordered, places = torch.sort(x, dim)
    middle = (x.shape[dim] - 1) // 2
    value, place = ordered.narrow(dim, middle, 1), places.narrow(dim, middle, 1)
    unordered = torch.isnan(x)
    spoilt = unordered.any(dim, keepdim=True)
    first = torch.argmax(unordered.to(torch.int32), dim, keepdim=True)
    value, place = torch.where(spoilt, torch.nan, value), torch.where(spoilt, first, place)
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


def cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """One product after the other; eager, too, keeps the products of floats in float64."""
    if dtype is None:
        dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    wide = torch.float64 if dtype.is_floating_point else dtype
    return _scanned(torch.mul, x.to(dtype).to(wide), dim, dtype)


def logcumsumexp(x: torch.Tensor, dim: int) -> Any:
    """One sum after the other, the first to nothing."""
    if not x.dtype.is_floating_point or _torch.symbols.may_be_empty(x):
        return NotImplemented
    if not x.dim():
        return x.clone()
    first, rest = x.narrow(dim, 0, 1), x.narrow(dim, 1, x.shape[dim] - 1)
    first = torch.logaddexp(first, torch.full_like(first, -math.inf))
    return _scanned(torch.logaddexp, torch.cat([first, rest], dim), dim, x.dtype)


def _scanned(
    step: Callable[..., torch.Tensor], x: torch.Tensor, dim: int, dtype: torch.dtype
) -> Any:
    if not x.dim():
        return x.to(dtype).clone()
    parts = _parts(x, dim)
    if not parts:
        return NotImplemented
    for i in range(1, len(parts)):
        parts[i] = step(parts[i - 1], parts[i])
    return torch.cat(parts, dim).to(dtype)


def running(is_better: Callable[..., torch.Tensor], x: torch.Tensor, dim: int) -> Any:
    """The largest, or smallest, so far, and where it is: the last of equals, or of NaN."""
    if not x.dim():
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    parts = _parts(x, dim)
    if not parts or x.dtype is torch.bool:
        return NotImplemented
    places = [torch.zeros_like(parts[0], dtype=torch.int64)]
    for i in range(1, len(parts)):
        best, candidate = parts[i - 1], parts[i]
        better = is_better(candidate, best) & (best == best) | (candidate != candidate)
        parts[i] = torch.where(better, candidate, best)
        places.append(torch.where(better, i, places[-1]))
    return torch.cat(parts, dim), torch.cat(places, dim)


def _parts(x: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """Slices of one element along ``dim``; none if there are too many, or an unknown number."""
    size = x.shape[dim]
    if not isinstance(size, int) or not 0 < size <= _LONGEST:
        return []
    return [x.narrow(dim, i, 1) for i in range(size)]


def index_reduce(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    """The same index for all elements of a slice."""
    if not x.dim():
        how: dict[str, Any] = {"reduce": reduce, "include_self": include_self}
        return over_one_element(aten.index_reduce.default, x, dim, index, source, **how)
    shape = [1] * x.dim()
    shape[dim] = index.numel()
    places = index.reshape(shape).expand(source.shape)
    return aten.scatter_reduce.two(x, dim, places, source, reduce, include_self=include_self)


def scatter_part(
    operator: Any, x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, **how: Any
) -> Any:
    """Only that part of the source for which there is an index; ONNX wants no other."""
    if not x.dim():
        return over_one_element(operator, x, dim, index, src, **how)
    static = all(isinstance(size, int) for size in (*index.shape, *src.shape))
    if not static or not index.dim() or index.shape == src.shape:
        return NotImplemented
    for along, size in enumerate(index.shape):
        src = src.narrow(along, 0, size)
    return operator(x, dim, index, src, **how)


def scatter_reduce(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    """A mean as a sum over a count."""
    if reduce != "mean" or not x.dtype.is_floating_point or not x.dim():
        how = {"include_self": include_self}
        operator = functools.partial(aten.scatter_reduce.two, reduce=reduce)
        return scatter_part(operator, x, dim, index, src, **how)
    ones = torch.ones_like(src)
    start = torch.ones_like(x) if include_self else torch.zeros_like(x)
    count = torch.scatter_add(start, dim, index, ones)
    total = torch.scatter_add(x if include_self else torch.zeros_like(x), dim, index, src)
    return torch.where(count == 0, x, total / count)


def scatter(x: torch.Tensor, dim: int, index: torch.Tensor, src: Any, *, reduce: str) -> Any:
    """The old spelling of ``scatter_add``, and of ``scatter_reduce`` with a product."""
    if not isinstance(src, torch.Tensor):
        src = torch.full_like(index, src, dtype=x.dtype)
    if reduce == "add":
        return aten.scatter_add.default(x, dim, index, src)
    return aten.scatter_reduce.two(x, dim, index, src, "prod")


def put(
    x: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False
) -> Any:
    """``index_put`` into the flat tensor."""
    if not x.dim() or not _torch.tensors.is_row_major(x):
        return NotImplemented
    flat = aten.index_put.default(
        x.reshape(-1), (index.reshape(-1),), source.reshape(-1), accumulate
    )
    return flat.reshape(x.shape)


def squeeze(x: torch.Tensor, dim: int) -> Any:
    """Nothing to take away from a size that is known and not one; ONNX calls that an error."""
    keeps = x.dim() and isinstance(x.shape[dim], int) and x.shape[dim] != 1
    return aten.alias.default(x) if keeps else NotImplemented


def squeeze_ones(x: torch.Tensor) -> Any:
    """By the dimensions that are known to be one: not all engines read a rank that is not said."""
    return x.squeeze(
        [dim for dim, size in enumerate(x.shape) if isinstance(size, int) and size == 1]
    )


def cdist(a: torch.Tensor, b: torch.Tensor, p: float, compute_mode: int | None) -> Any:
    """The norms of all differences, where they are not too many to be held at once."""
    difference = a.unsqueeze(-2) - b.unsqueeze(-3)
    if not all(isinstance(size, int) for size in difference.shape):
        return NotImplemented
    if not 0 < difference.numel() <= MOST_ADDED:
        return NotImplemented
    if p == 0:  # a norm counts NaN as one that is not zero
        differs = torch.where(difference != difference, difference, 1.0)
        return torch.where(difference == 0, 0.0, differs).sum(-1)
    return torch.linalg.vector_norm(difference, p, -1)


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
    """The product of all three, summed in their own dtype."""
    for dim in expand_a:
        a = a.unsqueeze(dim)
    for dim in expand_b:
        b = b.unsqueeze(dim)
    for dim in expand_c:
        c = c.unsqueeze(dim)
    return (a * b * c).sum(list(sumdim), dtype=a.dtype)


def addmm(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    """A product over no elements adds nothing."""
    if not isinstance(a.shape[1], int) or a.shape[1]:
        return alone(torch.mm, x, a, b, beta=beta, alpha=alpha)
    if beta == 0:
        return x.new_zeros(a.shape[0], b.shape[1])
    return (x * beta).expand(a.shape[0], b.shape[1]).clone()


def addbmm(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    """Integers by the product and the sum of :func:`total`; the translation has a sum of floats."""
    if x.dtype.is_floating_point or x.dtype is torch.bool:
        how = {"beta": beta, "alpha": alpha}
        return alone(lambda a, b: torch.bmm(a, b).sum(0), x, a, b, **how)
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
    """The product to which nothing is added; engines add zero times ``x``, which may be NaN.

    Models give memory that nobody has written to as such an ``x``.
    """
    if not isinstance(beta, int | float) or beta != 0:
        return NotImplemented
    return product(a, b) if alpha == 1 else product(a, b) * alpha
