"""The sink ``torch_trace``: adds attempts to torch's structured trace, for ``tlparse``."""

from __future__ import annotations

import json
from typing import Any

from composer import _torch
from composer.records import CompileReport
from composer.telemetry.base import Sink
from composer.telemetry.report import Report


class TorchTraceSink(Sink):
    """Adds the record and the report's table to Dynamo's structured trace of the compile."""

    @classmethod
    def wanted(cls, name: str, named: frozenset[str]) -> bool:
        """Return true if ``COMPOSER_SINKS`` names it, or if torch's structured trace is on."""
        return super().wanted(name, named) or _torch.dynamo.structured_trace_is_on()

    def emit(self, record: dict[str, Any]) -> None:
        """Write the artifacts ``composer_attempts`` (JSON) and ``composer_report`` (text)."""
        table = str(Report((CompileReport.from_dict(record),)))
        graph_id = record["graph_id"]
        _torch.dynamo.trace_artifact(
            "composer_attempts", "json", json.dumps(record, indent=2), graph_id
        )
        _torch.dynamo.trace_artifact("composer_report", "string", table, graph_id)
