"""The worker's end of the group through which servers of vLLM get weights, against the producer's end; without vLLM."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from producers.engines.group_sender import GroupSender

WORKER = """
import sys
from datetime import timedelta
import torch
from producers.engines.process_group import join
name, port, sizes = sys.argv[1], int(sys.argv[2]), [int(size) for size in sys.argv[3:]]
limit = timedelta(seconds=60)
member = join(name, rank=1, size=2, backend="gloo", host="127.0.0.1", port=port, timeout=limit,
              device=torch.device("cpu"))
for size in sizes:
    print(member.receive(size, timeout=limit).numpy().tobytes().hex(), flush=True)
member.close()
"""


def test_a_worker_gets_what_the_producer_sends() -> None:
    parts = [b"weights", b"", bytes(range(200))]

    async def send() -> str:
        sender = GroupSender("asyncrl-test", workers=1, timeout_s=60)
        port = await sender.listen()
        command = [sys.executable, "-c", WORKER, "asyncrl-test", str(port), *(str(len(part)) for part in parts)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        try:
            await sender.join()
            for part in parts:
                await sender.send(memoryview(bytearray(part)))
            return (await asyncio.to_thread(worker.communicate, timeout=60))[0]
        finally:
            worker.kill()
            await sender.close()

    assert asyncio.run(send()).splitlines() == [part.hex() for part in parts]
