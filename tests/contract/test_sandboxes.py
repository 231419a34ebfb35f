"""What every sandbox promises, on each implementation: isolated by bubblewrap, without isolation, and over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_lab import needs_bubblewrap, served

from asyncrl.errors import AsyncRLError
from asyncrl.runtime.host_facts import child_pids, descendants, is_alive
from producers.sandbox import Sandbox, SandboxJob, SandboxLimits, SandboxResult, SandboxSession, open_sandbox, process

LIMITS = SandboxLimits(timeout_s=60.0, output_bytes=20_000)


@pytest.fixture(scope="module", params=["bubblewrap", "none", "http"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if request.param == "bubblewrap":
        needs_bubblewrap()
    if request.param == "http":
        with served(LIMITS) as url, open_sandbox(url, LIMITS) as found:
            yield found
        return
    with open_sandbox(request.param, LIMITS) as found:
        yield found


@pytest.mark.parametrize(
    ("code", "stdin", "stdout", "exit_code"),
    [
        ("print(int(input()) + 1)", "41", "42\n", 0),
        ("import sys; print(sys.stdin.read()[::-1])", "abc", "cba\n", 0),
        ("import sys; sys.exit(7)", "", "", 7),
        ("exit()", "", "", 0),
        ("raise SystemExit('no')", "", "", 1),
        ("print('é', end='')", "", "é", 0),
        ("import threading\nthreading.Timer(0.05, lambda: print('later')).start()", "", "later\n", 0),
        ("import atexit; atexit.register(print, 'at the end')", "", "at the end\n", 0),
        ("if __name__ == '__main__': print('main')", "", "main\n", 0),
        ("import sys; print(sys.argv[1:])", "", "[]\n", 0),
    ],
)
def test_a_program_runs(sandbox: Sandbox, code: str, stdin: str, stdout: str, exit_code: int) -> None:
    result = sandbox.run(code, stdin)
    assert (result.status, result.stdout, result.exit_code) == ("finished", stdout, exit_code), result
    assert result.ok == (exit_code == 0) and result.wall_s > 0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def x(:", "SyntaxError"),
        ("import no_such_thing", "ModuleNotFoundError"),
        ("assert 1 == 2, 'differs'", "AssertionError: differs"),
    ],
)
def test_an_exception_is_a_result_with_its_text(sandbox: Sandbox, code: str, words: str) -> None:
    result = sandbox.run(code)
    assert result.status == "finished" and result.exit_code == 1 and words in result.stderr
    assert "runner.py" not in result.stderr  # nothing of the machinery


def test_a_program_out_of_time(sandbox: Sandbox) -> None:
    result = sandbox.run("print('began', flush=True)\nwhile True: pass", timeout_s=1.0)
    assert result.status == "timeout" and result.stdout == "began\n"


def test_a_program_that_sleeps_is_out_of_time_too(sandbox: Sandbox) -> None:
    assert sandbox.run("import time; time.sleep(1000)", timeout_s=0.5).status == "timeout"


def test_a_program_out_of_memory(sandbox: Sandbox) -> None:
    result = sandbox.run("x = bytearray(10 ** 10)", memory_bytes=256 << 20)
    assert result.status == "memory" and "MemoryError" in result.stderr


def test_output_is_capped(sandbox: Sandbox) -> None:
    result = sandbox.run("while True: print('x' * 999)")
    assert result.status == "output" and len(result.stdout) == 20_000


def test_a_crash_is_killed(sandbox: Sandbox) -> None:
    result = sandbox.run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert result.status == "killed" and result.exit_code == -11


def test_files_go_in_and_come_back(sandbox: Sandbox) -> None:
    code = "import helper\ndata = open('data/in.bin', 'rb').read()\nopen('out.bin', 'wb').write(data * helper.TIMES)"
    files = {"data/in.bin": b"\x00\xff", "helper.py": b"TIMES = 3"}
    result = sandbox.run(code, files=files, fetch=["out.bin", "absent.txt"])
    assert result.ok and result.files == {"out.bin": b"\x00\xff" * 3}


def test_a_folder_in_the_place_of_a_file_does_not_come_back(sandbox: Sandbox) -> None:
    """A program must not turn its own failure into one of the sandbox."""
    result = sandbox.run("import os\nos.mkdir('out')\nopen('more', 'w').write('1')", fetch=["out", "more"])
    assert result.ok and result.files == {"more": b"1"}, result


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../b", "", "main.py"])
def test_files_stay_in_the_folder(sandbox: Sandbox, name: str) -> None:
    with pytest.raises(AsyncRLError) as caught:
        sandbox.run("pass", files={name: b""})
    assert caught.value.code == "config.type"


def test_one_program_sees_nothing_of_another(sandbox: Sandbox) -> None:
    code = (
        "import os, sys\nprint(sorted(os.listdir('.')), hasattr(sys, 'left'))\nsys.left = 1\nopen('left', 'w').close()"
    )
    results = sandbox.run_many([SandboxJob(code=code) for _ in range(3)])
    assert {result.stdout for result in results} == {"['main.py'] False\n"}


def test_programs_give_the_same_every_time(sandbox: Sandbox) -> None:
    outputs = {sandbox.run("print({'ab', 'cd', 'ef', 'gh'}, hash('text'))").stdout for _ in range(3)}
    assert len(outputs) == 1


def test_threads_may_call_at_once(sandbox: Sandbox) -> None:
    found: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: sandbox.run(f"print({n} ** 2)").stdout})) for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {n: f"{n * n}\n" for n in range(6)}


def test_the_same_for_an_event_loop(sandbox: Sandbox) -> None:
    async def both() -> list[str]:
        results = await asyncio.gather(sandbox.arun("print(1)"), sandbox.arun("print(input())", "2"))
        return [result.stdout for result in results]

    assert asyncio.run(both()) == ["1\n", "2\n"]


# ---------------------------------------------------------------- sessions


@pytest.fixture(params=["bubblewrap", "none"])
def keeping(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if request.param == "bubblewrap":
        needs_bubblewrap()
    with open_sandbox(request.param, LIMITS) as found:
        yield found


@pytest.fixture
def session(keeping: Sandbox) -> Iterator[SandboxSession]:
    found = keeping.open_session()
    yield found
    found.close()


def test_a_session_keeps_variables_files_and_what_went_before_an_error(session: SandboxSession) -> None:
    assert session.run("x = 41\nopen('note', 'w').write('hi')").stdout == "2\n", "the value of the last line is shown"
    failed = session.run("x += 1\nprint('so far')\n1 / 0")
    assert (failed.status, failed.exit_code, failed.stdout) == ("finished", 1, "so far\n")
    assert failed.stderr.count("File") == 1 and "ZeroDivisionError" in failed.stderr
    assert session.run("print(x, open('note').read())").stdout == "42 hi\n"
    assert session.run("import sys; sys.exit(3)").exit_code == 3 and session.run("x").stdout == "42\n"


def test_limits_of_a_session_leave_its_state(session: SandboxSession) -> None:
    session.run("x = 1")
    stubborn = "while True:\n try:\n  while True: pass\n except Exception: pass"
    assert session.run(stubborn, timeout_s=0.2).status == "timeout"
    assert session.run("bytearray(1 << 40)").status == "memory"
    flood = session.run("print('y' * 50_000)")
    assert flood.status == "output" and len(flood.stdout) == LIMITS.output_bytes
    assert session.run("x").stdout == "1\n" and not session.run("x").state_lost


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(4)",
        "import ctypes; ctypes.string_at(0)",
        # frames of its own on the pipe to this process: one that is no result, one that claims to be huge
        "import os\nfor n in range(3, 20):\n try: os.write(n, b'\\5' + bytes(7) + b'[1,2]')\n except OSError: pass",
        "import os\nfor n in range(3, 20):\n try: os.write(n, b'\\xff' * 8)\n except OSError: pass",
    ],
)
def test_a_session_whose_process_is_lost_says_so_and_begins_anew(session: SandboxSession, code: str) -> None:
    session.run("x = 1")
    assert session.run(code).state_lost
    again = session.run("x")
    assert "NameError" in again.stderr and not again.state_lost


def test_sessions_see_nothing_of_each_other(keeping: Sandbox) -> None:
    with contextlib.closing(keeping.open_session()) as one, contextlib.closing(keeping.open_session()) as other:
        one.run("x = 1\nopen('note', 'w').close()")
        found = other.run("import os; print(os.listdir(), 'x' in globals())")
        assert found.stdout == "[] False\n"


def test_a_shell_keeps_its_folder_and_its_files(keeping: Sandbox) -> None:
    with contextlib.closing(keeping.open_session(shell=True)) as shell:
        assert shell.run("mkdir inner; cd inner; echo hi > note").ok
        assert shell.run("cat note; basename $PWD").stdout == "hi\ninner\n"
        assert shell.run("sleep 60", timeout_s=0.2).status == "timeout"
        assert shell.run("exit 3").exit_code == 3 and shell.run("cat note").stdout == "hi\n"


def test_a_session_that_is_closed_ends_the_program_that_runs(keeping: Sandbox, started: Callable[[], set[int]]) -> None:
    session = keeping.open_session()
    session.run("pass")
    running = threading.Thread(target=session.run, args=("import time; time.sleep(600)",))
    running.start()
    session.close()
    running.join(30)
    assert not running.is_alive() and session.run("1").status == "killed"
    assert not any(is_alive(pid) for pid in started())


def test_a_session_that_is_closed_while_its_process_starts_runs_nothing(
    keeping: Any, started: Callable[[], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, start = keeping.open_session(), keeping.start_runner

    def start_and_close(*args: Any, **options: Any) -> Any:
        runner = start(*args, **options)
        session.close()
        return runner

    monkeypatch.setattr(keeping, "start_runner", start_and_close)
    try:
        assert session.run("1").status == "killed"
        assert not any(is_alive(pid) for pid in started())
    finally:
        session.close()


def test_a_server_keeps_no_state() -> None:
    with open_sandbox("http://127.0.0.1:1", LIMITS) as found, pytest.raises(AsyncRLError, match="keeps no state"):
        found.open_session()


def test_another_name_is_refused() -> None:
    with pytest.raises(AsyncRLError, match="docker") as caught:
        open_sandbox("docker")
    assert caught.value.code == "config.type"


LOCAL = ["bubblewrap", "none"]


@pytest.fixture(params=LOCAL)
def own(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox of this host, of this test alone."""
    if request.param == "bubblewrap":
        needs_bubblewrap()
    with open_sandbox(request.param, LIMITS, workers=2) as found:
        yield found


@pytest.fixture
def started() -> Callable[[], set[int]]:
    """Living children of this process that it did not have before the test."""
    before = set(child_pids(os.getpid()))
    return lambda: {pid for pid in set(child_pids(os.getpid())) - before if is_alive(pid)}


def test_a_sandbox_outlives_the_thread_that_started_it(own: Sandbox, started: Callable[[], set[int]]) -> None:
    """The kernel ends a child with the thread that made it, where the child asks to die with its parent."""
    both = [threading.Thread(target=own.run, args=("import time; time.sleep(1)",)) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(timeout=60)
    time.sleep(0.2)
    warm = started()
    assert len(warm) == 2
    assert [own.run("print(1)").stdout for _ in range(2)] == ["1\n", "1\n"]
    assert started() == warm, "the same processes as before"


def test_a_sandbox_that_reads_nothing_is_given_up(
    own: Sandbox, started: Callable[[], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "GRACE_S", 3.0)
    assert own.run("print(1)").ok
    (first,) = started()
    for pid in (first, *descendants(first)):
        os.kill(pid, signal.SIGSTOP)
    result = own.run("print(input()[:1])", "x" * (4 << 20), timeout_s=0.5)
    assert result.status == "timeout", result
    assert own.run("print(2)", timeout_s=60).stdout == "2\n" and first not in started()


def test_a_sandbox_with_many_open_files_beside_it(own: Sandbox) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"at most {hard} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert own.run("print(1)").stdout == "1\n"
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
@pytest.mark.parametrize("who", ["the process that uses it", "the sandbox"])
def test_a_program_ends_with(kind: str, who: str) -> None:
    """Killed without a chance to clean up, as at the time-out of a reward."""
    if kind == "bubblewrap":
        needs_bubblewrap()
    code = (
        f"from producers.sandbox import open_sandbox\nopen_sandbox({kind!r}).run('import time; time.sleep(900)',"
        "timeout_s=900.0)"
    )
    user = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        whole = 3 if kind == "bubblewrap" else 2  # with bwrap
        wait_for(lambda: len(descendants(user.pid)) >= whole)
        (started,) = child_pids(user.pid)
        below = descendants(user.pid)
        os.kill(user.pid if who != "the sandbox" else started, signal.SIGKILL)
        wait_for(lambda: not any(map(is_alive, below)))
    finally:
        for pid in (*descendants(user.pid), user.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        user.wait(timeout=60)


def test_a_program_whose_runner_is_gone_does_not_begin(tmp_path: Path) -> None:
    """The runner may be killed between its fork and the moment from which the kernel takes the program with it."""
    (tmp_path / "main.py").write_text("open('ran', 'w').close()\n")
    code = (
        "import os, sys\nfrom producers.sandbox import runner\n"
        "job = {'args': [], 'timeout_s': 5, 'memory_bytes': 1 << 30, 'file_bytes': 1 << 20}\n"
        "settings, parent = {'paths': [], 'max_processes': 0}, os.getpid() + int(sys.argv[2])\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    runner.program(job, sys.argv[1], (0, 1, 2), settings, parent)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    for other, ran in ((0, True), (1, False)):
        command = [sys.executable, "-c", code, str(tmp_path), str(other)]
        done = subprocess.run(command, timeout=60, check=False, stdin=subprocess.DEVNULL)
        assert done.returncode == int(not ran) and (tmp_path / "ran").exists() is ran
        (tmp_path / "ran").unlink(missing_ok=True)


def test_what_was_stopped_is_gone(started: Callable[[], set[int]]) -> None:
    """Also at once, and not at the end of its time."""
    code = "import os, time\nfor _ in range(3): os.fork()\nx = b'x' * (100 << 20)\ntime.sleep(900)"
    needs_bubblewrap()
    living: set[int] = set()
    found: list[SandboxResult] = []
    with open_sandbox("bubblewrap", LIMITS) as sandbox:
        thread = threading.Thread(target=lambda: found.append(sandbox.run(code, timeout_s=900.0)))
        thread.start()
        while thread.is_alive():
            living |= {pid for above in started() for pid in descendants(above)}
            time.sleep(0.01)
    assert found[0].status == "memory" and len(living) > 2
    wait_for(lambda: not any(map(is_alive, living)))


def wait_for(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Fails where it does not come true."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
