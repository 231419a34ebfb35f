"""vLLM as bench_engines.py drives it: run by the Python of vLLM's environment, one JSON line in and out per round.

First line in: {"model": folder, "slots": n, "max_len": n}; out: {"ready": seconds}. Then rounds: {"in_flight": n,
"requests": [[prompt ids, new tokens], ...]}; out: {"seconds": s, "tokens": n}. Each request asks for log-probs of its
tokens, a seed of its own, and just so many tokens, as the hf engine is asked. What vLLM prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any


async def one(llm: Any, name: str, prompt: list[int], new: int) -> int:
    """Generate; how many tokens came."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    wanted = SamplingParams(
        max_tokens=new,
        ignore_eos=True,
        temperature=1.0,
        logprobs=0,
        detokenize=False,
        seed=hash(name) % 2**31,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    count = 0
    async for output in llm.generate({"prompt_token_ids": prompt}, wanted, request_id=name):
        count = len(output.outputs[0].token_ids)
    return count


async def round_of(llm: Any, command: dict[str, Any], number: int) -> dict[str, Any]:
    """All requests, so many at a time."""
    room = asyncio.Semaphore(command["in_flight"])

    async def bounded(place: int, prompt: list[int], new: int) -> int:
        async with room:
            return await one(llm, f"{number}-{place}", prompt, new)

    started = time.perf_counter()
    counts = await asyncio.gather(*(bounded(place, *pair) for place, pair in enumerate(command["requests"])))
    return {"seconds": time.perf_counter() - started, "tokens": sum(counts)}


async def main() -> None:
    """Serve rounds until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # its processes print
    given = json.loads(sys.stdin.readline())
    started = time.perf_counter()
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=given["model"],
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            seed=0,
            max_model_len=given["max_len"],
            max_num_seqs=given["slots"],
            max_num_batched_tokens=2048,
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=256 << 20,
            disable_log_stats=True,
            enable_prefix_caching=False,
        )
    )

    def say(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    say({"ready": time.perf_counter() - started})
    loop = asyncio.get_running_loop()
    number = 0
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        number += 1
        say(await round_of(llm, json.loads(line), number))
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
