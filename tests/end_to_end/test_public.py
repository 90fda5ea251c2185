"""The public face, from outside: fresh processes, the exported names, the entry points."""

from __future__ import annotations

import types
from importlib.metadata import entry_points

import pytest
import torch

import composer


def test_exports_are_exactly_the_contract_so_far() -> None:
    """``composer`` shows these names and no others."""
    assert all(hasattr(composer, name) for name in composer.__all__)
    public = {
        name
        for name, value in vars(composer).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public - {"annotations"} == set(composer.__all__) - {"errors", "passes", "testing"}
    assert set(composer.__all__) == {
        *("Attempt", "Candidate", "CompileReport", "Policy", "PolicyBook", "Reason", "Status"),
        *("configure", "errors", "explain", "passes", "refresh", "report", "reports", "reset"),
        *("load", "repro", "save", "testing", "using", "warm_up"),
    }


def test_without_torch_names_are_imported_when_they_are_asked_for(fresh_python) -> None:
    """All are shown at once, and modules are there as after an import of everything."""
    code = (
        "import composer, sys, types\n"
        "from importlib.metadata import version\n"
        "assert 'torch' not in sys.modules\n"
        "assert dir(composer) == sorted(composer.__all__)\n"
        "assert composer.Status.SUCCEEDED == 'succeeded'\n"
        "assert 'torch' not in sys.modules\n"
        "from composer import *\n"
        "all_of_them = {n: getattr(composer, n) for n in composer.__all__}\n"
        "modules = [n for n, v in all_of_them.items() if isinstance(v, types.ModuleType)]\n"
        "assert modules == ['errors', 'passes', 'testing'], modules\n"
        "assert composer.explain is explain and callable(explain)\n"
        "assert composer.telemetry.report.Report\n"
        "assert composer.__version__ == version('torch-compile-composer')\n"
        "composer.nothing\n"
    )
    done = fresh_python(code)
    assert done.stderr.endswith("AttributeError: module 'composer' has no attribute 'nothing'\n")


def test_several_threads_may_be_the_first_to_ask(fresh_python) -> None:
    """Which would break torch, if each imported what it needs of it."""
    code = (
        "import composer, threading\n"
        "names, found = composer.__all__ * 2, []\n"
        "def ask(name): found.append(getattr(composer, name))\n"
        "threads = [threading.Thread(target=ask, args=(name,)) for name in names]\n"
        "for each in threads: each.start()\n"
        "for each in threads: each.join()\n"
        "assert len(found) == len(names)\n"
    )
    assert fresh_python(code).returncode == 0


def test_what_is_missing_of_an_installation_is_named(fresh_python) -> None:
    """Not taken for a name that composer does not have."""
    code = "import sys, composer; sys.modules['pydantic'] = None; composer.policy"
    assert "ModuleNotFoundError: import of pydantic halted" in fresh_python(code).stderr


def test_entry_points_name_the_backends() -> None:
    """Dynamo finds composer and onnxrt by entry point, and no static one named tensorrt."""
    found = {e.name for e in entry_points(group="torch_dynamo_backends")}
    assert {"composer", "onnxrt"} <= found
    assert "tensorrt" not in found


def test_importing_composer_imports_no_engine(fresh_python) -> None:
    """Nothing heavy is loaded before a graph asks for it, but what Dynamo itself loads."""
    heavy = "onnx onnxruntime onnxscript tensorrt torch_tensorrt triton openvino transformers"
    code = (
        "import torch._dynamo, sys; dynamos = set(sys.modules); import composer;"
        f"print([m for m in {heavy.split()} if m in sys.modules and m not in dynamos])"
    )
    assert fresh_python(code).stdout.strip() == "[]"


@pytest.mark.slow
def test_works_in_a_fresh_process_with_nothing_imported_but_torch(fresh_python) -> None:
    """The one-liner of the README."""
    done = fresh_python(
        "import torch; f = torch.compile(torch.nn.Linear(4, 4), backend='composer');"
        "print(f(torch.ones(2, 4)).shape)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch.Size([2, 4])"
    assert "Warning" not in done.stderr


def test_no_engine_of_the_default_chain_is_imported_when_it_cannot_be_here(fresh_python) -> None:
    """On a machine without GPU the default chain loads nothing of TensorRT."""
    done = fresh_python(
        "import torch, sys, composer\n"
        "f = torch.compile(lambda x: x + 1, backend='composer',"
        " options={'chain': ['tensorrt', 'eager']})\n"
        "f(torch.ones(2))\n"
        "print([m for m in sys.modules if 'tensorrt' in m and not m.startswith('composer')"
        " and not m.startswith('torch._')])"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_direct_call_of_the_looked_up_backend_works() -> None:
    """``lookup_backend("composer")(gm, example_inputs)`` needs no Dynamo around it."""
    gm = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()))
    x = torch.randn(2, 3)
    backend = torch._dynamo.lookup_backend("composer")
    run = backend(gm, [x], options={"chain": ["aot_eager"]})
    torch.testing.assert_close(run(x), gm(x))
    assert composer.reports()[-1].graph_id == "direct"
    assert composer.reports()[-1].chosen == "aot_eager"
