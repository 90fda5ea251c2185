"""What composer keeps on disk between processes: small records, each with a blob if it has one.

Any number of processes may read and write; any of them may be killed at any moment; the disk may be
full, read-only or hold what something else wrote. None of that is an error of the user's: what
cannot be read is not there, what cannot be written is not kept, and a warning says so once.

An entry is ``<key>.json`` and, beside it, ``<key>.bin``. Both are written under another name first,
and renamed when both are whole; the record holds the digest of the blob and its own. Nothing is
ever unpickled. The user's folder is found by ``platformdirs``, which knows each system's place for
caches, and the lock is ``filelock``'s, which the kernel lets go of when its holder dies.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import io
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer import interrupts
from composer.errors import CacheWarning

CACHE_DIR = "COMPOSER_CACHE_DIR"
ELSEWHERE = f"{CACHE_DIR} names another folder"
PATIENCE = 10.0
"""Seconds to wait for another process that writes; a write that waits longer is left out."""
_SCHEMA = 1
_PROCESS = uuid.uuid4().hex
_KEY = re.compile("[0-9a-f]{64}")
_LEFTOVER = re.compile(r"[0-9a-f]{64}\.(bin|bin\.tmp|json\.tmp)")
_OTHERS = stat.S_IWGRP | stat.S_IWOTH

log = logging.getLogger("composer")


def cache_dir() -> Path:
    """Where everything is: ``COMPOSER_CACHE_DIR``, else the user's folder for caches."""
    asked = os.environ.get(CACHE_DIR)
    if asked:
        folder = os.path.expanduser(asked)  # noqa: PTH111  # Path's raises where nobody is at home
        return _without_home() if folder.startswith("~") else Path(folder).absolute()
    from platformdirs import user_cache_path  # not before it is needed

    try:
        folder_of_user = user_cache_path("composer", appauthor=False)
    except RuntimeError:  # of platformdirs 4.14; those before leave the tilde where it is
        return _without_home()
    return folder_of_user if folder_of_user.is_absolute() else _without_home()


@functools.cache
def _without_home() -> Path:
    """Of this process alone: a user id without a name, as containers have, has no home either."""
    warn_of(f"this user has no home directory, so nothing is kept on disk; {CACHE_DIR} says where")
    folder = tempfile.mkdtemp(prefix="composer-")
    atexit.register(_remove, folder, this_process())
    return Path(folder)


def _remove(folder: str, made_by: str) -> None:
    """At the end of the process that made it; a forked child has inherited the task."""
    if this_process() == made_by:
        shutil.rmtree(folder, ignore_errors=True)


def this_process() -> str:
    """What tells this process from all others, the one that it was forked from among them."""
    return f"{_PROCESS}-{os.getpid()}"


def digest_of(facts: Mapping[str, Any]) -> str:
    """SHA-256 of facts as JSON, equal in every process."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that was kept.

    Attributes:
        key: Its name, a SHA-256 in hexadecimal digits.
        facts: What it is: a JSON object.
        blob: Its bytes; ``None`` where it has none, or where they were not asked for.
        written: When it was written, in seconds since 1970.
        size: Bytes that it takes on disk.
    """

    key: str
    facts: dict[str, Any]
    blob: bytes | None
    written: float
    size: int


class _Broken(Exception):
    """A file is there and is not what was written."""


class Shelf:
    """One kind of thing that is kept, in a folder of its own that only its user can enter.

    Args:
        name: The folder's name.
        limit: Bytes that all entries may take; those not used for longest go first.
        root: Where the folder is; by default :func:`cache_dir`.

    ``trouble`` is what went wrong last, for the record of whoever asked; empty while all is well.
    """

    def __init__(self, name: str, *, limit: int, root: Path | None = None) -> None:
        self.name = name
        self.limit = limit
        self.path = (root or cache_dir()) / name
        self.trouble = ""

    def get(self, key: str) -> Entry | None:
        """The entry of this key; ``None`` if there is none, or none that can be trusted."""
        try:
            check_owner(self.path)
            entry = self._read_settled(_checked(key))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._report("cannot be read", error)
            return None
        if entry is not None:
            try:
                os.utime(self._record(key))
            except OSError as error:  # of a folder that can only be read
                interrupts.pass_on(error)
        return entry

    def put(self, key: str, facts: Mapping[str, Any], blob: bytes | None = None) -> bool:
        """Keep an entry in place of any other of its key.

        Args:
            key: SHA-256 of all that the entry depends on, in hexadecimal digits.
            facts: What JSON can hold.
            blob: Its bytes, if there are any.

        Returns:
            Whether it is kept: it may be too large, or the disk full, read-only, somebody else's.
        """
        record = _sealed(facts, blob)
        size = len(record) + len(blob or b"")
        if size > self.limit:
            self._report("takes no entry beyond its limit", f"{size} bytes of {self.limit}")
            return False
        try:
            with self._locked():
                self._remove_leftovers()
                self._make_room(size, _checked(key))
                self._replace(key, record, blob)
        except OSError as error:
            self._report("cannot be written", error, ELSEWHERE)
            return False
        return True

    def remove(self, key: str) -> None:
        """Keep this entry no longer."""
        with suppress(FileNotFoundError):
            try:
                check_owner(self.path)
                self._remove(_checked(key))
            except FileNotFoundError:
                raise
            except OSError as error:
                self._report("cannot be written", error)

    def entries(self) -> list[Entry]:
        """All entries that can be trusted, the newest first, without their blobs."""
        try:
            check_owner(self.path)
            keys = [each.stem for each in self.path.glob("*.json") if _KEY.fullmatch(each.stem)]
        except FileNotFoundError:
            return []
        except OSError as error:
            self._report("cannot be read", error)
            return []
        found = []
        for key in keys:
            try:
                found.append(self._read(key, with_blob=False))
            except (OSError, _Broken) as error:
                interrupts.pass_on(error)
        return sorted(found, key=lambda entry: entry.written, reverse=True)

    def clear(self) -> int:
        """Keep nothing; how many entries that were, the broken ones included."""
        try:
            if not self.path.is_dir():
                return 0
            with self._locked():
                self._remove_leftovers()
                keys = {each.stem for each in self._files()}
                for key in keys:
                    self._remove(key)
        except OSError as error:
            self._report("cannot be cleared", error)
            return 0
        return len(keys)

    def _record(self, key: str) -> Path:
        return self.path / f"{key}.json"

    def _blob(self, key: str) -> Path:
        return self.path / f"{key}.bin"

    def _files(self) -> Iterator[Path]:
        return (each for each in self.path.iterdir() if _KEY.fullmatch(each.stem))

    def _read_settled(self, key: str) -> Entry | None:
        """Read without the lock, and once more with it if a writer may have been in between."""
        with suppress(_Broken, FileNotFoundError):
            return self._read(key)
        if not self._record(key).exists():
            return None
        with self._locked():
            try:
                return self._read(key)
            except _Broken as broken:
                self._remove(key)
                trouble = str(broken)
        self._report("held an entry that is not what was written", trouble, "removed")
        return None

    def _read(self, key: str, *, with_blob: bool = True) -> Entry:
        text = self._record(key).read_bytes()
        sealed = _opened(text)
        blob, size = None, sealed["blob_size"] or 0
        if with_blob and sealed["blob_sha256"] is not None:
            try:
                blob = self._blob(key).read_bytes()
            except FileNotFoundError as error:
                raise _Broken("its blob is gone") from error
            if hashlib.sha256(blob).hexdigest() != sealed["blob_sha256"]:
                raise _Broken("its blob has another digest")
        return Entry(key, sealed["facts"], blob, sealed["written"], len(text) + size)

    def _replace(self, key: str, record: bytes, blob: bytes | None) -> None:
        """Whole or not there: no old record may ever stand beside a new blob."""
        try:
            unfinished = _written(self._record(key), record)
            unfinished_blob = None if blob is None else _written(self._blob(key), blob)
        except OSError:
            self._remove_leftovers()  # half a file on a disk that is full
            raise
        self._remove(key)
        if unfinished_blob is not None:
            unfinished_blob.replace(self._blob(key))
        unfinished.replace(self._record(key))

    def _remove(self, key: str) -> None:
        self._record(key).unlink(missing_ok=True)  # first: a blob alone is not an entry
        self._blob(key).unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """What killed writers left: writers hold the lock, so none of it is in use."""
        for each in self.path.iterdir():  # a folder of that name may hold files of the user's
            if _LEFTOVER.fullmatch(each.name) and not each.with_suffix(".json").exists():
                each.unlink(missing_ok=True)

    def _make_room(self, size: int, key: str) -> None:
        """Remove what was not used for longest, until ``size`` bytes more fit under the limit."""
        sizes: dict[str, int] = {}
        used: dict[str, float] = {}
        for each in self._files():
            facts = each.stat()
            sizes[each.stem] = sizes.get(each.stem, 0) + facts.st_size
            used[each.stem] = max(used.get(each.stem, 0.0), facts.st_mtime)
        taken = sum(sizes.values()) - sizes.pop(key, 0)
        for oldest in sorted(sizes, key=used.__getitem__):
            if taken + size <= self.limit:
                return
            self._remove(oldest)
            taken -= sizes[oldest]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        from filelock import FileLock, Timeout  # not before it is needed: 10 ms

        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        check_owner(self.path)
        lock = FileLock(self.path / ".lock", mode=0o600)
        try:
            with lock.acquire(timeout=PATIENCE, poll_interval=0.01):
                yield
        except Timeout:
            raise TimeoutError(f"another process holds its lock after {PATIENCE:g} s") from None
        except NotImplementedError as error:  # what filelock makes of a system without locks
            raise OSError(str(error)) from error

    def _report(self, kind: str, detail: OSError | str, remedy: str = "") -> None:
        self.trouble = report(self.path, kind, detail, remedy)


def report(path: Path, kind: str, detail: Exception | str, remedy: str = "") -> str:
    """Warn of a cache, once for each kind of trouble with it; the whole of what was said.

    Args:
        path: The cache's folder.
        kind: What it cannot do.
        detail: Why; that may name a file or a size, and be another each time.
        remedy: What helps.

    Raises:
        BaseException: what a signal's handler raised, if that is what ``detail`` came of; it may be
            an ``OSError``, such as ``TimeoutError``.
    """
    if isinstance(detail, Exception):
        interrupts.pass_on(detail)
    trouble = f"the cache {str(path)!r} {kind}: {detail}{'; ' if remedy else ''}{remedy}"
    code = getattr(detail, "errno", None) or getattr(detail, "sqlite_errorname", None)
    warn_of(trouble, once_for=f"{path} {kind} {type(detail).__name__} {code}")
    return trouble


@dataclass(frozen=True, slots=True)
class _Trouble:
    """What a warning is about, by which it is told from others, and what it says."""

    about: str
    text: str = field(compare=False)


def warn_of(trouble: str, once_for: str = "") -> None:
    """Say it once in this process; it is no error, even where warnings are.

    Args:
        trouble: What to say.
        once_for: What it is about, where the text may be another each time.
    """
    _say(_Trouble(once_for or trouble, trouble))


@functools.lru_cache(maxsize=100)  # Python forgets what it warned of whenever torch sets a filter
def _say(trouble: _Trouble) -> None:
    log.warning("%s", trouble.text)
    with suppress(CacheWarning):
        warnings.warn(trouble.text, CacheWarning, stacklevel=3)


def warn_again() -> None:
    """Forget what was warned of."""
    _say.cache_clear()


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"a key is 64 hexadecimal digits, not {key!r}")
    return key


def check_owner(path: Path) -> None:
    """What others may have written is not read: an entry can hold what an engine executes.

    Raises:
        FileNotFoundError: there is no such folder.
        PermissionError: it is another user's, or open to the writes of others.
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
    """The bytes of a record: the entry, and the digest of its text."""
    entry = {
        "schema": _SCHEMA,
        "written": time.time(),
        "facts": dict(facts),
        "blob_size": None if blob is None else len(blob),
        "blob_sha256": None if blob is None else hashlib.sha256(blob).hexdigest(),
    }
    return json.dumps({"sha256": digest_of(entry), "entry": entry}, indent=1).encode()


def _opened(record: bytes) -> dict[str, Any]:
    try:
        found = json.loads(record)
        entry: dict[str, Any] = found["entry"]
        genuine = found["sha256"] == digest_of(entry) and entry["schema"] == _SCHEMA
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        interrupts.pass_on(error)
        raise _Broken("it is no record") from error
    if not genuine:
        raise _Broken("its record has another digest or schema")
    return entry


def _written(path: Path, content: bytes) -> Path:
    """A file beside ``path`` with this content, to be renamed; the next writer removes a rest."""
    unfinished = path.with_name(f"{path.name}.tmp")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with io.FileIO(descriptor, "wb") as file:
        rest = memoryview(content)
        while rest:  # a write may be short
            rest = rest[file.write(rest) :]
    return unfinished
