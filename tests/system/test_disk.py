"""What is kept on disk: whole or not there, whatever other processes and the disk do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pwd
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import composer
from composer.errors import CacheWarning
from composer.system import disk
from composer.system.disk import Shelf

MIB = 1 << 20


def key_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


KEY = key_of("a")


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf("things", limit=MIB, root=tmp_path)


def test_entry_is_found_again_by_another_shelf(shelf: Shelf, tmp_path: Path) -> None:
    """What one object put, another one over the same folder gets, facts and blob."""
    assert shelf.put(KEY, {"what": "plan", "sizes": [1, 2]}, b"\0blob")
    found = Shelf("things", limit=MIB, root=tmp_path).get(KEY)
    assert found is not None
    assert (found.facts, found.blob) == ({"what": "plan", "sizes": [1, 2]}, b"\0blob")
    assert time.time() - found.written < 60


def test_absent_key_and_absent_folder_are_no_trouble(shelf: Shelf) -> None:
    """What was never put is not there, and nobody warns."""
    assert shelf.get(KEY) is None
    assert shelf.entries() == []
    assert shelf.clear() == 0
    shelf.remove(KEY)
    assert not shelf.path.exists()
    assert not shelf.trouble


def test_put_replaces(shelf: Shelf) -> None:
    """The last one put is the one that is got; without a blob the old one's goes."""
    shelf.put(KEY, {"n": 1}, b"one")
    shelf.put(KEY, {"n": 2})
    found = shelf.get(KEY)
    assert found is not None
    assert (found.facts, found.blob) == ({"n": 2}, None)
    assert not list(shelf.path.glob("*.bin"))


def test_folder_is_private(shelf: Shelf) -> None:
    """Only the user can enter the folder or read the files."""
    shelf.put(KEY, {}, b"x")
    assert shelf.path.stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o077 for each in shelf.path.iterdir()} == {0}


def test_key_has_to_be_a_digest(shelf: Shelf) -> None:
    """A key is part of a file's name, so nothing but a digest is one."""
    with pytest.raises(ValueError, match=r"64 hexadecimal digits, not '\.\./x'"):
        shelf.put("../x", {})


def garble_record(shelf: Shelf) -> None:
    path = shelf.path / f"{KEY}.json"
    path.write_text(path.read_text().replace('"n": 1', '"n": 7'))


def truncate_record(shelf: Shelf) -> None:
    path = shelf.path / f"{KEY}.json"
    path.write_bytes(path.read_bytes()[:-20])


def truncate_blob(shelf: Shelf) -> None:
    (shelf.path / f"{KEY}.bin").write_bytes(b"blo")


def lose_blob(shelf: Shelf) -> None:
    (shelf.path / f"{KEY}.bin").unlink()


def put_something_else(shelf: Shelf) -> None:
    (shelf.path / f"{KEY}.json").write_text('["what another program wrote"]')


def put_binary(shelf: Shelf) -> None:
    (shelf.path / f"{KEY}.json").write_bytes(bytes(range(256)))


def nest_deeply(shelf: Shelf) -> None:
    (shelf.path / f"{KEY}.json").write_text("[" * 200_000)


@pytest.mark.parametrize(
    "damage",
    [
        garble_record,
        truncate_record,
        truncate_blob,
        lose_blob,
        put_something_else,
        put_binary,
        nest_deeply,
    ],
)
def test_damaged_entry_is_removed_and_warned_of(shelf: Shelf, damage: Any) -> None:
    """What is not what was written is not there; it goes, and can be put again."""
    shelf.put(KEY, {"n": 1}, b"blob")
    damage(shelf)
    with pytest.warns(CacheWarning, match="held an entry that is not what was written"):
        assert shelf.get(KEY) is None
    assert "removed" in shelf.trouble
    assert not list(shelf.path.glob(f"{KEY}*"))
    assert shelf.put(KEY, {"n": 1}, b"blob")
    assert shelf.get(KEY) is not None


def test_another_schema_is_not_read(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that a later composer wrote is not misread."""
    monkeypatch.setattr(disk, "_SCHEMA", 2)
    shelf.put(KEY, {})
    monkeypatch.undo()
    with pytest.warns(CacheWarning, match="another digest or schema"):
        assert shelf.get(KEY) is None


def test_least_recently_used_goes_first(tmp_path: Path) -> None:
    """Where the limit is reached, what was got last stays."""
    shelf = Shelf("things", limit=5000, root=tmp_path)
    names = [key_of(name) for name in "abc"]
    for age, key in zip((300, 200, 100), names, strict=True):
        shelf.put(key, {}, b"x" * 1000)
        then = time.time() - age
        os.utime(shelf.path / f"{key}.json", (then, then))
        os.utime(shelf.path / f"{key}.bin", (then, then))
    assert shelf.get(names[0])
    shelf.put(key_of("d"), {}, b"x" * 1000)
    shelf.put(key_of("e"), {}, b"x" * 1000)
    left = {entry.key for entry in shelf.entries()}
    assert names[0] in left
    assert names[1] not in left
    assert sum(each.stat().st_size for each in shelf.path.iterdir()) <= 5000


def test_entry_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    """One entry cannot push out all others and still not fit."""
    shelf = Shelf("things", limit=1000, root=tmp_path)
    shelf.put(KEY, {})
    with pytest.warns(CacheWarning, match="takes no entry beyond its limit: [0-9]+ bytes of 1000"):
        assert not shelf.put(key_of("b"), {}, b"x" * 1000)
    assert shelf.get(KEY) is not None


def test_clear_says_how_many_went(shelf: Shelf) -> None:
    """Broken ones are counted and go, too."""
    for name in "abc":
        shelf.put(key_of(name), {}, b"x")
    garbled = shelf.path / f"{KEY}.json"
    garbled.write_text("?")
    assert len(shelf.entries()) == 2
    assert shelf.clear() == 3
    assert shelf.entries() == []
    assert not list(shelf.path.glob("*.bin"))


@pytest.mark.skipif(os.name != "posix", reason="ownership is POSIX's")
def test_folder_of_another_user_is_not_used(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody else may have written is neither read nor added to."""
    shelf.put(KEY, {})
    monkeypatch.setattr(os, "geteuid", lambda: shelf.path.stat().st_uid + 1)
    with pytest.warns(CacheWarning, match="belongs to another user"):
        assert shelf.get(KEY) is None
    assert not shelf.put(KEY, {})
    assert shelf.entries() == []


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_folder_open_to_others_is_not_used(shelf: Shelf) -> None:
    """A folder that others may write to can hold anything."""
    shelf.put(KEY, {})
    shelf.path.chmod(0o777)
    with pytest.warns(CacheWarning, match=r"others may write to .* \(mode 777\)"):
        assert shelf.get(KEY) is None


def test_place_that_cannot_be_written_is_warned_of_once(tmp_path: Path) -> None:
    """A cache whose root is a file: nothing is kept, and nothing is raised."""
    (tmp_path / "file").write_text("")
    shelf = Shelf("things", limit=MIB, root=tmp_path / "file")
    with pytest.warns(CacheWarning, match="cannot be written"):
        assert not shelf.put(KEY, {})
    with pytest.warns(CacheWarning, match="cannot be read"):
        assert shelf.get(KEY) is None
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        assert not shelf.put(KEY, {})
    assert (again, "COMPOSER_CACHE_DIR names another" in shelf.trouble) == ([], True)
    composer.reset()
    with pytest.warns(CacheWarning, match="cannot be written"):
        assert not shelf.put(KEY, {})


def test_trouble_of_a_kind_is_warned_of_once_for_all_entries(tmp_path: Path) -> None:
    """Whatever their sizes and files are; the text of the last one is kept."""
    shelf = Shelf("things", limit=1000, root=tmp_path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for size in range(1000, 1005):
            assert not shelf.put(KEY, {}, b"x" * size)
    assert len(told) == 1
    assert shelf.trouble != f"{told[0].message}"


def test_trouble_is_no_error_where_warnings_are(tmp_path: Path) -> None:
    """``-W error`` makes no difference to the one who asks."""
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not Shelf("things", limit=MIB, root=tmp_path / "file").put(KEY, {})


FILL = """
import resource, signal, sys, warnings
from pathlib import Path
from composer.system.disk import Shelf
warnings.simplefilter("ignore")
shelf = Shelf("things", limit=1 << 30, root=Path(sys.argv[1]))
assert shelf.put("a" * 64, {"n": 1}, b"old")
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
print(shelf.put("a" * 64, {"n": 2}, b"x" * 100_000), shelf.trouble)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the size of files stands for it")
def test_full_disk_keeps_what_was_there(tmp_path: Path, run_python: Any) -> None:
    """A write that ends half-way leaves the old entry, and no rest of the new one."""
    done = run_python(FILL, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False")
    assert os.strerror(errno.EFBIG) in done.stdout
    shelf = Shelf("things", limit=1 << 30, root=tmp_path)
    found = shelf.get("a" * 64)
    assert found is not None
    assert (found.facts, found.blob) == ({"n": 1}, b"old")
    assert not list(shelf.path.glob("*.tmp"))


def test_what_the_user_keeps_in_such_a_folder_stays(shelf: Shelf) -> None:
    """Weights in a folder that is called as the shelf is."""
    shelf.put(KEY, {"n": 1}, b"blob")
    theirs = [shelf.path / name for name in ("encoder.bin", "half.tmp", f"{KEY[:-1]}.bin")]
    for each in theirs:
        each.write_bytes(b"mine")
    shelf.put(KEY, {"n": 2}, b"blob")
    shelf.clear()
    assert all(each.read_bytes() == b"mine" for each in theirs)


KILL = """
import os, signal, sys, time
from pathlib import Path
from composer.system.disk import Shelf

def write():
    shelf = Shelf("things", limit=1 << 20, root=Path(sys.argv[1]))
    for n in range(1_000_000):
        assert shelf.put(f"{n % 7:064x}", {"n": n}, bytes([n % 256]) * 20_000), shelf.trouble

def started():
    pid = os.fork()
    if not pid:
        write()
    return pid

shelf = Shelf("things", limit=1 << 20, root=Path(sys.argv[1]))
read = 0
for kill in range(20):
    writers = [started(), started()]
    until = time.time() + 0.05 + 0.01 * kill
    while time.time() < until:
        for n in range(7):
            found = shelf.get(f"{n:064x}")
            if found is not None:
                read += 1
                assert found.blob == bytes([found.facts["n"] % 256]) * 20_000
    for pid in writers:
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
assert not shelf.trouble, shelf.trouble
print(read)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the writers are forked")
@pytest.mark.filterwarnings("ignore::composer.errors.CacheWarning")
def test_folder_that_cannot_be_looked_at_is_told_of_and_no_error(tmp_path: Path) -> None:
    """Its name is too long, say."""
    shelf = Shelf("failures", limit=1 << 20, root=tmp_path / ("x" * 300))
    assert shelf.put("a" * 64, {}) is False
    assert shelf.get("a" * 64) is None
    assert shelf.entries() == []
    shelf.remove("a" * 64)
    assert shelf.clear() == 0
    assert "cannot be cleared" in shelf.trouble


def test_killed_writers_leave_no_torn_entry(tmp_path: Path, run_python: Any) -> None:
    """Killed at any moment, two writers at a time: what is got is what was put, and no rest."""
    done = run_python(KILL, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
    shelf = Shelf("things", limit=MIB, root=tmp_path)
    assert shelf.entries()
    assert shelf.put(KEY, {})
    assert not list(shelf.path.glob("*.tmp"))
    assert not shelf.trouble


def test_cache_dir_is_the_environments_or_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """COMPOSER_CACHE_DIR goes before the system's place for caches."""
    monkeypatch.setenv("COMPOSER_CACHE_DIR", str(tmp_path / "here"))
    assert disk.cache_dir() == tmp_path / "here"
    monkeypatch.setenv("COMPOSER_CACHE_DIR", "~/there")
    assert disk.cache_dir() == Path.home() / "there"
    monkeypatch.delenv("COMPOSER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk.cache_dir().name == "composer"


def test_without_a_home_a_passing_folder_will_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a container a user may have none: nothing outlives the process, and nothing breaks."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("COMPOSER_CACHE_DIR")
    disk._without_home.cache_clear()
    with pytest.warns(CacheWarning, match="COMPOSER_CACHE_DIR"):
        folder = disk.cache_dir()
    monkeypatch.setenv("COMPOSER_CACHE_DIR", "~/there")
    assert folder == disk.cache_dir()
    assert folder.parent == tmp_path
    shelf = Shelf("things", limit=MIB)
    assert shelf.put(KEY, {})
    assert shelf.get(KEY)
    disk._without_home.cache_clear()


def test_record_is_json_that_a_person_can_read(shelf: Shelf) -> None:
    """Beside a blob lies what it is."""
    shelf.put(KEY, {"backend": "tensorrt"}, b"plan")
    text = json.loads((shelf.path / f"{KEY}.json").read_text())
    assert text["entry"]["facts"] == {"backend": "tensorrt"}
    assert text["entry"]["blob_sha256"] == hashlib.sha256(b"plan").hexdigest()


def test_a_digest_is_the_same_in_whatever_order_facts_are_given() -> None:
    """Else another process would not find what one has kept."""
    assert disk.digest_of({"a": 1, "b": {"c": 2, "d": 3}}) == disk.digest_of(
        {"b": {"d": 3, "c": 2}, "a": 1}
    )
    assert disk.digest_of({"a": 1}) != disk.digest_of({"a": 2})
