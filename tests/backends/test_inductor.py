"""Inductor through composer is Inductor through plain torch.compile: code, caches, settings."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config as inductor_config
from common import compiled, last, thorough
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code

import composer
from composer.errors import OptionError

pytestmark = pytest.mark.slow


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(3, 8, 3)
    return torch.nn.Sequential(conv, torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval()


def code(function, *args) -> list[str]:
    """The source that Inductor generates, and does not take from its cache of graphs."""
    torch.compiler.reset()
    with inductor_config.patch(fx_graph_cache=False), torch.no_grad():
        _, sources = run_and_get_code(function, *args)
    return [line for source in sources for line in source.splitlines() if "AOT ID" not in line]


@pytest.mark.parametrize("dynamic", [False, *thorough(True)])
def test_generated_code_is_the_same(dynamic) -> None:
    """Line by line, with static and dynamic shapes."""
    net, x = model(), torch.randn(2, 3, 8, 8)
    ours = code(compiled(net, "inductor", dynamic=dynamic), x)
    assert last().chosen == "inductor"
    assert ours == code(torch.compile(net, dynamic=dynamic), x)


def test_a_second_compile_hits_inductors_caches() -> None:
    """The clone of the graph has the original's cache key."""
    net, x = model(), torch.randn(2, 3, 8, 8)
    with fresh_cache(), torch.no_grad():
        for _ in range(2):
            torch.compiler.reset()
            counters.clear()
            compiled(net, "inductor")(x)
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1
        torch.compiler.reset()
        counters.clear()
        compiled(net, "inductor", on_exhausted="raise")(x)
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1


def test_weights_are_static_inputs_still() -> None:
    """CUDA graphs and freezing rest on it; checked on what AOTAutograd is told."""
    seen = []

    def spy(gm, example_inputs):
        from torch._functorch._aot_autograd import frontend_utils

        count = len(example_inputs)
        seen.append(frontend_utils._try_get_metadata_from_dynamo(gm, {}.keys(), count, [])[1])
        return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)

    compiled(torch.nn.Linear(3, 3), spy)(torch.ones(2, 3))
    torch.compiler.reset()
    torch.compile(torch.nn.Linear(3, 3), backend=spy)(torch.ones(2, 3))
    assert seen[0] == seen[1] == [0, 1]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # by tuning, in torch 2.11
def test_mode_reaches_inductor_and_the_record() -> None:
    """``max-autotune-no-cudagraphs`` tunes, as torch has it."""
    net, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
    with torch.no_grad():
        f = torch.compile(net, backend="composer", mode="max-autotune-no-cudagraphs")
        torch.testing.assert_close(f(x), net(x))
    assert last().attempts[-1].engine["mode"] == "max-autotune-no-cudagraphs"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freezin": True}, "did you mean 'freezing'"),
        ({"freezing": "yes"}, "Unexpected type of attr freezing"),
    ],
)
def test_wrong_settings_raise(options, message) -> None:
    """The user's own mistake is no reason to fall back."""
    with pytest.raises(BackendCompilerFailed, match=message) as caught:
        compiled(torch.sin, {"backend": "inductor", "options": options})(torch.ones(2))
    assert isinstance(caught.value.inner_exception, OptionError)


def test_no_compiler_is_a_failed_attempt_and_the_next_serves() -> None:
    """On a machine without a C++ compiler the chain goes on."""
    broken = {"backend": "inductor", "options": {"cpp.cxx": (None, "no-such-compiler")}}
    x = torch.randn(4)
    with fresh_cache():
        torch.testing.assert_close(compiled(lambda x: x.sin() + 1, broken, "eager")(x), x.sin() + 1)
    assert last().attempts[0].reason == "build_failed"
    assert "compiler" in last().attempts[0].message
    assert last().chosen == "eager"


def test_reports_of_inductor_name_the_torch_that_ran() -> None:
    """And the whole graph is covered."""
    compiled(torch.sin, "inductor")(torch.ones(2))
    assert composer.reports()[0].attempts[0].engine == {"torch": torch.__version__}
    assert last().attempts[0].coverage == 1.0
