"""A condition on graphs, and the facts of a graph that it looks at."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pydantic import BaseModel

from composer.policy.tables import FROZEN
from composer.records import GraphRequest


class Match(BaseModel):
    """A condition on graphs. A graph must match every key that is given."""

    model_config = FROZEN

    model: str | None = None
    """A glob that must match one of the model's names: the class or function whose frame Dynamo
    traces, the one that the program compiled, or the field ``model`` of the policy."""

    device: str | None = None
    """A glob that must match the device: ``cpu``, ``cuda``, ``cuda:0``."""

    dtype: str | None = None
    """A glob that must match the most common floating dtype of inputs and weights, such as
    ``float32``."""

    training: bool | None = None
    """True for graphs compiled in grad mode of which an input or a weight requires grad."""

    dynamic: bool | None = None
    """True for graphs with a symbolic size."""

    def holds(self, graph: Facts) -> bool:
        """Return True if the graph matches every key that is given."""
        kind = graph.device.partition(":")[0]
        return (
            _matches(self.model, graph.model, *graph.names)
            and _matches(self.device, graph.device, kind)
            and _matches(self.dtype, graph.dtype)
            and self.training in (None, graph.training)
            and self.dynamic in (None, graph.dynamic)
        )

    def __str__(self) -> str:
        """The keys that are given, such as ``"device = 'cuda', training = False"``."""
        given = self.model_dump(exclude_none=True)
        return ", ".join(f"{key} = {value!r}" for key, value in given.items())


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a graph that policies match. ``names`` are further names of its model."""

    model: str
    device: str
    dtype: str
    training: bool
    dynamic: bool
    names: tuple[str, ...] = ()

    @staticmethod
    def of(request: GraphRequest) -> Facts:
        """Return the facts of a captured graph."""
        return Facts(
            **{each.name: getattr(request, each.name) for each in dataclasses.fields(Facts)}
        )


def _matches(glob: str | None, *texts: str) -> bool:
    return glob is None or any(fnmatchcase(text, glob) for text in texts if text)
