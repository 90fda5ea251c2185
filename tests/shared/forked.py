"""A Python that has imported torch and composer already, and forks for each run.

Most of what a short child process takes is imports: Dynamo's, Inductor's and the ONNX exporter's
too. Where what is imported, or read from the environment meanwhile, is what a test is about, it
wants a fresh interpreter instead.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

PATIENCE = 300
"""Seconds until a run is ended by SIGALRM."""


_LEAKS = "nanobind: leaked"
"""What Triton 3.9 says at the end of any process that imported it, and did nothing with it."""


class Interpreter:
    """Runs code, modules and scripts as ``python`` would; one run at a time."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", "import forked; forked.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        )
        atexit.register(self._server.kill)

    def run(
        self,
        args: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """What ``python *args`` came to: ``-c`` and code, ``-m`` and a module, or a script."""
        assert self._server.stdin
        assert self._server.stdout
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            asked = [
                list(args),
                dict(env or os.environ),
                str(cwd or Path.cwd()),
                str(out),
                str(err),
            ]
            print(json.dumps(asked), file=self._server.stdin, flush=True)
            code = json.loads(self._server.stdout.readline())
            said, _, _ = err.read_text().partition(_LEAKS)
            return subprocess.CompletedProcess(args, code, out.read_text(), said)


def serve() -> None:
    """Fork for each line on stdin, and answer with the exit code."""
    import torch._inductor.compile_fx  # so that no child has to

    from composer.cli import bench, cache, doctor, lock, passes, policy, run, tune  # noqa: F401
    from composer.lowering.operators.translations import translator

    translator()
    torch._inductor.cpu_vec_isa.valid_vec_isa_list()  # asks the compiler, and a process that loads
    sys.path[0] = ""  # as with -c and -m, of the folder that each run is in
    gc.collect()
    gc.freeze()  # a child's collections would copy all that they look at

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _be(*json.loads(line))
            return
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _be(args: list[str], env: dict[str, str], cwd: str, out: str, err: str) -> None:
    """The process that was asked for; it ends as any other, its exit handlers included."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate((out, err), 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    more = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [each for each in more if each and each not in sys.path]
    signal.alarm(PATIENCE)
    how, *rest = args
    if how == "-m":
        sys.argv = [how, *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv = [how, *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv, sys.path[0] = args, str(Path(how).parent)
        runpy.run_path(how, run_name="__main__")
