"""Writes a graph as a Python program that needs torch alone: ``class Graph`` and ``inputs()``.

The dumps of passes and the folders of :mod:`composer.graphs.case` are such programs. A value is
never part of one: a program draws others in its place (:mod:`composer.graphs.likeness`).
"""

from __future__ import annotations

import copy
import pathlib
import pkgutil
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import attribute_at, is_strided

ValueAt = Callable[[torch.fx.Node, Any], str]
"""Returns an expression for the value of an input or an attribute."""

_HELPERS = {
    "given": '''FILE = pathlib.Path(__file__).with_name("data.pt")
DATA = torch.load(FILE) if FILE.exists() else {}


def given(place, drawn):
    """Return the value at a place in the file data.pt; without such a file the drawn one."""
    return copy.deepcopy(DATA.get(place, drawn))
''',
    "tensor": '''def tensor(shape, strides, dtype, device, seed=0, **like):
    """Draw numbers like those of the program, or else from 0 to 1; integers are zeros then."""
    size = 1 + sum((n - 1) * step for n, step in zip(shape, strides)) if all(shape) else 0
    draw = torch.Generator().manual_seed(seed)
    is_number = dtype.is_floating_point or dtype.is_complex
    low = like.get("low", 0)
    count = like.get("high", 0) - low + 1
    if "of" in like:
        share = like.get("share", 0.5)
        values = torch.tensor(like["of"])
        chosen = torch.randint(len(values), (size,), generator=draw)
        if len(values) == 2:
            chosen = (torch.rand(size, generator=draw) < share).long()
        values = values[chosen]
    elif "std" in like:
        kind = torch.complex64 if dtype.is_complex else torch.float32
        values = torch.randn(size, generator=draw, dtype=kind) * like["std"] + like["mean"]
        values = values.abs() if like.get("positive") else values
    elif is_number:
        values = torch.rand(size, generator=draw)
    elif like.get("order") == "distinct":
        values = torch.randperm(count, generator=draw)[:size] + low
    else:
        values = torch.randint(count, (size,), generator=draw) + low
    if like.get("order") == "ascending":
        values = values.sort().values
    if like.get("order") == "range":
        values = torch.arange(size)
    return values.to(device=device, dtype=dtype).as_strided(shape, strides)
''',
    "absent": '''def absent(what):
    """Stand in for what a file of text cannot hold."""

    def call(*args, **kwargs):
        raise NotImplementedError(f"{what} is not part of this dump")

    return call
''',
    "hold": '''def hold(module, path, value):
    """Set an attribute at a dotted path."""
    *parents, name = path.split(".")
    for each in parents:
        if not hasattr(module, each):
            setattr(module, each, torch.nn.Module())
        module = getattr(module, each)
    setattr(module, name, value)
''',
}

_MAIN = '''def main():
    """Run the graph once and say what it returns."""
    torch.manual_seed(0)
    for index, value in enumerate(Graph()(*inputs())):
        kind = f"{value.dtype} {tuple(value.shape)}" if torch.is_tensor(value) else repr(value)
        print(f"output {index}: {kind}")


if __name__ == "__main__":
    main()
'''


def as_python(
    graph: torch.fx.Graph,
    root: torch.nn.Module,
    title: str,
    value_at: ValueAt,
    *,
    verbose: bool = True,
) -> str:
    """Return a Python file with ``class Graph``, a function ``inputs()``, and ``main()``.

    Args:
        graph: The graph.
        root: Holds the attributes that the graph reads.
        title: The docstring of the file.
        value_at: Returns an expression for the value of an input, or of an attribute that a node
            reads; its second argument is the attribute, or ``None``.
        verbose: True to write the shape of each value, and the line of the user's code.
    """
    names: dict[str, Any] = {"torch": torch, "pathlib": pathlib, "copy": copy}
    classes = list(_classes("Graph", graph, root, names, value_at, verbose=verbose))
    body = "\n\n".join((*classes, _inputs(graph, value_at)))
    helpers = [text for name, text in _HELPERS.items() if re.search(rf"\b{name}\(", body)]
    used = "\n\n".join((*helpers, body))
    imports: list[str] = []
    stubs: list[str] = []
    for name, value in sorted(names.items()):
        if not re.search(rf"(?<![\w.]){name}\b", used):
            continue
        line = _import(name, value)
        if line:
            imports.append(line)
        else:
            stubs.append(f"{name} = absent({name!r})\n")
    if stubs and _HELPERS["absent"] not in helpers:
        helpers.append(_HELPERS["absent"])
    top = "\n".join((f'"""{title}"""\n', *imports, ""))
    text = "\n\n".join((top, *helpers, *stubs, body, _MAIN))
    return re.sub(r" +$", "", text, flags=re.MULTILINE)


def _classes(
    name: str,
    graph: torch.fx.Graph,
    root: torch.nn.Module,
    names: dict[str, Any],
    value_at: ValueAt,
    *,
    verbose: bool,
) -> Iterator[str]:
    """Yield the classes of the nested graphs, and then the class of the graph.

    The global names that they use are added to ``names``.
    """
    code = graph.python_code("self", verbose=verbose)
    names.update(code.globals)
    lines: list[str] = []
    reads = [node for node in graph.nodes if node.op in ("get_attr", "call_module")]
    for path, node in {str(node.target): node for node in reads}.items():
        value = attribute_at(root, path)
        if isinstance(value, torch.fx.GraphModule):
            nested = f"{name}_{path.replace('.', '_')}"
            yield from _classes(nested, value.graph, value, names, value_at, verbose=verbose)
            # Operators such as tag_activation_checkpoint ask for a graph module.
            made = f"torch.fx.symbolic_trace({nested}())"
        else:
            made = value_at(node, value)
        lines.append(f"hold(self, {path!r}, {made})")
    setup = "\n    ".join(("def __init__(self):", "super().__init__()", *lines))
    methods = textwrap.indent(f"{setup}\n\n{code.src.strip()}", "    ")
    yield f"class {name}(torch.nn.Module):\n{methods}\n"


def _inputs(graph: torch.fx.Graph, value_at: ValueAt) -> str:
    lines = ""
    for node in graph.find_nodes(op="placeholder"):
        lines += f"        {value_at(node, None)},  # {node.target}\n"
    docstring = '"""Inputs of the shapes and dtypes of the first call."""'
    return f"def inputs():\n    {docstring}\n    return [\n{lines}    ]\n"


def expression(value: Any, *more: str) -> str:
    """Return a Python expression that makes a value with the same shape, dtype and device.

    Args:
        value: The value.
        more: Further arguments of the function that draws a tensor.
    """
    if is_strided(value):
        sizes = tuple(map(_number, value.shape))
        strides = tuple(map(_number, value.stride()))
        given = (str(sizes), str(strides), str(value.dtype), repr(str(value.device)), *more)
        return f"tensor({', '.join(given)})"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return repr(_number(value))
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    kind = type(value)
    is_layer = kind.__module__.startswith("torch.nn.modules") and not list(value.children())
    return f"torch.nn.{value!r}" if is_layer else f"absent({kind.__qualname__!r})"


def _number(size: Any) -> Any:
    """Return a symbol's value in the first call; 1 if it depends on data."""
    known = _torch.symbols.hint(size)
    return 1 if known is None else known


def _import(name: str, value: Any) -> str:
    """Return the line that imports or makes a global; empty if it cannot be imported."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__}{_alias(name, value.__name__)}"
    if isinstance(value, float):
        return f"{name} = float({str(value)!r})"
    if value is type(None):
        return f"{name} = type(None)"
    module = getattr(value, "__module__", "")
    attribute = getattr(value, "__qualname__", "")
    if module and attribute.isidentifier() and _leads_to(f"{module}:{attribute}", value):
        return f"from {module} import {attribute}{_alias(name, attribute)}"
    return ""


def _alias(name: str, original: str) -> str:
    return "" if name == original else f" as {name}"


def _leads_to(path: str, value: Any) -> bool:
    try:
        return pkgutil.resolve_name(path) is value
    except (ImportError, AttributeError, ValueError):
        return False
