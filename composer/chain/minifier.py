"""Writes the policy in force into the scripts of torch's minifier, which run in another process.

The minifier reduces a graph that fails to a smaller graph that still fails
(https://docs.pytorch.org/docs/main/user_guide/torch_compiler/torch.compiler_troubleshooting.html).
While it is on, errors of candidates and of engines at a call are raised
(:func:`composer.policy.switches.switches`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch.fx

from composer import session
from composer.chain.candidates import ONLY_TABLES
from composer.graphs import capture
from composer.policy import Facts
from composer.policy.resolution import resolve
from composer.policy.spelling import spelled


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
    fields = {name: spelled(getattr(policy, name)) for name in sorted(policy.model_fields_set)}
    settings = {"cache": spelled(resolved.cache), "distributed": spelled(resolved.distributed)}
    return "\n".join(
        (
            "import sys",
            f"sys.path += [each for each in {sys.path!r} if each not in sys.path]",
            "os.environ.pop('COMPOSER_CONFIG', None)",
            "import composer",
            f"composer.configure({ {'version': 1, 'defaults': fields, **settings}!r})",
        )
    )
