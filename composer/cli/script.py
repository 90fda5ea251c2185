"""Runs a user's script within this process, as ``python script.py`` would run it."""

from __future__ import annotations

import builtins
import importlib
import inspect
import os
import pkgutil
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType

import torch


def run_script(script: str, args: Sequence[str], *, as_module: bool) -> int:
    """Run a script, or a module, as ``__main__`` and return the exit code it ends with.

    Changes to ``sys.argv``, ``sys.path``, modules and environment stay. An uncaught exception goes
    to ``sys.excepthook``, without the frames of composer around the script.

    Args:
        script: A path; with ``as_module``, the name of a module.
        args: The script's arguments, without ``sys.argv[0]``.
        as_module: Run it as ``python -m`` does.

    Raises:
        ImportError: there is no such module, or the module or folder has nothing to run.
    """
    sys.excepthook = sys.__excepthook__  # typer has set one of its own
    sys.argv = [script, *args]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd() if as_module else Path(script).resolve().parent)
    try:
        if as_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        elif pkgutil.get_importer(script) is not None:  # a folder or an archive, with __main__.py
            runpy.run_path(script, run_name="__main__")
        else:
            _run_file(Path(script).absolute())
    except SystemExit as ending:
        return _exit_code(ending)
    except BaseException as error:  # as the interpreter itself would
        tail = _behind(error.__traceback__, _RUNS_SCRIPT)
        if tail is None and isinstance(error, ImportError):
            raise
        sys.excepthook(type(error), error.with_traceback(tail), tail)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run_file(file: Path) -> None:
    """Run a file as ``__main__``, and keep that module for threads and exit handlers.

    (``runpy`` removes it afterwards, and does not make a relative path absolute.)
    """
    main = ModuleType("__main__")
    vars(main).update(__file__=str(file), __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main
    exec(compile(file.read_bytes(), file, "exec", dont_inherit=True), vars(main))


def _exit_code(ending: SystemExit) -> int:
    """Return the exit code as Python does: ``None`` is 0; anything but a number is printed."""
    if ending.code is None:
        return 0
    if isinstance(ending.code, int):
        return ending.code
    sys.stderr.write(f"{ending.code}\n")
    return 1


def show(error: Exception) -> None:
    """Print an error of the user's code on stderr, without the frames before that code.

    An error without a frame of the user's code is shown with all frames.
    """
    traceback.print_exception(type(error), error, _of_the_user(error))


def _of_the_user(error: Exception) -> TracebackType | None:
    """Return the traceback from the first frame that is not composer's, an import's or torch's."""
    tail = _behind(error.__traceback__, _COMPOSER)
    if tail is None and not isinstance(error, SyntaxError):  # which no frame of its file is in
        return error.__traceback__
    return _behind(tail, _TORCH) or tail


def _behind(tail: TracebackType | None, machinery: tuple[str, ...]) -> TracebackType | None:
    """Return a traceback without the first frames that are in these files."""
    while tail is not None and tail.tb_frame.f_code.co_filename.startswith(machinery):
        tail = tail.tb_next
    return tail


_COMPOSER = ("<frozen", importlib.__file__, f"{Path(__file__).parents[1]}{os.sep}")
_TORCH = (f"{Path(inspect.getfile(torch)).parent}{os.sep}",)
_RUNS_SCRIPT = (__file__, "<frozen runpy>", runpy.__file__)
