"""A folder that many machines share, by any URL that ``fsspec`` knows: one JSON file for each key.

``fsspec`` has the file systems (local, S3, GCS, Azure, SFTP, HTTP, ...), their credentials and
their packages. The folder may be slow, offline or forbidden: each access has a few seconds, in a
thread that is not waited for any longer, and after the first trouble the folder is left alone until
:func:`composer.reset`.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from composer.errors import OptionError, error_line, text_of
from composer.system import control_flow
from composer.system.disk import warn_of

PATIENCE = 5.0
"""Seconds that an access may take, the import of the file system's package included."""
LIMIT = 1 << 20
"""Bytes that are read of a file; a verdict has fewer."""

T = TypeVar("T")


class SharedStore:
    """Texts by key, at a URL.

    Attributes:
        url: The folder's URL or path.
        name: The URL without a password or token, for people to read.
        trouble: Why the folder is left alone; empty if it is not.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = _without_secrets(url)
        self.trouble = ""

    def check(self) -> None:
        """Find before anything is kept that this process cannot have the folder, or no other can.

        Raises:
            OptionError: it cannot be read, or is in the memory of the process that writes to it.
        """
        if re.search(r"(^|::)memory:", self.url):
            raise OptionError(
                f"the verdict store {self.name!r} ends with the process that fills it"
            )
        try:
            _within(PATIENCE, lambda: self._read("0"))
        except Exception as error:  # a file system may raise anything: told of
            control_flow.pass_on(error)
            message = _without_secrets(error_line(error)).removesuffix(": ")
            raise OptionError(
                f"the verdict store {self.name!r} cannot be used: {message}"
            ) from error

    def get(self, key: str) -> str | None:
        """The text of this key; ``None`` if there is none, or none can be had."""
        return self._attempt(lambda: self._read(key), None)

    def put(self, key: str, text: str) -> bool:
        """Keep a text in place of any other of its key; whether that could be done."""
        return self._attempt(lambda: self._write(key, text.encode()), default=False)

    def _attempt(self, task: Callable[[], T], default: T) -> T:
        if self.trouble:
            return default
        try:
            return _within(PATIENCE, task)
        except BaseException as error:  # noqa: BLE001  # told of; a shared folder is never the user's problem
            control_flow.pass_on(error)
            message = _without_secrets(error_line(error)).removesuffix(": ")
            self.trouble = (
                f"the verdict store {self.name!r} is not used any more in this process: {message}"
            )
            warn_of(self.trouble)
            return default

    def _read(self, key: str) -> str | None:
        files, folder = _file_system(self.url)
        try:
            with files.open(f"{folder}/{key}.json", "rb") as file:
                content = bytes(file.read(LIMIT))
        except FileNotFoundError:
            return None
        return content.decode(errors="replace")

    def _write(self, key: str, content: bytes) -> bool:
        files, folder = _file_system(self.url)
        try:
            _replace(files, folder, key, content)
        except FileNotFoundError:
            files.makedirs(folder, exist_ok=True)
            _replace(files, folder, key, content)
        return True


def _without_secrets(text: str) -> str:
    """Return a text whose URLs have no user, password, query or fragment.

    Errors of file systems quote the whole URL. Parts of a chained URL are separated by ``::``.
    """
    text = re.sub(r"//[^/@\s]*@", "//", text)
    return re.sub(r"(://[^\s?#'\"]*)[?#]((?!::)[^\s'\"])*", r"\1", text)


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec  # not before it is needed

    files, folder = fsspec.core.url_to_fs(url)
    return files, folder.rstrip("/")


def _replace(files: Any, folder: str, key: str, content: bytes) -> None:
    """Whole or not at all: object stores do so by themselves, a disk by renaming."""
    path = f"{folder}/{key}.json"
    if "file" not in files.protocol:
        files.pipe_file(path, content)
        return
    unfinished = f"{folder}/.{key}.{uuid.uuid4().hex}.tmp"
    files.pipe_file(unfinished, content)
    files.mv(unfinished, path)


def _within(seconds: float, task: Callable[[], T]) -> T:
    """Return the result of a task, if it ends in time; else stop waiting while the task goes on.

    Raises:
        TimeoutError: it does not.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(task())
        except BaseException as error:  # noqa: BLE001  # the one who waits raises it
            result.set_exception(error)

    threading.Thread(target=run, name="composer-verdict-store", daemon=True).start()
    try:
        return result.result(timeout=seconds)
    except TimeoutError as late:
        raise TimeoutError(text_of(late) or f"no answer within {seconds:g} s") from None
