"""Renders a graph as text: a Python file that runs by itself, or a table.

Values of weights are not included.
"""

from __future__ import annotations

import pkgutil
import re
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import attribute_at, described, is_strided
from composer.graphs.written import Word, rows
from composer.passes.metadata import key_at
from composer.passes.snapshot import Snapshot
from composer.records import Stage

_HELPERS = {
    "tensor": '''def tensor(shape, strides, dtype, device):
    """Numbers from 0 to 1, or zeros (valid as indices) where the dtype is not a floating one."""
    size = 1 + sum((n - 1) * step for n, step in zip(shape, strides)) if all(shape) else 0
    draws = dtype.is_floating_point or dtype.is_complex
    values = torch.rand(size) if draws else torch.zeros(size)
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


def as_python(snapshot: Snapshot, stage: Stage | str, title: str) -> str:
    """Return a Python file with ``class Graph``, a function ``inputs()``, and ``main()``.

    ``inputs()`` makes inputs with the graph's shapes and dtypes. ``title`` becomes the docstring.
    """
    graph, key, names = snapshot.copy, key_at(stage), {"torch": torch}
    classes = list(_classes("Graph", graph, snapshot.module(), key, names))
    body = "\n\n".join((*classes, _inputs(graph, key)))
    imports, stubs = [], []
    for name, value in sorted(names.items()):
        if not re.search(rf"(?<![\w.]){name}\b", body):  # it is not used
            continue
        line = _import(name, value)
        if line:
            imports.append(line)
        else:
            stubs.append(f"{name} = absent({name!r})\n")
    body = "\n\n".join((*stubs, body))
    helpers = [text for name, text in _HELPERS.items() if f"{name}(" in body]
    top = "\n".join((f'"""{title}"""\n', *imports, ""))
    text = "\n\n".join((top, *helpers, body, _MAIN))
    return re.sub(r" +$", "", text, flags=re.MULTILINE)


def _classes(
    name: str, graph: torch.fx.Graph, root: torch.nn.Module, key: str, names: dict[str, Any]
) -> Iterator[str]:
    """Yield the classes of the nested graphs, and then the class of the graph.

    The global names that they use are added to ``names``.
    """
    code = graph.python_code("self", verbose=True)
    names.update(code.globals)
    lines: list[str] = []
    reads = [node for node in graph.nodes if node.op in ("get_attr", "call_module")]
    for path, node in {str(node.target): node for node in reads}.items():
        value = attribute_at(root, path)
        if isinstance(value, torch.fx.GraphModule):
            nested = f"{name}_{path.replace('.', '_')}"
            yield from _classes(nested, value.graph, value, key, names)
            # Operators such as tag_activation_checkpoint ask for a graph module.
            expression = f"torch.fx.symbolic_trace({nested}())"
        elif value is None:
            expression = _expression(node.meta.get(key))
        else:
            expression = _expression(value)
        lines.append(f"hold(self, {path!r}, {expression})")
    setup = "\n    ".join(("def __init__(self):", "super().__init__()", *lines))
    methods = textwrap.indent(f"{setup}\n\n{code.src.strip()}", "    ")
    yield f"class {name}(torch.nn.Module):\n{methods}\n"


def _inputs(graph: torch.fx.Graph, key: str) -> str:
    lines = ""
    for node in graph.find_nodes(op="placeholder"):
        lines += f"        {_expression(node.meta.get(key))},  # {node.target}\n"
    docstring = '"""Inputs of the shapes and dtypes of the first call."""'
    return f"def inputs():\n    {docstring}\n    return [\n{lines}    ]\n"


def _expression(value: Any) -> str:
    """Return a Python expression that makes a value with the same shape, dtype and device."""
    if is_strided(value):
        sizes, strides = tuple(map(_number, value.shape)), tuple(map(_number, value.stride()))
        return f"tensor({sizes}, {strides}, {value.dtype}, {str(value.device)!r})"
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
    module, attribute = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
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


def as_table(snapshot: Snapshot, stage: Stage | str, title: str) -> str:
    """Return a table with a row for each node: name, operation, target, arguments, fake value."""
    gm, key = snapshot.graph_module(), key_at(stage)
    names = {node: Word(node.name) for node in gm.graph.nodes}
    table: list[tuple[str, ...]] = [("name", "op", "target", "args", "kwargs", "value")]
    for node, row in zip(gm.graph.nodes, rows(gm, names), strict=True):
        table.append((*row, described(node.meta[key]) if key in node.meta else ""))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [title, ""]
    for row in table:
        lines.append("  ".join(map(str.ljust, row, widths)).rstrip())
    return "\n".join((*lines, ""))
