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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import composer
from composer.errors import CacheWarning
from composer.system import disk
from composer.system.disk import DiskCache

MIB = 1 << 20


def key_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


KEY = key_of("a")


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache("things", limit=MIB, root=tmp_path)


def test_entry_is_found_again_by_another_cache(cache: DiskCache, tmp_path: Path) -> None:
    """What one object put, another one over the same folder gets, facts and blob."""
    assert cache.put(KEY, {"what": "plan", "sizes": [1, 2]}, b"\0blob")
    found = DiskCache("things", limit=MIB, root=tmp_path).get(KEY)
    assert found is not None
    assert (found.facts, found.blob) == ({"what": "plan", "sizes": [1, 2]}, b"\0blob")
    assert time.time() - found.written < 60


def test_absent_key_and_absent_folder_are_no_trouble(cache: DiskCache) -> None:
    """What was never put is not there, and nobody warns."""
    assert cache.get(KEY) is None
    assert cache.entries() == []
    assert cache.clear() == 0
    cache.remove(KEY)
    assert not cache.path.exists()
    assert not cache.trouble


def test_put_replaces(cache: DiskCache) -> None:
    """The last one put is the one that is got; without a blob the old one's goes."""
    cache.put(KEY, {"n": 1}, b"one")
    cache.put(KEY, {"n": 2})
    found = cache.get(KEY)
    assert found is not None
    assert (found.facts, found.blob) == ({"n": 2}, None)
    assert len(list(cache.path.iterdir())) == 1


def test_folder_is_private(cache: DiskCache) -> None:
    """Only the user can enter the folder or read the files."""
    cache.put(KEY, {}, b"x")
    assert cache.path.stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o077 for each in cache.path.iterdir()} == {0}


def test_key_has_to_be_a_digest(cache: DiskCache) -> None:
    """A key is part of a file's name, so nothing but a digest is one."""
    with pytest.raises(ValueError, match=r"64 hexadecimal digits, not '\.\./x'"):
        cache.put("../x", {})


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "record garbled": lambda content: content.replace(b'"n": 1', b'"n": 7'),
    "record truncated": lambda content: content[:20],
    "blob truncated": lambda content: content[:-1],
    "blob gone": lambda content: content[: content.index(b"\n") + 1],
    "blob of another": lambda content: content[:-4] + b"bolb",
    "empty": lambda content: b"",
    "of another program": lambda content: b'["what another program wrote"]',
    "binary": lambda content: bytes(range(256)),
    "nested deeply": lambda content: b"[" * 200_000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_entry_is_removed_and_warned_of(
    cache: DiskCache, damage: Callable[[bytes], bytes]
) -> None:
    """What is not what was written is not there; it goes, and can be put again."""
    cache.put(KEY, {"n": 1}, b"blob")
    (file,) = cache.path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    with pytest.warns(CacheWarning, match="held an entry that is not what was written"):
        assert cache.get(KEY) is None
    assert "removed" in cache.trouble
    assert not file.exists()
    assert cache.put(KEY, {"n": 1}, b"blob")
    assert cache.get(KEY) is not None


def test_another_schema_is_not_read(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that a later composer wrote is not misread."""
    monkeypatch.setattr(disk, "_SCHEMA", 7)
    cache.put(KEY, {})
    monkeypatch.undo()
    with pytest.warns(CacheWarning, match="another digest or schema"):
        assert cache.get(KEY) is None


def test_least_recently_used_goes_first(tmp_path: Path) -> None:
    """Where the limit is reached, what was got last stays."""
    cache = DiskCache("things", limit=5000, root=tmp_path)
    names = [key_of(name) for name in "abc"]
    for age, key in zip((300, 200, 100), names, strict=True):
        cache.put(key, {}, b"x" * 1000)
        then = time.time() - age
        os.utime(cache.path / f"{key}.entry", (then, then))
    assert cache.get(names[0])
    cache.put(key_of("d"), {}, b"x" * 1000)
    cache.put(key_of("e"), {}, b"x" * 1000)
    left = {entry.key for entry in cache.entries()}
    assert names[0] in left
    assert names[1] not in left
    assert sum(each.stat().st_size for each in cache.path.iterdir()) <= 5000


def test_entry_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    """One entry cannot push out all others and still not fit."""
    cache = DiskCache("things", limit=1000, root=tmp_path)
    cache.put(KEY, {})
    with pytest.warns(CacheWarning, match="takes no entry beyond its limit: [0-9]+ bytes of 1000"):
        assert not cache.put(key_of("b"), {}, b"x" * 1000)
    assert cache.get(KEY) is not None


def test_clear_says_how_many_went(cache: DiskCache) -> None:
    """Broken ones are counted and go, too."""
    for name in "abc":
        cache.put(key_of(name), {}, b"x")
    (cache.path / f"{KEY}.entry").write_text("?")
    assert len(cache.entries()) == 2
    assert cache.clear() == 3
    assert cache.entries() == []
    assert not list(cache.path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="ownership is POSIX's")
def test_folder_of_another_user_is_not_used(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What somebody else may have written is neither read nor added to."""
    cache.put(KEY, {})
    monkeypatch.setattr(os, "geteuid", lambda: cache.path.stat().st_uid + 1)
    with pytest.warns(CacheWarning, match="belongs to another user"):
        assert cache.get(KEY) is None
    assert not cache.put(KEY, {})
    assert cache.entries() == []


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_folder_open_to_others_is_not_used(cache: DiskCache) -> None:
    """A folder that others may write to can hold anything."""
    cache.put(KEY, {})
    cache.path.chmod(0o777)
    with pytest.warns(CacheWarning, match=r"others may write to .* \(mode 777\)"):
        assert cache.get(KEY) is None


def test_place_that_cannot_be_written_is_warned_of_once(tmp_path: Path) -> None:
    """A cache whose root is a file: nothing is kept, and nothing is raised."""
    (tmp_path / "file").write_text("")
    cache = DiskCache("things", limit=MIB, root=tmp_path / "file")
    with pytest.warns(CacheWarning, match="cannot be written"):
        assert not cache.put(KEY, {})
    with pytest.warns(CacheWarning, match="cannot be read"):
        assert cache.get(KEY) is None
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        assert not cache.put(KEY, {})
    assert (again, "COMPOSER_CACHE_DIR names another" in cache.trouble) == ([], True)
    composer.reset()
    with pytest.warns(CacheWarning, match="cannot be written"):
        assert not cache.put(KEY, {})


def test_trouble_of_a_kind_is_warned_of_once_for_all_entries(tmp_path: Path) -> None:
    """Whatever their sizes and files are; the text of the last one is kept."""
    cache = DiskCache("things", limit=1000, root=tmp_path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for size in range(1000, 1005):
            assert not cache.put(KEY, {}, b"x" * size)
    assert len(told) == 1
    assert cache.trouble != f"{told[0].message}"


def test_trouble_is_no_error_where_warnings_are(tmp_path: Path) -> None:
    """``-W error`` makes no difference to the one who asks."""
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not DiskCache("things", limit=MIB, root=tmp_path / "file").put(KEY, {})


FILL = """
import resource, signal, sys, warnings
from pathlib import Path
from composer.system.disk import DiskCache
warnings.simplefilter("ignore")
cache = DiskCache("things", limit=1 << 30, root=Path(sys.argv[1]))
assert cache.put("a" * 64, {"n": 1}, b"old")
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
print(cache.put("a" * 64, {"n": 2}, b"x" * 100_000), cache.trouble)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the size of files stands for it")
def test_full_disk_keeps_what_was_there(tmp_path: Path, run_python: Any) -> None:
    """A write that ends half-way leaves the old entry, and no rest of the new one."""
    done = run_python(FILL, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False")
    assert os.strerror(errno.EFBIG) in done.stdout
    cache = DiskCache("things", limit=1 << 30, root=tmp_path)
    found = cache.get("a" * 64)
    assert found is not None
    assert (found.facts, found.blob) == ({"n": 1}, b"old")
    assert not list(cache.path.glob("*.tmp"))


def test_what_the_user_keeps_in_such_a_folder_stays(cache: DiskCache) -> None:
    """Weights in a folder that is called as the cache is."""
    cache.put(KEY, {"n": 1}, b"blob")
    theirs = [cache.path / name for name in ("encoder.entry", "half.tmp", f"{KEY[:-1]}.entry")]
    for each in theirs:
        each.write_bytes(b"mine")
    cache.put(KEY, {"n": 2}, b"blob")
    cache.clear()
    assert all(each.read_bytes() == b"mine" for each in theirs)


KILL = """
import os, signal, sys, time
from pathlib import Path
from composer.system.disk import DiskCache

def write():
    cache = DiskCache("things", limit=1 << 20, root=Path(sys.argv[1]))
    for n in range(1_000_000):
        assert cache.put(f"{n % 7:064x}", {"n": n}, bytes([n % 256]) * 20_000), cache.trouble

def started():
    pid = os.fork()
    if not pid:
        write()
    return pid

cache = DiskCache("things", limit=1 << 20, root=Path(sys.argv[1]))
read = 0
for kill in range(20):
    writers = [started(), started()]
    until = time.time() + 0.05 + 0.01 * kill
    while time.time() < until:
        for n in range(7):
            found = cache.get(f"{n:064x}")
            if found is not None:
                read += 1
                assert found.blob == bytes([found.facts["n"] % 256]) * 20_000
    for pid in writers:
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
assert not cache.trouble, cache.trouble
assert read
"""


@pytest.mark.filterwarnings("ignore::composer.errors.CacheWarning")
def test_folder_that_cannot_be_looked_at_is_told_of_and_no_error(tmp_path: Path) -> None:
    """Its name is too long, say."""
    cache = DiskCache("failures", limit=1 << 20, root=tmp_path / ("x" * 300))
    assert cache.put("a" * 64, {}) is False
    assert cache.get("a" * 64) is None
    assert cache.entries() == []
    cache.remove("a" * 64)
    assert cache.clear() == 0
    assert "cannot be cleared" in cache.trouble


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the writers are forked")
def test_killed_writers_leave_no_torn_entry(
    tmp_path: Path, run_python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at any moment, two writers at a time: what is got is what was put.

    Files that they had not finished go when they are an hour old.
    """
    done = run_python(KILL, str(tmp_path))
    assert done.returncode == 0, done.stderr
    cache = DiskCache("things", limit=MIB, root=tmp_path)
    assert cache.entries()
    (cache.path / f"{KEY}.0a_b.tmp").write_bytes(b"half an ent")
    assert cache.put(KEY, {})
    assert list(cache.path.glob("*.tmp"))
    monkeypatch.setattr(disk, "_HOUR", -1.0)
    assert cache.put(KEY, {})
    assert not list(cache.path.glob("*.tmp"))
    assert not cache.trouble


FILL_TOGETHER = """
import os, sys
from pathlib import Path
from composer.system.disk import DiskCache

cache = DiskCache("things", limit=200_000, root=Path(sys.argv[1]))
writers = []
for writer in range(4):
    if not (pid := os.fork()):
        for n in range(100):
            assert cache.put(f"{1000 * writer + n:064x}", {}, b"x" * 9_000), cache.trouble
        os._exit(0)
    writers.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in writers] == [0] * 4
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the writers are forked")
def test_limit_holds_whoever_writes(tmp_path: Path, run_python: Any) -> None:
    """Four processes at once fill the cache, and leave it full and within its limit."""
    done = run_python(FILL_TOGETHER, str(tmp_path))
    assert done.returncode == 0, done.stderr
    taken = sum(each.stat().st_size for each in (tmp_path / "things").iterdir())
    assert 100_000 < taken <= 200_000


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
    cache = DiskCache("things", limit=MIB)
    assert cache.put(KEY, {})
    assert cache.get(KEY)
    disk._without_home.cache_clear()


def test_record_is_json_that_a_person_can_read(cache: DiskCache) -> None:
    """It is the first line of the file; the blob follows as it is."""
    cache.put(KEY, {"backend": "tensorrt"}, b"plan")
    (file,) = cache.path.iterdir()
    record, blob = file.read_bytes().split(b"\n")
    entry = json.loads(record)["entry"]
    assert entry["facts"] == {"backend": "tensorrt"}
    assert entry["blob_sha256"] == hashlib.sha256(blob).hexdigest()
    assert blob == b"plan"


def test_entry_is_found_in_a_folder_that_can_only_be_read(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container's image: that it was used cannot be noted, and nobody is told so."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EROFS, "Read-only file system")

    cache.put(KEY, {"n": 1})
    monkeypatch.setattr(os, "utime", refuse)
    assert cache.get(KEY) is not None
    assert not cache.trouble


def test_a_digest_is_the_same_in_whatever_order_facts_are_given() -> None:
    """Else another process would not find what one has kept."""
    assert disk.digest_of({"a": 1, "b": {"c": 2, "d": 3}}) == disk.digest_of(
        {"b": {"d": 3, "c": 2}, "a": 1}
    )
    assert disk.digest_of({"a": 1}) != disk.digest_of({"a": 2})
