"""Sessions of several turns in whole runs on the real vLLM: an environment that outlives the engine, and an agent."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from exact_run import GAP
from test_agents_run import agent_openai, complete
from test_tool_run import ENVIRONMENT, check_archive
from test_vllm_run import OWN, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
ON_VLLM = ("producers.engine=vllm", "producers.count=1", "weightsync.timeout_s=120", *OWN)
#: The environment of the runs on hf; once, between two turns of a session, all processes of vLLM are killed.
KILLING = """
import os, signal
from asyncrl.runtime.host_facts import descendants

async def killing(chat, row, *, folder):
    killed = pathlib.Path(folder) / "killed"
    if row["number"] == 9 and not killed.exists():
        await chat.say(max_new_tokens=5)
        killed.write_text(str(os.getpid()))
        for pid in descendants(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        await chat.say("+1+", max_new_tokens=5)
        (pathlib.Path(folder) / "answered").write_text("a dead engine answered")
    return await play(chat, row, folder=folder)
"""


def largest_gap(run: Any) -> float:
    """Between engine and learner under the same weights, over all sampled tokens of all rows; nats."""
    gaps = [
        line["lag/0/logprob_gap_max"] for line in run.lines("metrics/learner.jsonl") if "lag/0/logprob_gap_max" in line
    ]
    assert gaps, "the first step always has tokens of its own weights"
    return max(gaps)


def test_sessions_on_vllm_outlive_its_death(run: Any, figure: Callable[[str], None]) -> None:
    (run.folder / "my_envs.py").write_text(ENVIRONMENT + KILLING)
    rows = [{"prompt": f"{n % 90 + 10}+{n % 7 + 10}=", "number": n} for n in range(64)]
    (run.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run.launch(
        "environment.name=my_envs:killing",
        f'environment.args={{folder="{run.folder}"}}',
        "learner.steps=3",
        "log.archive=true",
        "data.shuffle=false",
        *ON_VLLM,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + run.logs()
    audit = run.audit()
    assert (audit["exit"], audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, 0, 12)
    assert audit["spans"] == audit["spans_matched"] > 0
    producers = {line["pid"] for line in run.lines("processes.jsonl") if line["role"] == "producer"}
    assert len(producers) == 2 and int((run.folder / "killed").read_text()) in producers
    assert not (run.folder / "answered").exists()
    assert "engine.broken" in (run.dir / "logs" / "producer-0.log").read_text()
    assert check_archive(run) > 0 and run.living() == []
    gap = largest_gap(run)
    assert gap <= GAP
    figure(f"vllm, killed in a session: engine and learner at lag 0 differ by at most {gap:.1g} nats")


def test_an_agent_plays_a_run_on_vllm(run: Any, tiny_model: Any, figure: Callable[[str], None]) -> None:
    run.config.write_text(agent_openai.configuration(run.folder, tiny_model, steps=2))
    done = run.launch(
        "buffer.batch_groups=2", "sampling.group_size=2", "environment.agent.max_processes=2", *ON_VLLM, timeout=800
    )
    assert done.returncode == 0, done.stdout + run.logs()
    complete(run, groups=4)
    lines = [line for line in run.lines("metrics/learner.jsonl") if "reward_mean" in line]
    assert len(lines) == 2 and all(0 < line["observed_share"] < 1 for line in lines)
    gap = largest_gap(run)
    assert gap <= GAP
    figure(f"vllm, agents: engine and learner at lag 0 differ by at most {gap:.1g} nats")
