"""What the user asks for, and the policy in force for one graph.

A policy (:mod:`~composer.policy.model`) is found (:mod:`~composer.policy.sources`), merged with the
:mod:`~composer.policy.switches`, and its names are looked up (:mod:`~composer.policy.resolution`).
"""

from __future__ import annotations

from composer.policy.model import (
    AUTO,
    DYNAMO,
    Candidate,
    Policy,
    PolicyBook,
    names_code,
    read_policy,
)
from composer.policy.sources import using
from composer.policy.tables import (
    Cache,
    Distributed,
    Facts,
    FormatVersion,
    Match,
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
    "names_code",
    "read_policy",
    "using",
]
