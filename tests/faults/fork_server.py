"""Starts learner processes without their three seconds of imports: forks them off a parent that has imported already.

Run by `learner_lab` as a process of its own. A child is a real process: it has its own pid and signals, takes SIGKILL
like any other, and leaves nothing behind but its files. One JSON line per child on stdin: {"argv", "env", "log"};
answers on stdout: {"pid"} at its start, {"pid", "code"} at its end (negative: the signal).
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from typing import Any


def load_everything() -> None:
    """What `python -m learners.main` imports on its way to the first step. It must start no thread."""
    import safetensors.torch
    import torch.distributed.fsdp
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import buffers.client
    import learners.backends.fsdp2
    import learners.loop
    import learners.main
    import weightsync.publisher

    torch.set_num_threads(1)
    assert all((safetensors.torch, AutoModelForCausalLM, AutoTokenizer, buffers.client, learners, weightsync))
    assert len(os.listdir("/proc/self/task")) == 1, "a forked child would miss the other threads"


def become(order: dict[str, Any]) -> None:
    """The child: the learner's own main, its own log, its own environment."""
    from learners.main import main

    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(log, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(order["env"])
    for limit, value in order.get("limits", {}).items():
        import resource

        resource.setrlimit(getattr(resource, limit), (value, value))
    code = 70
    try:
        code = main(order["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def say(**what: Any) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def serve() -> None:
    """Until stdin is closed; then the children are killed."""
    children: set[int] = set()
    text = b""
    say(pid=os.getpid())
    while True:
        if select.select([0], [], [], 0.01)[0]:
            part = os.read(0, 65536)
            if not part:
                break
            text += part
            while b"\n" in text:
                line, _, text = text.partition(b"\n")
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    become(order)
                children.add(pid)
                say(pid=pid)
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.discard(pid)
                say(pid=pid, code=os.waitstatus_to_exitcode(status))
    for pid in children:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    load_everything()
    serve()
