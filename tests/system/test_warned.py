"""Warnings point at the user's own line."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from common import compiled

from composer.errors import FallbackWarning
from composer.system import warned
from composer.testing import FakeBackend

LIBRARY = """
def forward(model, x):
    return model(x)
"""


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_failure_at_run_time_is_shown_at_the_users_line(
    is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not that of the installed package which calls the model; another file may be theirs."""
    path = tmp_path / "library.py"
    path.write_text(LIBRARY)
    if is_installed:
        monkeypatch.setattr(warned, "_INSTALLED", (*warned._INSTALLED, str(tmp_path)))
    spec = importlib.util.spec_from_file_location("library", path)
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)

    run = compiled(torch.sin, FakeBackend("raises", at=2))
    library.forward(run, torch.ones(2))
    with pytest.warns(FallbackWarning) as found:
        library.forward(run, torch.ones(2))
    assert found[0].filename == (__file__ if is_installed else str(path))


class Own(torch.nn.Module):
    """A module of the user's; with ``breaks``, its part is compiled after a graph break."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.part = Own(breaks=False) if breaks else torch.nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return self.part(x)


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("at", [1, 2])
def test_a_failure_of_an_own_module_is_shown_at_its_call(breaks: bool, at: int) -> None:
    """Dynamo runs code of its own in place of ``forward``, whose frame stands at the ``def``."""
    run = compiled(Own(breaks), FakeBackend("raises", at=at))
    for _ in range(at - 1):
        run(torch.ones(2))
    line = sys._getframe().f_lineno + 2
    with pytest.warns(FallbackWarning) as found:
        run(torch.ones(2))
    assert [(each.filename, each.lineno) for each in found] == [(__file__, line)]
