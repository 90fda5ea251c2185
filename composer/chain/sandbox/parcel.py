"""A graph, its inputs and a candidate as bytes, for a sandbox of this process.

Python's pickle, by ``torch.save``: it goes through a socket to a process that this one started,
and never through a file. Graphs are taken apart into nodes (:func:`composer.graphs.written.apart`).
Floating-point parameters are made up by the receiver; everything else keeps its values.
"""

from __future__ import annotations

import io
import pickle
import pkgutil
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.errors import Refusal, refuse, text_of
from composer.graphs import clones, written
from composer.records import Reason, Status

_FILLING = 0.01
"""The value of a made-up weight: small, positive (a variance, say), and no special case."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A tensor without the attributes that Python code hung on it."""

    tensor: torch.Tensor
    requires_grad: bool

    def open(self) -> torch.Tensor:
        return self.tensor.requires_grad_(self.requires_grad)


def pack(contents: Mapping[str, Any]) -> bytes:
    """The contents as bytes.

    Args:
        contents: What to send, by what a message calls it ("the graph").

    Raises:
        Refusal: ``declined`` with ``not_isolatable``, naming what cannot be sent.
    """
    packed: dict[str, bytes] = {}
    for name, value in contents.items():
        try:
            packed[name] = _dumps(value)
        except Refusal:
            raise
        except Exception as error:  # noqa: BLE001  # pickle raises whatever an object's class does
            what = f"{name} cannot be sent to another process: {text_of(error)}"
            refuse(Status.DECLINED, Reason.NOT_ISOLATABLE, what)
    return pickle.dumps(packed)


def unpack(parcel: bytes) -> dict[str, Any]:
    """What was packed.

    Raises:
        Refusal: ``declined`` with ``not_isolatable``, naming what cannot be imported here.
    """
    contents: dict[str, Any] = {}
    for name, packed in pickle.loads(parcel).items():
        try:
            contents[name] = torch.load(io.BytesIO(packed), weights_only=False)
        except Exception as error:  # noqa: BLE001  # importing runs anybody's code
            what = f"{name} cannot be received by another process: {text_of(error)}"
            refuse(Status.DECLINED, Reason.NOT_ISOLATABLE, what)
    return contents


def inputs_to_send(example_inputs: Sequence[Any]) -> list[Any]:
    """Symbols as numbers, tensors without what Python code hung on them.

    Raises:
        Refusal: ``declined`` with ``not_isolatable``: only data decide what a symbol is.
    """
    weights = {i for i, v in enumerate(example_inputs) if isinstance(v, torch.nn.Parameter)}
    with _torch.fakes.unset_fake_temporarily():  # a pickled tensor has all of its storage with it
        return [_input(value) for value in clones.copy_inputs(example_inputs, keep=weights)]


def opened(sent: Sequence[Any]) -> list[Any]:
    """The inputs that :func:`inputs_to_send` was given, as they arrived."""
    return [each.open() if isinstance(each, _Sent) else each for each in sent]


def surroundings() -> dict[str, Any]:
    """What torch was told outside of the graph and changes what is compiled."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": _torch.modes.autocasts(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "precision": _torch.modes.float32_precision(),
    }


@contextmanager
def within(given: Mapping[str, Any]) -> Iterator[None]:
    """Have torch be told the same, here; the settings of the process stay."""
    torch.set_default_dtype(given["dtype"])
    torch.set_num_threads(given["threads"])
    _torch.modes.set_float32_precision(given["precision"])
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(given["inference"]))
        stack.enter_context(torch.set_grad_enabled(given["grad"]))
        for device, dtype in given["autocast"]:
            stack.enter_context(torch.autocast(device, dtype))
        yield


def _dumps(value: Any) -> bytes:
    stream = io.BytesIO()
    with _torch.fakes.unset_fake_temporarily():
        torch.save(value, stream, pickle_module=_PICKLE)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Take graphs apart, name operators, and leave the values of weights behind.

        torch names its memory formats in a way that only pickles of a later protocol than
        ``torch.save``'s understand, and those look for the first module that imported torch. Its
        pools of maxima are made within a function; their modules have them under their plain names.
        """
        if isinstance(value, torch.fx.GraphModule):
            return written.together, (*written.apart(value),)
        if isinstance(value, torch.Tensor):
            return _weight(value)
        if isinstance(value, types.FunctionType) and _is_found_by_name(value):
            return value.__name__
        is_format = isinstance(value, torch.memory_format)
        path = str(value) if is_format else _torch.operators.operator_path(value)
        return NotImplemented if path is None else (pkgutil.resolve_name, (path,))


_PICKLE: Any = types.SimpleNamespace(Pickler=_Pickler, __name__="composer.chain.sandbox.parcel")
"""What ``torch.save`` takes for a pickle module."""


def _is_found_by_name(function: types.FunctionType) -> bool:
    module = sys.modules.get(function.__module__)
    return getattr(module, function.__name__, None) is function


def _input(value: Any) -> Any:
    if type(value) is torch.Tensor:
        return _Sent(value.detach(), value.requires_grad)
    return written.number_of(value)


def _weight(value: torch.Tensor) -> Any:
    """How a tensor without values is sent; ``NotImplemented`` for one that keeps them."""
    is_fake = isinstance(value, _torch.fakes.FakeTensor)
    is_float = type(value) is torch.nn.Parameter and value.is_floating_point()
    if not is_fake and not (is_float and value.layout is torch.strided):
        return NotImplemented
    sizes, strides = map(_torch.symbols.hint, value.shape), map(_torch.symbols.hint, value.stride())
    layout = tuple(sizes), tuple(strides), value.dtype, value.device
    return _made_up, (*layout, value.requires_grad, isinstance(value, torch.nn.Parameter))


def _made_up(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    made.fill_(_FILLING if dtype.is_floating_point else 0)
    if is_parameter:
        return torch.nn.Parameter(made, requires_grad)
    return made.requires_grad_(requires_grad)
