"""What every sandbox promises, on each implementation: isolated by bubblewrap, without isolation, and over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from sandbox_lab import needs_bubblewrap, served

from asyncrl.errors import AsyncRLError
from producers.sandbox import Sandbox, SandboxJob, SandboxLimits, open_sandbox

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
    [("1 / 0", "ZeroDivisionError"), ("def x(:", "SyntaxError"), ("import no_such_thing", "ModuleNotFoundError"),
     ("assert 1 == 2, 'differs'", "AssertionError: differs")],
)  # fmt: skip
def test_an_exception_is_a_result_with_its_text(sandbox: Sandbox, code: str, words: str) -> None:
    result = sandbox.run(code)
    assert result.status == "finished" and result.exit_code == 1 and words in result.stderr
    assert "inside.py" not in result.stderr  # nothing of the machinery


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


def test_another_name_is_refused() -> None:
    with pytest.raises(AsyncRLError, match="docker") as caught:
        open_sandbox("docker")
    assert caught.value.code == "config.type"
