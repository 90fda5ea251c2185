"""The sink ``torch_trace``: composer's attempts in torch's structured trace, for ``tlparse``."""

from __future__ import annotations

import json
from typing import Any

from composer import _torch
from composer.records import CompileReport
from composer.telemetry.base import Sink
from composer.telemetry.report import Report


class TorchTraceSink(Sink):
    """Writes the record, and its table for a person, beside what Dynamo writes of the compile."""

    @classmethod
    def wanted(cls, name: str, named: frozenset[str]) -> bool:
        """Whether it is named, or torch's trace is on: whoever set ``TORCH_TRACE`` wants it."""
        return super().wanted(name, named) or _torch.dynamo.structured_trace_is_on()

    def emit(self, record: dict[str, Any]) -> None:
        """Write the artifacts ``composer_attempts`` (JSON) and ``composer_report`` (text)."""
        table = str(Report((CompileReport.from_dict(record),)))
        graph_id = record["graph_id"]
        _torch.dynamo.trace_artifact(
            "composer_attempts", "json", json.dumps(record, indent=2), graph_id
        )
        _torch.dynamo.trace_artifact("composer_report", "string", table, graph_id)
