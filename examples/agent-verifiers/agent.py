"""Any environment of verifiers 0.4 (tasksets and harnesses) as an agent, in an interpreter that has verifiers.

    python agent.py environment.json --rows > rows.jsonl    # the tasks, for data.path
    python agent.py environment.json                        # environment.agent.command, with sessions above 1

`environment.json` is the environment's own configuration, `env` in verifiers. The harness asks the producer's endpoint,
which records the policy's tokens. The reward of an episode is the mean of its trained agents' rewards; metrics are
parts. An episode that failed has no reward (`environment.no_reward`), and its prompt is tried again.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


def rows(env: vf.Env) -> None:
    """Print a row for each task. The prompt is only shown: the harness makes the one that the policy sees."""
    for index, task in enumerate(env.taskset):
        print(json.dumps({"prompt": str(task.data.prompt or ""), "task": index}))


async def play(env: vf.Env, job: dict) -> dict | None:
    """Play one episode; its reward and metrics."""
    origin, version = job["base_url"].rsplit("/", 1)
    address = f"{origin}/s/{job['api_key']}/{version}"  # verifiers keeps one client for each address, and its key
    client = EvalClientConfig(base_url=address, api_key_var="PATH")
    task = next(iter(env.taskset.include(idx=[job["row"]["task"]])))
    episode = await env.run_episode(task, ModelContext(model=job["model"], client=client))
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if not episode.ok or not trained:
        failures = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        print(*(f"{error.type}: {error.message}" for error in failures), sep="\n", file=sys.stderr)
        return None
    metrics = {name: value for trace in trained for name, value in trace.metrics.items() if isinstance(value, float)}
    return metrics | {"reward": sum(trace.reward for trace in trained) / len(trained)}


async def serve(env: vf.Env) -> None:
    """Play sessions until standard input ends. Only answers go to standard output."""
    answers, sys.stdout = sys.stdout, sys.stderr
    loop = asyncio.get_running_loop()
    async with env.serving():
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await play(env, json.loads(line))), file=answers, flush=True)


def main() -> None:
    """Play the sessions, or print the rows."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of uv
    sys.path.insert(0, str(Path(sys.argv[1]).resolve().parent))  # a taskset may be a module next to its configuration
    env = load_environment(resolve_env_config(json.loads(Path(sys.argv[1]).read_text())))
    if "--rows" in sys.argv[2:]:
        rows(env)
    else:
        asyncio.run(serve(env))


if __name__ == "__main__":
    main()
