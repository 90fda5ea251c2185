"""A graph on disk: a folder with a Python program of it, and what else one needs to run it again.

=============  ====================================================================================
``graph.py``   ``class Graph`` with weights like those of the model, and ``inputs()``
``check.py``   compares an engine with eager mode (:mod:`composer.graphs.check`), by
               ``comparison.py``
``about.json`` modes of torch, versions, and what the writer says besides
``data.pt``    the values of weights and inputs, only if the user asked for them
=============  ====================================================================================

Nothing of the user's data is in the first three. Nodes, inputs and weights get names of their own,
because Dynamo names them after the user's variables. A size and any other integer that the graph
takes as a number are kept, since shapes depend on them.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.fx
from torch.fx.node import map_aggregate

from composer import _torch
from composer.graphs import python
from composer.graphs.likeness import like, like_number
from composer.graphs.nodes import attribute_at
from composer.graphs.written import Unsayable, qualified
from composer.records import GraphRequest
from composer.system import distribution

FORM = 1
"""The version of the form."""

_WORD = re.compile(r"[\w.-]{0,64}")
_EQUATION = re.compile(r"[a-zA-Z.,> -]{0,64}")
"""Of ``einsum``."""
_OWN = ("torch", "_operator", "builtins", "math")
_OPERATORS = ("aten", "prims", "higher_order")


@dataclass(frozen=True)
class Case:
    """A graph as it is written to a folder.

    Attributes:
        text: The program ``graph.py``.
        facts: What ``about.json`` says.
        data: Values of weights and inputs, by their places; empty where they are not to be kept.
    """

    text: str
    facts: Mapping[str, Any]
    data: Mapping[int, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        gm: torch.fx.GraphModule,
        inputs: Sequence[Any],
        weights: Collection[int],
        facts: Mapping[str, Any],
        *,
        with_data: bool = False,
    ) -> Case:
        """Return a graph as it is written to a folder.

        Args:
            gm: The graph; it is not changed.
            inputs: The values of its placeholders.
            weights: The positions of the inputs that are weights.
            facts: What ``about.json`` says besides.
            with_data: True to keep the values of weights and inputs.

        Raises:
            Unsayable: the graph has something that a program of torch alone cannot have.
        """
        values = _Values(dict(enumerate(inputs)), frozenset(weights))
        graph, root = _renamed(gm, values)
        title = f"A graph of {len(graph.nodes)} nodes, written by composer. Run it by run.py."
        with torch.no_grad(), _torch.fakes.unset_fake_temporarily():
            text = python.as_python(graph, root, title, values.expression, verbose=False)
            if "absent(" in text:
                names = re.findall(r"absent\((.*?)\)", text)
                raise Unsayable(f"it has what no program can import: {', '.join(names[-1:])}")
            data = values.data() if with_data else {}
        return Case(text, {"form": FORM, **facts}, data)

    @staticmethod
    def of_request(request: GraphRequest, *, with_data: bool = False) -> Case:
        """Return the graph that candidates get, with the modes of torch that are on now.

        Raises:
            Unsayable: as for :meth:`of`.
        """
        facts = {
            "mode": request.mode,
            "dynamic": request.dynamic,
            "training": request.training,
            "autocast": [[device, str(dtype)] for device, dtype in _torch.modes.autocasts()],
            "default_dtype": str(torch.get_default_dtype()),
            "versions": versions(("torch", distribution.NAME)),
        }
        inputs = list(map(_torch.symbols.hint, request.example_inputs))
        return Case.of(request.gm, inputs, request.weights, facts, with_data=with_data)

    @staticmethod
    def read(folder: Path, *, with_data: bool = False) -> Case:
        """Read a graph from a folder.

        Args:
            folder: The folder.
            with_data: True to read the values of weights and inputs.

        Raises:
            OSError: a file is missing. The values are, where the writer did not keep them.
        """
        data = torch.load(folder / "data.pt") if with_data else {}
        facts = json.loads((folder / "about.json").read_text())
        text = (folder / "graph.py").read_text()
        return Case(text, facts, data)

    def write(self, folder: Path, more: Mapping[str, str] | None = None, **facts: Any) -> None:
        """Write the graph to a new folder, which appears with all of its files or not at all.

        Args:
            folder: The folder.
            more: Further files: their texts by name.
            facts: What ``about.json`` says besides.

        Raises:
            OSError: the folder is there, or cannot be written.
        """
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            made.chmod(0o755)
            about = json.dumps({**self.facts, **facts, "with_data": bool(self.data)}, indent=1)
            texts = {"graph.py": self.text, "about.json": about, **(more or {})}
            for name, text in texts.items():
                (made / name).write_text(text, encoding="utf-8")
            for name in ("check.py", "comparison.py"):
                source = Path(__file__).with_name(name).read_text(encoding="utf-8")
                (made / name).write_text(source.replace(f"{__package__}.", ""), encoding="utf-8")
            if self.data:
                torch.save(dict(self.data), made / "data.pt")
            made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of installed packages, and the kind of machine."""
    known = {name: distribution.version_of(name) for name in packages}
    here = {"python": platform.python_version(), "machine": platform.machine()}
    return here | {name: version for name, version in known.items() if version}


class _Values:
    """The values that a graph gets and holds, each with a place: its seed, and its key in a file.

    Args:
        given: The values of the inputs, by position.
        weights: The positions of the weights.
    """

    def __init__(self, given: dict[int, Any], weights: frozenset[int]) -> None:
        self.weights = weights
        self._values = given
        self._places: dict[torch.fx.Node, int] = {}

    def put(self, node: torch.fx.Node, place: int | None, value: Any = None) -> None:
        """Note which value a node has: the input at a position, or another value."""
        if place is None:
            place = len(self._values)
            self._values[place] = value
        self._places[node] = place

    def at(self, place: int) -> Any:
        """Return the value at a place."""
        return self._values[place]

    def data(self) -> dict[int, Any]:
        """Return all values that a program would draw, copied with their strides."""
        kept: dict[int, Any] = {}
        for place in self._places.values():
            value = self._values[place]
            if isinstance(value, torch.Tensor):
                kept[place] = _copied(value)
            elif isinstance(value, float):
                kept[place] = value
        return kept

    def expression(self, node: torch.fx.Node, _: object) -> str:
        """Return a Python expression that makes the value of a node.

        Raises:
            Unsayable: there is none.
        """
        place = self._places.get(node)
        if place is None:  # an input of a nested graph
            return "None"
        value = self._values[place]
        if isinstance(value, float):
            return f"given({place}, {like_number(value)})"
        if not isinstance(value, torch.Tensor):
            return python.expression(value)
        if type(value) not in _torch.tensors.PLAIN_TENSORS or _is_special(value):
            kind = f"{type(value).__name__} of {value.dtype}, {value.layout}"
            raise Unsayable(f"one of its tensors is a {kind}, which a program cannot draw")
        seeded = (f"seed={place}", *like(value))
        made = f"given({place}, {python.expression(value, *seeded)})"
        if isinstance(value, torch.nn.Parameter):
            return f"torch.nn.Parameter({made}, requires_grad={value.requires_grad})"
        if value.requires_grad:
            made = f"{made}.requires_grad_()"
        return made if node.op == "placeholder" else f"torch.nn.Buffer({made})"


def _is_special(value: torch.Tensor) -> bool:
    is_dense = value.layout is torch.strided and not value.is_quantized
    return not is_dense or value.is_conj() or value.is_neg()


def _copied(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor with its strides, and nothing else of its memory."""
    memory = value.detach().as_strided((_torch.tensors.reach(value),), (1,)).clone()
    return memory.as_strided(value.shape, value.stride())


def _renamed(
    gm: torch.fx.GraphModule, values: _Values, *, nested: bool = False
) -> tuple[torch.fx.Graph, torch.nn.Module]:
    """Return a copy of a graph with plain names, and the module that holds what it reads.

    Weights among the inputs become attributes.
    """
    graph = torch.fx.Graph()
    root = torch.nn.Module()
    twins: dict[torch.fx.Node, torch.fx.Node] = {}
    held: dict[str, torch.fx.Node] = {}
    position = 0
    for number, node in enumerate(gm.graph.nodes):
        if node.op == "output":
            graph.output(_arguments(node, twins)[0][0])
            continue
        if node.op == "placeholder":
            is_weight = not nested and position in values.weights
            name = f"{'w' if is_weight else 'x'}{position}"
            twin = graph.create_node("get_attr" if is_weight else "placeholder", name, name=name)
            if not nested:
                values.put(twin, position)
            if is_weight:
                setattr(root, name, values.at(position))
            position += 1
        elif node.op == "get_attr":
            target = str(node.target)
            if target not in held:
                held[target] = _held(graph, root, attribute_at(gm, target), number, values)
            twin = held[target]
        elif node.op == "call_module":
            raise Unsayable(f"it calls a module, {node.target}")
        else:
            args, kwargs = _arguments(node, twins)
            name = f"{_short(node.target)}_{number}"
            twin = graph.create_node(node.op, node.target, args, kwargs, name=name)
        twins[node] = twin
    return graph, root


def _held(
    graph: torch.fx.Graph, root: torch.nn.Module, value: Any, number: int, values: _Values
) -> torch.fx.Node:
    """Have a graph read what its module holds: a tensor, or a nested graph."""
    is_graph = isinstance(value, torch.fx.GraphModule)
    name = f"{'graph' if is_graph else 'held'}_{number}"
    twin = graph.create_node("get_attr", name, name=name)
    if is_graph:
        inner, holder = _renamed(value, values, nested=True)
        value = torch.fx.GraphModule(holder, inner)
    else:
        values.put(twin, None, value)
    setattr(root, name, value)
    return twin


def _arguments(
    node: torch.fx.Node, twins: Mapping[torch.fx.Node, torch.fx.Node]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a node's copy.

    Raises:
        Unsayable: one is a text that may be the user's.
    """

    def copied(value: Any) -> Any:
        if isinstance(value, str):
            return _word(value, node.target)
        return twins[value] if isinstance(value, torch.fx.Node) else value

    both: Any = node.args, node.kwargs
    return cast("tuple[tuple[Any, ...], dict[str, Any]]", map_aggregate(both, copied))


def _word(text: str, target: Any) -> str:
    """Return a text that is an argument of a call, if it is a word of torch's own."""
    if "assert" in _short(target):
        return ""  # the user's message
    if not _is_word(text, target):
        raise Unsayable(f"a text is an argument of {_short(target)}")
    return text


def _is_word(text: str, target: Any) -> bool:
    """Return True if a text can only be a word of torch's own, such as ``"trunc"``."""
    spelling = _EQUATION if "einsum" in str(target) else _WORD
    if not spelling.fullmatch(text):
        return False
    if isinstance(target, str):  # a method of a tensor
        return True
    namespace = _torch.operators.operator_namespace(target)
    if namespace:
        return namespace in _OPERATORS
    return str(getattr(target, "__module__", "")).partition(".")[0] in _OWN


def _short(target: Any) -> str:
    """Return a name for the results of a call: ``linear``, or ``add`` for ``aten.add.Tensor``."""
    name = qualified(target) if callable(target) else str(target)
    parts = name.split(".")
    is_overload = isinstance(target, _torch.operators.OpOverload)
    word = parts[-2] if is_overload and len(parts) > 1 else parts[-1]
    return re.sub(r"\W", "_", word).strip("_") or "value"
