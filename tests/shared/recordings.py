"""Made-up recordings of any size, for what reads them."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from composer import Attempt, CompileReport, Reason, Status
from composer.records import Counters, GraphInput, PassRecord, Runtime
from composer.telemetry.recording import Process, Recording
from composer.telemetry.report import Report

BEGAN = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
MODELS = (
    "transformers.models.bert.modeling_bert.BertModel",
    "torchvision.models.resnet.ResNet",
    "diffusers.models.unets.unet_2d_condition.UNet2DConditionModel",
    "my_company.ranking.towers.TwoTowerWithCrossAttention",
    "loss_of",
)
TRACEBACK = (
    "Traceback (most recent call last):\n"
    + '  File "engine.py", line 7, in build\n    lower(graph)\n' * 20
    + "RuntimeError: no kernel for aten.roll"
)
UNAVAILABLE = Attempt("tensorrt", Status.UNAVAILABLE, Reason.NO_DEVICE, "no GPU", 0.0001)
FAILED = Attempt(
    "onnxrt",
    Status.FAILED,
    Reason.EXPORT_FAILED,
    "no kernel for aten.roll\nsaid the exporter",
    0.4,
    error_type="RuntimeError",
    traceback=TRACEBACK,
)
REJECTED = Attempt(
    "tvm", Status.REJECTED, Reason.RETURNED_ORIGINAL, "it returned the graph unchanged", 0.02
)
DECLINED = Attempt(
    "onnxrt",
    Status.DECLINED,
    Reason.LOW_COVERAGE,
    "it takes 12 % of the work, less than min_coverage",
    0.3,
    coverage=0.12,
    engine={"onnxruntime": "1.31.1", "left_to_torch": ["aten.roll: no translation, at roll_3"]},
)


def served(backend: str, seconds: float, coverage: float | None = None) -> Attempt:
    """The attempt that was accepted."""
    engine = {"torch": "2.13.0"} if backend == "inductor" else {"onnxruntime": "1.31.1"}
    return Attempt(
        backend, Status.SUCCEEDED, None, "", seconds, coverage=coverage, engine={**engine}
    )


def timed(attempt: Attempt, ms: float, eager_ms: float = 1.0) -> Attempt:
    """An attempt whose engine was measured; one that is not accepted lost."""
    return replace(attempt, engine={**attempt.engine, "timing": {"ms": ms, "eager_ms": eager_ms}})


def graph(*attempts: Attempt, ended: float = 10.0, **fields: Any) -> CompileReport:
    """A graph that took as long as its attempts, ``ended`` seconds after the beginning.

    ``calls`` and ``run`` are its counters; any field of the report can be given.
    """
    counters = Counters(calls=fields.pop("calls", 0), seconds=fields.pop("run", 0.0))
    accepted = [each.backend for each in attempts if each.accepted]
    made = CompileReport(
        time=(BEGAN + timedelta(seconds=ended)).isoformat(timespec="milliseconds"),
        number=1,
        graph_id="0/0",
        graph_key="5f" * 32,
        model="torch.nn.modules.linear.Linear",
        device="cpu",
        dtype="float32",
        training=False,
        dynamic=False,
        nodes=100,
        inputs=(GraphInput("x", "tensor", (8, "s0", 224), "float32", "cpu"),),
        policy=("options",),
        attempts=attempts,
        chosen=accepted[-1] if accepted else "eager",
        seconds=sum(each.seconds for each in attempts),
        runtime=Runtime(counters),
    )
    return replace(made, runtime=made.runtime, **fields)


def recording(*graphs: CompileReport, pid: int = 100, rank: int | None = None) -> Recording:
    """What one process wrote."""
    return Recording(Process("trainer-0", pid, rank, BEGAN.isoformat()), Report(graphs))


def many(graphs: int, processes: int = 2) -> list[Recording]:
    """The same at every call: all that happens to graphs, compiled one after the other."""
    draw = random.Random(graphs)
    per_process = -(-graphs // processes)
    return [
        recording(
            *_compiled(draw, min(per_process, graphs - rank * per_process)),
            pid=4000 + rank,
            rank=rank,
        )
        for rank in range(processes)
    ]


def _compiled(draw: random.Random, graphs: int) -> list[CompileReport]:
    found, clock = [], draw.uniform(0, 3)
    for number in range(graphs):
        attempts = _chain(draw)
        clock += sum(each.seconds for each in attempts) + 0.05 + (300 if number % 97 == 50 else 0.1)
        made = graph(
            *attempts,
            ended=clock,
            number=number + 1,
            graph_id=f"{number}/{number % 3}",
            model=draw.choice(MODELS),
            nodes=draw.randint(3, 900),
            passes=_passes(draw),
            calls=draw.randint(0, 5000),
            run=draw.uniform(0, 20),
            training=number % 2 == 0,
            dynamic=number % 7 == 0,
        )
        found.append(replace(made, seconds=made.seconds + draw.uniform(0.01, 0.3)))
    return found


def _chain(draw: random.Random) -> tuple[Attempt, ...]:
    lost = Attempt("onnxrt", Status.NOT_CHOSEN, Reason.SLOWER, "1.2 ms a call", 0.5)
    slow = replace(FAILED, seconds=draw.uniform(0.1, 2))
    chains: tuple[tuple[Attempt, ...], ...] = (
        (UNAVAILABLE, served("inductor", draw.uniform(0.5, 9), 1.0)),
        (UNAVAILABLE, served("inductor", draw.uniform(0.5, 9), 1.0)),
        (UNAVAILABLE, slow, served("inductor", draw.uniform(0.5, 4), 1.0)),
        (UNAVAILABLE, REJECTED, served("onnxrt", draw.uniform(0.2, 2), draw.uniform(0.6, 1))),
        (UNAVAILABLE, DECLINED, slow),
        (UNAVAILABLE, timed(lost, 1.2), timed(served("inductor", 3.0, 1.0), 0.25)),
    )
    return draw.choice(chains)


def _passes(draw: random.Random) -> tuple[PassRecord, ...]:
    before = draw.randint(50, 900)
    fold = PassRecord("fold_batch_norm", "aten", True, 4, before, before - 8, draw.uniform(0, 0.2))
    broken = PassRecord(
        "lose_thread", "torch", seconds=0.01, error="pass 'lose_thread' broke the rule 'raises'"
    )
    idle = PassRecord("fuse_rope", "joint", False, 0, before, before, 0.002)
    return (fold, idle, broken)[: draw.randint(0, 3)]


def taken_over(report: CompileReport, by: str) -> CompileReport:
    """The report after its engine failed at run time and ``by`` took the graph over."""
    *others, engine = report.attempts
    failed = dataclasses.replace(
        engine,
        status=Status.FAILED,
        reason=Reason.RAISED_AT_RUNTIME,
        message="device lost",
        error_type="RuntimeError",
        traceback="Traceback ...",
    )
    follower = dataclasses.replace(engine, backend=by, seconds=0.5)
    return dataclasses.replace(report, attempts=(*others, failed, follower), chosen=by)
