"""Writes the policy in force into the scripts of torch's minifier, which run in another process.

The minifier reduces a graph that fails to a smaller graph that still fails
(https://docs.pytorch.org/docs/main/user_guide/torch_compiler/torch.compiler_troubleshooting.html).
While it is on, errors of candidates and of engines at a call are raised
(:func:`composer.policy.switches.switches`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch.fx
from pydantic import BaseModel

from composer import session
from composer.chain.candidates import ONLY_TABLES
from composer.graphs import capture
from composer.policy import Candidate, Facts, Worded
from composer.policy.resolution import resolve


def preamble(gm: torch.fx.GraphModule, inputs: Sequence[Any], arguments: Mapping[str, Any]) -> str:
    """Return lines for the minifier's script that set the policy in force for this graph.

    Args:
        gm: The graph.
        inputs: The inputs of the call.
        arguments: ``mode`` and ``options`` of ``torch.compile``.
    """
    mode, options = arguments.get("mode"), arguments.get("options")
    facts = Facts.of(capture.read_request(gm, inputs, mode=mode))
    resolved = resolve(facts, ONLY_TABLES, mode, options, session.current().configured)
    policy = resolved.policy
    fields = {name: _spelled(getattr(policy, name)) for name in sorted(policy.model_fields_set)}
    settings = {"cache": _spelled(resolved.cache), "distributed": _spelled(resolved.distributed)}
    return "\n".join(
        (
            "import sys",
            f"sys.path += [each for each in {sys.path!r} if each not in sys.path]",
            "os.environ.pop('COMPOSER_CONFIG', None)",
            "import composer",
            f"composer.configure({ {'version': 1, 'defaults': fields, **settings}!r})",
        )
    )


def _spelled(value: Any) -> Any:
    """Return a value as in a policy file; an object of code becomes ``"module:name"``."""
    if isinstance(value, Candidate):
        rest = _spelled({name: getattr(value, name) for name in value.model_fields_set})
        return rest | {"backend": _spelled(value.backend)}
    if isinstance(value, Worded):
        return value.spelled
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_defaults=True)
    if isinstance(value, Mapping):
        return {key: _spelled(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_spelled, value))
    if isinstance(value, str | int | float | None):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return {"pass": _spelled(type(value)), **_spelled(fields)}
    name = getattr(value, "__name__", type(value).__qualname__)
    return f"{value.__module__}:{getattr(value, '__qualname__', name)}"
