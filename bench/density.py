"""How dense the code is: decisions for 100 lines of function bodies, by package.

``python bench/density.py`` counts ``composer/``. A decision is a branch, a loop, a handler of an
exception, a boolean operand, a conditional expression, or a clause of a comprehension. Docstrings
do not count as lines of a body. xDSL, onnx_ir, structlog and httpx have 16 to 24.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "composer"

BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.IfExp, ast.ExceptHandler, ast.match_case)


def bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """The statements of each function but its docstring, also of a function within another."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node, clean=False) is not None
            yield node.body[1:] if has_docstring else node.body


def decisions(node: ast.AST) -> int:
    """Decisions that this node itself makes."""
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return int(isinstance(node, BRANCHES))


def counted(files: list[Path]) -> tuple[int, int]:
    """Decisions, and lines of function bodies."""
    made = lines = 0
    for file in files:
        for body in filter(None, bodies(ast.parse(file.read_text(encoding="utf-8")))):
            lines += (body[-1].end_lineno or 0) - body[0].lineno + 1
            made += sum(decisions(node) for statement in body for node in ast.walk(statement))
    return made, lines


def density(files: list[Path]) -> float:
    """Decisions for 100 lines of function bodies."""
    made, lines = counted(files)
    return 100 * made / lines


def main() -> None:
    """Print the density of each package and of all."""
    everything = sorted(PACKAGE.rglob("*.py"))
    rooms = sorted({file.relative_to(PACKAGE).parts[0] for file in everything})
    for room in rooms:
        files = [each for each in everything if each.relative_to(PACKAGE).parts[0] == room]
        if counted(files)[1]:
            print(f"{density(files):5.1f}  {room}")
    size = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in everything)
    print(f"{density(everything):5.1f}  all, of {size:,} lines in {len(everything)} files")


if __name__ == "__main__":
    main()
