"""Packs a graph, its inputs and a candidate as bytes, to send them to a sandbox.

The bytes are pickles that ``torch.save`` writes. They go through a socket to a child of this
process, and never through a file. Graphs are taken apart into nodes
(:func:`composer.graphs.written.apart`). The values of floating-point parameters are not sent: the
receiver makes up values. All other tensors keep theirs.
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
"""The value of a made-up weight: small, positive (it may be a variance), and no special case."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A tensor without the attributes that Python code has set on it."""

    tensor: torch.Tensor
    requires_grad: bool

    def open(self) -> torch.Tensor:
        return self.tensor.requires_grad_(self.requires_grad)


def pack(contents: Mapping[str, Any]) -> bytes:
    """Return the contents as bytes.

    Args:
        contents: The objects to send, by the name that error messages use, such as "the graph".

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
            message = f"{name} cannot be sent to another process: {text_of(error)}"
            refuse(Status.DECLINED, Reason.NOT_ISOLATABLE, message)
    return pickle.dumps(packed)


def unpack(parcel: bytes) -> dict[str, Any]:
    """Return the contents that were packed.

    Raises:
        Refusal: ``declined`` with ``not_isolatable``, naming what cannot be imported here.
    """
    contents: dict[str, Any] = {}
    for name, packed in pickle.loads(parcel).items():
        try:
            contents[name] = torch.load(io.BytesIO(packed), weights_only=False)
        except Exception as error:  # noqa: BLE001  # importing runs anybody's code
            message = f"{name} cannot be received by another process: {text_of(error)}"
            refuse(Status.DECLINED, Reason.NOT_ISOLATABLE, message)
    return contents


def inputs_to_send(example_inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs with symbols as numbers, and tensors without attributes set on them.

    Raises:
        Refusal: ``declined`` with ``not_isolatable``: the value of a symbol depends on data.
    """
    weights = {i for i, v in enumerate(example_inputs) if isinstance(v, torch.nn.Parameter)}
    with _torch.fakes.unset_fake_temporarily():  # a pickled tensor brings its whole storage: copy
        return list(map(_input, clones.copy_inputs(example_inputs, keep=weights)))


def opened(sent: Sequence[Any]) -> list[Any]:
    """Return the inputs that :func:`inputs_to_send` was given, in the receiving process."""
    return [each.open() if isinstance(each, _Sent) else each for each in sent]


def surroundings() -> dict[str, Any]:
    """Return the settings of torch, outside of the graph, that change what is compiled."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": _torch.modes.autocasts(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "precision": _torch.modes.float32_precision(),
    }


@contextmanager
def within(settings: Mapping[str, Any]) -> Iterator[None]:
    """Apply the sender's :func:`surroundings` in this context.

    The default dtype, the number of threads and the precision of float32 stay set afterwards.
    """
    torch.set_default_dtype(settings["dtype"])
    torch.set_num_threads(settings["threads"])
    _torch.modes.set_float32_precision(settings["precision"])
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(settings["inference"]))
        stack.enter_context(torch.set_grad_enabled(settings["grad"]))
        for device, dtype in settings["autocast"]:
            stack.enter_context(torch.autocast(device, dtype))
        yield


def _dumps(value: Any) -> bytes:
    stream = io.BytesIO()
    with _torch.fakes.unset_fake_temporarily():
        torch.save(value, stream, pickle_module=_PICKLE)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Pickle graphs as nodes, operators by name, and weights without their values.

        Two kinds of objects are pickled by their plain names, since pickle's default fails. The
        default for torch's memory formats needs a later protocol than that of ``torch.save``, and
        looks for the first module that imported torch. torch's max-pool functions are defined
        within another function, so their qualified names cannot be imported.
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
"""The object that ``torch.save`` takes as its pickle module."""


def _is_found_by_name(function: types.FunctionType) -> bool:
    module = sys.modules.get(function.__module__)
    return getattr(module, function.__name__, None) is function


def _input(value: Any) -> Any:
    if type(value) is torch.Tensor:
        return _Sent(value.detach(), value.requires_grad)
    return written.number_of(value)


def _weight(value: torch.Tensor) -> Any:
    """Return how to send a tensor without its values; ``NotImplemented`` if it keeps them."""
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
