"""What composer keeps on disk as rows of one SQLite file: small texts, each with a key.

The manners are as in :mod:`composer.system.disk`: any number of processes may use it, any
of them may be killed, the disk may be full, read-only or hold what something else wrote, and none
of that is an error of the user's. SQLite, which Python brings, sees to the first two by its
write-ahead log; on a file system that has no room for one it falls back to its rollback journal.

Each operation opens the file and closes it again (about a millisecond), so that nothing is shared
between threads or inherited by a fork.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from composer import interrupts
from composer.system.disk import ELSEWHERE, Entry, cache_dir, check_owner, report

if TYPE_CHECKING:
    import sqlite3

PATIENCE = 2.0
"""Seconds to wait for another process that has the file locked."""
_TABLE = """
CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, written REAL NOT NULL, text TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS by_age ON kept (written);
"""
_ERROR, _CORRUPT, _NOTADB = 1, 11, 26
"""SQLite's codes for a database with other columns than the query's, a damaged one, and none."""

T = TypeVar("T")


class Ledger:
    """One kind of thing that is kept, in a folder of its own that only its user can enter.

    Args:
        name: The folder's name.
        limit: How many rows there may be; the oldest go first.
        root: Where the folder is; by default :func:`composer.system.disk.cache_dir`.

    ``trouble`` is what went wrong last, for the record of whoever asked; empty while all is well.
    """

    def __init__(self, name: str, *, limit: int, root: Path | None = None) -> None:
        self.name = name
        self.limit = limit
        self.path = (root or cache_dir()) / name
        self.file = self.path / f"{name}.sqlite"
        self.trouble = ""

    def get(self, key: str) -> str | None:
        """The text of this key; ``None`` if there is none, or none that can be read."""

        def read(rows: sqlite3.Connection) -> str | None:
            found = rows.execute("SELECT text FROM kept WHERE key = ?", (key,)).fetchone()
            return found[0] if found and isinstance(found[0], str) else None

        return self._reading(read, None)

    def put(self, key: str, text: str) -> bool:
        """Keep a text in place of any other of its key.

        Returns:
            Whether it is kept: the disk may be full, read-only, somebody else's.
        """

        def write(rows: sqlite3.Connection) -> bool:
            with rows:
                rows.execute("BEGIN IMMEDIATE")
                rows.execute("REPLACE INTO kept VALUES (?, ?, ?)", (key, time.time(), text))
                rows.execute(
                    "DELETE FROM kept WHERE key IN "
                    "(SELECT key FROM kept ORDER BY written DESC LIMIT -1 OFFSET ?)",
                    (self.limit,),
                )
            return True

        return self._writing(write, default=False)

    def remove(self, key: str) -> None:
        """Keep the text of this key no longer."""

        def write(rows: sqlite3.Connection) -> None:
            rows.execute("DELETE FROM kept WHERE key = ?", (key,))

        if self._is_there():
            self._writing(write, None)

    def entries(self) -> list[Entry]:
        """All rows that hold a JSON object, the newest first."""

        def read(rows: sqlite3.Connection) -> list[Entry]:
            found = rows.execute("SELECT key, written, text FROM kept ORDER BY written DESC")
            return [entry for row in found if (entry := _entry(*row))]

        return self._reading(read, [])

    def clear(self) -> int:
        """Keep nothing; how many rows that were."""
        if not self._is_there():
            return 0
        return self._writing(lambda rows: rows.execute("DELETE FROM kept").rowcount, 0)

    def _is_there(self) -> bool:
        try:
            return self.file.exists()
        except OSError as error:
            self._report("cannot be read", error)
            return False

    def _reading(self, task: Callable[[sqlite3.Connection], T], default: T) -> T:
        try:
            check_owner(self.path)
            if not self.file.exists():
                return default
            with self._opened(changing=os.access(self.path, os.W_OK)) as rows:
                return task(rows)
        except FileNotFoundError:
            return default
        except Exception as error:  # noqa: BLE001  # told of; a cache is never the user's problem
            interrupts.pass_on(error)
            self._set_aside_if_broken(error)
            self._report("cannot be read", error)
            return default

    def _writing(self, task: Callable[[sqlite3.Connection], T], default: T) -> T:
        """Once more if what was in the way could be put aside."""
        for _ in range(2):
            try:
                self._make_room()
                with self._opened(changing=True) as rows:
                    result = task(rows)
                self.trouble = ""
                return result
            except Exception as error:  # noqa: BLE001  # as above
                interrupts.pass_on(error)
                again = self._set_aside_if_broken(error)
                self._report("cannot be written", error, ELSEWHERE)
                if not again:
                    break
        return default

    def _make_room(self) -> None:
        """The folder and an empty file, which SQLite would let others read.

        A file that is there is not opened: closing it would drop the locks that SQLite holds on it
        for other threads (POSIX locks belong to the process), and another process could take this
        one's log away.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        check_owner(self.path)
        with suppress(FileExistsError):
            os.close(os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))

    @contextmanager
    def _opened(self, *, changing: bool) -> Iterator[sqlite3.Connection]:
        """A connection; in a folder that can only be read, one that makes no files beside its own.

        A writer may have been killed before it made the table.
        """
        import sqlite3  # not before it is needed; some builds of Python have none

        how = "mode=rw" if changing else "mode=ro&immutable=1"
        uri = f"{self.file.absolute().as_uri()}?{how}"
        opened = sqlite3.connect(uri, uri=True, timeout=PATIENCE, isolation_level=None)
        with closing(opened) as rows:
            rows.text_factory = _text
            if changing:
                with suppress(sqlite3.OperationalError):  # no such log here, or being made just now
                    rows.execute("PRAGMA journal_mode = WAL")
                rows.execute("PRAGMA synchronous = NORMAL")
                rows.executescript(_TABLE)
            yield rows

    def _set_aside_if_broken(self, error: Exception) -> bool:
        """Whether what is no database of ours, if that is the trouble, was moved away."""
        code = getattr(error, "sqlite_errorcode", None)
        if code is None or code & 0xFF not in (_ERROR, _CORRUPT, _NOTADB):
            return False
        try:
            self.file.replace(self.file.with_suffix(".broken"))
            for rest in ("-wal", "-shm", "-journal"):
                Path(f"{self.file}{rest}").unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def _report(self, kind: str, error: Exception, remedy: str = "") -> None:
        self.trouble = report(self.path, kind, error, remedy)


def _text(stored: bytes) -> str:
    return stored.decode(errors="replace")


def _entry(key: Any, written: Any, text: Any) -> Entry | None:
    try:
        facts = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(facts, dict) or not isinstance(written, float):
        return None
    return Entry(str(key), facts, None, written, len(text.encode()))
