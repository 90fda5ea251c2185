"""Dynamo's guards left out by ``guard_filter_fn``: what is noticed all the same, and what is not.

The table of docs/explanation/call-cost.md, held to torch and to composer.
"""

from __future__ import annotations

import pytest
import torch
from common import compiled, last
from weight_changes import CHANGES

import composer
from composer.errors import FallbackWarning

MODULES = torch.compiler.skip_guard_on_all_nn_modules_unsafe
TENSORS = torch.compiler.keep_tensor_guards_unsafe
ALL = torch.compiler.skip_all_guards_unsafe
FILTERS = [MODULES, TENSORS, ALL]

pytestmark = pytest.mark.slow


def filtered(left_out) -> dict[str, object]:
    """The option, if there is a filter."""
    return {} if left_out is None else {"guard_filter_fn": left_out}


def mean(x: torch.Tensor) -> torch.Tensor:
    """Its graph has the number of rows of the first call as a constant."""
    return x.sum(0) / x.shape[0]


def all_dropping() -> torch.nn.Module:
    """In training mode all that it returns is zero."""
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(1.0)).eval()


@pytest.mark.parametrize("left_out", FILTERS)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_seen_without_guards(left_out, change) -> None:
    """By composer, which looks at bound weights itself."""
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 16)), torch.randn(3, 8)
    f = compiled(model, "onnxrt", guard_filter_fn=left_out)
    with torch.no_grad():
        before = f(x)
        change(model)
        torch.testing.assert_close(f(x), model(x))
        assert not torch.allclose(f(x), before)
    assert [report.chosen for report in composer.reports()] == ["onnxrt"]


@pytest.mark.parametrize("left_out", FILTERS)
def test_weights_that_lie_otherwise_in_their_memory_are_seen_by_refresh(left_out) -> None:
    """Their identity, address and version are as before; Dynamo's guards would have seen it."""
    model, x = torch.nn.Linear(8, 8), torch.randn(3, 8)
    f = compiled(model, "onnxrt", guard_filter_fn=left_out)
    with torch.no_grad():
        before = f(x)
        model.weight.data = model.weight.data.t()
        torch.testing.assert_close(f(x), before)
        composer.refresh()
        torch.testing.assert_close(f(x), model(x))


@pytest.mark.parametrize(("left_out", "seen"), [(None, True), *((f, False) for f in FILTERS)])
def test_fewer_rows_in_the_memory_of_a_weight_are_seen_by_guards_only(left_out, seen: bool) -> None:
    """Identity, address and version are as before: this is what composer's own check misses."""
    model, x = torch.nn.Linear(8, 8), torch.randn(3, 8)
    f = compiled(model, "onnxrt", **filtered(left_out))
    with torch.no_grad():
        f(x)
        for each in model.parameters():
            each.data = each.data[:4]
        assert (f(x).shape == model(x).shape) == seen


@pytest.mark.parametrize("left_out", FILTERS)
def test_weights_of_other_sizes_are_left_to_eager(left_out) -> None:
    """The engine refuses them; the numbers are right where the graph has no size as a constant."""
    model, x = torch.nn.Linear(8, 8), torch.randn(3, 8)
    f = compiled(model, "onnxrt", guard_filter_fn=left_out)
    with torch.no_grad():
        f(x)
        for name, each in dict(model.named_parameters()).items():
            setattr(model, name, torch.nn.Parameter(each[:4].clone()))
        with pytest.warns(FallbackWarning):
            torch.testing.assert_close(f(x), model(x))


@pytest.mark.parametrize(("left_out", "right"), [(None, True), *((f, False) for f in FILTERS)])
def test_inductor_reads_a_weight_of_another_dtype_as_the_old_one(left_out, right: bool) -> None:
    """Nobody but Dynamo's guards looks at it, so composer offers no filter of guards on weights."""
    model, x = torch.nn.Embedding(10, 8), torch.arange(5)
    f = compiled(model, "inductor", **filtered(left_out))
    with torch.no_grad():
        f(x)
        model.weight.data = model.weight.data.double()
        assert torch.equal(f(x).double(), model(x)) == right


@pytest.mark.parametrize(("left_out", "seen"), [(None, True), *((f, False) for f in FILTERS)])
def test_a_weight_that_is_to_be_trained_again_is_seen_by_guards_only(left_out, seen: bool) -> None:
    """Else it gets no gradient."""
    model, x = torch.nn.Linear(8, 8), torch.randn(3, 8, requires_grad=True)
    f = compiled(model.requires_grad_(False), "onnxrt", **filtered(left_out))
    f(x)
    model.requires_grad_(True)
    f(x).sum().backward()
    assert (model.weight.grad is not None) == seen


@pytest.mark.parametrize("left_out", [None, *FILTERS])
def test_a_hook_on_a_layer_is_not_seen(left_out) -> None:
    """By default Dynamo has no guards on hooks (``skip_nnmodule_hook_guards``)."""
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.randn(3, 8)
    f = compiled(model, "onnxrt", **filtered(left_out))
    with torch.no_grad():
        before = f(x)
        model[0].register_forward_hook(lambda module, args, output: output + 1)
        torch.testing.assert_close(f(x), before)


@pytest.mark.parametrize("left_out", FILTERS)
def test_training_mode_is_not_seen_without_guards_on_modules(left_out) -> None:
    """The answer is that of evaluation mode."""
    model, x = all_dropping(), torch.randn(3, 8)
    f = compiled(model, "onnxrt", guard_filter_fn=left_out)
    with torch.no_grad():
        before = f(x)
        model.train()
        torch.testing.assert_close(f(x), before)
        assert not model(x).any()


@pytest.mark.parametrize("left_out", [MODULES, TENSORS])
def test_another_shape_is_seen_with_guards_on_tensors(left_out) -> None:
    """It is compiled anew."""
    f = compiled(mean, "onnxrt", guard_filter_fn=left_out)
    for x in (torch.randn(2, 8), torch.randn(5, 8)):
        torch.testing.assert_close(f(x), mean(x))
    assert len(composer.reports()) == 2


def test_another_shape_is_not_seen_without_any_guard() -> None:
    """The engine refuses it, and the captured graph answers by the sizes that it has."""
    f = compiled(mean, "onnxrt", guard_filter_fn=ALL)
    f(torch.randn(2, 8))
    x = torch.randn(5, 8)
    with pytest.warns(FallbackWarning, match="invalid dimensions"):
        torch.testing.assert_close(f(x), x.sum(0) / 2)
    assert last().runtime.fallbacks == 1


@pytest.mark.parametrize(("left_out", "seen"), [(MODULES, True), (TENSORS, False), (ALL, False)])
def test_grad_mode_is_seen_unless_only_tensors_are_watched(left_out, seen: bool) -> None:
    """Where it is not, what comes out has no gradient."""
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 16)), torch.randn(3, 8)
    f = compiled(model, "onnxrt", guard_filter_fn=left_out)
    with torch.no_grad():
        f(x)
    assert f(x).requires_grad == seen


@pytest.mark.parametrize(("left_out", "seen"), [(MODULES, True), (TENSORS, True), (ALL, False)])
def test_autocast_is_seen_unless_no_guard_is_left(left_out, seen: bool) -> None:
    """By the guards on tensors."""
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 16)), torch.randn(3, 8)
    f = compiled(model, "onnxrt", "aot_eager", guard_filter_fn=left_out)
    with torch.no_grad():
        f(x)
        with torch.autocast("cpu"):
            assert f(x).dtype == (torch.bfloat16 if seen else torch.float32)


def test_torch_takes_the_filter_out_of_the_options_given() -> None:
    """No backend sees it, and a dict that is given twice has it once; if not, mend the page."""
    options = {"chain": ["eager"], "guard_filter_fn": ALL}
    torch.compile(mean, backend="composer", options=options)
    assert options == {"chain": ["eager"]}
