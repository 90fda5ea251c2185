"""The disk cache: what composer keeps on disk between processes.

Any number of processes may read and write. Any of them may be killed at any moment. The disk may be
full or read-only, and may hold files that another program wrote. None of this is the user's error:
an entry that cannot be read counts as absent, and an entry that cannot be written is not kept. The
user gets one warning for each kind of trouble.

An entry is one file, ``<key>.entry``. Its first line is its record in JSON, and the bytes of its
blob follow, if it has one. A writer gives the file this name only when the file is whole, so
neither readers nor writers need a lock. The record holds its own digest and the blob's. Nothing is
ever unpickled. The user's folder is found by ``platformdirs``, which knows each system's place for
caches.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer.errors import CacheWarning
from composer.system import control_flow
from composer.system.warned import warn_once

CACHE_DIR = "COMPOSER_CACHE_DIR"
ELSEWHERE = f"{CACHE_DIR} names another folder"
_SCHEMA = 1
_PROCESS = uuid.uuid4().hex
_KEY = re.compile("[0-9a-f]{64}")
_SUFFIX = ".entry"
_OURS = re.compile(r"[0-9a-f]{64}(\.entry|\.\w+\.tmp)")
_HOUR = 3600.0
"""Seconds after which an unfinished file counts as abandoned by its writer."""
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_dir() -> Path:
    """The folder of all caches: ``COMPOSER_CACHE_DIR``, or else the user's folder for caches."""
    asked = os.environ.get(CACHE_DIR)
    if asked:
        folder = os.path.expanduser(asked)  # noqa: PTH111  # Path's raises where nobody is at home
        return _without_home() if folder.startswith("~") else Path(folder).absolute()
    from platformdirs import user_cache_path  # not before it is needed

    try:
        folder_of_user = user_cache_path("composer", appauthor=False)
    except RuntimeError:  # platformdirs 4.14 raises; older releases keep the tilde
        return _without_home()
    return folder_of_user if folder_of_user.is_absolute() else _without_home()


@functools.cache
def _without_home() -> Path:
    """A folder for this process alone. In a container a user may have neither name nor home."""
    warn_of(f"this user has no home directory, so nothing is kept on disk; {CACHE_DIR} says where")
    folder = tempfile.mkdtemp(prefix="composer-")
    atexit.register(_remove, folder, this_process())
    return Path(folder)


def _remove(folder: str, made_by: str) -> None:
    """Remove the folder at the end of the process that made it, and not at a forked child's end."""
    if this_process() == made_by:
        shutil.rmtree(folder, ignore_errors=True)


def this_process() -> str:
    """A name that no other process has, not even the one that this one was forked from."""
    return f"{_PROCESS}-{os.getpid()}"


def digest_of(facts: Mapping[str, Any]) -> str:
    """SHA-256 of facts as JSON, equal in every process."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a disk cache.

    Attributes:
        key: A SHA-256 in hexadecimal digits.
        facts: The record: a JSON object.
        blob: The bytes of the blob; ``None`` if there is none, or if it was not asked for.
        written: When the entry was written, in seconds since 1970.
        size: Bytes that the entry takes on disk.
    """

    key: str
    facts: dict[str, Any]
    blob: bytes | None
    written: float
    size: int


class _Broken(Exception):
    """A file does not hold what was written to it."""


class DiskCache:
    """The entries of one kind, in a folder of their own that only the user can enter.

    Args:
        name: The folder's name.
        limit: Bytes that all entries together may take. The least recently used are removed first.
        root: Where the folder is; by default :func:`cache_dir`.

    Attributes:
        trouble: The text of the last warning, for the caller's record; empty if there was none.
    """

    def __init__(self, name: str, *, limit: int, root: Path | None = None) -> None:
        self.name = name
        self.limit = limit
        self.path = (root or cache_dir()) / name
        self.trouble = ""

    def has(self, key: str) -> bool:
        """True if an entry of this key is there; false also if nobody may look."""
        return os.path.exists(self._file(key))  # noqa: PTH110  # Path's may raise

    def get(self, key: str) -> Entry | None:
        """The entry of this key; ``None`` if there is none, or if it cannot be trusted."""
        path, entry = self._file(key), None
        with self._reporting("cannot be read"):
            check_owner(self.path)
            try:
                entry = _read(path)
                _mark_as_used(path)
            except _Broken as broken:
                path.unlink(missing_ok=True)
                self._report("held an entry that is not what was written", str(broken), "removed")
        return entry

    def put(self, key: str, facts: Mapping[str, Any], blob: bytes | None = None) -> bool:
        """Keep an entry in place of any other of its key.

        Args:
            key: SHA-256 of all that the entry depends on, in hexadecimal digits.
            facts: The record, of values that JSON can hold.
            blob: The bytes of the blob, if the entry has one.

        Returns:
            True if the entry is kept; false if it is too large, or the folder cannot be written.
        """
        path, record = self._file(key), _sealed(facts, blob)
        size = len(record) + len(blob or b"")
        if size > self.limit:
            self._report("takes no entry beyond its limit", f"{size} bytes of {self.limit}")
            return False
        try:
            self._make_folder()
            _write(path, record, blob or b"")
            self._remove_oldest(but=path)
        except OSError as error:
            self._report("cannot be written", error, ELSEWHERE)
            return False
        return True

    def remove(self, key: str) -> None:
        """Remove the entry of this key, if there is one."""
        path = self._file(key)
        with self._reporting("cannot be written"):
            check_owner(self.path)
            path.unlink()

    def entries(self) -> list[Entry]:
        """All entries that can be trusted, the newest first, without their blobs."""
        found = []
        with self._reporting("cannot be read"):
            check_owner(self.path)
            for path in self._files():
                try:
                    found.append(_read(path, with_blob=False))
                except (OSError, _Broken) as error:
                    control_flow.pass_on(error)
        return sorted(found, key=lambda entry: entry.written, reverse=True)

    def clear(self) -> int:
        """Remove all entries, and return their number. Damaged entries count, too."""
        number = 0
        with self._reporting("cannot be cleared"):
            check_owner(self.path)
            for path in self._files():
                path.unlink(missing_ok=True)
                number += path.suffix == _SUFFIX
        return number

    def _file(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"a key is 64 hexadecimal digits, not {key!r}")
        return self.path / f"{key}{_SUFFIX}"

    def _files(self) -> list[Path]:
        """The entries and unfinished files. Other files in the folder may be the user's."""
        return [each for each in self.path.iterdir() if _OURS.fullmatch(each.name)]

    def _make_folder(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        check_owner(self.path)

    def _remove_oldest(self, but: Path) -> None:
        """Remove the least recently used entries until the rest fits, and abandoned files.

        Several writers may do this at once: they see the same files, and remove the same ones.
        """
        found = []
        for path in self._files():
            with suppress(FileNotFoundError):  # another process was faster
                facts = path.stat()
                if path.suffix == _SUFFIX:
                    found.append((facts.st_mtime, facts.st_size, path))
                elif facts.st_mtime < time.time() - _HOUR:
                    path.unlink()
        taken = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if taken <= self.limit:
                return
            if path != but:
                path.unlink(missing_ok=True)
                taken -= size

    @contextmanager
    def _reporting(self, kind: str) -> Iterator[None]:
        """Report trouble with the disk instead of raising it. A missing file is no trouble."""
        try:
            yield
        except FileNotFoundError:
            pass
        except OSError as error:
            self._report(kind, error)

    def _report(self, kind: str, detail: OSError | str, remedy: str = "") -> None:
        """Warn, once for each kind of trouble.

        Args:
            kind: What the cache cannot do.
            detail: The cause. It may name a file or a size, and so differ each time.
            remedy: What the user can do about it.

        Raises:
            BaseException: ``detail`` was raised by a signal handler. Such an error may be an
                ``OSError``, as ``TimeoutError`` is.
        """
        if isinstance(detail, OSError):
            control_flow.pass_on(detail)
        self.trouble = f"the cache {str(self.path)!r} {kind}: {detail}"
        if remedy:
            self.trouble += f"; {remedy}"
        code = getattr(detail, "errno", None)
        warn_of(self.trouble, once_for=f"{self.path} {kind} {type(detail).__name__} {code}")


def warn_of(trouble: str, once_for: str = "") -> None:
    """Warn once in this process. The warning is never raised, even where warnings are errors.

    Args:
        trouble: The text.
        once_for: The subject, where the text may differ each time.
    """
    warn_once(CacheWarning(trouble), about=once_for)


def check_owner(path: Path) -> None:
    """Refuse a folder that others may have written to: an engine may execute what an entry holds.

    Raises:
        FileNotFoundError: there is no such folder.
        NotADirectoryError: it is a file.
        PermissionError: it belongs to another user, or others may write to it.
    """
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{path} is not a folder")
    if os.name != "posix":
        return
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user (uid {found.st_uid})")
    if found.st_mode & _OTHERS:
        raise PermissionError(f"others may write to {path} (mode {stat.S_IMODE(found.st_mode):o})")


def _sealed(facts: Mapping[str, Any], blob: bytes | None) -> bytes:
    """The line of a record: the entry, and the entry's digest."""
    entry = {
        "schema": _SCHEMA,
        "written": time.time(),
        "facts": dict(facts),
        "blob_sha256": None if blob is None else hashlib.sha256(blob).hexdigest(),
    }
    return json.dumps({"sha256": digest_of(entry), "entry": entry}).encode() + b"\n"


def _opened(record: bytes) -> dict[str, Any]:
    try:
        found = json.loads(record)
        entry: dict[str, Any] = found["entry"]
        genuine = found["sha256"] == digest_of(entry) and entry["schema"] == _SCHEMA
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        control_flow.pass_on(error)
        raise _Broken("it is no record") from error
    if not genuine:
        raise _Broken("its record has another digest or schema")
    return entry


def _read(path: Path, *, with_blob: bool = True) -> Entry:
    with path.open("rb") as file:
        entry, blob = _opened(file.readline()), None
        size = os.fstat(file.fileno()).st_size
        if with_blob and entry["blob_sha256"] is not None:
            blob = file.read()
    if blob is not None and hashlib.sha256(blob).hexdigest() != entry["blob_sha256"]:
        raise _Broken("its blob has another digest")
    return Entry(path.stem, entry["facts"], blob, entry["written"], size)


def _mark_as_used(path: Path) -> None:
    try:
        os.utime(path)
    except OSError as error:  # the folder is read-only
        control_flow.pass_on(error)


def _write(path: Path, record: bytes, blob: bytes) -> None:
    """Write the whole file, or leave the old one as it is."""
    descriptor, unfinished = tempfile.mkstemp(".tmp", f"{path.stem}.", path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(record)
            file.write(blob)
        Path(unfinished).replace(path)
    finally:
        Path(unfinished).unlink(missing_ok=True)
