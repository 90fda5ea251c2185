"""Serve a model over HTTP, with a policy, and with composer's counters for Prometheus.

::

    python examples/serving.py --port 8000
    curl -d '[[0.1, 0.2, 0.3, 0.4]]' localhost:8000/predict
    curl localhost:8000/metrics
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any
from wsgiref.simple_server import make_server

import torch
from prometheus_client import make_wsgi_app

import composer
from composer.session import add_sink
from composer.telemetry.prometheus import PrometheusSink

POLICY = {"version": 1, "defaults": {"chain": ["onnxrt", "inductor"], "verify": "compile"}}

model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.GELU(), torch.nn.Linear(32, 2)).eval()
compiled = torch.compile(model, backend="composer", dynamic=True)
metrics = make_wsgi_app()


def predict(rows: list[list[float]]) -> list[list[float]]:
    """Run the model on rows of four numbers each."""
    with torch.inference_mode():
        return compiled(torch.tensor(rows)).tolist()


def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """Answer ``/metrics``, and every other path with the model's output."""
    if environ["PATH_INFO"] == "/metrics":
        return metrics(environ, start_response)
    rows = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(predict(rows)).encode()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    port = parser.parse_args().port
    composer.configure(POLICY)
    add_sink(PrometheusSink())
    print(composer.warm_up(predict, [([[0.0] * 4] * 2,)]))  # before the first request comes
    with make_server("127.0.0.1", port, app) as server:
        print(f"serving on port {server.server_port}", flush=True)
        server.serve_forever()
