"""Run by the interpreter of vLLM: what vLLM alone, without asyncrl, generates greedily in float32, as JSON.

python tests/e2e/vllm_says.py FOLDER 5 6 7 8
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """One request of eight tokens."""
    from vllm import LLM, SamplingParams

    engine = LLM(model=sys.argv[1], dtype="float32", max_model_len=64, enforce_eager=True)
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
    [found] = engine.generate([{"prompt_token_ids": [int(word) for word in sys.argv[2:]]}], params)
    ids = list(found.outputs[0].token_ids)
    logprobs = [step[token].logprob for token, step in zip(ids, found.outputs[0].logprobs, strict=True)]
    print("\n" + json.dumps({"ids": ids, "logprobs": logprobs}), flush=True)


if __name__ == "__main__":
    main()
