"""What the user asks for, and the policy in force for one graph.

- :mod:`~composer.policy.model` is the model of a policy, with its :mod:`~composer.policy.tables`
  and the conditions on graphs (:mod:`~composer.policy.match`);
- :mod:`~composer.policy.book` is what a file holds, :mod:`~composer.policy.sources` finds it, and
  :mod:`~composer.policy.found` says what a file that was only found may not say;
- :mod:`~composer.policy.switches` reads the environment;
- :mod:`~composer.policy.resolution` merges all of them for a graph;
- :mod:`~composer.policy.mistakes` finds unknown names, and :mod:`~composer.policy.wording` puts
  mistakes into words.
"""

from __future__ import annotations

from composer.policy.book import PolicyBook
from composer.policy.match import Facts, Match
from composer.policy.model import (
    AUTO,
    DYNAMO,
    Candidate,
    Policy,
    fields_of,
    names_code,
    read_policy,
)
from composer.policy.sources import using
from composer.policy.tables import (
    Cache,
    Distributed,
    FormatVersion,
    OnRuntimeError,
    Precision,
    Select,
    Verify,
    Worded,
)

__all__ = [
    "AUTO",
    "DYNAMO",
    "Cache",
    "Candidate",
    "Distributed",
    "Facts",
    "FormatVersion",
    "Match",
    "OnRuntimeError",
    "Policy",
    "PolicyBook",
    "Precision",
    "Select",
    "Verify",
    "Worded",
    "fields_of",
    "names_code",
    "read_policy",
    "using",
]
