"""The interface of ONNX engines, by the example's engine and by engines that refuse and fail."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from common import ROOT, compiled, last, upstream
from onnx.reference import ReferenceEvaluator

import composer
from composer.backends.onnx_engine import (
    LoadAgain,
    Loaded,
    ModelRefused,
    NodesRefused,
    OnnxEngine,
    Reason,
    Status,
    dynamo_backend,
    to_plain,
)
from composer.errors import OptionError
from composer.testing import check_backend

pytestmark = pytest.mark.slow


def _example() -> type[OnnxEngine[Mapping[str, Any]]]:
    path = ROOT / "examples" / "reference_engine.py"
    spec = importlib.util.spec_from_file_location("reference_engine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    engine: type[OnnxEngine[Mapping[str, Any]]] = module.ReferenceEngine
    return engine


ReferenceEngine = _example()


class Refusing(ReferenceEngine):  # type: ignore[valid-type, misc]  # a class that a file made
    """Takes no sine: it names the node, or refuses the whole model."""

    names_nodes = True

    def load(self, region: Any, weights: Any, build: Any) -> Loaded:
        kinds = [node.op_type for node in region.graph.model.graph.node]
        if "Sin" not in kinds:
            return super().load(region, weights, build)
        if self.names_nodes:
            plain = to_plain(region.graph)
            nodes = enumerate(plain.graph.model.graph.node)
            raise NodesRefused(plain, {i: "no sine" for i, each in nodes if each.op_type == "Sin"})
        raise ModelRefused(Status.FAILED, Reason.BUILD_FAILED, "not this model")


class RefusingWhole(Refusing):
    """Refuses the whole model, and names no node."""

    names_nodes = False


class Forgetting(ReferenceEngine):  # type: ignore[valid-type, misc]  # a class that a file made
    """What it loads serves two calls, and then has to be loaded again."""

    loads = 0

    def load(self, region: Any, weights: Any, build: Any) -> Loaded:
        type(self).loads += 1
        run, calls = super().load(region, weights, build).run, iter(range(2))

        def twice(args: tuple[Any, ...]) -> Any:
            if next(calls, None) is None:
                raise LoadAgain
            return run(args)

        return Loaded(run=twice, sums={"loads": 1, "kinds": {"twice": 1}})


class Remembering(ReferenceEngine):  # type: ignore[valid-type, misc]  # a class that a file made
    """What it loads refers to the terms of the build."""

    def load(self, region: Any, weights: Any, build: Any) -> Loaded:
        position = {name: i for i, name in enumerate(region.graph.inputs)}
        run = super().load(region, weights, build).run
        return Loaded(run=lambda args: run(args) if position else build)


class Choosy(ReferenceEngine):  # type: ignore[valid-type, misc]  # a class that a file made
    """Reads a model only while a switch is on."""

    reads = True

    def read(self, model: Any, region: Any, build: Any) -> None:
        if not self.reads:
            raise ModelRefused(Status.DECLINED, Reason.UNSUPPORTED_OP, "not any more")


def _bert() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=50, num_hidden_layers=2, **sizes)
    torch.manual_seed(0)
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def test_the_example_computes_bert_with_changed_weights_and_a_dynamic_size() -> None:
    """A weight that changes is bound again, and the second length makes the size dynamic."""
    model = _bert()
    run = compiled(model, ReferenceEngine)
    with torch.no_grad():
        for length in (7, 7, 9, 12):
            tokens = torch.randint(0, 50, (2, length))
            expected = model(tokens).last_hidden_state
            torch.testing.assert_close(run(tokens).last_hidden_state, expected)
            model.encoder.layer[0].output.dense.weight.mul_(1.5)
    assert last().dynamic
    assert {report.chosen for report in composer.reports()} == {"ReferenceEngine"}
    assert last().runtime.fallbacks == 0


def test_the_example_computes_the_gradients_of_bert() -> None:
    """The engine runs the backward as well."""
    model = _bert()
    tokens = torch.randint(0, 50, (2, 7))
    found = []
    for run in (model, compiled(model, ReferenceEngine)):
        model.zero_grad()
        run(tokens).last_hidden_state.square().sum().backward()
        found.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert last().chosen == "ReferenceEngine"
    assert last().training


def test_the_example_takes_a_graph_in_part() -> None:
    """Torch runs what ONNX cannot express, and what NumPy has no dtype for."""

    def function(x: torch.Tensor) -> torch.Tensor:
        half = (torch.special.bessel_j0(x * 2) + 1).bfloat16() * 2
        return half.float() - x

    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(function, ReferenceEngine)(x), function(x))
    (attempt,) = last().attempts
    assert attempt.coverage is not None
    assert 0 < attempt.coverage < 1
    left = " ".join(attempt.engine["left_to_torch"])
    assert "bessel_j0" in left
    assert "bfloat16" in left


def test_the_example_keeps_the_contract_of_a_backend() -> None:
    """All rules of ``check_backend``: options, training, dynamic sizes, a second process."""
    seen = check_backend(ReferenceEngine)
    assert seen.graphs >= 3


@pytest.mark.parametrize("engine", [Refusing, RefusingWhole])
def test_a_refused_call_is_left_to_torch(engine: Any) -> None:
    """The engine names the node, or composer asks for each call."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * 2).relu() + x

    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(function, engine)(x), function(x))
    (attempt,) = last().attempts
    (line,) = attempt.engine["left_to_torch"]
    reason = "no sine" if engine is Refusing else "not this model"
    assert line.startswith(f"aten.sin.default ({reason}")
    assert (attempt.status, attempt.coverage) == ("succeeded", 0.75)


def test_what_has_to_be_loaded_again_answers_the_same_call() -> None:
    """Without a fallback; the facts of both regions are added up."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x * 2) + 1

    run, x = compiled(function, Forgetting), torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(run(x), function(x))
    assert last().runtime.fallbacks == 0
    facts = last().attempts[0].engine
    assert facts["loads"] == 2
    assert facts["kinds"] == {"twice": 2}
    assert Forgetting.loads > 2


def test_what_is_loaded_keeps_no_weight_alive_by_the_terms_of_the_build() -> None:
    """An engine that keeps them does not keep the model."""
    model = torch.nn.Linear(4, 3)
    weight, x = weakref.ref(model.weight), torch.randn(2, 4)
    with torch.no_grad():
        run = compiled(lambda m, x: m(x), Remembering)
        torch.testing.assert_close(run(model, x), model(x))
    assert last().chosen == "Remembering"
    del model
    gc.collect()
    assert weight() is None


@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
def test_a_kept_graph_that_the_engine_refuses_now_is_compiled_as_a_new_one(monkeypatch) -> None:
    """The refusal of the model from disk does not end the attempt."""
    x = torch.randn(3, 4)
    with torch.no_grad():
        compiled(torch.sin, Choosy)(x)
        assert last().attempts[0].engine["artefacts"] == "kept"
        torch.compiler.reset()
        compiled(torch.sin, Choosy)(x)
        assert last().attempts[0].engine["artefacts"] == "graph reused"
        torch.compiler.reset()
        monkeypatch.setattr(Choosy, "reads", False)
        torch.testing.assert_close(compiled(torch.sin, Choosy, "eager")(x), torch.sin(x))
    (declined, _) = last().attempts
    assert (declined.status, declined.reason) == ("declined", "unsupported_op")
    assert "aten.sin.default (not any more)" in declined.message


def test_an_engine_is_a_backend_of_dynamo() -> None:
    """Without a chain; an option that it does not have is the caller's mistake."""
    reference = dynamo_backend(ReferenceEngine, "reference")
    x = torch.randn(3, 4)
    run = torch.compile(torch.sin, backend=reference)
    torch.testing.assert_close(run(x), torch.sin(x))
    wrong = torch.compile(torch.cos, backend=reference, options={"threads": 2})
    with pytest.raises(Exception, match="unknown option 'threads'") as caught:
        wrong(x)
    assert isinstance(caught.value.__cause__ or caught.value.inner_exception, OptionError)  # type: ignore[attr-defined]  # Dynamo's


@upstream
def test_the_reference_evaluator_still_gathers_from_few_columns_only() -> None:
    """The example may take ``aten.gather`` when this works."""
    node = onnx.helper.make_node("GatherElements", ["x", "i"], ["y"], axis=1)
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 512])
    i = onnx.helper.make_tensor_value_info("i", onnx.TensorProto.INT64, [1, 3])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 3])
    graph = onnx.helper.make_graph([node], "g", [x, i], [y])
    evaluator = ReferenceEvaluator(onnx.helper.make_model(graph))
    feeds = {"x": np.zeros((1, 512), np.float32), "i": np.zeros((1, 3), np.int64)}
    with pytest.raises(ValueError, match="cannot reshape array of size 1"):
        evaluator.run(None, feeds)
