"""Ways out of the sandbox, each tried by a program: none may work, and the next program must find it as new.

Run twice: as root does it (an unprivileged uid of the host) and as anybody else does (a user namespace).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sandbox_lab import needs_bubblewrap

from asyncrl.errors import AsyncRLError
from producers.sandbox import Sandbox, SandboxLimits, SandboxResult, bubblewrap, local, open_sandbox, seccomp

LIMITS = SandboxLimits(
    timeout_s=60.0, memory_bytes=256 << 20, disk_bytes=16 << 20, output_bytes=10_000, max_processes=16
)
CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*args):
    done = libc.syscall(*args)
    return os.strerror(ctypes.get_errno()) if done == -1 else f"worked: {done}"
"""


@pytest.fixture(scope="module", params=["root", "user"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    needs_bubblewrap()
    if request.param == "root" and not bubblewrap.is_privileged():
        pytest.skip("these tests do not run as root")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "user":
            patch.setattr(bubblewrap, "is_privileged", lambda: False)
        with open_sandbox("bubblewrap", LIMITS) as found:
            yield found


@pytest.fixture(autouse=True)
def as_new_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    if "sandbox" not in request.fixturenames:
        yield
        return
    sandbox = request.getfixturevalue("sandbox")
    yield
    code = "import os; print(os.listdir('/tmp'), os.listdir('.'), [p for p in os.listdir('/proc') if p.isdigit()])"
    result = sandbox.run(code)
    assert result.stdout.startswith("['work'] ['main.py'] ['1', "), result
    assert result.stdout.count("'") == 8, "it is alone with pid 1"


def count_called(word: str) -> int:
    """Processes of the host with this word in their command line."""
    found = 0
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            found += word.encode() in place.read_bytes()
    return found


def test_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0asyncrl-test-{os.getpid()}")
        abstract.listen()
        code = f"""
import socket
def attempt(family, address):
    try:
        with socket.socket(family) as end:
            end.settimeout(5)
            end.connect(address)
            return 'connected'
    except OSError as error:
        return type(error).__name__
print(attempt(socket.AF_INET, ('127.0.0.1', {listener.getsockname()[1]})))
print(attempt(socket.AF_INET, ('1.1.1.1', 53)))
print(attempt(socket.AF_UNIX, '\\0asyncrl-test-{os.getpid()}'))
try:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); print('netlink')
except OSError as error:
    print(error.strerror)
"""
        result = sandbox.run(code)
    assert result.stdout.split("\n")[:3] == ["ConnectionRefusedError", "OSError", "ConnectionRefusedError"], result
    assert "connected" not in result.stdout and "Address family not supported" in result.stdout


def test_fork_bomb(sandbox: Sandbox) -> None:
    marker = 7_654_321 + os.getpid()
    bomb = sandbox.run(f"import os, time\nwhile True:\n    if os.fork() == 0: time.sleep({marker})", timeout_s=20.0)
    assert bomb.status in ("killed", "memory", "finished") and not bomb.ok, bomb  # stopped, or refused by the kernel
    endless = sandbox.run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", timeout_s=2.0)
    assert endless.status in ("killed", "memory", "timeout"), endless


def test_ten_gigabytes(sandbox: Sandbox) -> None:
    result = sandbox.run("x = b'x' * (10 << 30)")
    assert result.status == "memory", result


def test_memory_of_many_processes_together(sandbox: Sandbox) -> None:
    code = "import os, time\nfor _ in range(10):\n    if os.fork() == 0: break\nx = b'x' * (90 << 20)\ntime.sleep(50)"
    result = sandbox.run(code, timeout_s=50.0)
    assert result.status == "memory", result


def test_memory_that_processes_share_counts(sandbox: Sandbox) -> None:
    code = (
        "import mmap, os, time\nfor _ in range(10):\n    if os.fork() == 0: break\n"
        "held = mmap.mmap(-1, 90 << 20)\nfor _ in range(90): held.write(b'x' * (1 << 20))\ntime.sleep(50)"
    )
    result = sandbox.run(code, timeout_s=50.0)
    assert result.status == "memory", result


def test_memory_behind_descriptors_is_refused(sandbox: Sandbox) -> None:
    result = sandbox.run("import os\ntry: os.memfd_create('x')\nexcept OSError as error: print(error.strerror)")
    assert result.stdout == "Operation not permitted\n", "no process would hold it, and nothing would count it"


def test_files_without_end_count_as_memory(sandbox: Sandbox) -> None:
    code = "import itertools\nfor number in itertools.count(): open(str(number), 'w').close()"
    result = sandbox.run(code, timeout_s=50.0, memory_bytes=64 << 20)
    assert result.status == "memory", result


def test_disk_fill(sandbox: Sandbox) -> None:
    code = """
import os
total = 0
try:
    for number in range(100):
        with open(f'/tmp/{number}', 'wb') as stream:
            for _ in range(4): total += stream.write(bytes(1 << 20)); stream.flush()
except OSError as error:
    print(error.strerror)
print(total >> 20)
for folder in ('/', '/dev', '/dev/shm', '/proc', '/usr', '/usr/lib', '/lib', '/sandbox', '/etc', '/tmp/..'):
    for name in ('x', 'python3'):
        try:
            open(f'{folder}/{name}', 'w'); print('wrote to', folder)
        except OSError:
            pass
"""
    result = sandbox.run(code)
    assert result.ok, result
    assert result.stdout.splitlines()[0] == "No space left on device" and int(result.stdout.splitlines()[1]) <= 16
    assert "wrote" not in result.stdout


def test_signal_parent(sandbox: Sandbox) -> None:
    code = f"""
import os, signal
os.kill(1, signal.SIGKILL); os.kill(os.getppid(), signal.SIGTERM)
for pid in ({os.getpid()}, {os.getppid()}):
    try:
        os.kill(pid, signal.SIGKILL); print('reached', pid)
    except OSError as error:
        print(error.strerror)
try:
    os.kill(-1, signal.SIGKILL)
except OSError:
    pass
print('end')
"""
    result = sandbox.run(code)
    assert "reached" not in result.stdout, result  # `as_new_afterwards` shows that pid 1 lives


def test_read_a_key_file(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.write_text("the secret of the run")
    monkeypatch.setenv("ASYNCRL_TEST_SECRET", "the secret of the run")
    with open_sandbox("bubblewrap", LIMITS) as fresh:  # started with the secret in its environment
        result = fresh.run(f"""
import os
for place in ({str(key)!r}, '/etc/passwd', '/etc/shadow', '/root/.ssh', '/root/.bashrc', '/proc/1/environ',
              '/proc/1/root{key}', '/proc/self/root{key}', '/proc/kcore', {str(Path(__file__))!r}):
    try:
        print('read', place, open(place, 'rb').read(100))
    except OSError as error:
        pass
print(dict(os.environ))
""")
    assert result.ok and "secret" not in result.stdout and "read" not in result.stdout, result


@pytest.mark.parametrize("who", ["1", "host"])
def test_memory_of_the_parent(sandbox: Sandbox, who: str) -> None:
    pid = os.getpid() if who == "host" else 1
    result = sandbox.run(f"""
for name in ('mem', 'maps', 'environ', 'fd/0', 'cwd', 'exe'):
    try:
        open('/proc/{pid}/' + name, 'rb').read(10); print('read', name)
    except OSError as error:
        print(error.strerror)
""")
    assert result.ok and "read" not in result.stdout, result


def test_ptrace_and_other_calls(sandbox: Sandbox) -> None:
    import platform

    column = seccomp.MACHINES[platform.machine()][1]
    numbers = {name: both[column] for name, *both in seccomp.REFUSED}
    attempts = {
        "attach to pid 1": f"call({numbers['ptrace']}, 16, 1, 0, 0)",
        "read pid 1": f"call({numbers['process_vm_readv']}, 1, 0, 0, 0, 0, 0)",
        "new user namespace": f"call({numbers['unshare']}, 0x10000000)",
        "mount": f"call({numbers['mount']}, b'none', b'/tmp', b'tmpfs', 0, 0)",
        "bpf": f"call({numbers['bpf']}, 0, 0, 0)",
        "keys": f"call({numbers['keyctl']}, 0, 0, 0)",
        "shared memory that stays": f"call({numbers['shmget']}, 1, 4096, 0o1666)",
        "clone with namespaces": f"call({seccomp.MACHINES[platform.machine()][2]}, 0x10000011, 0, 0, 0, 0)",
    }
    code = CALL + "\n".join(f"print({name!r}, '=', {attempt})" for name, attempt in attempts.items())
    result = sandbox.run(code)
    lines = dict(line.split(" = ") for line in result.stdout.splitlines())
    assert lines == dict.fromkeys(attempts, "Operation not permitted"), result


def test_symlinks_in_tmp(sandbox: Sandbox, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("here")
    code = f"""
import os
os.symlink('/etc', 'folder'); os.symlink('/proc/1/environ', 'out'); os.symlink({str(precious)!r}, '/tmp/precious')
os.symlink('/tmp', 'loop'); os.mkfifo('pipe')
os.makedirs('locked/inner'); open('locked/inner/x', 'w').close(); os.chmod('locked', 0)
"""
    result = sandbox.run(code, fetch=["out", "folder/passwd", "pipe"])
    assert result.ok and result.files == {}, result
    assert (precious / "file").read_text() == "here" and not Path("/tmp/precious").exists()


def test_folders_too_deep_to_remove(sandbox: Sandbox) -> None:
    result = sandbox.run("import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')")
    assert result.status == "finished"  # `as_new_afterwards` finds a new sandbox


def test_infinite_output(sandbox: Sandbox) -> None:
    for stream in ("stdout", "stderr"):
        result = sandbox.run(f"import sys\nwhile True: sys.{stream}.write('x' * 5000)")
        assert result.status == "output" and len(result.stdout) + len(result.stderr) <= 11_000


def test_a_program_that_stays_behind(sandbox: Sandbox) -> None:
    result = sandbox.run("import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(1000)\nprint('main ends')")
    assert result.stdout == "main ends\n" and result.ok


def test_what_is_read_from_the_frames_is_no_frame(sandbox: Sandbox) -> None:
    code = (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'x'); print('wrote', fd)\n    except OSError: pass"
    )
    assert sandbox.run(code).stdout == ""


def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    needs_bubblewrap()
    marker = str(tmp_path)  # a folder to import from: it stands in the command lines
    code = """
import os, sys, time
from producers.sandbox import SandboxLimits, open_sandbox
sandbox = open_sandbox('bubblewrap', SandboxLimits(paths=(os.environ['MARKER'],)))
sandbox.run('pass')
print('up', flush=True)
time.sleep(300)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "MARKER": marker}
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    assert count_called(marker) >= 2
    process.kill()
    process.wait(timeout=60)
    process.stdout.close()
    wait_for(lambda: count_called(marker) == 0)


def wait_for(condition: Callable[[], bool], *, limit_s: float = 60.0) -> None:
    """Until it holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AsyncRLError) as caught:
        open_sandbox("bubblewrap").run("print(1)")
    assert caught.value.code == "sandbox.unavailable" and "apt-get install bubblewrap" in caught.value.remedy


def test_where_namespaces_are_forbidden_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in = tmp_path / "bwrap"
    stand_in.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(AsyncRLError, match="No permissions to create new namespace") as caught:
        open_sandbox("bubblewrap").run("print(1)")
    assert caught.value.code == "sandbox.unavailable"


def killed_by_hand(sandbox: Sandbox) -> SandboxResult:
    assert isinstance(sandbox, local.LocalSandbox)
    inside = sandbox._idle[0]
    os.killpg(inside._process.pid, 9)
    inside._process.wait(timeout=60)
    return sandbox.run("print('again')")


def test_a_sandbox_that_was_killed_is_started_again(sandbox: Sandbox) -> None:
    assert killed_by_hand(sandbox).stdout == "again\n"
