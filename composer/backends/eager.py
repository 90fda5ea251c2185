"""Eager: the captured graph's own forward. As a candidate it is accepted and ends the chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer.backends.base import Backend, Build, BuildRequest, check_known
from composer.graphs.checkpoints import eager_forward


class EagerBackend(Backend):
    """No engine, by the user's own choice; nothing is compiled and nothing can fail."""

    reads_example_inputs = False
    may_return_original = True

    def check_options(self, options: Mapping[str, Any]) -> None:
        """There are none."""
        check_known(options, (), "eager")

    def build(self, request: BuildRequest) -> Build:
        """There is nothing to build."""
        return Build(eager_forward(request.gm))
