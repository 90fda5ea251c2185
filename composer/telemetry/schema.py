"""The JSON schema of a record. ``python -m composer.telemetry.schema`` prints it."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from composer.records import SCHEMA_VERSION, CompileReport


def committed() -> dict[str, Any]:
    """Return the committed schema, from the file in this folder."""
    text = files("composer.telemetry").joinpath("record.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def generated() -> dict[str, Any]:
    """Return the schema that follows from the fields, types and descriptions of the records."""
    schema = TypeAdapter(CompileReport).json_schema(mode="serialization")
    _drop_titles(schema)
    schema["$schema"] = GenerateJsonSchema.schema_dialect
    schema["title"] = f"composer's record of a compiled graph, version {SCHEMA_VERSION}"
    schema["properties"]["schema"]["const"] = SCHEMA_VERSION
    return schema


def _drop_titles(schema: Any) -> None:
    """Remove Pydantic's titles, which only repeat the names."""
    if isinstance(schema, dict):
        if isinstance(schema.get("title"), str):
            del schema["title"]
        for each in schema.values():
            _drop_titles(each)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(generated(), indent=2) + "\n")
