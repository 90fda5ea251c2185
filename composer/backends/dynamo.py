"""Any other backend: a name that Dynamo knows, or a callable of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.fx

from composer import _torch
from composer.backends.base import Backend
from composer.errors import refuse
from composer.records import GraphRequest, Reason, Status


class CallableBackend(Backend):
    """A function ``(gm, example_inputs) -> callable``, with ``options=`` if it has options."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def build(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: list[Any],
        *,
        mode: str | None,
        options: Mapping[str, Any],
    ) -> object:
        """Call the function; ``mode`` is a word of torch's that only torch's engines know."""
        if options:
            return self.function(gm, example_inputs, options=dict(options))
        return self.function(gm, example_inputs)


class DynamoBackend(Backend):
    """A name looked up in Dynamo's registry when it is needed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def probe(self, request: GraphRequest) -> None:
        """Refuse with ``not_registered`` when no package here registers the name."""
        self._lookup()

    def build(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: list[Any],
        *,
        mode: str | None,
        options: Mapping[str, Any],
    ) -> object:
        """Look the name up and call what it stands for."""
        found = CallableBackend(self._lookup())
        return found.build(gm, example_inputs, mode=mode, options=options)

    def _lookup(self) -> Callable[..., Any]:
        try:
            return _torch.lookup_backend(self.name)
        except _torch.InvalidBackend:
            refuse(
                Status.UNAVAILABLE,
                Reason.NOT_REGISTERED,
                f"no installed package registers a Dynamo backend named {self.name!r}",
            )
