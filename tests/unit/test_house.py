"""Rules of the house that a machine can see: no pickle, every wait bounded, lazy imports, a fast front door."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from house_waits import unbounded

ROOT = Path(__file__).parents[2]
PACKAGES = ("asyncrl", "buffers", "weightsync", "producers", "learners")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "ray"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "recv_pyobj",
    "send_pyobj",
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
CONTRACTS = [
    "errors",
    "versions",
    "wire",
    "config",
    "metrics",
    "net.requester",
    "net.async_requester",
    "net.responder",
    "plugins",
    "runtime.run_dir",
    "runtime.role",
    "runtime.device",
]


def names_of(tree: ast.AST) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.lineno, node.module.split(".")[0]))
    return found


def calls_of(tree: ast.AST) -> list[tuple[ast.Call, str]]:
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            calls.append((node, name))
    return calls


def pickles(source: str) -> list[str]:
    """Every use of pickle or of code from data in a source text."""
    tree = ast.parse(source)
    bad = [f"line {line}: import {name}" for line, name in names_of(tree) if name in FORBIDDEN_MODULES]
    for call, name in calls_of(tree):
        method = isinstance(call.func, ast.Attribute)
        owner = getattr(getattr(call.func, "value", None), "id", "") if method else ""
        weights_only = any(
            word.arg == "weights_only" and getattr(word.value, "value", None) is True for word in call.keywords
        )
        if name in FORBIDDEN_CALLS and not (method and name in ("eval", "exec")):  # model.eval() is not eval()
            bad.append(f"line {call.lineno}: {name}()")
        if owner == "torch" and name == "load" and not weights_only:
            bad.append(f"line {call.lineno}: torch.load without weights_only=True")
        if owner == "yaml" and name == "load":
            bad.append(f"line {call.lineno}: yaml.load")
    return bad


def test_the_lint_sees_pickle() -> None:
    assert len(pickles("import pickle\nfrom dill import x\nsocket.recv_pyobj()\ntorch.load(p)\nexec('x')")) == 5
    assert pickles("model.eval()\ntorch.load(p, weights_only=True)") == []


def test_no_pickle_anywhere() -> None:
    bad = {str(path.relative_to(ROOT)): found for path in SOURCES if (found := pickles(path.read_text()))}
    in_sandbox = bad.pop("producers/sandbox/session_runner.py")  # it is started inside a sandbox, to run programs
    assert {found.partition(": ")[2] for found in in_sandbox} == {"exec()"}
    assert bad == {}


def too_narrow(source: str) -> list[str]:
    """Every `except msgspec.DecodeError`: text that is no UTF-8 raises another ValueError (see errors.UNREADABLE)."""
    handlers = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler) and node.type]
    return [
        f"line {handler.lineno}: {node.attr}"
        for handler in handlers
        for node in ast.walk(handler.type or handler)
        if isinstance(node, ast.Attribute) and node.attr in ("DecodeError", "MsgspecError")
    ]


def test_what_cannot_be_decoded_is_caught_whole() -> None:
    assert len(too_narrow("try: f()\nexcept msgspec.DecodeError: pass\nexcept (OSError, m.MsgspecError): pass")) == 2
    bad = {str(path.relative_to(ROOT)): found for path in SOURCES if (found := too_narrow(path.read_text()))}
    assert bad == {}


ENDLESS = [
    "thread.join()", "process.wait()", "event.wait()", "process.communicate()", "process.wait(None)",
    "event.wait(timeout=None)", "queue.get()", "async def f(): await queue.get()", "lock.acquire()",
    "lock.acquire(True, None) or lock.acquire()", "subprocess.run(['x'])", "subprocess.check_output(['x'])",
    "subprocess.run(['x'], timeout=None)", "async def f(): await asyncio.wait(tasks)",
    "async def f(): await asyncio.wait(tasks, return_when=FIRST)", "async def f(): await asyncio.gather(a(), b())",
    "async def f(): await task", "async def f(): await self.task", "condition.wait_for(ready)",
    "async def f():\n async with asyncio.timeout(3):\n  def g(): thread.join()", "select.select([a], [], [])",
    "select.select([a], [], [], None)", "poller.poll()", "self._socket.poll()", "socket.poll(None)",
    "fcntl.flock(file, fcntl.LOCK_EX)", "dist.init_process_group('gloo')", "dist.new_group([0])", "dist.barrier()",
    "TCPStore('h', 1)", "redis.Redis(host='h')", "Redis.from_url(url)", "socket.create_connection(('h', 1))",
    "def f():\n s = socket.socket()\n s.recv(4)", "s.accept()", "socket.recv()", "socket.recv(copy=False)",
    "signal.pause()", "os.waitpid(pid, 0)", "input()", "pool.shutdown(wait=True)", "urlopen(url)",
    "process.stdout.readline()", "# bounded: not this line\nx = 1\nevent.wait()", "event.wait()  # bounded:",
    "event.wait()  # it will be set",
]  # fmt: skip
BOUNDED = [
    "thread.join(timeout=3)", "', '.join(x)", "event.wait(5)", "event.wait(timeout_s=x)", "values.get('a')",
    "queue.get(timeout=1)", "queue.get(block=False)", "lock.acquire(timeout=1)", "subprocess.run(['x'], timeout=9)",
    "async def f(): await asyncio.wait(tasks, timeout=3)", "async def f(): await asyncio.wait_for(queue.get(), 60)",
    "async def f():\n async with asyncio.timeout(3):\n  await task\n  await queue.get()",
    "async def f(): await asyncio.wait_for(asyncio.gather(a(), b()), timeout=3)", "condition.wait_for(ready, 60)",
    "select.select([a], [], [], 0.5)", "poller.poll(100)", "self._socket.poll(5)", "process.poll()",
    "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)", "fcntl.flock(file, fcntl.LOCK_UN)",
    "dist.init_process_group('gloo', timeout=t)", "dist.new_group([0], timeout=t)",
    "Redis.from_url(u, socket_timeout=5)",
    "def f():\n s = socket.socket()\n s.settimeout(1)\n s.recv(4)", "socket.recv(NOBLOCK, copy=False)",
    "os.waitpid(pid, os.WNOHANG)", "pool.shutdown(wait=False)", "event.wait()  # bounded: the caller's deadline",
    "async def f(): await asyncio.wait(\n  tasks,  # bounded: each has its own deadline\n )",
    "async def f(): await g()", "# it works or ends; bounded: the deadline of its caller\nevent.wait()",
]  # fmt: skip


@pytest.mark.parametrize("source", ENDLESS)
def test_the_lint_sees_endless_waits(source: str) -> None:
    assert unbounded(source) != []


@pytest.mark.parametrize("source", BOUNDED)
def test_the_lint_lets_bounded_waits_pass(source: str) -> None:
    assert unbounded(source) == []


def test_every_wait_has_a_limit() -> None:
    bad = {str(path.relative_to(ROOT)): found for path in SOURCES if (found := unbounded(path.read_text()))}
    assert bad == {}


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize(
    "statement",
    [
        f"import {', '.join('asyncrl.' + name for name in CONTRACTS)}",
        "import asyncrl.cli",
        "import buffers.client.producer, buffers.client.learner, asyncrl.monitor.status",
        "import weightsync.plan.buckets, weightsync.coordinator.rounds, buffers.groups.machine",
    ],
)
def test_light_parts_import_nothing_heavy(statement: str) -> None:
    assert modules_after(statement) & {"torch", "redis", "transformers", "vllm", "sglang", "pyarrow"} == set()


def test_producers_and_reward_workers_start_without_torch() -> None:
    assert modules_after("import producers.data.prompts, producers.rewards.main") & {"torch", "redis", "vllm"} == set()
