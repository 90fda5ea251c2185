"""One ONNX model from a functional graph: what can be said in ONNX is said, the rest declined."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.fx

from composer import _torch
from composer.errors import Refusal, refuse
from composer.lowering.aot import FunctionalGraph
from composer.lowering.constants import evaluate_constants, lift_scalars
from composer.lowering.faithful import unfaithful
from composer.records import Reason, Status

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class Output:
    """How one output of the graph is made from what the engine returns.

    ``kind`` is ``engine`` (the engine's output number ``index``), ``input`` (the argument at
    ``index``, handed through) or ``constant`` (``value`` itself: an integer, ``None``). ``order``
    is the order of dimensions, outermost first, in which eager lays the tensor out, ``None`` where
    that is the usual one. ``view`` is (size, stride, offset) of an output that shares the memory
    of the engine's output, or the argument, ``index``; the offset counts from the other's.
    ``repeated`` are dimensions along which eager's tensor repeats one element (a stride of zero).
    ``strides`` are those of a tensor that eager lays out with gaps, such as a part of another.
    ``is_symbol`` marks an integer, ``is_bool`` a boolean.
    """

    kind: str
    index: int = -1
    value: Any = None
    order: tuple[int, ...] | None = None
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
    repeated: tuple[int, ...] = ()
    is_symbol: bool = False
    is_bool: bool = False
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class OnnxGraph:
    """An ONNX model whose inputs are those of the graph's placeholders that it reads, weights too.

    ``inputs`` are the names of all placeholders by position; ``constants`` are tensors that the
    graph holds itself, by name; ``outputs`` says how the engine's results become the graph's.
    """

    model: onnx.ModelProto
    inputs: tuple[str, ...]
    constants: dict[str, torch.Tensor]
    outputs: tuple[Output, ...]

    def with_weights(self, names: Iterable[str]) -> onnx.ModelProto:
        """The model with these inputs as initializers whose data the engine is given by address.

        No value enters the protobuf, so its limit of 2 GB never matters.
        """
        import onnx

        chosen = set(names)
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        bound = [each for each in model.graph.input if each.name in chosen]
        for each in bound:
            model.graph.input.remove(each)
            tensor_type = each.type.tensor_type
            model.graph.initializer.append(
                onnx.TensorProto(
                    name=each.name,
                    data_type=tensor_type.elem_type,
                    dims=[dim.dim_value for dim in tensor_type.shape.dim],
                    data_location=onnx.TensorProto.EXTERNAL,
                    external_data=[onnx.StringStringEntryProto(key="location", value="weights")],
                )
            )
        return model


def to_onnx(graph: FunctionalGraph) -> OnnxGraph:
    """Translate a functional graph, which is changed on the way.

    Raises:
        Refusal: ``declined`` for what has no faithful translation, ``failed`` with
            ``export_failed`` where the exporter breaks.
    """
    import onnx_ir

    gm = graph.gm
    translator = _torch.onnx_translator()
    _decline_dtypes(gm)
    lift_scalars(gm)
    evaluate_constants(gm, lambda node: _why_not(node, translator.translates) is not None)
    _decline_operators(gm, translator.translates)
    constants = _lift_constants(gm)
    outputs = _plan_outputs(gm)
    try:
        model = translator.translate(translator.prepare(gm))
    except Exception as error:
        raise Refusal(Status.FAILED, Reason.EXPORT_FAILED, _root_cause(error)) from error
    names = tuple(str(value.name) for value in model.graph.inputs)
    unused = [value for value in model.graph.inputs if not value.uses()]
    for value in unused:  # an engine that is given a weight nobody reads refuses the model
        model.graph.inputs.remove(value)
    return OnnxGraph(onnx_ir.to_proto(model), names, constants, outputs)


def _decline_dtypes(gm: torch.fx.GraphModule) -> None:
    """ONNX has no complex arithmetic, and engines none for what is not a plain dense tensor."""
    for node in gm.graph.nodes:
        for value in _tensors(node):
            if value.dtype.is_complex or value.layout is not torch.strided or value.is_quantized:
                what = f"{node.name} is {value.dtype}, {value.layout}"
                refuse(Status.DECLINED, Reason.UNSUPPORTED_DTYPE, what)


def _decline_operators(gm: torch.fx.GraphModule, translates: Callable[[Any], bool]) -> None:
    """What the exporter does not know, or does not say faithfully."""
    refused: dict[str, str] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(_constant(gm, node), torch.nn.Module):
            refused.setdefault(f"{node.target} (a nested graph)", _source_line(node))
        if node.op != "call_function":
            continue
        why = _why_not(node, translates)
        if why is not None:
            refused.setdefault(f"{node.target}{why}", _source_line(node))
    if refused:
        names = ", ".join(f"{name}{place}" for name, place in sorted(refused.items()))
        refuse(Status.DECLINED, Reason.UNSUPPORTED_OP, f"no faithful ONNX translation for {names}")


def _why_not(node: torch.fx.Node, translates: Callable[[Any], bool]) -> str | None:
    """`` (why)`` the call is not taken, an empty string for no translation; ``None`` if it is."""
    if node.target is operator.getitem:
        return None
    why = unfaithful(node)
    if why is not None:
        return f" ({why})"
    return None if translates(node.target) else ""


def _lift_constants(gm: torch.fx.GraphModule) -> dict[str, torch.Tensor]:
    """Turn tensors that the graph holds itself into placeholders; returns them by name."""
    constants: dict[str, torch.Tensor] = {}
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node in gm.graph.find_nodes(op="get_attr"):
        with (
            gm.graph.inserting_after(placeholders[-1])
            if placeholders
            else (gm.graph.inserting_before(next(iter(gm.graph.nodes))))
        ):
            lifted = gm.graph.placeholder(node.name)
        lifted.meta.update(node.meta)
        constants[lifted.name] = _constant(gm, node)
        placeholders.append(lifted)
        node.replace_all_uses_with(lifted)
        gm.graph.erase_node(node)
    return constants


def _plan_outputs(gm: torch.fx.GraphModule) -> tuple[Output, ...]:
    """Plan every output, and leave each computed tensor in the graph's outputs once.

    Raises:
        Refusal: ``declined`` where outputs share memory in a way that cannot be made anew.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    (returned,) = gm.graph.find_nodes(op="output")
    computed: list[torch.fx.Node] = []
    plans: list[Output] = []
    for value in returned.args[0]:
        if isinstance(value, torch.fx.Node):
            plans.append(_plan_input(value, placeholders) or _plan_computed(value, computed))
        else:
            plans.append(Output("constant", value=value))
    if not computed:
        refuse(Status.DECLINED, Reason.UNSUPPORTED_OP, "the graph computes nothing")
    returned.args = (tuple(computed),)
    return tuple(plans)


def _plan_input(node: torch.fx.Node, placeholders: list[torch.fx.Node]) -> Output | None:
    """The plan of an output that is an input, or a view of one; ``None`` for any other."""
    for index, placeholder in enumerate(placeholders):
        if node is placeholder:
            return Output("input", index)
        if _share_memory(node.meta["val"], placeholder.meta["val"]):
            return Output("input", index, view=_view_of(node.meta["val"], placeholder.meta["val"]))
    return None


def _plan_computed(node: torch.fx.Node, computed: list[torch.fx.Node]) -> Output:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        if node not in computed:
            computed.append(node)
        return Output("engine", computed.index(node), is_symbol=True)
    for index, other in enumerate(computed):
        if node is other:
            return _plan_tensor(index, value)
        if _share_memory(value, other.meta["val"]):
            view = _view_of(value, other.meta["val"])
            _decline_partial_base(other.meta["val"])
            return Output("engine", index, view=view, is_bool=value.dtype is torch.bool)
    computed.append(node)
    return _plan_tensor(len(computed) - 1, value)


def _plan_tensor(index: int, value: torch.Tensor) -> Output:
    strides = [_torch.hint(stride) for stride in value.stride()]
    order = tuple(sorted(range(value.dim()), key=lambda dim: -strides[dim]))
    repeated = tuple(dim for dim, stride in enumerate(strides) if stride == 0)
    usual = order == tuple(range(value.dim())) or bool(repeated)
    is_bool = value.dtype is torch.bool
    if _has_gaps(value) and not repeated:
        return Output("engine", index, is_bool=is_bool, strides=tuple(value.stride()))
    return Output("engine", index, None, None if usual else order, None, repeated, False, is_bool)


def _has_gaps(value: torch.Tensor) -> bool:
    """Whether the memory between its first element and its last holds others; of static sizes."""
    if not all(isinstance(number, int) for number in (*value.shape, *value.stride())):
        return False
    pairs = zip(value.shape, value.stride(), strict=True)
    return value.numel() > 0 and 1 + sum((n - 1) * step for n, step in pairs) != value.numel()


def _share_memory(a: object, b: object) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return _torch.storage_id(a) == _torch.storage_id(b)


def _view_of(
    value: torch.Tensor, base: torch.Tensor
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Size, stride and offset of ``value``, the offset counted from that of ``base``."""
    offset = value.storage_offset() - base.storage_offset()
    numbers = (*value.shape, *value.stride(), offset)
    if value.dtype != base.dtype or not all(isinstance(number, int) for number in numbers):
        _decline_shared_memory()
    return tuple(value.shape), tuple(value.stride()), int(offset)


def _decline_partial_base(base: torch.Tensor) -> None:
    """An engine returns fresh contiguous memory; a view must not reach beyond it."""
    whole = base.untyped_storage().nbytes() == base.numel() * base.element_size()
    if not (base.is_contiguous() and base.storage_offset() == 0 and whole):
        _decline_shared_memory()


def _decline_shared_memory() -> NoReturn:
    what = "outputs share memory, with an input or each other, in a way that cannot be made anew"
    refuse(Status.DECLINED, Reason.OUTPUT_MISMATCH, what)


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return [each for each in values if isinstance(each, torch.Tensor)]


def _constant(gm: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(gm)


def _source_line(node: torch.fx.Node) -> str:
    """``" (file:line)"`` of the user's code that the node comes from, as far as it is known."""
    places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f" ({places[-1][0]}:{places[-1][1]})" if places else ""


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
