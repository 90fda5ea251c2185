"""Imports go one way, and torch's private side is named in one package only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import composer

PACKAGE = Path(composer.__file__).parent
LAYERS = [
    ("errors", "system.forks", "records"),
    ("_torch",),
    ("system",),
    ("graphs",),
    ("registry", "build", "policy"),
    ("passes",),
    ("lowering", "telemetry"),
    ("backends",),
    ("knowledge",),
    ("policy.mistakes", "session"),
    ("chain",),
    ("runtime",),
    ("dispatch",),
    ("testing", "tools"),
    ("__init__", "cli"),
    ("__main__",),
]
"""The plan of the house: each package and module imports only what stands before it in this list.

Within a line the order counts as well. The modules of one package may import one another.
"""

ORDER = {name: i for i, name in enumerate(name for line in LAYERS for name in line)}
FILES = sorted(PACKAGE.rglob("*.py"))


def place(name: str) -> str:
    """The entry of the order that a module, or a name in it, belongs to."""
    room, *inner = name.split(".")[1:3] or ["__init__"]
    return next((each for each in (".".join([room, *inner]), room) if each in ORDER), "__init__")


def stands_below(name: str, here: str) -> bool:
    """Whether a module may import this name."""
    theirs, mine = place(name), place(here)
    return theirs == mine or ORDER[theirs] < ORDER[mine]


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
    """A module imports only what stands below it, or beside it in its own room."""
    wrong = []
    for path in FILES:
        here = module_of(path)
        names = (n for n in imports(ast.parse(path.read_text())) if n.split(".")[0] == "composer")
        wrong += [f"{here} imports {name}" for name in names if not stands_below(name, here)]
    assert wrong == []


def test_openvino_is_built_by_the_public_interface() -> None:
    """A third party's engine has the same means."""
    public = ("composer.backends.onnx_engine", "composer.errors", "composer.backends.openvino")
    wrong = [
        f"{module_of(path)} imports {name}"
        for path in sorted((PACKAGE / "backends" / "openvino").rglob("*.py"))
        for name in imports(ast.parse(path.read_text()))
        if name.startswith("composer") and not name.startswith(public)
    ]
    assert wrong == []


def is_private(name: str) -> bool:
    """Whether it is a name of torch's behind an underscore, and no operator."""
    first, *rest = name.split(".")
    hidden = any(part.startswith("_") and part != "__version__" for part in rest)
    return first == "torch" and hidden and not name.startswith("torch.ops.")


def test_private_names_of_torch_stand_in_one_package() -> None:
    """Neither an import nor an attribute chain reaches ``torch._something`` elsewhere."""
    wrong = []
    for path in (each for each in FILES if each.parent.name != "_torch"):
        tree = ast.parse(path.read_text())
        chains = (ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute))
        named = filter(is_private, (*imports(tree), *chains))
        wrong += [f"{module_of(path)} names {name}" for name in named]
    assert wrong == []


@pytest.mark.parametrize("package", ["onnxruntime", "openvino"])
def test_package_that_tells_of_its_use_is_imported_in_one_file(package: str) -> None:
    """Which sees to it that it sends nothing away, and imports it by its name as text."""
    named = {
        module_of(path)
        for path in FILES
        for name in imports(ast.parse(path.read_text()))
        if name.split(".")[0] == package
    }
    assert named == set()
    loads = [path for path in FILES if f'import_module("{package}' in path.read_text()]
    assert [each.stem for each in loads] == ["library"]


def test_locks_are_made_in_one_file() -> None:
    """Which sees to it that a forked child finds them free."""
    bare = ("threading.Lock", "threading.RLock", "threading.Condition()")
    makes = {
        module_of(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call | ast.keyword)
        and any(map(ast.unparse(node).__contains__, bare))
    }
    assert makes == {"composer.system.forks"}


def test_every_file_has_its_place_in_the_order() -> None:
    """A new package is given one, and no entry of the order is without a file."""
    modules = [module_of(path) for path in FILES]
    rooms = {(name.split(".")[1:2] or ["__init__"])[0] for name in modules}
    assert rooms == {name.split(".")[0] for name in ORDER}
    assert {place(module) for module in modules} == set(ORDER)


CONTEXT_VARIABLES = {
    "composer.build": "Dynamo's signature stands between composer and an engine",
    "composer.policy.sources": "composer.using",
    "composer._torch.backwards": "torch makes the backward in its own code",
    "composer._torch.breaks": "torch tells of a graph break in its own code",
}
"""What is carried without an argument, and why. Nothing is to be added here."""


def test_ambient_state_is_what_is_listed() -> None:
    """All else is handed over by arguments."""
    found = [module_of(path) for path in FILES if "ContextVar(" in path.read_text()]
    assert sorted(found) == sorted(CONTEXT_VARIABLES)
