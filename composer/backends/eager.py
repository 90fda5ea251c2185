"""Eager: run the captured graph as it is. As a candidate it always succeeds and ends the chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer.backends.base import Backend, Build, BuildRequest, check_known
from composer.graphs.checkpoints import eager_forward


class EagerBackend(Backend):
    """Runs the graph without an engine. Nothing is compiled, so nothing can fail."""

    reads_example_inputs = False
    may_return_original = True

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuse any option: there are none."""
        check_known(options, (), "eager")

    def build(self, request: BuildRequest) -> Build:
        """Return the graph's own forward; nothing is compiled."""
        return Build(eager_forward(request.gm))
