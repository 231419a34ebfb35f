"""Rows to token ids: which text is the answer, what is set aside and why; the rows of the demonstration tasks."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.config.mode import DATA_PREFIX
from asyncrl.demo import tasks
from producers.data.prompts import BadPrompt
from producers.data.tokenizer import Tokenizer
from producers.dataset_worker import row_rewards
from producers.engines.dataset import data_digest, encode_row

USER = {"role": "user", "content": "1+1="}
SAID = {"role": "assistant", "content": "2"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    from learners.warm_start.tiny_model import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    made = make_tokenizer(folder)
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    made.save_pretrained(str(folder))
    return Tokenizer(folder, trust_remote_code=False)


def settings(mode: str, **overrides: Any) -> config.Config:
    words = [f"{key}={value}" for key, value in overrides.items()]
    size = 1 if mode in ("sft", "kto") else 2
    return config.parse(
        f'learner.mode = "{mode}"\nmodel.path = "m"\ndata.path = "p.jsonl"\nproducers.engine = "dataset"\n'
        f"sampling.group_size = {size}\nsampling.max_new_tokens = 4\ndata.max_prompt_tokens = 8\n",
        overrides=[word.replace("__", ".") for word in words],
    )


def texts(tokenizer: Tokenizer, row: dict[str, Any], made: config.Config) -> tuple[str, list[str]]:
    prompt, found = encode_row(row, made, tokenizer)
    assert all(tokens[-1] == tokenizer.end_id for tokens in found), "an answer ends"
    return tokenizer.decode(prompt.tolist()), [tokenizer.decode(tokens[:-1].tolist()) for tokens in found]


@pytest.mark.parametrize(
    ("mode", "row", "wanted"),
    [
        ("sft", {"prompt": "1+1=", "response": "2"}, ["2"]),
        ("sft", {"prompt": [USER], "response": SAID}, ["2"]),
        ("sft", {"prompt": [USER, SAID]}, ["2"]),
        ("sft", {"prompt": "1+1=", "response": ""}, [""]),
        ("kto", {"prompt": "1+1=", "completion": "2", "label": True}, ["2"]),
        ("kto", {"prompt": [USER, SAID], "label": False}, ["2"]),
        ("dpo", {"prompt": "1+1=", "chosen": "2", "rejected": "3"}, ["2", "3"]),
        ("dpo", {"prompt": [USER], "chosen": [USER, SAID], "rejected": [{**SAID, "content": "3"}]}, ["2", "3"]),
        ("reward_model", {"prompt": "1+1=", "chosen": "2", "rejected": "3"}, ["2", "3"]),
    ],
)
def test_the_answers_of_a_row(tokenizer: Tokenizer, mode: str, row: dict[str, Any], wanted: list[str]) -> None:
    assert texts(tokenizer, row, settings(mode)) == ("1+1=", wanted)


@pytest.mark.parametrize(
    ("mode", "row", "reason"),
    [
        ("sft", {"prompt": "1+1="}, "answer: no column 'response'"),
        ("sft", {"prompt": [SAID]}, "answer: no column 'response'"),
        ("sft", {"prompt": [SAID, USER]}, "neither text nor a message of the assistant"),
        ("sft", {"prompt": "1+1=", "response": 2}, "neither text nor"),
        ("kto", {"prompt": "1+1=", "response": "2", "label": True}, "answer: no column 'completion'"),
        ("dpo", {"prompt": "1+1=", "chosen": "2"}, "answer: no column 'rejected'"),
        ("dpo", {"prompt": [USER], "chosen": [SAID, SAID], "rejected": "3"}, "neither text nor"),
        ("sft", {"prompt": "1+1=", "response": "12345"}, "too_long: an answer of 6 tokens"),
        ("dpo", {"prompt": "1+1=", "chosen": "1", "rejected": "12345"}, "too_long: an answer of 6 tokens"),
        ("sft", {"prompt": "1+1+1+1+1=", "response": "5"}, "too_long: 10 tokens"),
        ("sft", {"prompt": None, "response": "5"}, "prompt:"),
    ],
)
def test_what_is_set_aside(tokenizer: Tokenizer, mode: str, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadPrompt) as caught:
        encode_row(row, settings(mode), tokenizer)
    assert reason in caught.value.reason


def test_chosen_has_the_higher_reward() -> None:
    assert row_rewards({}, settings("dpo")) == (1.0, 0.0) and row_rewards({}, settings("sft")) == (0.0,)


def test_the_label_is_the_reward_and_must_be_one() -> None:
    made = settings("kto")
    assert [row_rewards({"label": label}, made) for label in (True, False, 1)] == [(1.0,), (0.0,), (1.0,)]
    for row in ({}, {"label": None}, {"label": "true"}, {"label": 0.5}, {"label": 2}):
        with pytest.raises(BadPrompt, match="'label' is neither true nor false"):
            row_rewards(row, made)
    assert row_rewards({"good": True}, settings("kto", data__label_key="good")) == (1.0,)


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    one, two = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    one.write_text("x")
    two.write_text("x")
    digests = {path: data_digest(settings("sft", data__path=path)) for path in (one, two, f"{one},{two}")}
    assert digests[one] == digests[two] != digests[f"{one},{two}"]
    assert digests[one].startswith(DATA_PREFIX)
    two.write_text("y")
    assert data_digest(settings("sft", data__path=two)) != digests[one]


@pytest.mark.parametrize("task", tasks.TASKS)
def test_rows_of_the_demonstration_tasks(task: str) -> None:
    prompts = [row["prompt"] for row in tasks.prompt_rows(task, 50, 3)]
    reward = getattr(tasks, f"{task}_reward")
    right, pairs = tasks.answer_rows(task, 50, 3), tasks.pair_rows(task, 50, 3)
    assert [row["prompt"] for row in right] == [row["prompt"] for row in pairs] == prompts
    for row, pair in zip(right, pairs, strict=True):
        truth = row["reward_model"]["ground_truth"]
        assert reward(task, row["response"], truth) == reward(task, pair["chosen"], truth) == 1.0
        assert reward(task, pair["rejected"], truth) == 0.0
    assert pairs == tasks.pair_rows(task, 50, 3)
    for row, pair in zip(tasks.label_rows(task, 50, 3), pairs, strict=True):
        assert row["prompt"] == pair["prompt"] and row["completion"] == pair["chosen" if row["label"] else "rejected"]
