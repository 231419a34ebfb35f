"""Runs on resources servers of NeMo-Gym, unmodified, with their own example rows (`make test-nemo-gym`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nemo_servers
import pytest
from env_lab import ASCII, TOOLS_SHOWN

from learners.warm_start.tiny_model import make_tiny_qwen3, make_tokenizer, save_model

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import agent_openai  # noqa: E402, RUF100

pytestmark = [pytest.mark.slow, nemo_servers.INSTALLED]
#: One token each, so that random weights say them.
SAID = [
    *(f"\\boxed{{{letter}}}" for letter in "BCEI"),  # the right answers to the rows of mcqa
    *(f"<action>{action}</action>" for action in ("hit", "stand")),
    nemo_servers.called("get_counter_value"),
    *(nemo_servers.called("increment_counter", count=count) for count in range(1, 6)),
]


@pytest.mark.parametrize("name", ["mcqa", "example_session_state_mgmt", "blackjack"])
def test_samples_of_a_server_train(run: Any, name: str) -> None:
    model = run.folder / "model"
    tokenizer = make_tokenizer(model, characters=ASCII, words=SAID, chat_template=TOOLS_SHOWN)
    save_model(model, make_tiny_qwen3(len(tokenizer), seed=1, layers=2, hidden_size=64, max_positions=2048))
    text = agent_openai.configuration(run.folder, model, steps=2)
    with nemo_servers.serve(name) as url:
        for old, new in (
            (
                f'path = "{run.folder}/rows.jsonl"',
                f'path = "{nemo_servers.data(name)}"\nprompt_key = "responses_create_params"',
            ),
            ("max_prompt_tokens = 24", "max_prompt_tokens = 1600"),
            ("max_new_tokens = 24", "max_new_tokens = 400"),
            ("micro_batch_tokens = 2048", "micro_batch_tokens = 8192"),
        ):
            assert text.count(old) == 1
            text = text.replace(old, new)
        text = text[: text.index("[environment]")]
        run.config.write_text(f'{text}[environment]\nname = "nemo_gym"\nargs = {{url = "{url}"}}\nmax_turns = 5\n')
        done = run.launch("buffer.batch_groups=3", "sampling.group_size=4", timeout=150)
    assert done.returncode == 0, done.stdout + run.logs()
    audit = run.audit()
    assert audit["exit"] == 0 and (audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, 6), audit
    lines = [line for line in run.lines("metrics/learner.jsonl") if "reward_mean" in line]
    assert len(lines) == 2
    if name == "example_session_state_mgmt":
        assert all(line["observed_share"] > 0 for line in lines), "what the server shows is not trained"
    else:
        assert any(line["reward_std"] > 0 for line in lines), lines
