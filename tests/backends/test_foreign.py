"""Backends of other packages count as successful only where their own engines did the work."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from common import compiled, last

pytestmark = pytest.mark.slow

PRELUDE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, composer
BACKEND = torch._dynamo.lookup_backend("openvino")  # imports the package
from openvino.frontend.pytorch.torchdynamo import execute, partition

def raises(*args, **kwargs):
    raise RuntimeError("no such part")

def cosine(x):
    return torch.cos(x).relu() + 1

def told(function, calls=1, **options):
    chain = [{"backend": BACKEND, "options": options}]
    run = torch.compile(function, backend="composer", options={"chain": chain})
    with torch.no_grad():
        for _ in range(calls):
            torch.testing.assert_close(run(torch.ones(3)), function(torch.ones(3)))
    (attempt,) = composer.reports()[-1].attempts
    return str(attempt.status), attempt.reason and str(attempt.reason), attempt.message
"""


@pytest.fixture
def run(run_python: Any) -> Any:
    """In a process of its own: the openvino package (2026.4.1) changes Dynamo's settings."""
    if importlib.util.find_spec("openvino") is None:
        pytest.skip("the package itself")

    def run_all(code: str) -> None:
        done = run_python(PRELUDE + code)
        assert done.returncode == 0, done.stderr

    return run_all


AOT = "aot_autograd=True"


@pytest.mark.parametrize("training", [False, True])
def test_cuda_graphs_that_cannot_be_made_are_no_success(training: bool) -> None:
    """Dynamo's backend runs the graph without them, and logs that."""
    x = torch.ones(3, requires_grad=training)
    torch.testing.assert_close(compiled(torch.sin, "cudagraphs")(x), torch.sin(x))
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("failed", "build_failed")
    assert "skipping cudagraphs due to cpu device" in attempt.message


@pytest.mark.parametrize("options", ["", AOT])
def test_engines_that_work_are_accepted(run: Any, options: str) -> None:
    """With AOTAutograd in front of the package's backend, too."""
    run(f"assert told(cosine, 2, {options}) == ('succeeded', None, '')")


def test_openvino_in_a_chain_is_composers_engine_and_theirs_has_dynamo_before_its_name(
    run: Any,
) -> None:
    """Also where the package has registered its own, which is proven to have done the work."""
    run("""
for name in ("openvino", "dynamo:openvino", "composer_openvino"):
    torch.compiler.reset()
    f = torch.compile(cosine, backend="composer", options={"chain": [name]})
    with torch.no_grad():
        torch.testing.assert_close(f(torch.ones(3)), cosine(torch.ones(3)))
    (attempt,) = composer.reports()[-1].attempts
    assert (attempt.backend, attempt.status) == (name, "succeeded"), attempt
    assert (attempt.coverage == 1.0) == (name != "dynamo:openvino"), attempt
partition.Partitioner.make_partitions = raises
torch.compiler.reset()
f = torch.compile(cosine, backend="composer", options={"chain": ["dynamo:openvino"]})
with torch.no_grad():
    f(torch.ones(3))
(attempt,) = composer.reports()[-1].attempts
assert (attempt.status, attempt.message) == ("failed", "no such part"), attempt
assert composer.reports()[-1].chosen == "eager"
""")


@pytest.mark.parametrize("options", ["", AOT])
def test_compile_that_would_be_handed_over_to_inductor_has_failed(run: Any, options: str) -> None:
    """By the package's own error."""
    run(f"""
partition.Partitioner.make_partitions = raises
assert told(cosine, 1, {options}) == ("failed", "build_failed", "no such part")
""")


def test_graph_that_is_left_to_torch_is_no_success(run: Any) -> None:
    """The package compiles no part of a single operator, and none that it does not know."""
    run("""
for function in (torch.cos, torch.special.bessel_j0):
    status, reason, said = told(function)
    assert (status, reason) == ("rejected", "returned_original")
    assert said == "openvino returned a graph with no engine inside"
""")


def test_engine_that_gives_up_at_a_call_has_failed(run: Any) -> None:
    """The package has torch run its part from then on."""
    run("""
execute.openvino_compile = raises
status, reason, said = told(cosine)
assert (status, reason) == ("failed", "raised_at_runtime")
assert "an engine of openvino raised, and torch ran its part" in said
""")


def test_engine_that_gives_up_where_inputs_are_written_to_fails_at_the_next_call(run: Any) -> None:
    """Torch has answered, and nobody could answer the same call again."""
    run("""
execute.openvino_compile = raises

def writes(x):
    return torch.cos(x.add_(1)).relu() + 1

assert told(writes)[0] == "succeeded"
torch.compiler.reset()
assert told(writes, 2)[:2] == ("failed", "raised_at_runtime")
""")


def test_function_that_a_compile_was_handed_over_to_is_put_back(run: Any) -> None:
    """The package's backend by itself does as it did."""
    run("""
from openvino.frontend.pytorch.torchdynamo import backend
usual = backend.compile_fx
partition.Partitioner.make_partitions = raises
told(cosine)
assert backend.compile_fx is usual
""")


def test_version_of_openvino_without_that_function_is_taken_as_it_is(run: Any) -> None:
    """And the record says that a hand-over could not be told."""
    run("""
from openvino.frontend.pytorch.torchdynamo import backend
del backend.compile_fx
assert told(cosine)[0] == "succeeded"
assert "cannot be told" in composer.reports()[-1].attempts[0].engine["handed_to_inductor"]
""")
