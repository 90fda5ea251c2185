"""``composer doctor``: which engines can run graphs here, and what the others lack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import metadata
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from composer import interrupts
from composer.attempt import classify
from composer.backends import BACKENDS, find_backend
from composer.cli.options import Json
from composer.errors import text_of
from composer.graphs import capture
from composer.machine import version_of
from composer.records import GraphRequest, Reason

_PACKAGES = {
    "tensorrt": ("torch-tensorrt", "tensorrt", "tensorrt-rtx"),
    "onnxrt": ("onnxruntime",),
    "composer_openvino": ("openvino",),
}
"""The distributions whose version says most about an engine, that is the first of them that is
here; torch itself for the others."""

_EXTRAS = {"composer_openvino": "openvino"}
"""Composer's extra of an engine, where it has not the engine's name."""


def doctor(
    as_json: Json = False,
) -> None:
    """Say which engines can run graphs here, on which device, and what the others lack."""
    requests = [_request(device) for device in _devices()]
    rows = [_row(name, requests) for name in BACKENDS.names()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(Column("backend", no_wrap=True), "here", "version", "device", "what is missing")
    table.add_column("what brings it", overflow="fold")
    for row in rows:
        here = "yes" if row["available"] else "no"
        devices = ", ".join(row["devices"])
        lacks = escape(row["message"]), escape(row["install"])
        table.add_row(row["backend"], here, row["version"], devices, *lacks)
    Console().print(table)


def _devices() -> Iterator[str]:
    if torch.cuda.is_available():
        yield "cuda"
    yield "cpu"


def _request(device: str) -> GraphRequest:
    """A graph of one operation, to ask engines about."""
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.relu, (graph.placeholder("x"),)),))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    return capture.read_request(gm, [torch.ones(1, device=device)])


def _row(name: str, requests: list[GraphRequest]) -> dict[str, Any]:
    """An engine is here if it takes a graph on one of the devices; else the first says why not."""
    devices, errors = [], []
    for request in requests:
        try:
            find_backend(name).probe(request)
        except BaseException as error:  # noqa: BLE001  # another package's may raise anything: its row says it
            interrupts.pass_on(error)
            errors.append(error)
        else:
            devices.append(request.device)
    first = errors[0] if errors and not devices else None
    reason = classify(first)[1] if first else ""
    found = _version(name)
    missing = first is not None and (reason is Reason.NOT_INSTALLED or not found)
    return {
        "backend": name,
        "version": found,
        "available": bool(devices),
        "devices": devices,
        "reason": reason,
        "message": text_of(first) if first else "",
        "install": _install(name) if missing else "",
    }


def _install(name: str) -> str:
    """The command that brings an engine's packages, where composer has an extra for them."""
    extra = _EXTRAS.get(name, name)
    extras = metadata("torch-composer").get_all("Provides-Extra") or []
    return f"pip install 'torch-composer[{extra}]'" if extra in extras else ""


def _version(backend: str) -> str:
    """That of the first of an engine's packages that is here."""
    return next(filter(None, map(version_of, _PACKAGES.get(backend, ("torch",)))), "")
