"""Forked children of a program that has compiled something: they call it, and they end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from common import in_child

from composer.system import forks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

COMPILED = """
import gc, os, signal, sys, torch, composer

torch.set_num_threads(2)
engine = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).eval().requires_grad_(False)
options = {"chain": [engine], "on_exhausted": "raise"}
f = torch.compile(model, backend="composer", options=options, dynamic=False)
x = torch.randn(256, 64)
want = f(x)
f(x)

def forked(child):
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        torch.set_num_threads(1)  # torch's own threads did not survive either
        child()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

CHILDREN = {
    "ends": "pass",
    "calls": "torch.testing.assert_close(f(x), want)",
    "frees everything": """f.__dict__.clear()
    torch.compiler.reset()
    composer.reset()
    gc.collect()""",
    "changes a weight": """model[0].weight.mul_(2)
    for _ in range(4):
        torch.testing.assert_close(f(x), model(x))
    gc.collect()""",
    "builds another": "torch.testing.assert_close(f(x[:3]), model(x[:3])), gc.collect()",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHILDREN)
@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
def test_forked_child_ends(
    engine: str, what: str, run_python: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the threads that its parent's engine would wait for are not there."""
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    done = run_python(
        f"{COMPILED}\ndef child():\n    {CHILDREN[what]}\n\nprint(forked(child))", engine
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_lock_that_another_thread_held_is_free_in_a_child() -> None:
    """For good: the child may take it, and let go of it."""
    lock, holds, may_end = forks.lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holds.set()
            assert may_end.wait(60)

    def child() -> None:
        for _ in range(2):
            with lock:
                pass

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(60)
    code = in_child(child)
    may_end.set()
    thread.join()
    assert code == 0


def test_lock_that_the_forking_thread_held_stays_its_own() -> None:
    """In the child it goes on with what it was doing, and other threads wait for that."""
    lock, taken = forks.lock(), []

    def child() -> None:
        thread = threading.Thread(target=lambda: taken.append(lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        assert taken == [False]
        lock.release()

    with lock:
        assert in_child(child) == 0


FREED = {
    "onnxruntime": """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(relu.SerializeToString(), options)
""",
    "openvino": """
    core = openvino.Core()
    request = core.compile_model(core.read_model(relu.SerializeToString())).create_infer_request()
    request.infer({0: numpy.ones(4, numpy.float32)})
    return request
""",
}


@pytest.mark.thorough  # only another version of a library can change it
@pytest.mark.slow
@pytest.mark.parametrize("package", FREED)
def test_library_hangs_where_it_is_freed_in_a_forked_child(
    package: str, run_python: Callable[..., Any]
) -> None:
    """Were this to fail, ``never_freed_in_forks`` could go.

    It hangs where the library's threads wait for work: a child that was forked before they do
    may end, so that several are forked.
    """
    code = f"""
import os, signal, time, numpy, onnx, {package}
from onnx import TensorProto, helper

(x, y) = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy")
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
relu = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)

def made():
{FREED[package]}

held = made()
for _ in range(10):
    pid = os.fork()
    if not pid:
        signal.alarm(4)
        del held
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        break
    time.sleep(0.1)
print(code, flush=True)
os._exit(0)
"""
    done = run_python(code)
    killed = {str(-signal.SIGALRM), str(-signal.SIGSEGV)}
    assert done.stdout.strip() in killed, done.stdout + done.stderr
