"""Rows in one SQLite file: there or not there, whatever other processes and the disk do."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from composer.errors import CacheWarning
from composer.store import ledger
from composer.store.ledger import Ledger

KEY = "a" * 64


@pytest.fixture
def rows(tmp_path: Path) -> Ledger:
    return Ledger("things", limit=100, root=tmp_path)


def test_row_is_found_again_by_another_ledger(rows: Ledger, tmp_path: Path) -> None:
    """What one object put, another one over the same file gets; the last one put counts."""
    assert rows.put(KEY, "one")
    assert rows.put(KEY, '{"n": 2}')
    other = Ledger("things", limit=100, root=tmp_path)
    assert other.get(KEY) == '{"n": 2}'
    (entry,) = other.entries()
    assert (entry.key, entry.facts, entry.size) == (KEY, {"n": 2}, 8)
    assert time.time() - entry.written < 60


def test_absent_key_and_absent_file_are_no_trouble(rows: Ledger) -> None:
    """What was never put is not there, and nothing is made to say so."""
    assert rows.get(KEY) is None
    assert rows.entries() == []
    assert rows.clear() == 0
    rows.remove(KEY)
    assert not rows.path.exists()
    rows.put(KEY, "{}")
    rows.remove(KEY)
    assert rows.get(KEY) is None
    assert not rows.trouble


def test_file_is_private_and_has_a_write_ahead_log(rows: Ledger) -> None:
    """Only the user can enter the folder or read the files."""
    rows.put(KEY, "{}")
    assert rows.path.stat().st_mode & 0o777 == 0o700
    reader = sqlite3.connect(rows.file)
    assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    rows.put(KEY, "{}")
    assert len(list(rows.path.iterdir())) > 1
    assert {each.stat().st_mode & 0o777 for each in rows.path.iterdir()} == {0o600}
    reader.close()


def test_oldest_goes_first(tmp_path: Path) -> None:
    """There are never more rows than the limit."""
    rows = Ledger("things", limit=3, root=tmp_path)
    for n in range(5):
        rows.put(str(n), "{}")
    assert [entry.key for entry in rows.entries()] == ["4", "3", "2"]
    assert rows.clear() == 3
    assert rows.entries() == []


def write_text(file: Path) -> None:
    file.write_text("no database, but long enough to be taken for one" * 100)


def damage_pages(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[100:] = os.urandom(len(content) - 100)
    file.write_bytes(content)


def make_other_table(file: Path) -> None:
    file.unlink()
    other = sqlite3.connect(file)
    other.execute("CREATE TABLE kept (id INTEGER)")
    other.close()


@pytest.mark.parametrize("damage", [write_text, damage_pages, make_other_table])
def test_broken_file_is_put_aside_and_warned_of(rows: Ledger, damage: Any) -> None:
    """It is not lost, and a new one takes its place."""
    rows.put(KEY, "{}")
    damage(rows.file)
    with pytest.warns(CacheWarning, match="cannot be read"):
        assert rows.get(KEY) is None
    assert rows.file.with_suffix(".broken").exists()
    assert rows.put(KEY, "again")
    assert rows.get(KEY) == "again"


def test_broken_file_does_not_stop_a_write(rows: Ledger) -> None:
    """It is put aside, and the write made once more."""
    rows.put(KEY, "{}")
    write_text(rows.file)
    with pytest.warns(CacheWarning, match="cannot be written: file is not a database"):
        assert rows.put(KEY, "new")
    assert (rows.get(KEY), rows.trouble) == ("new", "")


READ = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT * FROM kept').fetchall()"


def test_write_keeps_the_locks_of_other_threads(rows: Ledger) -> None:
    """Closing any descriptor of a file drops the process's locks on it.

    Another process would then take the write-ahead log for nobody's, and remove it.
    """
    rows.put(KEY, "{}")
    with closing(sqlite3.connect(rows.file)) as of_another_thread:
        of_another_thread.execute("SELECT * FROM kept").fetchall()
        rows.put(KEY, "{}")
        subprocess.run([sys.executable, "-c", READ, rows.file], check=True, timeout=60)
        assert Path(f"{rows.file}-wal").exists()


def test_row_that_is_no_text_is_not_there(rows: Ledger) -> None:
    """Whoever put it."""
    rows.put(KEY, "{}")
    with sqlite3.connect(rows.file) as other:
        other.execute("UPDATE kept SET text = x'ff00', written = 'then'")
    other.close()
    assert rows.get(KEY) is None
    assert rows.entries() == []


def test_locked_file_is_waited_for_and_then_left(
    rows: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write is left out; a read is not in the way of a writer."""
    monkeypatch.setattr(ledger, "PATIENCE", 0.05)
    rows.put(KEY, "{}")
    other = sqlite3.connect(rows.file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.warns(CacheWarning, match="cannot be written: database is locked"):
        assert not rows.put(KEY, "new")
    assert rows.get(KEY) == "{}"
    other.execute("ROLLBACK")
    other.close()
    assert rows.put(KEY, "new")


def test_file_system_without_the_log_will_do(rows: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """What SQLite says then is no error."""

    class Refusing(sqlite3.Connection):
        def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
            if "journal_mode" in sql:
                raise sqlite3.OperationalError("locking protocol")
            return super().execute(sql, *args)

    monkeypatch.setattr(sqlite3, "connect", _with_factory(Refusing))
    assert rows.put(KEY, "{}")
    assert rows.get(KEY) == "{}"
    assert not rows.trouble


def _with_factory(factory: type[sqlite3.Connection]) -> Any:
    genuine = sqlite3.connect
    return lambda *args, **kwargs: genuine(*args, factory=factory, **kwargs)


def test_folder_that_can_only_be_read_is_read(
    rows: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container's image: no file is made beside the one there."""
    rows.put(KEY, "{}")
    before = sorted(rows.path.iterdir())
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert rows.get(KEY) == "{}"
    assert sorted(rows.path.iterdir()) == before


def test_python_without_sqlite_will_do(rows: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are built so."""
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    with pytest.warns(CacheWarning, match="cannot be written: import of sqlite3"):
        assert not rows.put(KEY, "{}")


@pytest.mark.skipif(os.name != "posix", reason="ownership is POSIX's")
def test_folder_of_another_user_is_not_used(rows: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody else may have written is neither read nor added to."""
    rows.put(KEY, "{}")
    monkeypatch.setattr(os, "geteuid", lambda: rows.path.stat().st_uid + 1)
    with pytest.warns(CacheWarning, match="belongs to another user"):
        assert rows.get(KEY) is None
    assert not rows.put(KEY, "{}")
    assert rows.clear() == 0


def test_place_that_cannot_be_written_is_no_error_where_warnings_are(tmp_path: Path) -> None:
    """A cache whose root is a file: nothing is kept, and nothing is raised."""
    (tmp_path / "file").write_text("")
    rows = Ledger("things", limit=100, root=tmp_path / "file")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not rows.put(KEY, "{}")
        assert rows.get(KEY) is None
    assert "cannot be read" in rows.trouble
    unnameable = Ledger("x" * 300, limit=100, root=tmp_path)
    with pytest.warns(CacheWarning, match="cannot be read"):
        unnameable.remove(KEY)
    assert unnameable.clear() == 0
