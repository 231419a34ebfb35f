"""Judges with a model of their own: a sequence classifier, a language model that writes, one that says yes or no."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForSequenceClassification

from asyncrl.config.sections.reward import JudgeConfig
from asyncrl.demo.tasks import CHARACTERS
from asyncrl.errors import ConfigError
from learners.warm_start.tiny_model import make_tiny_qwen3, make_tokenizer, save_model
from producers.rewards.judges.classifier import Classifier, Text
from producers.rewards.judges.generative import Written, YesNo, engine_config
from producers.rewards.outcome import JudgeSettings, Model, Outcome, Problem, Verdict
from producers.rewards.sample import RewardSample

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}#{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}a:{% endif %}"
TEXTS = ["4", "5", "12 - 3", "a" * 30, "7+7=14"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy, a classifier beside it with the same tokenizer, and a judge with a template of its own."""
    root = tmp_path_factory.mktemp("judges")
    tokenizer = make_tokenizer(root / "policy")
    model = make_tiny_qwen3(len(tokenizer), seed=3, layers=2, hidden_size=32, head_dim=8, mlp_size=64)
    save_model(root / "policy", model)
    with_template = make_tokenizer(root / "grader")
    with_template.chat_template = TEMPLATE
    with_template.save_pretrained(root / "grader")
    save_model(root / "grader", model)
    for name, labels in (("scorer", 1), ("labels", 3)):
        model.config.num_labels = labels
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            head = Qwen3ForSequenceClassification(model.config)
        head.model.load_state_dict(model.model.state_dict())
        head.save_pretrained(root / name)
        make_tokenizer(root / name)
    return root


def ids_of(text: str) -> list[int]:
    """Ids of the tiny tokenizer: one per character."""
    return [3 + CHARACTERS.index(character) for character in text]


def sample(text: str, prompt: str = "2+2=", **row: Any) -> RewardSample:
    return RewardSample.from_row(
        row, prompt=prompt, response=text, prompt_ids=ids_of(prompt), response_ids=[*ids_of(text), 2], finish="stop"
    )


def scores(model: Model, samples: list[RewardSample]) -> list[Outcome]:
    async def whole() -> list[Outcome]:
        await model.start()
        found: dict[int, Outcome] = {}
        try:
            await model.score(samples, lambda place, what: found.update({place: what}))
        finally:
            await model.close()
        assert sorted(found) == list(range(len(samples)))
        return [found[place] for place in range(len(samples))]

    return asyncio.run(asyncio.wait_for(whole(), 120))


def asked(folder: Path, name: str, kind: str, **settings: Any) -> JudgeSettings:
    given = {"device": "cpu", "prompt": "{prompt}{response}", **settings}
    table = JudgeConfig("grader", kind=kind, model=str(folder / name), **given)  # type: ignore[arg-type]
    return JudgeSettings(table, 60.0, str(folder / "policy"), "float32", "prompt")


def value(outcome: Outcome) -> float:
    assert isinstance(outcome, Verdict), outcome
    return outcome.value


# ---------------------------------------------------------------- classifier


def test_a_classifier_scores_the_very_tokens_whatever_is_beside_them(folder: Path) -> None:
    reference = Qwen3ForSequenceClassification.from_pretrained(folder / "scorer").eval()
    samples = [sample(text) for text in TEXTS]
    wanted = []
    for one in samples:
        ids = torch.tensor([one.prompt_ids + one.response_ids])
        with torch.inference_mode():
            wanted.append(float(reference(input_ids=ids).logits[0, 0]))
    for at_once in (1, 3, 16):
        found = scores(Classifier(asked(folder, "scorer", "classifier", concurrency=at_once)), samples)
        assert [value(outcome) for outcome in found] == pytest.approx(wanted, abs=1e-5)
    as_text = scores(Classifier(asked(folder, "scorer", "classifier", input="text")), samples)
    assert [value(outcome) for outcome in as_text] == pytest.approx(wanted, abs=1e-5)
    assert len(set(wanted)) == len(wanted)


def test_a_classifier_with_a_template_sees_a_chat(folder: Path) -> None:
    judge = Classifier(asked(folder, "scorer", "classifier", input="chat"))
    with pytest.raises(ConfigError, match="no chat template"):
        scores(judge, [sample("4")])


def test_a_label_of_several(folder: Path) -> None:
    found = [scores(Classifier(asked(folder, "labels", "classifier", label=n)), [sample("4")])[0] for n in range(3)]
    assert sum(value(outcome) for outcome in found) == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(ConfigError, match="3 labels"):
        scores(Classifier(asked(folder, "labels", "classifier")), [])


def test_what_is_too_long_or_not_finite_or_out_of_memory_is_a_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Classifier(asked(folder, "scorer", "classifier", max_tokens=20))
    found = scores(judge, [sample("4"), sample("a" * 30)])
    assert isinstance(found[0], Verdict) and isinstance(found[1], Problem) and found[1].reason == "too_long"

    forward = Classifier._forward

    def small(self: Classifier, rows: list[Text]) -> list[Outcome]:
        if len(rows) > 1 or len(rows[0].ids) > 30:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, rows)

    monkeypatch.setattr(Classifier, "_forward", small)
    found = scores(Classifier(asked(folder, "scorer", "classifier")), [sample(text) for text in TEXTS])
    reasons = [outcome.reason if isinstance(outcome, Problem) else "" for outcome in found]
    assert reasons == ["", "", "", "memory", ""], "in halves down to one sample"
    monkeypatch.undo()

    judge = Classifier(asked(folder, "scorer", "classifier"))

    async def broken() -> Outcome:
        await judge.start()
        with torch.no_grad():
            judge._model.score.weight.fill_(float("nan"))
        found: list[Outcome] = []
        await judge.score([sample("4")], lambda _, what: found.append(what))
        return found[0]

    outcome = asyncio.run(broken())
    assert isinstance(outcome, Problem) and outcome.reason == "not_finite"


def test_the_version_is_that_of_the_files(folder: Path) -> None:
    async def version(name: str) -> str:
        judge = Classifier(asked(folder, name, "classifier", label=0))
        await judge.start()
        return judge.version()

    assert asyncio.run(version("scorer")) == asyncio.run(version("scorer")) != asyncio.run(version("labels"))


# ---------------------------------------------------------------- generative


def greedy(folder: Path, text: str, new: int) -> str:
    """What transformers itself writes."""
    from transformers import AutoModelForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder / "grader")
    model = AutoModelForCausalLM.from_pretrained(folder / "grader").eval()
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(shown, return_tensors="pt", add_special_tokens=False).input_ids
    made = model.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :]
    return str(tokenizer.decode(made, skip_special_tokens=True))


def test_a_judge_writes_its_answer_with_an_engine_of_its_own(folder: Path) -> None:
    settings = {"pattern": "(?s)^(.*)$", "max_new_tokens": 6, "max_tokens": 64}
    texts = ["4", "5", "12"]
    wanted = [greedy(folder, f"2+2={text}", 6) for text in texts]
    found = scores(Written(asked(folder, "grader", "generative", **settings)), [sample(text) for text in texts])
    for outcome, text in zip(found, wanted, strict=True):
        try:
            number = float(text)
        except ValueError:
            assert isinstance(outcome, Problem) and outcome.reason == "unparsed" and repr(text[:120]) in outcome.detail
        else:
            assert value(outcome) == number
    found = scores(Written(asked(folder, "grader", "generative", **settings)), [sample("a" * 64)])
    assert isinstance(found[0], Problem) and found[0].reason == "too_long"


def test_a_number_in_what_it_writes_is_the_reward(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Written(asked(folder, "grader", "generative", max_new_tokens=4, max_tokens=64))
    monkeypatch.setattr(judge._questions.tokenizer, "decode", lambda ids: f"Score: {len(ids)}")
    assert [value(outcome) for outcome in scores(judge, [sample("4"), sample("5")])] == [4, 4]
    monkeypatch.setattr(judge._questions.tokenizer, "decode", lambda ids: "1. first, 2. second")
    (found,) = scores(judge, [sample("4")])
    assert isinstance(found, Problem) and found.reason == "unparsed" and "was cut" in found.detail


def test_no_room_for_an_answer_is_said(folder: Path) -> None:
    with pytest.raises(ConfigError, match="leaves no room"):
        engine_config(asked(folder, "grader", "generative", max_tokens=8, max_new_tokens=8))


@pytest.mark.parametrize("at_once", [1, 8])
def test_yes_against_no_is_read_from_the_next_token(folder: Path, at_once: int) -> None:
    from transformers import AutoModelForCausalLM

    judge = YesNo(asked(folder, "grader", "generative", answer="yes_no", yes=("y",), no=("n",), concurrency=at_once))
    samples = [sample(text) for text in TEXTS]
    found = scores(judge, samples)
    model = AutoModelForCausalLM.from_pretrained(folder / "grader").eval()
    for one, outcome in zip(samples, found, strict=True):
        ids = ids_of(f"u:{one.prompt}{one.response}#a:")
        with torch.inference_mode():
            chance = model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)
        yes, no = float(chance[ids_of("y")[0]]), float(chance[ids_of("n")[0]])
        assert value(outcome) == pytest.approx(yes / (yes + no), abs=1e-5)


def test_words_that_begin_alike_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="begin with the same token"):
        scores(YesNo(asked(folder, "grader", "generative", answer="yes_no", yes=("yes",), no=("yet",))), [])


@pytest.mark.parametrize("make", [Classifier, YesNo], ids=["classifier", "yes_no"])
def test_a_folder_that_is_no_model_is_said(tmp_path: Path, make: Callable[[JudgeSettings], Model]) -> None:
    make_tokenizer(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"no (sequence classifier|language model)"):
        scores(make(asked(tmp_path, "empty", "generative", answer="yes_no")), [])
