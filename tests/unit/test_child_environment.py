"""Processes that run code of users, models, data sets and agents see no secrets of the launcher."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from bare_config import BARE
from test_house import ROOT, calls_of

from asyncrl.config import Config, parse
from asyncrl.config.judges import find_judge
from asyncrl.config.sections.environment import AgentConfig
from asyncrl.environment import ToolCall
from asyncrl.launcher.process import Child
from asyncrl.preflight.code import check_rewards
from asyncrl.process_plan.plan import ProcessPlan, plan
from asyncrl.runtime.child_environment import NAMES, child_environment, is_inherited
from producers.agents.processes import Agent
from producers.rewards.build import make_scorer
from producers.rewards.pipe import Result
from producers.rewards.sample import RewardSample
from producers.sandbox import SandboxJob, open_sandbox
from producers.tools.base import make_toolbox

SECRETS = {
    "WANDB_API_KEY": "wandb-0c1d",
    "SWANLAB_API_KEY": "swan-0c1d",
    "MLFLOW_TRACKING_TOKEN": "mlflow-0c1d",
    "HF_TOKEN": "hf-0c1d",
    "HUGGING_FACE_HUB_TOKEN": "hub-0c1d",
    "VLLM_API_KEY": "vllm-0c1d",
    "ASYNCRL_REDIS_PASSWORD": "redis-0c1d",
    "ASYNCRL_ENGINE_TOKEN": "engine-0c1d",
    "JUDGE_KEY": "judge-0c1d",
    "AWS_SECRET_ACCESS_KEY": "aws-0c1d",
    "SSH_AUTH_SOCK": "/ssh-0c1d",
    "HTTPS_PROXY": "http://me:0c1d@proxy",
}
MARK = "0c1d"
WANTED = "OWN_SERVICE_KEY"
#: A program that prints every variable that it and the kernel know of itself.
LOOK = "import os; print(sorted(os.environ.items())); print(open('/proc/self/environ').read())"


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(WANTED, "wanted")


def config_of(text: str = "", **where: Path) -> Config:
    return parse(BARE + text, overrides=[f"run.dir={where['folder'] / 'run'}"] if where else [])


# ---------------------------------------------------------------- what is inherited


def test_names_of_secrets_pass_only_when_they_are_listed() -> None:
    assert not [name for name in SECRETS if is_inherited(name)]
    made = child_environment([WANTED], more={"OPENAI_API_KEY": "session"})
    assert made[WANTED] == "wanted" and made["OPENAI_API_KEY"] == "session"
    assert made["PATH"] == os.environ["PATH"] and MARK not in str(made)
    assert child_environment(["NOT_SET"]) == child_environment()


@pytest.mark.parametrize(
    "name",
    ["PATH", "HOME", "LC_ALL", "PYTHONPATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
     "ASCEND_RT_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "HF_HOME", "TOKENIZERS_PARALLELISM", "ASYNCRL_FAILPOINT"],
)  # fmt: skip
def test_what_programs_need_is_inherited(name: str) -> None:
    assert is_inherited(name) and not any(word in NAMES for word in SECRETS)


# ---------------------------------------------------------------- every kind of child


REWARD = """
import os
SEEN = str(sorted(os.environ.items())) + open("/proc/self/environ").read()
def look(data_source, solution_str, ground_truth, extra_info=None):
    seen = str(sorted(os.environ.items())) + SEEN
    raise ValueError(("0c1d" in seen, "OWN_SERVICE_KEY" in seen))
"""


@pytest.fixture
def reward_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "looking.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("listed", [False, True])
def test_reward_functions(reward_module: Path, listed: bool) -> None:
    env = f'env = ["{WANTED}"]\n' if listed else ""
    config = parse(BARE.replace("[[reward]]", f"[[reward]]\n{env}").replace('"m:f"', '"looking:look"'))
    judge = find_judge(config, "")
    assert judge is not None and judge.env == ((WANTED,) if listed else ())
    scorer, found = make_scorer(config, judge), list[Result]()
    scorer.start()
    try:
        sample = RewardSample("", "", [], [], {})
        scorer.score([sample], found.append)
    finally:
        scorer.close()
    assert f"(False, {listed})" in found[0].detail, found


def test_checks_of_reward_functions_see_what_the_functions_will_see(reward_module: Path) -> None:
    (reward_module / "keyed.py").write_text(f'import os\nKEY = os.environ["{WANTED}"]\ndef score(sample): return 1.0\n')
    config = config_of()
    asked = msgspec.structs.replace(config.reward[0], function="keyed:score")
    [problem] = check_rewards(msgspec.structs.replace(config, reward=(asked,)))
    assert WANTED in problem.message
    named = msgspec.structs.replace(asked, env=(WANTED,))
    assert not list(check_rewards(msgspec.structs.replace(config, reward=(named,))))


def test_judge_gets_the_key_of_its_server_alone() -> None:
    text = '[[judge]]\nname = "u"\nkind = "url"\nurl = "http://127.0.0.1:9/v1"\nmodel = "m"\nprompt = "{response}"\n'
    config = config_of(text + 'api_key_env = "JUDGE_KEY"\n[[reward]]\njudge = "u"\n')
    judge = find_judge(config, "u")
    assert judge is not None and judge.env == ("JUDGE_KEY",)
    scorer = make_scorer(config, judge)
    made = child_environment(scorer._env)
    assert [name for name in SECRETS if name in made] == ["JUDGE_KEY"]


@pytest.mark.parametrize("sessions", [1, 2])
@pytest.mark.parametrize("names", [(), (WANTED,)])
def test_agents(names: tuple[str, ...], sessions: int) -> None:
    check = "seen = str(sorted(os.environ.items())) + open('/proc/self/environ').read()\n"
    say = (
        f"print({{'reward': ('{MARK}' in seen) * 1.0, 'own': '{WANTED}' in seen}}.__repr__().replace(chr(39), chr(34))"
    )
    say += ".replace('True', 'true').replace('False', 'false'), flush=True)\n"
    loop = "import os, sys\n" + check + ("for line in sys.stdin:\n    " + say if sessions > 1 else say)

    async def play() -> dict[str, object]:
        agent = Agent(AgentConfig(command=(sys.executable, "-c", loop), sessions=sessions), env=names)
        try:
            found: dict[str, object] = await agent.play({}, url="http://here", key="of this session")
            return found
        finally:
            await agent.close()

    assert asyncio.run(play()) == {"reward": 0.0, "own": bool(names)}


def kinds_of_sandboxes() -> Iterator[str]:
    yield "none"
    if shutil.which("bwrap"):
        yield "bubblewrap"


@pytest.mark.parametrize("kind", ["none", "bubblewrap"])
def test_programs_in_sandboxes(kind: str) -> None:
    if kind not in kinds_of_sandboxes():
        pytest.skip("no bwrap on the PATH")
    sandbox = open_sandbox(kind)
    parents = (
        "\nfor pid in (os.getppid(), 1):\n    try: print(open(f'/proc/{pid}/environ').read())\n    except OSError: pass"
    )
    try:
        found = sandbox.run_job(SandboxJob(code=LOOK + (parents if kind == "bubblewrap" else "")))
    finally:
        sandbox.close()
    assert found.exit_code == 0 and "PATH" in found.stdout, found
    assert MARK not in found.stdout and WANTED not in found.stdout


SERVER = f"""
import os
from mcp.server.mcpserver import MCPServer
server = MCPServer("env")
@server.tool()
def look() -> str:
    seen = str(sorted(os.environ.items())) + open("/proc/self/environ").read()
    return str(("{MARK}" in seen, "{WANTED}" in seen, os.environ.get("OWN")))
server.run()
"""


@pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="needs mcp")
@pytest.mark.parametrize("names", [(), (WANTED,)])
def test_servers_of_tools(tmp_path: Path, names: tuple[str, ...]) -> None:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    args = {"mcp": {"env": {"command": sys.executable, "args": [str(path)], "env": {"OWN": "given"}}}}

    async def ask() -> str:
        box = make_toolbox(["mcp:env"], args, env=names)
        await box.open()
        try:
            return await box.call(ToolCall("look", {}), timeout_s=30.0)
        finally:
            await box.close()

    assert asyncio.run(ask()) == str((False, bool(names), "given"))


# ---------------------------------------------------------------- roles of the launcher


def inherited(config: Config, role: str) -> tuple[str, ...] | None:
    return next(one.inherits for one in plan(config, ("buffer", "producer", "reward", "learner"), config_path=Path("c"))
                if one.role == role)  # fmt: skip


def test_workers_inherit_what_their_settings_name() -> None:
    config = config_of(f'[environment]\nenv = ["{WANTED}"]\n')
    assert inherited(config, "producer") == (WANTED,) and inherited(config, "reward") == ()
    assert inherited(config, "buffer") is None is inherited(config, "learner")
    served = config_of('[producers]\nengine = "sglang"\nurl = "http://127.0.0.1:9"\n')
    assert inherited(served, "producer") == ("ASYNCRL_ENGINE_TOKEN",)


@pytest.mark.parametrize(("names", "seen"), [((), False), (None, True)])
def test_launched_processes(tmp_path: Path, names: tuple[str, ...] | None, seen: bool) -> None:
    child = Child(
        ProcessPlan("producer", "p", (sys.executable, "-c", LOOK), env={"MINE": "plan"}, inherits=names),
        tmp_path / "p.log",
    )
    child.start()
    assert child.process is not None and child.process.wait(60) == 0
    said = (tmp_path / "p.log").read_text()
    assert "MINE" in said and (MARK in said) == seen


# ---------------------------------------------------------------- every place that starts a process


STARTERS = {"Popen", "run", "call", "check_call", "check_output", "create_subprocess_exec", "create_subprocess_shell",
            "spawn", "StdioServerParameters"}  # fmt: skip
NEVER = {"system", "popen", "fork", "forkpty", "posix_spawn", "Process", "Pool", "ProcessPoolExecutor"}
NEVER |= {f"{verb}{end}" for verb in ("exec", "spawn") for end in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")}
FORKS = {
    "producers/sandbox/runner.py": "a program of the sandbox, whose environment is made here",
    "producers/sandbox/browser_runner.py": "the browser of the sandbox, in the environment of the sandbox",
    "producers/sandbox/session_runner.py": "a command of the sandbox's shell, in the environment of the sandbox",
}


def wrong_starts(source: str) -> list[str]:
    """Calls that start a process whose environment is not made by `child_environment`."""
    tree, wrong = ast.parse(source), []
    own = {  # a function that starts processes for others passes on what it was given
        call
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in STARTERS
        for call, _ in calls_of(node)
        if any(word.arg == "env" and getattr(word.value, "id", "") == "env" for word in call.keywords)
    }
    for call, name in calls_of(tree):
        owner = getattr(getattr(call.func, "value", None), "id", "")
        if name in NEVER and owner in ("os", "multiprocessing", "context", "futures", ""):
            wrong.append(f"line {call.lineno}: {name}")
        if name not in STARTERS or (name in ("run", "call") and owner != "subprocess") or call in own:
            continue
        env = next((word.value for word in call.keywords if word.arg == "env"), None)
        made = isinstance(env, ast.Call) and getattr(env.func, "id", "") == "child_environment"
        if not made and getattr(env, "id", "") != "ENVIRONMENT":
            wrong.append(f"line {call.lineno}: {name} without env=child_environment(...)")
    return wrong


def test_every_process_of_producers_gets_such_an_environment() -> None:
    found, starts = {}, 0
    for path in sorted((ROOT / "producers").rglob("*.py")):
        source, name = path.read_text(), str(path.relative_to(ROOT))
        starts += source.count("env=child_environment(") + source.count("env=ENVIRONMENT")
        if name not in FORKS and (wrong := wrong_starts(source)):
            found[name] = wrong
    assert not found and starts == 5


@pytest.mark.parametrize(
    "source",
    ["subprocess.run(['x'])", "subprocess.Popen(['x'], env=os.environ)", "subprocess.Popen(['x'], env={**os.environ})",
     "asyncio.create_subprocess_exec('x', env=env)", "os.system('x')", "os.fork()", "os.execve('x', [], {})",
     "spawn(['x'], env=dict(os.environ))", "multiprocessing.Process(target=f)",
     "def start(env):\n    subprocess.Popen(['x'], env=env)"],
)  # fmt: skip
def test_other_environments_are_found(source: str) -> None:
    assert wrong_starts(source)


@pytest.mark.parametrize(
    "source",
    ["subprocess.run(['x'], env=child_environment(names))", "asyncio.run(f())", "loop.call(x)",
     "def spawn(env):\n    subprocess.Popen(['x'], env=env)"],
)  # fmt: skip
def test_right_ones_pass(source: str) -> None:
    assert not wrong_starts(source)
