"""Numbers by which engines went wrong without a word, put into torch's own operator samples.

``op_db`` draws its samples evenly from a small interval: no NaN and no infinity, no ties to round,
no steps of a tenth whose quotient is rounded, nothing near the ends of a range. :func:`refills`
gives a sample again with such numbers, one kind of them at a time, drawn with fixed seeds.
``python bench/ops.py --values edges`` runs them. The signs of zeros are drawn, and not compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

_ORDINARY = (-2.0, -1.5, -0.7, 0.3, 1.0, 2.5, 3.0)
_KINDS: dict[str, Sequence[float]] = {
    "nan": (math.nan, *_ORDINARY),
    "infinities": (math.inf, -math.inf, 0.0, -0.0, *_ORDINARY),
    "halves": [each / 2 for each in range(-9, 10)],
    "decimals": [each / 10 for each in range(-20, 21)],
}
"""What any operator is given in floats; and what is large or small (:func:`_extremes`)."""

_NOT_REFILLED = re.compile(
    # probabilities, rates and deviations
    r"bernoulli|multinomial|normal(\..*)?|cauchy|exponential|geometric|log_normal|uniform|rand.*|"
    r"nn\.functional\.(.*dropout.*|rrelu|binary_cross_entropy|gaussian_nll_loss|ctc_loss)|"
    # what has to be in order, or says how many elements there are
    r"bucketize|searchsorted|histogram|histogramdd|histc|arange|linspace.*|logspace.*|"
    r"nn\.functional\.fractional_max_pool.*|repeat_interleave|tensor_split|split.*|resize.*|"
    # decompositions of matrices, and what is solved by them: most matrices have none
    r"cholesky.*|geqrf|ormqr|lu|lu_.*|svd.*|qr|pca_lowrank|triangular_solve|pinverse|logdet|"
    r"linalg\.(?!cross|diag|vec|matrix_power|multi_dot|norm|matrix_norm|vander).*|norm\.nuc|"
    r"matrix_exp|"
    # places alone, of any one of several that are equal
    r"argsort|"
    # poles at each negative integer, near which eager is off, too
    r".*polygamma.*|mvlgamma.*|"
    # scales, and numbers that become integers: C++ does not say which integer NaN becomes
    r"(quantized_decomposed|torchao)\..*|_int_mm|_weight_int8pack_mm"
)
"""Operators whose operands are no numbers that one may choose."""

_FIRST_ONLY = re.compile(
    # places among integers, between pixels, and in the order of what is sorted
    r"gather|scatter.*|index_.*|take.*|put|_unsafe_masked_index.*|__getitem__|grid_sampler.*|"
    r"nn\.functional\.(nll_loss|cross_entropy|linear_cross.*|multi.*_loss|embedding_bag)|"
    r"nn\.functional\.(grid_sample|max_unpool.*)|max_pool2d_with_indices_backward|"
    r"(nan)?quantile|"
    # shifts by less than nothing or by more than all bits, which are undefined
    r"bitwise_(left|right)_shift|ldexp|"
    # weights: engines do not multiply padding by them, and may multiply before they subtract
    r"nn\.functional\.conv.*|.*(batch|layer|group|instance|rms)_norm.*"
)
"""Operators of which only the first operand is refilled."""

_PLACES = re.compile(r"nn\.functional\.(embedding|embedding_bag|one_hot)|bincount|unravel_index")
"""Operators whose first operand is an integer that is none to compute with."""

_ANY_OF_EQUALS = re.compile(r"sort|topk|kthvalue|(nan)?median|mode")
"""Operators that also give places, those of any one of several that are equal."""

_WITHOUT = {
    # what becomes of NaN, or of a number that the other dtype does not hold, is undefined
    r"int|long|short|byte|char|to|type|half|view_as.*|.*with_dtype": "nan infinities extremes",
    # differences and quotients of what overflows
    r".*(batch|layer|group|instance|rms|local_response)_norm.*": "extremes",
    r"(.*\.)?(std|var)(_mean)?(\..*)?|cov|corrcoef|(.*\.)?cross|.*trapez?oid|trapz": "extremes",
    r"nn\.functional\.conv.*": "extremes",
    r"(std|var)_mean.*|_softmax_backward_data": "infinities extremes",
    r"nn\.functional\.(interpolate.*|upsample.*|grid_sample)|grid_sampler.*": "extremes",
    # eager finds those that are equal by sorting
    r"isin|unique.*": "nan",
}
"""Kinds of numbers that say nothing about an operator."""


def is_refilled(name: str, dtype: torch.dtype) -> bool:
    """Whether an operator's operands may be any numbers at all."""
    places = not dtype.is_floating_point and _PLACES.fullmatch(name)
    return not (places or _NOT_REFILLED.fullmatch(name))


def refills(name: str, op: Any, sample: Any, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """What kind of numbers, and the sample with such in all its tensors of ``dtype``.

    The tensors are the sample's own, written over: use each before the next is asked for.
    """
    others = () if _FIRST_ONLY.fullmatch(name) else (sample.args, sample.kwargs)
    leaves, _ = tree_flatten((sample.input, others))
    leaves = [each for each in leaves if isinstance(each, torch.Tensor)]
    if _ANY_OF_EQUALS.fullmatch(name):
        sample.output_process_fn_grad = _values
    for kind, numbers in kinds(name, op, dtype).items():
        pool = torch.tensor(numbers, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        for leaf in leaves:
            if leaf.dtype is dtype and leaf.layout is torch.strided:
                _fill(leaf, pool, generator)
        yield kind, sample


def _values(returned: Any) -> Any:
    """The first of what an operator returns, without the places."""
    return returned[0] if isinstance(returned, tuple) else returned


def kinds(name: str, op: Any, dtype: torch.dtype) -> dict[str, Sequence[float]]:
    """The numbers to draw from, by their kind."""
    if dtype is torch.bool:
        return {"truths": [False, True]}
    if not dtype.is_floating_point:
        held = torch.iinfo(dtype)
        small = [each for each in range(-7, 8) if each >= held.min]
        ends = [held.min, held.min + 1, held.max - 1, held.max, held.max // 2 + 2]
        ends += [
            each
            for each in (3, -3, 2**24 + 1, -(2**31) - 5, 2**33, 2**53 + 1)
            if held.min <= each <= held.max
        ]
        # no -1 beside the least number, whose quotient ends the process, in eager as well
        return {"small": small, "not zero": [each for each in small if each], "ends": ends}
    found = _KINDS | {"extremes": _extremes(op, dtype)}
    dropped = " ".join(kinds for each, kinds in _WITHOUT.items() if re.fullmatch(each, name))
    return {kind: numbers for kind, numbers in found.items() if kind not in dropped.split()}


def _extremes(op: Any, dtype: torch.dtype) -> list[float]:
    """Numbers at the ends of the range, of both signs where no sum could cancel."""
    held = torch.finfo(dtype)
    root = math.sqrt(held.max)
    found = [held.max, held.max / 2, root, 2 * root, 1 / root, held.tiny, held.tiny / 8, held.eps]
    found += [1.0, 11.0, 90.0, 1 / held.eps + 1, 4 / held.eps + 4]
    return found + [-each for each in found] if is_elementwise(op) else found


def is_elementwise(op: Any) -> bool:
    """Whether each result is of one element of each operand, by one kernel."""
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

    return isinstance(op, BinaryUfuncInfo | UnaryUfuncInfo)


def _fill(tensor: torch.Tensor, pool: torch.Tensor, generator: torch.Generator) -> None:
    """Write over all memory of a tensor: what shares it, or repeats it, goes on to do so."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    memory.copy_(pool[torch.randint(len(pool), memory.shape, generator=generator)])


def in_float32(sample: Any) -> Any:
    """The sample with halves of float32."""
    parts = tree_map(_widened, (sample.input, sample.args, sample.kwargs))
    names = "input", "args", "kwargs"
    process = sample.output_process_fn_grad
    return SimpleNamespace(**dict(zip(names, parts, strict=True)), output_process_fn_grad=process)


def rounded(wide: Any, like: Any) -> Any:
    """Nested values with tensors of float32 rounded, where those of ``like`` are halves."""
    leaves, spec = tree_flatten(wide)
    others, _ = tree_flatten(like)
    found = (
        each.to(other.dtype) if _is_half(other) and isinstance(each, torch.Tensor) else each
        for each, other in zip(leaves, others, strict=False)
    )
    return tree_unflatten(list(found), spec)


def _widened(value: Any) -> Any:
    return value.float().detach().requires_grad_(value.requires_grad) if _is_half(value) else value


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
