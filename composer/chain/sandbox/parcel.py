"""Packs a graph, its inputs and its candidates as bytes, to send them to a sandbox.

The bytes are pickles that ``torch.save`` writes. They go through a socket to a child of this
process, and never through a file. Large tensors are copied once, into memory that the sandbox maps
(:class:`Memory`).
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import mmap
import os
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
from composer.chain.candidates import ChainEntry
from composer.errors import Refusal, SandboxRefusal, refuse, text_of
from composer.graphs import clones, collectives, written
from composer.passes.resolve import SharedPasses
from composer.records import Attempt, GraphRequest, Reason, Status
from composer.system import forks

WORK = "composer.chain.sandbox.isolated:tried"
"""What a sandbox does with a parcel."""

_FILLING = 0.01
"""The value of a tensor that has none: small, positive (it may be a variance), no special case."""

_LARGE = 1 << 16
"""Tensors of as many bytes go through shared memory, where the system has it."""


class Memory:
    """Memory for the large tensors of a parcel, which a sandbox maps without a copy.

    It is freed when it is closed and no sandbox maps it any more. On a system without
    ``memfd_create`` all tensors are in the bytes of the parcel.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("composer") if hasattr(os, "memfd_create") else None
        self._size = 0
        forks.with_each_child(self, Memory.close)

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the memory."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def holds(self, value: torch.Tensor) -> bool:
        """Return True if a tensor goes through this memory."""
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        is_large = is_plain and value.layout is torch.strided and _bytes_of(value) >= _LARGE
        return self._file is not None and is_large and not (value.is_conj() or value.is_neg())

    def add(self, value: torch.Tensor) -> tuple[str, int, int]:
        """Copy a tensor into the memory; return the path, the offset and the bytes."""
        assert self._file is not None
        offset, size = self._size, _bytes_of(value)
        self._size += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self._file, self._size)
        memory = torch.frombuffer(mmap.mmap(self._file, size, offset=offset), dtype=value.dtype)
        memory.copy_(value.as_strided((size // value.element_size(),), (1,)))
        return f"/proc/{os.getpid()}/fd/{self._file}", offset, size


def _bytes_of(value: torch.Tensor) -> int:
    """Return the bytes from the first to the last element of a tensor."""
    if not value.numel():
        return 0
    steps = zip(value.shape, value.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * value.element_size()


@functools.cache
def _mapped(path: str) -> mmap.mmap:
    """Map the memory of the parcel that this sandbox got. What it writes stays its own."""
    file = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(file)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A tensor without the attributes that Python code has set on it."""

    tensor: torch.Tensor
    requires_grad: bool

    def open(self) -> torch.Tensor:
        return self.tensor.requires_grad_(self.requires_grad)


def pack(contents: Mapping[str, Any], memory: Memory) -> bytes:
    """Return the contents as bytes.

    Args:
        contents: The objects to send, by the name that error messages use, such as "the graph".
        memory: Takes the large tensors. It has to stay open until the contents are unpacked.

    Raises:
        Refusal: ``declined`` with ``not_isolatable``, naming what cannot be sent.
    """
    packed: dict[str, bytes] = {}
    for name, value in contents.items():
        try:
            packed[name] = _dumps(value, memory)
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


def opened(contents: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what :func:`case` was given, in the receiving process.

    These are the chain, the passes, the graph with its inputs, the facts about it, the settings,
    and the surroundings of the sender.
    """
    *groups, options, shared, (gm, torch_gm, sent), last = contents.values()
    facts, settings, surroundings = last
    entries = dict(itertools.chain.from_iterable(groups))
    chain = [_with_options(entries[place], given) for place, given in enumerate(options)]
    inputs = [each.open() if isinstance(each, _Sent) else each for each in sent]
    return chain, shared, (gm, inputs), facts | {"torch_gm": torch_gm}, settings, surroundings


def case(
    request: GraphRequest,
    entries: Sequence[ChainEntry],
    shared: SharedPasses,
    settings: Mapping[str, Any] = types.MappingProxyType({}),
    around: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what a sandbox needs to try candidates, by the names for messages.

    Args:
        request: The graph.
        entries: The chain.
        shared: The passes of the later stages.
        settings: The settings of a decision.
        around: The :func:`surroundings` of the inputs; those of now by default.

    Raises:
        Refusal: ``declined`` with ``not_isolatable``.
    """
    if collectives.meets_other_ranks(request.gm):
        message = "the graph has collectives, and a child process is no rank"
        refuse(Status.DECLINED, Reason.NOT_ISOLATABLE, message)
    groups: dict[str, list[tuple[int, ChainEntry]]] = {}
    for place, entry in enumerate(entries):
        limits = entry.limits
        if entry.backend.isolates_itself:  # it would start a sandbox of its own there
            limits = dataclasses.replace(limits, isolate=False)
        sent = dataclasses.replace(_with_options(entry, {}), limits=limits, in_sandbox=True)
        groups.setdefault(f"the backend {entry.candidate.name!r}", []).append((place, sent))
    if request.dynamic and request.torch_gm not in (None, request.gm):
        message = "the graph has two forms, which have the same symbols"
        refuse(Status.DECLINED, Reason.NOT_ISOLATABLE, message)
    names = {each.name for each in dataclasses.fields(request)}
    names -= {"gm", "torch_gm", "example_inputs", "_made"}
    facts = {name: getattr(request, name) for name in names}
    return {
        **groups,
        "its options": [entry.candidate.options for entry in entries],
        "the shared passes": shared if shared.late else SharedPasses(),
        "the graph": (request.gm, request.torch_gm, inputs_to_send(request.example_inputs)),
        "its surroundings": (facts, {**_SETTINGS, **settings}, around or surroundings()),
    }


def _with_options(entry: ChainEntry, options: Mapping[str, Any]) -> ChainEntry:
    """Return the candidate with other options."""
    candidate = entry.candidate.model_copy(update={"options": dict(options)})
    return dataclasses.replace(entry, candidate=candidate)


_SETTINGS = {"benchmark": None, "strict": False, "beside": False}


def attempts_of(answer: Mapping[str, Any]) -> list[Attempt]:
    """Return the records that a sandbox answered.

    Raises:
        Refusal: ``declined`` with ``not_isolatable``: the sandbox could not unpack the parcel, or
            its walk did not end.
    """
    if "unfinished" in answer:
        refuse(Status.DECLINED, Reason.NOT_ISOLATABLE, answer["unfinished"])
    if "refused" in answer:
        raise refusal_of(Attempt.of(answer["refused"]))
    return [Attempt.of(each) for each in answer["attempts"]]


def refusal_of(attempt: Attempt) -> Refusal:
    """Return the refusal with which an attempt in a sandbox ended."""
    status, reason, message = attempt.status, attempt.reason, attempt.message
    assert reason is not None
    if reason is Reason.NOT_REGISTERED:  # it is registered here: the caller's own probe found it
        status, reason = Status.DECLINED, Reason.NOT_ISOLATABLE
        message = f"in a child process {message}"
    return SandboxRefusal(status, reason, message, attempt.error_type, attempt.traceback)


def surroundings() -> dict[str, Any]:
    """Return the settings of torch, outside of the graph, that change what is compiled."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": _torch.modes.autocasts(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "precision": _torch.modes.float32_precision(),
        "compilers": _torch.inductor.portable_settings(),
    }


@contextmanager
def within(settings: Mapping[str, Any]) -> Iterator[None]:
    """Apply the sender's :func:`surroundings` in this context.

    All but the modes of this thread stays set afterwards.
    """
    torch.set_default_dtype(settings["dtype"])
    torch.set_num_threads(settings["threads"])
    _torch.modes.set_float32_precision(settings["precision"])
    _torch.inductor.apply_settings(settings["compilers"])
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(settings["inference"]))
        stack.enter_context(torch.set_grad_enabled(settings["grad"]))
        for device, dtype in settings["autocast"]:
            stack.enter_context(torch.autocast(device, dtype))
        yield


def _dumps(value: Any, memory: Memory) -> bytes:
    class Pickler(_Pickler):
        """Pickles large tensors into this parcel's memory."""

    Pickler.memory = memory
    stream = io.BytesIO()
    module: Any = types.SimpleNamespace(Pickler=Pickler, __name__=__name__)
    with _torch.fakes.unset_fake_temporarily():
        torch.save(value, stream, pickle_module=module)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    memory: Memory

    def reducer_override(self, value: Any) -> Any:
        """Pickle graphs in their own form, operators by name, and large tensors into the memory.

        Two kinds of objects are pickled by their plain names, since pickle's default fails. The
        default for torch's memory formats needs a later protocol than that of ``torch.save``, and
        looks for the first module that imported torch. torch's max-pool functions are defined
        within another function, so their qualified names cannot be imported.
        """
        if isinstance(value, torch.fx.GraphModule):
            return written.of_bytes, (written.as_bytes(value),)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, types.FunctionType) and _is_found_by_name(value):
            return value.__name__
        is_format = isinstance(value, torch.memory_format)
        path = str(value) if is_format else _torch.operators.operator_path(value)
        return NotImplemented if path is None else (pkgutil.resolve_name, (path,))

    def _tensor(self, value: torch.Tensor) -> Any:
        """Return how to send a tensor; ``NotImplemented`` for pickle's own way."""
        if isinstance(value, _torch.fakes.FakeTensor):
            return _made_up, (_Layout.of(value),)
        if not self.memory.holds(value):
            return NotImplemented
        return _from_memory, (_Layout.of(value), self.memory.add(value.detach()))


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a tensor is besides its values. Symbols are numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_parameter: bool

    @classmethod
    def of(cls, value: torch.Tensor) -> _Layout:
        """Return the layout of a tensor."""
        shape = tuple(map(_torch.symbols.hint, value.shape))
        stride = tuple(map(_torch.symbols.hint, value.stride()))
        is_parameter = isinstance(value, torch.nn.Parameter)
        return cls(shape, stride, value.dtype, value.device, value.requires_grad, is_parameter)

    def over(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this layout over these values."""
        tensor = values.as_strided(self.shape, self.stride).to(self.device)
        if self.is_parameter:
            return torch.nn.Parameter(tensor, self.requires_grad)
        return tensor.requires_grad_(self.requires_grad)


def _is_found_by_name(function: types.FunctionType) -> bool:
    module = sys.modules.get(function.__module__)
    return getattr(module, function.__name__, None) is function


def _input(value: Any) -> Any:
    if type(value) is torch.Tensor:
        return _Sent(value.detach(), value.requires_grad)
    number = _torch.symbols.hint(value)
    if isinstance(value, torch.SymInt | torch.SymFloat) and not isinstance(number, int | float):
        what = f"the graph cannot be sent to another process: only data decide its size {value}"
        refuse(Status.DECLINED, Reason.NOT_ISOLATABLE, what)
    return number


def _from_memory(layout: _Layout, place: tuple[str, int, int]) -> torch.Tensor:
    path, offset, size = place
    count = size // layout.dtype.itemsize
    return layout.over(
        torch.frombuffer(_mapped(path), dtype=layout.dtype, count=count, offset=offset)
    )


def _made_up(layout: _Layout) -> torch.Tensor:
    made = torch.empty_strided(
        layout.shape, layout.stride, dtype=layout.dtype, device=layout.device
    )
    return layout.over(made.fill_(_FILLING if layout.dtype.is_floating_point else 0))
