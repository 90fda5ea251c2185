"""Child processes: forked by a server that has imported what they need, and fresh otherwise."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from common import in_child, in_threads

from composer.errors import SandboxRefusal
from composer.system.subprocesses import NONE, Limits, ask, servers, serving

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")


@pytest.fixture(autouse=True)
def _a_server_of_its_own() -> Iterator[None]:
    servers.servers.end_all()  # one that other tests have left may be about to end
    yield
    servers.servers.end_all()


def look_around(payload: bytes = b"", module: str = "children") -> dict[str, Any]:
    return ask(f"{module}:look_around", payload, NONE)


def look_around_standing_back() -> dict[str, Any]:
    return ask("children:look_around", b"", NONE, stands_back=True)


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_children_come_of_one_server_and_know_nothing_of_each_other() -> None:
    """What they would import is there, and nothing else is."""
    first, second = look_around(), look_around()
    assert first["pid"] != second["pid"]
    assert first["server"] == second["server"] == second["imported_by"]
    assert second["left_behind"] == 0


def test_child_that_stands_back_does_so_from_the_imports_on() -> None:
    """By its nice value and by its session's, of which not every kernel has one. Others do not."""
    usual, back = look_around(), look_around_standing_back()
    assert back["nice"] == back["nice_at_import"] == min(os.nice(0) + serving._NICENESS, 19)
    assert usual["nice"] == usual["nice_at_import"] == os.nice(0)
    assert (usual["session"], back["session"]) in (([], []), (["0"], [str(serving._NICENESS)]))


def test_servers_of_both_kinds_are_kept() -> None:
    """A request takes one of its own kind."""
    usual, back = look_around(), look_around_standing_back()
    assert usual["server"] != back["server"]
    assert look_around()["server"] == usual["server"]
    assert look_around_standing_back()["server"] == back["server"]


def test_child_is_where_its_caller_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By then, not when the server was started."""
    server = look_around()["server"]
    monkeypatch.syspath_prepend("/nowhere")
    monkeypatch.setenv("COMPOSER_CHAIN", "eager")
    monkeypatch.setenv("COMPOSER_SINKS", "jsonl")
    there = look_around()
    monkeypatch.chdir(tmp_path)
    assert look_around()["folder"] == str(tmp_path)
    assert there["server"] == server
    assert there["path"] == sys.path
    assert there["environment"]["COMPOSER_CHAIN"] == "eager"
    assert "COMPOSER_SINKS" not in there["environment"]


def test_environment_that_imports_may_have_read_makes_a_new_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``OMP_NUM_THREADS``, say, which is read once."""
    before = look_around()["server"]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    after = look_around()
    assert after["server"] != before
    assert after["environment"]["OMP_NUM_THREADS"] == "7"
    wait_until(lambda: not is_alive(before))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["inductor", "onnxrt", "openvino"])
def test_what_engines_do_to_the_process_makes_no_new_server(
    engine: str, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """They set variables, for one."""
    if engine == "openvino":
        pytest.importorskip("openvino", reason="the engine itself")
    ran = run_python(
        "import torch\n"
        "from composer.system.subprocesses import servers\n"
        "before = servers._place()\n"
        f"options = {{'chain': ['{engine}'], 'strict': True}}\n"
        "with torch.no_grad():\n"
        "    torch.compile(torch.sin, backend='composer', options=options)(torch.ones(3))\n"
        "assert servers._place() == before\n"
    )
    assert ran.returncode == 0, ran.stderr


def test_folder_that_has_no_path_is_the_childs_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was removed; or the user, as which the program runs now, may not walk there."""
    look_around()
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    inode = gone.stat().st_ino
    gone.rmdir()
    assert look_around()["inode"] == inode


def test_path_within_the_folder_leads_to_where_that_is_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python remembers what it found by a path, and for ``.`` it would be another folder."""
    monkeypatch.syspath_prepend("plug")
    for name in ("here", "there"):
        plug = tmp_path / name / "plug"
        plug.mkdir(parents=True)
        (plug / f"children_{name}.py").write_text("from children import look_around")
        monkeypatch.chdir(plug.parent)
        assert look_around(module=f"children_{name}")["folder"] == str(plug.parent)


def test_child_is_the_user_its_caller_is_by_now() -> None:
    """A program may have given up rights, or limited itself, since its first question."""
    before, umask = look_around(), os.umask(0o077)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] - 1, limits[1]))
    try:
        after = look_around()
    finally:
        os.umask(umask)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (before["umask"], after["umask"]) == (umask, 0o077)
    assert (before["open_files"], after["open_files"]) == (limits[0], limits[0] - 1)


def test_random_numbers_are_not_those_of_the_child_before() -> None:
    """Who names a file by them would overwrite the other's."""
    assert len({look_around()["drawn"] for _ in range(3)}) == 3


def test_large_payload_arrives() -> None:
    """Many times what a pipe holds."""
    assert look_around(bytes(50 << 20))["size"] == 50 << 20


def test_server_that_nobody_asks_ends_and_the_next_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds memory."""
    monkeypatch.setattr(servers, "IDLE_SECONDS", 0.5)
    first = look_around()["server"]
    wait_until(lambda: not is_alive(first))
    assert look_around()["server"] != first


def test_server_that_is_killed_is_nobodys_failure() -> None:
    """Its child goes with it. The next question starts another."""
    with pytest.raises(SandboxRefusal, match="killed by SIGKILL") as caught:
        ask("children:ends_the_server", b"", NONE)
    assert caught.value.by_others
    assert look_around()["pid"]


def test_server_that_imports_for_ever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the limit of a start. The next question is for another server."""
    monkeypatch.setattr("composer.system.subprocesses.asking.START_SECONDS", 0.5)
    monkeypatch.setattr("composer.system.subprocesses.asking.END_SECONDS", 0.5)
    with pytest.raises(SandboxRefusal, match="had not started its work") as caught:
        ask("children_that_hang:work", b"", NONE)
    assert caught.value.by_others
    monkeypatch.undo()
    assert look_around()["pid"]


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_what_an_import_started_ends_with_a_server_that_fails() -> None:
    """It holds nothing of the server's that anybody waits for."""
    with pytest.raises(SandboxRefusal, match="before it had imported composer") as caught:
        ask("children_with_a_helper:work", b"", NONE)
    helper = int(caught.value.traceback.removeprefix("started "))
    wait_until(lambda: not is_alive(helper))


def test_limit_of_time_holds_where_the_server_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is stuck in. The caller ends both then."""
    monkeypatch.setattr("composer.system.subprocesses.asking.END_SECONDS", 0.5)
    with pytest.raises(SandboxRefusal, match=r"stopped after 0\.3 s"):
        ask("children:stops_the_server", b"", Limits(isolate=True, timeout=0.3))
    assert look_around()["pid"]


def test_program_that_dies_of_sigpipe_does_not() -> None:
    """Command-line tools have it so. What a server that has ended is sent is sent again."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        server = look_around()["server"]
        (kept,) = servers.servers._idle[False]
        kept._process.poll = lambda: None  # not seen to have ended, yet
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not is_alive(server))
        assert look_around()["server"] != server
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_server_that_cannot_fork_says_why(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server goes on, and a later request may succeed."""

    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    mine, channel = socket.socketpair()
    with mine, channel:
        assert serving._fork(serving._Link(channel, os.getppid()))
        assert mine.recv(100) == b'\n["ended", 1]\n'
    assert "temporarily unavailable" in capfd.readouterr().err


def test_questions_leave_nothing_open() -> None:
    """Nor where the child crashed."""
    look_around()
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(5):
        look_around()
        with pytest.raises(SandboxRefusal):
            ask("children:prints_and_exits", b"", NONE)
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_program_may_have_a_thousand_files_open() -> None:
    """``select.select`` would not take the sockets that are opened then."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert look_around()["pid"]
    finally:
        for each in files:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_thread_that_started_the_server_may_end() -> None:
    """Linux would tell the server of the death of that thread, not of the process."""
    servers: list[int] = []
    thread = threading.Thread(target=lambda: servers.append(look_around()["server"]))
    thread.start()
    thread.join()
    assert look_around()["server"] == servers[0]


def test_child_beyond_its_time_is_ended_and_the_server_goes_on() -> None:
    """The limit counts from when the child is ready."""
    server = look_around()["server"]
    with pytest.raises(SandboxRefusal, match=r"stopped after 0\.3 s in a child process"):
        ask("children:waits", b"", Limits(isolate=True, timeout=0.3))
    assert look_around()["server"] == server


def test_last_words_are_kept_of_each_child() -> None:
    """Of the one that the server was started for, and of the next."""
    for _ in range(2):
        with pytest.raises(SandboxRefusal, match="exited with status 7") as caught:
            ask("children:prints_and_exits", b"", NONE)
        assert caught.value.traceback == "the last word"
        assert not caught.value.by_others


def test_work_that_cannot_be_imported_is_named() -> None:
    """By the server's traceback, or by the child's."""
    for _ in range(2):
        with pytest.raises(SandboxRefusal, match="before it had imported composer") as caught:
            ask("no_such_module:work", b"", NONE)
        assert "No module named 'no_such_module'" in caught.value.traceback
        look_around()


def test_threads_ask_at_once(tmp_path: Path) -> None:
    """Each gets the answer to its own question, and all servers are kept for the next ones."""
    answers: dict[int, Any] = {}

    def question(number: int) -> None:
        answers[number] = look_around(bytes(number))

    in_threads(question, range(3))
    assert {number: answer["size"] for number, answer in answers.items()} == {
        number: number for number in range(3)
    }
    assert look_around()["server"] in {answer["server"] for answer in answers.values()}


def test_child_outlives_a_server_that_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server that is asked no more ends after its last child."""
    file = tmp_path / "here"
    answers: list[Any] = []

    def question() -> None:
        answers.append(ask("children:waits_for_a_file", bytes(file), NONE))

    thread = threading.Thread(target=question)
    thread.start()
    wait_until(file.exists)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    other = look_around()
    file.unlink()
    thread.join()
    assert answers[0]["server"] != other["server"]
    wait_until(lambda: not is_alive(answers[0]["server"]))


def test_forked_process_starts_a_server_of_its_own() -> None:
    """That of its parent answers to the parent."""
    server = look_around()["server"]

    def differs() -> None:
        assert look_around()["server"] != server
        servers.servers.end_all()

    assert in_child(differs) == 0
    assert look_around()["server"] == server


def test_caller_may_ignore_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is started inherits that, and its children would be nobody's to wait for."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(SandboxRefusal, match="exited with status 7"):
            ask("children:prints_and_exits", b"", NONE)
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("module", ["children_of_a_device", "children_with_a_thread"])
def test_child_is_fresh_where_a_fork_of_the_server_would_not_do(module: str) -> None:
    """CUDA cannot be used in a fork of a process that counted the cards."""
    there = look_around(b"123", module=module)
    assert there["imported_by"] == there["pid"] != there["server"]
    assert there["size"] == 3


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.slow
def test_server_and_child_end_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    """Also where a process that it forked holds the sockets open."""
    file = tmp_path / "here"
    code = (
        "import os, threading, time\n"
        "from composer.system.subprocesses import NONE, ask\n"
        f"asks = lambda: ask('children:waits_for_a_file', {bytes(file)!r}, NONE)\n"
        "threading.Thread(target=asks, daemon=True).start()\n"
        f"while not os.path.exists({str(file)!r}): time.sleep(0.01)\n"
        "if not os.fork(): time.sleep(60)\n"
        "print('forked', flush=True)\n"
        "time.sleep(60)\n"
    )
    path = os.pathsep.join(map(str, sys.path))
    caller = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert caller.stdout
        assert caller.stdout.readline() == b"forked\n"
        child, server = map(int, file.read_text().split())
        assert is_alive(child)
        assert is_alive(server)
        caller.kill()
        wait_until(lambda: not is_alive(server))
        wait_until(lambda: not is_alive(child))
    finally:
        os.killpg(caller.pid, signal.SIGKILL)
        caller.wait()
        caller.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_imports_of_the_work_start_no_thread_and_touch_no_device(
    fresh_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """So that what has imported them can be forked: one thread is of numpy's, and it sees to it."""
    code = (
        "import os, sys, numpy, torch\n"
        "def touched(*_): sys.exit('a device was looked for')\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = touched\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "import composer.chain.sandbox.isolated, composer.tools.tune.work\n"
        "import composer.backends.tensorrt.apart\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    ran = fresh_python(code)
    assert ran.stdout == "0\n", ran.stderr
