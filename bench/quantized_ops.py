"""Samples of the operators that quantize, and of products of quantized numbers.

Torch's ``op_db`` has none of them. ``bench/ops.py`` runs these samples beside its own. torchao's
operators (``quantize_affine`` and its kin) are composed of others, and torch takes them apart
itself; they are among the samples if torchao is installed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators

ROWS, COLUMNS = 6, 32
INT8, UINT8 = (-128, 127, torch.int8), (0, 255, torch.uint8)
SCALE, ZERO = 0.021, 3

Arguments = Iterator[tuple[Any, ...]]

ops = torch.ops.quantized_decomposed
aten = torch.ops.aten


def database() -> list[Any]:
    """An entry like those of ``op_db`` for each operator."""
    from torch.testing._internal.opinfo.core import OpInfo

    named = of_pt2e() | _PRODUCTS
    if importlib.util.find_spec("torchao") is not None:
        named |= {f"torchao.{name}": each for name, each in _torchao().items()}
    return [
        OpInfo(
            name,
            op=function,
            dtypes=(torch.float32,),
            sample_inputs_func=functools.partial(_samples, make),
            supports_autograd=False,
            supports_out=False,
        )
        for name, (function, make) in named.items()
    ]


def of_pt2e() -> dict[str, tuple[Any, Callable[[], Arguments]]]:
    """The operators by which PT2E quantizes, by name, each with its samples."""
    return {f"quantized_decomposed.{name}": each for name, each in _PT2E.items()}


def _samples(make: Callable[[], Arguments], *_: Any, **__: Any) -> Iterator[Any]:
    from torch.testing._internal.opinfo.core import SampleInput

    for first, *others in make():
        yield SampleInput(first, args=tuple(others))


def numbers(*shape: int) -> torch.Tensor:
    """Numbers of both signs."""
    return torch.randn(*shape or (ROWS, COLUMNS))


def integers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Integers of the whole range of a dtype."""
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape or (ROWS, COLUMNS)).to(dtype)


def scales(*shape: int) -> torch.Tensor:
    """Positive scales."""
    return torch.rand(shape) * 0.05 + 0.01


def zeros(*shape: int) -> torch.Tensor:
    """Zero points."""
    return torch.randint(-9, 9, shape)


def by_number() -> Arguments:
    """To quantize with Python's numbers: whole ranges, narrow ones, and other shapes."""
    for kind in (INT8, UINT8, (-8, 7, torch.int8)):
        yield numbers(), SCALE, ZERO, *kind
    yield numbers(2, 3, 4), SCALE, ZERO, *INT8


def of_number() -> Arguments:
    """To dequantize with Python's numbers."""
    for kind in (INT8, UINT8):
        yield integers(kind[-1]), SCALE, ZERO, *kind


def by_tensor() -> Arguments:
    """To quantize with scales and zero points that are tensors of one element."""
    for kind in (INT8, UINT8):
        yield numbers(), torch.tensor(SCALE), torch.tensor(ZERO), *kind
        yield numbers(), torch.tensor([SCALE], dtype=torch.float64), torch.tensor([ZERO]), *kind


def of_tensor() -> Arguments:
    """To dequantize with such tensors."""
    for kind in (INT8, UINT8):
        yield integers(kind[-1]), torch.tensor(SCALE), torch.tensor(ZERO), *kind


def by_tensors() -> Arguments:
    """To quantize with limits that are tensors, too."""
    limits = torch.tensor(-128), torch.tensor(127)
    yield numbers(), torch.tensor(SCALE), torch.tensor(ZERO), *limits, torch.int8


def of_tensors() -> Arguments:
    """To dequantize with such limits."""
    limits = torch.tensor(-128), torch.tensor(127)
    yield integers(torch.int8), torch.tensor(SCALE), torch.tensor(ZERO), *limits, torch.int8


def by_channel() -> Arguments:
    """To quantize along each axis."""
    yield numbers(), scales(ROWS), zeros(ROWS), 0, *INT8
    yield numbers(), scales(COLUMNS), zeros(COLUMNS), 1, *INT8


def of_channel() -> Arguments:
    """To dequantize along each axis, also without zero points."""
    yield integers(torch.int8), scales(ROWS), zeros(ROWS), 0, *INT8
    yield integers(torch.int8), scales(COLUMNS), None, 1, *INT8


def by_token() -> Arguments:
    """To quantize each row."""
    yield numbers(), scales(ROWS, 1), zeros(ROWS, 1), *INT8


def of_token() -> Arguments:
    """To dequantize each row."""
    yield integers(torch.int8), scales(ROWS, 1), zeros(ROWS, 1), *INT8, torch.float32


def by_group() -> Arguments:
    """To quantize groups of eight."""
    yield numbers(), scales(ROWS, COLUMNS // 8), zeros(ROWS, COLUMNS // 8), *INT8, 8


def of_group() -> Arguments:
    """To dequantize groups of eight, also without zero points."""
    given = integers(torch.int8), scales(ROWS, COLUMNS // 8)
    yield *given, zeros(ROWS, COLUMNS // 8), *INT8, 8, torch.float32
    yield *given, None, *INT8, 8, torch.float32


def to_choose() -> Arguments:
    """Numbers of both signs, of one sign, and zeros, for which a scale is chosen."""
    for x in (numbers(), numbers().abs(), -numbers().abs(), torch.zeros(ROWS, COLUMNS)):
        for low, high, dtype in (INT8, UINT8):
            yield x, low, high, 1e-6, dtype


def to_choose_by_token() -> Arguments:
    """Such numbers, with a scale for each row."""
    for x in (numbers(), numbers().abs(), -numbers().abs(), torch.zeros(ROWS, COLUMNS)):
        yield x, torch.int8


def of_integers() -> Arguments:
    """Factors of both kinds, and at the ends of the range."""
    for dtype in (torch.int8, torch.uint8):
        yield integers(dtype), integers(torch.int8, COLUMNS, 5)
        most = torch.full((ROWS, COLUMNS), torch.iinfo(dtype).max, dtype=dtype)
        yield most, torch.full((COLUMNS, 5), -128, dtype=torch.int8)


def of_int8_weight() -> Arguments:
    """Floats times a weight with a scale for each row."""
    yield numbers(), integers(torch.int8, 5, COLUMNS), scales(5)


def of_int4_weight() -> Arguments:
    """Floats times a weight of four bits in groups of 32, in the layout of this processor."""
    weight = torch.randint(0, 16, (64, COLUMNS), dtype=torch.int32)
    packed = aten._convert_weight_to_int4pack_for_cpu(weight, 1)
    yield numbers(), packed, COLUMNS, scales(1, 64, 2)


_PT2E: dict[str, tuple[Any, Callable[[], Arguments]]] = {
    "quantize_per_tensor": (ops.quantize_per_tensor.default, by_number),
    "quantize_per_tensor_tensor": (ops.quantize_per_tensor.tensor, by_tensor),
    "quantize_per_tensor_tensor2": (ops.quantize_per_tensor.tensor2, by_tensors),
    "dequantize_per_tensor": (ops.dequantize_per_tensor.default, of_number),
    "dequantize_per_tensor_tensor": (ops.dequantize_per_tensor.tensor, of_tensor),
    "dequantize_per_tensor_tensor2": (ops.dequantize_per_tensor.tensor2, of_tensors),
    "quantize_per_channel": (ops.quantize_per_channel.default, by_channel),
    "dequantize_per_channel": (ops.dequantize_per_channel.default, of_channel),
    "quantize_per_token": (ops.quantize_per_token.default, by_token),
    "dequantize_per_token": (ops.dequantize_per_token.default, of_token),
    "quantize_per_channel_group": (ops.quantize_per_channel_group.default, by_group),
    "dequantize_per_channel_group": (ops.dequantize_per_channel_group.default, of_group),
    "choose_qparams": (ops.choose_qparams.tensor, to_choose),
    "choose_qparams_symmetric": (ops.choose_qparams_symmetric.tensor, to_choose),
    "choose_qparams_per_token": (ops.choose_qparams_per_token.default, to_choose_by_token),
    "choose_qparams_per_token_asymmetric": (
        ops.choose_qparams_per_token_asymmetric.default,
        to_choose_by_token,
    ),
}

_PRODUCTS: dict[str, tuple[Any, Callable[[], Arguments]]] = {
    "_int_mm": (aten._int_mm.default, of_integers),
    "_weight_int8pack_mm": (aten._weight_int8pack_mm.default, of_int8_weight),
    "_weight_int4pack_mm_for_cpu": (aten._weight_int4pack_mm_for_cpu.default, of_int4_weight),
}


def _torchao() -> dict[str, tuple[Any, Callable[[], Arguments]]]:
    from torchao.quantization import quant_primitives as primitives

    block = [1, 8]
    shape = ROWS, COLUMNS // 8

    def by_block() -> Arguments:
        yield numbers(), block, scales(*shape), zeros(*shape).int(), torch.int8

    def of_block() -> Arguments:
        given = scales(*shape), zeros(*shape).int(), torch.int8
        yield integers(torch.int8), block, *given

    def to_choose_by_block() -> Arguments:
        for mapping in (primitives.MappingType.SYMMETRIC, primitives.MappingType.ASYMMETRIC):
            yield numbers(), mapping, block, torch.int8

    return {
        "quantize_affine": (primitives.quantize_affine, by_block),
        "dequantize_affine": (primitives.dequantize_affine, of_block),
        "choose_qparams_affine": (primitives.choose_qparams_affine, to_choose_by_block),
    }
