"""ONNX Runtime's own telemetry, which composer does not let speak."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from common import upstream
from torch.utils.dlpack import from_dlpack

from composer.backends.onnxrt import library

SWITCH = "ORT_DISABLE_TELEMETRY"

AUTOMATIC = (
    *("CI", "TF_BUILD", "GITHUB_ACTIONS", "GITLAB_CI", "CIRCLECI", "TRAVIS", "JENKINS_URL"),
    *("CODEBUILD_BUILD_ID", "BUILDKITE", "TEAMCITY_VERSION", "APPVEYOR", "BITBUCKET_BUILD_NUMBER"),
)
"""Variables by which ONNX Runtime knows that no user is there, and keeps nothing."""

COMPILED = """
import os, torch
f = torch.compile(torch.sin, backend="composer", options={"chain": ["onnxrt"], "strict": True})
f(torch.ones(2))
assert "ORT_DISABLE_TELEMETRY" not in os.environ
"""


@pytest.fixture
def left_in_cache(
    run_python: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., bool]:
    """Whether code left ONNX Runtime's database of events in the user's cache directory."""

    def left(code: str, **env: str) -> bool:
        for name in (SWITCH, *AUTOMATIC):
            monkeypatch.delenv(name, raising=False)
        here = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = run_python(f"{code}\nimport os; os._exit(0)", env=here | env)
        assert done.returncode == 0, done.stderr
        return any(tmp_path.rglob("onnxruntime.db"))

    return left


@pytest.mark.slow
def test_sessions_keep_no_events_and_no_identity(left_in_cache: Callable[..., bool]) -> None:
    """Nothing leaves the machine by itself; the environment is as it was."""
    assert not left_in_cache(COMPILED)


@pytest.mark.slow
def test_library_by_itself_keeps_events(left_in_cache: Callable[..., bool]) -> None:
    """Were this to fail, composer would have nothing to switch off."""
    assert left_in_cache("import onnxruntime")


@pytest.mark.slow
def test_users_own_word_on_telemetry_holds(left_in_cache: Callable[..., bool]) -> None:
    """Who wants it sets the variable."""
    assert left_in_cache(COMPILED.rpartition("assert")[0], **{SWITCH: "0"})


@pytest.mark.parametrize("said", [None, "0", "1"])
def test_package_that_the_program_imported_records_no_more(
    said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the environment has a word on it."""
    calls: list[None] = []
    monkeypatch.setattr(onnxruntime, "disable_telemetry_events", lambda: calls.append(None))
    monkeypatch.delenv(SWITCH, raising=False)
    if said is not None:
        monkeypatch.setenv(SWITCH, said)
    library.onnxruntime.cache_clear()
    assert library.onnxruntime() is onnxruntime
    assert library.onnxruntime() is onnxruntime
    assert len(calls) == (said is None)
    assert os.environ.get(SWITCH) == said


IDENTITY = """
<ir_version: 8, opset_import: ["" : 18]>
identity (float[N, 2] x) => (float[N, 2] y) { y = Identity(x) z = Exp(x) }
"""
"""A model with a node whose result nothing reads."""


@upstream
def test_nodes_are_still_run_whose_results_nothing_reads(tmp_path: Path) -> None:
    """``drop_unread`` can go once this fails."""
    onnx = pytest.importorskip("onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    content = onnx.parser.parse_model(IDENTITY).SerializeToString()
    onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(options.optimized_model_filepath)
    assert "Exp" in [node.op_type for node in optimized.graph.node]


@upstream
def test_a_model_without_an_opset_is_still_refused() -> None:
    """``_torch.exporter`` need not add one once this fails."""
    onnx = pytest.importorskip("onnx")
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (float x) => (x) {}'
    )
    del model.opset_import[:]
    with pytest.raises(Exception, match="opset"):
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@upstream
def test_tensors_without_elements_still_have_strides_of_zero() -> None:
    """As DLPack from ONNX Runtime says since 1.32; ``_receiver`` can leave them once this fails."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime", minversion="1.32")
    content = onnx.parser.parse_model(IDENTITY).SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    empty = onnxruntime.OrtValue.ortvalue_from_numpy(torch.zeros(0, 2).numpy())
    (result,) = session.run_with_ort_values(None, {"x": empty})
    assert from_dlpack(result._ortvalue.to_dlpack()).stride() == (0, 0)
