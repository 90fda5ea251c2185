"""The ONNX exporter."""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.fx
from torch._ops import OpOverload
from torch.export import default_decompositions
from torch.export import graph_signature as export
from torch.fx.traceback import preserve_node_meta

from composer._torch.compiles import patched
from composer._torch.fakes import fake_mode_of, faking
from composer._torch.operators import registry_name
from composer._torch.tensors import tensors_among
from composer.system import forks

if TYPE_CHECKING:
    import onnx_ir


class OnnxTranslator:
    """The exporter's translation of functional ATen graphs, without its capture and retracing.

    ``torch.onnx.export`` accepts only programs from ``torch.export``, refuses symbolic integers as
    inputs, and runs every decomposition again, which takes most of its time. Only its last step is
    needed here: one pass over the nodes with torchlib's registry. To make a translator takes about
    a second, most of it for imports.
    """

    def __init__(self) -> None:
        from torch.onnx._internal import _lazy_import
        from torch.onnx._internal.exporter import (
            _building,
            _core,
            _decomp,
            _fx_passes,
            _registration,
        )
        from torch.onnx._internal.fx.passes import type_promotion

        self._lock = forks.lock()
        self._signatures: dict[tuple[str, str, int], Any] = {}
        self._building = _building
        self._core, self._passes = _core, _fx_passes
        self._promotions = type_promotion.TypePromotionTable()
        self._interpreter = type_promotion._TypePromotionInterpreter
        with _quiet(_registration.logger):  # it warns where torchvision is not installed
            self._registry = _registration.ONNXRegistry.from_torchlib()
        registered = _decomp.get_onnx_implemented_overloads(self._registry)
        names = frozenset(map(registry_name, registered))
        self._absent: dict[str, list[Any]] = {}
        imports: Any = _lazy_import  # type checkers do not see its attributes
        for each in imports.onnxscript_apis.get_torchlib_ops():
            if each.qualified_name not in names:
                self._absent.setdefault(each.qualified_name, []).append(each)
        self.known = names | self._absent.keys()
        """The operators that the exporter itself translates, by :func:`registry_name`.

        They include operators that no library has registered in this process so far, such as those
        of torchvision, since a library may be loaded at any time.
        """

    def register(self, translations: Mapping[Any, Callable[..., Any]]) -> None:
        """Register functions that translate these operators, in place of the exporter's own."""
        for target, function in translations.items():
            self._registry.register_op(target, function)

    @property
    def translated(self) -> frozenset[str]:
        """The operators that can be translated, by :func:`registry_name`."""
        names = {*self._absent}
        for target, functions in self._registry.functions.items():
            if functions:
                names.add(target if isinstance(target, str) else registry_name(target))
        return frozenset(names)

    def prepare(self, gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Make type promotion explicit and drop assertions, in place, as the exporter does."""
        rules = {node: self._rule_of(node) for node in gm.graph.nodes}
        if any(rules.values()):
            self._promote(gm, rules)
        return self._passes.remove_assertion_nodes(gm)

    def _promote(self, gm: torch.fx.GraphModule, rules: Mapping[torch.fx.Node, Any]) -> None:
        """Insert casts before and after the nodes that promote types, by the rule of each node.

        The exporter runs every node again to learn its result. Here the metadata of the nodes say
        it.
        """
        interpreter = self._interpreter(gm, self._promotions)
        interpreter.env = {n: n.meta["val"] for n in gm.graph.nodes if "val" in n.meta}
        mode = fake_mode_of(list(interpreter.env.values()))
        with faking(mode), preserve_node_meta():
            for node, rule in rules.items():
                if rule is None:
                    continue
                with interpreter._set_current_node(node):
                    interpreter._maybe_promote_node(node, rule)

    def _rule_of(self, node: torch.fx.Node) -> Any:
        """The rule of type promotion for a node that mixes types; ``None`` for other nodes."""
        if not isinstance(node.target, OpOverload):
            return None
        rule = self._promotions.get_rule(node.target.overloadpacket)
        return rule if rule is not None and _mixes_types(node) else None

    def translate(self, gm: torch.fx.GraphModule) -> onnx_ir.Model:
        """Translate a graph to an ONNX model.

        The model has an input for each placeholder, and an output for each returned node.
        """
        for node in gm.graph.nodes:
            node.meta.setdefault("nn_module_stack", {})  # else a warning for each such node
        program = types.SimpleNamespace(
            graph_module=gm,
            graph_signature=_signature(gm),
            range_constraints={},
            constants={},
            named_parameters=tuple,
            named_buffers=tuple,
        )
        # onnx_ir warns of an empty list, which stands for the shape of a number. The exporter warns
        # of an operator with several results if it makes only one.
        ir, exporter = logging.getLogger("onnx_ir._convenience"), self._core.logger
        with (
            self._lock,
            self._signatures_read_once(),
            self._constants_kept_by_text(),
            _quiet(ir),
            _quiet(exporter),
        ):
            self._register_those_in(gm)
            translated = self._core._exported_program_to_onnx_program(
                cast(Any, program), registry=self._registry
            )
        # ONNX Runtime refuses a model without an opset (tests/backends/onnxrt/
        # test_onnxrt_library.py). The exporter gives none to a model without nodes.
        translated.model.opset_imports.setdefault("", self._registry.opset_version)
        return translated.model

    def _register_those_in(self, gm: torch.fx.GraphModule) -> None:
        """Register the translations of a graph's operators whose library was loaded lately.

        The exporter's registry leaves out each operator that does not exist when it is made.
        """
        for node in gm.graph.nodes:
            for each in self._absent.pop(registry_name(node.target), ()):
                self._registry.register_op(node.target, each.function, each.is_complex)

    def _signatures_read_once(self) -> contextlib.AbstractContextManager[None]:
        """Keep the signatures that the exporter reads from the schemas of ONNX operators.

        The exporter reads the schema again for each node that it makes, which takes a third of its
        time (torch 2.13).
        """
        from onnx_ir import schemas

        read = schemas.OpSignature.from_op_schema

        def read_once(schema: Any) -> Any:
            key = schema.domain, schema.name, schema.since_version
            if key not in self._signatures:
                self._signatures[key] = read(schema)
            return self._signatures[key]

        return patched(schemas.OpSignature, "from_op_schema", staticmethod(read_once))

    def _constants_kept_by_text(self) -> contextlib.AbstractContextManager[None]:
        """Let two constants of a model be one only if their text is the same.

        The exporter keeps constants by their number. To a dict ``-0.0`` is ``0.0``, so the first of
        the two in a graph would stand for both (torch 2.13,
        ``test_the_exporter_takes_zeros_of_both_signs_for_one``).
        """
        make = self._building._get_or_create_constant

        def make_one(kept: dict[Any, Any], constant: Any, *how: Any) -> Any:
            return make(kept.setdefault(repr(constant), {}), constant, *how)

        return patched(self._building, "_get_or_create_constant", make_one)


def _mixes_types(node: torch.fx.Node) -> bool:
    """True if the operands and the result of an operator may have several dtypes."""
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    dtypes = {tensor.dtype for tensor in tensors_among(values)}
    has_symbol = any(isinstance(value, torch.SymInt) for value in values)
    if has_symbol or len(dtypes) > 1:
        return True
    has_number = any(isinstance(argument, int | float) for argument in node.args)
    return has_number and not all(dtype.is_floating_point for dtype in dtypes)


def onnx_decompositions(known: frozenset[str]) -> dict[Any, Callable[..., Any]]:
    """The exporter's table of decompositions, made without importing the exporter, which is slow.

    The operators that the exporter translates (``known``) are left out of the table.
    """
    from torch._decomp import decomposition_table

    table: dict[Any, Callable[..., Any]] = {**decomposition_table, **default_decompositions()}
    overloads = (each for each in table if isinstance(each, OpOverload))
    return {each: table[each] for each in overloads if registry_name(each) not in known}


def _signature(gm: torch.fx.GraphModule) -> Any:
    def argument(node: torch.fx.Node) -> Any:
        if isinstance(node.meta["val"], torch.Tensor):
            return export.TensorArgument(name=node.name)
        return export.SymIntArgument(name=node.name)

    placeholders = gm.graph.find_nodes(op="placeholder")
    (output,) = gm.graph.find_nodes(op="output")
    user_input, user_output = export.InputKind.USER_INPUT, export.OutputKind.USER_OUTPUT
    return export.ExportGraphSignature(
        [export.InputSpec(user_input, argument(node), None) for node in placeholders],
        [export.OutputSpec(user_output, argument(node), None) for node in output.args[0]],
    )


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
