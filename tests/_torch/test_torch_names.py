"""Private names of torch: each is known, and all but the essential ones may be missing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._dynamo

from composer import _torch
from composer._torch import names

FOLDER = Path(_torch.__file__).parent
FOR_ONNX = {
    "torch._dynamo.backends.common:aot_autograd": "functional graphs, and backwards",
    "torch._decomp:decomposition_table": "what ONNX has no operator for",
    "torch._prims_common:compute_elementwise_output_logical_to_physical_perm": "layouts",
    "torch._prims_common:suggest_memory_format": "layouts",
    "torch.onnx._internal._lazy_import:onnxscript_apis": "the exporter",
    "torch.onnx._internal.exporter._building:_get_or_create_constant": "the exporter",
    "torch.onnx._internal.exporter._core:_exported_program_to_onnx_program": "the exporter",
    "torch.onnx._internal.exporter._decomp:get_onnx_implemented_overloads": "the exporter",
    "torch.onnx._internal.exporter._fx_passes:remove_assertion_nodes": "the exporter",
    "torch.onnx._internal.exporter._registration:ONNXRegistry.from_torchlib": "the exporter",
    "torch.onnx._internal.exporter._registration:logger": "the exporter",
    "torch.onnx._internal.fx.passes.type_promotion:TypePromotionTable": "the exporter",
    "torch.onnx._internal.fx.passes.type_promotion:_TypePromotionInterpreter": "the exporter",
}
"""The names without which the engines that read ONNX are ``unavailable``, and their uses."""
OF_OLDER_RELEASES = {"torch.fx._symbolic_trace:_is_fx_tracing_flag"}  # before 2.14
KNOWN = {
    *names.ESSENTIAL,
    *FOR_ONNX,
    *OF_OLDER_RELEASES,
    *(name for feature in names.FEATURES for name in feature.names),
}


def private_names(path: Path) -> Iterator[str]:
    """Every private name of torch that a file mentions, as ``module.attribute``, the longest."""
    tree = ast.parse(path.read_text())
    short: dict[str, str] = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
            short |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            short |= {each.asname: each.name for each in node.names if each.asname}
    chains = (ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute | ast.Name))
    for chain in chains:
        first, _, rest = chain.partition("(")[0].partition(".")
        full = f"{short[first]}.{rest}".rstrip(".") if first in short else ""
        if is_private(full):
            yield full


def is_private(name: str) -> bool:
    first, *rest = name.split(".")
    documented = name.startswith("torch._dynamo.") and rest[1] in torch._dynamo.__all__
    listed = name.startswith("torch._inductor.list_")
    inner = any(each.startswith("_") and not each.startswith("__") for each in rest)
    return first == "torch" and inner and not (documented or listed or rest[0] == "ops")


def covers(known: str, name: str) -> bool:
    """Whether a known name is this one, an attribute of it, or what it is an attribute of."""
    dotted = known.replace(":", ".")
    return f"{dotted}.".startswith(f"{name}.") or f"{name}.".startswith(f"{dotted}.")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_every_private_name_of_torch_is_known(path: Path) -> None:
    """It is essential, or the function that uses it says what is off without it."""
    unknown = {
        name for name in private_names(path) if not any(covers(known, name) for known in KNOWN)
    }
    assert unknown == set()


def test_no_feature_is_off_with_this_torch() -> None:
    """Each name is where it is said to be."""
    assert names.off(look=True) == []
    names.require_essential()


def test_missing_essential_name_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it is for."""
    monkeypatch.setattr(names, "has", lambda name: name != "torch._guards:TracingContext")
    with pytest.raises(ImportError, match=r"lacks torch\._guards:TracingContext \(the compile"):
        names.require_essential()


WITHOUT = """
import importlib.util, sys, torch

hidden = set(sys.argv[2:])
spec = importlib.util.spec_from_file_location("composer._torch.names", sys.argv[1])
names = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = names
spec.loader.exec_module(names)
has = names.has
names.has = lambda name: name not in hidden and has(name)
import composer

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.BatchNorm1d(8)).eval()
given, said = torch.randn(3, 4), False
for engine in ("onnxrt", "inductor", "eager"):
    for trains in (False, True):
        torch.compiler.reset()
        compiled = torch.compile(model, backend="composer", options={"chain": [engine]})
        x, y = (given.clone().requires_grad_(trains) for _ in range(2))
        with torch.set_grad_enabled(trains):
            result, expected = compiled(x), model(y)
        torch.testing.assert_close(result, expected)
        if trains:
            result.sum().backward(), expected.sum().backward()
            torch.testing.assert_close(x.grad, y.grad)
        report = composer.reports()[-1]
        first = report.attempts[0]
        assert report.chosen == engine or first.reason == "training_graph", first.message
        said = said or "torch_lacks" in first.engine
assert said or not names.off(look=False)  # a feature that no graph here asked for
assert all(any(name in line for line in names.off(look=True)) for name in hidden)
"""


def without(*hidden: str) -> None:
    """Compile by each engine where torch lacks these names, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT), str(FOLDER / "names.py"), *hidden],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stderr


OPTIONAL = sorted({name for feature in names.FEATURES for name in feature.names})


@pytest.mark.slow
def test_engines_compile_without_any_optional_name() -> None:
    """Forward and backward; the record says which features are off."""
    without(*OPTIONAL)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIONAL)
def test_engines_compile_without_one_optional_name(name: str) -> None:
    """What one lacks costs one feature."""
    without(name)
