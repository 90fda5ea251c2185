"""Imports go one way, and torch's private side is named in one file only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import composer

PACKAGE = Path(composer.__file__).parent
LAYERS = [
    {"errors", "memory", "footprint"},
    {"records"},
    {"_torch"},
    {"registry", "writes", "disk", "child", "collectives", "machine", "background", "gate"},
    {"clones", "comparison", "ledger"},
    {"capture"},
    {"passes"},
    {"lowering", "telemetry"},
    {"backends"},
    {"policy"},
    {"book"},
    {"session"},
    {"agreement", "shared_store"},
    {"prove"},
    {"double"},
    {"parcel", "verify"},
    {"isolate", "sampling", "failures", "track", "precision", "verdicts"},
    {"select"},
    {"choice"},
    {"remembered", "contenders"},
    {"chain", "backward"},
    {"standby"},
    {"guard"},
    {"isolated", "succession", "lock"},
    {"overtaking"},
    {"dispatch"},
    {"subject"},
    {"workload"},
    {"testing", "explain", "tuning"},
    {"ranking"},
    {"advice"},
    {"__init__", "cli"},
    {"__main__"},
]
FILES = sorted(PACKAGE.rglob("*.py"))


def level(module: str) -> int:
    room = module.split(".")[1] if "." in module else "__init__"
    return next(i for i, names in enumerate(LAYERS) if room in names)


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module or name imported, at any depth, except for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imports(node)


def module_of(path: Path) -> str:
    parts = ["composer", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_imports_go_one_way() -> None:
    """A module imports only rooms below its own, or its own room."""
    wrong = []
    for path in FILES:
        here = module_of(path)
        room = here.split(".")[1:2]
        names = (n for n in imports(ast.parse(path.read_text())) if n.split(".")[0] == "composer")
        others = (name for name in names if name.split(".")[1:2] != room)
        wrong += [f"{here} imports {name}" for name in others if level(name) >= level(here)]
    assert wrong == []


def is_private(name: str) -> bool:
    """Whether it is a name of torch's behind an underscore, and no operator."""
    first, *rest = name.split(".")
    hidden = any(part.startswith("_") and part != "__version__" for part in rest)
    return first == "torch" and hidden and not name.startswith("torch.ops.")


def test_private_names_of_torch_stand_in_one_file() -> None:
    """Neither an import nor an attribute chain reaches ``torch._something`` elsewhere."""
    wrong = []
    for path in (each for each in FILES if each.name != "_torch.py"):
        tree = ast.parse(path.read_text())
        chains = (ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute))
        named = filter(is_private, (*imports(tree), *chains))
        wrong += [f"{module_of(path)} names {name}" for name in named]
    assert wrong == []


def test_every_file_has_a_room() -> None:
    """A new file must be given its place in the order above."""
    assert all(level(module_of(path)) >= 0 for path in FILES)
