"""What follows from the learner's mode: contradictions, roles, the bound, epochs, the columns that rows must have."""

import json
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.config import mode
from asyncrl.errors import ConfigErrors
from asyncrl.preflight import derived, files
from asyncrl.preflight.check import check_files
from asyncrl.process_plan.plan import TARGETS, plan
from buffers.groups.records import settings_of

ROOT = Path(__file__).parents[2]
ROWS = '[model]\npath = "m"\n[data]\npath = "p.jsonl"\n[producers]\nengine = "dataset"\n'
SFT = ROWS + '[learner]\nmode = "sft"\n[sampling]\ngroup_size = 1\n'
KTO = ROWS + '[learner]\nmode = "kto"\n[sampling]\ngroup_size = 1\n'
SPIN = '[model]\npath = "m"\n[data]\npath = "p.jsonl"\n[learner.algorithm]\npreset = "spin"\n'
PAIRS = ROWS + '[learner]\nmode = "reward_model"\npreference.margin_key = "gap"\n[sampling]\ngroup_size = 2\n'
DPO = ROWS + '[learner]\nmode = "dpo"\n[sampling]\ngroup_size = 2\n'


def messages_of(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigErrors) as caught:
        config.parse(text, file="run.toml", overrides=overrides)
    return "\n".join(f"{error.where}: {error.message}" for error in caught.value.errors)


@pytest.mark.parametrize(
    ("text", "overrides", "part"),
    [
        (PAIRS, ["learner.mode=dpo"], "margin_key is of mode reward_model"),
        (SFT, ["learner.mode=rl"], "rows have no log-probs"),
        (SFT, ["producers.engine=hf"], "set producers.engine = 'dataset', not 'hf'"),
        (SFT, ["sampling.group_size=2"], "needs sampling.group_size = 1"),
        (DPO, ["sampling.group_size=8"], "needs sampling.group_size = 2"),
        (DPO, ["sampling.over_issue=1"], "over_issue = 0 and"),
        (DPO, ["sampling.temperature=0.7"], "sampling.temperature must be 1"),
        (DPO, ['buffer.filters=["zero_variance"]'], "no rewards to filter by"),
        (
            DPO,
            ["learner.preference.loss=ipo", "learner.preference.label_smoothing=0.1"],
            "of the losses sigmoid, robust, simpo",
        ),
        (
            DPO,
            ["learner.micro_batch_tokens=4000"],
            "max_new_tokens) = 2 * (1024 + 1024) = 4096",
        ),
        (DPO, ["producers.engine=hf"], "no [[reward]]"),
        (DPO, ["producers.engine=hf", "sampling.group_size=1"], "set sampling.group_size to 2 or more"),
        (DPO, ["producers.engine=hf", "sampling.greedy_baseline=true"], "and no greedy_baseline"),
        (SPIN, ["learner.mode=rl"], "it needs mode dpo and an engine that generates"),
        (SPIN, ["learner.mode=kto"], "it needs mode dpo and an engine that generates"),
        (SPIN, ["producers.engine=dataset"], "it needs mode dpo and an engine that generates"),
        (SPIN, ["sampling.group_size=3"], "set sampling.group_size = 2, over_issue = 0"),
        (SPIN, ["sampling.over_issue=1"], "set sampling.group_size = 2, over_issue = 0"),
        (SPIN, ["environment.name=chat"], "needs answers of one turn"),
        (SPIN, ["buffer.max_staleness=18"], "set buffer.max_staleness = 19, not 18"),
        (SPIN, ["buffer.pipeline_depth=18"], "engines take new weights within an iteration of 20 versions: set 'auto'"),
        (SPIN, ["learner.preference.loss=simpo"], "renews a reference, and there is none"),
        (SPIN, ["learner.lora.rank=4"], "the reference is the model under the adapters"),
        (SPIN, ["learner.backend=megatron"], "keeps the start weights as the reference"),
        (
            SPIN + '[[reward]]\nfunction = "a:b"\n',
            ["evaluation.path=h", "evaluation.every=30"],
            "set a multiple of 20 (iteration)",
        ),
        (KTO, ["producers.engine=hf"], "set producers.engine = 'dataset', not 'hf'"),
        (KTO, ["sampling.group_size=2"], "needs sampling.group_size = 1"),
        (KTO, ["learner.preference.reference_free=true"], "compares with a reference"),
        (KTO, ["learner.preference.loss=simpo"], "compares with a reference"),
        (KTO, ["buffer.batch_groups=7", "learner.algorithm.minibatches=4"], "fewer than 2 rows"),
    ],
)
def test_contradictions(text: str, overrides: list[str], part: str) -> None:
    assert part in messages_of(text, *overrides)


def test_rows_need_no_reward_and_no_second_sample() -> None:
    parsed = config.parse(SFT)
    assert (parsed.reward, parsed.sampling.group_size, mode.is_paired(parsed)) == ((), 1, False)
    assert mode.answer_keys(parsed) == ("response",)
    assert mode.answer_keys(config.parse(DPO)) == ("chosen", "rejected")


def test_a_run_over_rows_starts_three_processes() -> None:
    parsed = config.parse(SFT)
    roles = mode.present_roles(TARGETS["all"], parsed)
    assert [p.name for p in plan(parsed, roles, config_path=Path("c.toml"))] == ["buffer", "producer-0", "learner"]
    assert "1 producer (dataset)" in derived.what_starts(parsed, roles)
    online = config.parse(DPO + '[[reward]]\nfunction = "a:b"\n', overrides=["producers.engine=hf"])
    others = tuple(role for role in TARGETS["all"] if role != "evaluator")
    assert mode.present_roles(TARGETS["all"], online) == others


def test_pairs_are_made_of_any_number_of_generated_samples() -> None:
    text = '[model]\npath = "m"\n[data]\npath = "p.jsonl"\n[[reward]]\nfunction = "a:b"\n'
    online = config.parse(text, overrides=["learner.algorithm.preset=online_dpo"])
    assert (online.learner.mode, online.sampling.group_size, mode.is_paired(online)) == ("dpo", 8, True)
    assert mode.explain_update(online) == (
        "sigmoid(beta=0.1) against the start weights, the best and the worst sample of each prompt"
    )
    assert mode.explain_update(config.parse(KTO)) == "kto(beta=0.1) against the start weights"
    assert mode.explain_update(config.parse(SFT)) == "sft"


def test_self_play_needs_no_reward_and_publishes_at_the_start_of_its_iterations() -> None:
    spin = config.parse(SPIN, overrides=["learner.steps=50"])
    assert mode.demonstrates(spin) and mode.answer_columns(spin, {"prompt": "a"}) == {"response_key": "response"}
    assert "reward" not in mode.present_roles(TARGETS["all"], spin)
    assert [step for step in range(1, 51) if mode.publishes(spin, step)] == [20, 40, 50]
    assert mode.explain_update(spin) == (
        "sigmoid(beta=0.1) against the weights of every 20 versions, the row's answer and a sample of each prompt"
    )
    scored = config.parse(SPIN + '[[reward]]\nfunction = "a:b"\n', overrides=["evaluation.path=h", "learner.steps=50"])
    assert "reward" in mode.present_roles(TARGETS["all"], scored)
    online = config.parse(DPO + '[[reward]]\nfunction = "a:b"\n', overrides=["producers.engine=hf"])
    assert all(mode.publishes(online, step) for step in range(1, 9)) and not mode.demonstrates(online)


def test_rows_have_no_age_but_generated_pairs_have() -> None:
    rows = config.parse(DPO, overrides=["learner.steps=70", "buffer.max_staleness=2"])
    settings = settings_of(rows)
    assert (settings.max_staleness, settings.depth) == (70, 2)
    online = config.parse(
        DPO + '[[reward]]\nfunction = "a:b"\n', overrides=["producers.engine=hf", "buffer.max_staleness=2"]
    )
    assert settings_of(online).max_staleness == 2


@pytest.mark.parametrize(("epochs", "rows", "batch", "steps"), [(3, 10, 4, 8), (1, 8, 4, 2), (2, 1, 16, 1)])
def test_steps_cover_every_row_so_often(epochs: int, rows: int, batch: int, steps: int) -> None:
    parsed = config.parse(SFT, overrides=[f"data.epochs={epochs}", f"buffer.batch_groups={batch}"])
    assert mode.derive_steps(parsed, rows).learner.steps == steps
    assert config.parse(SFT).learner.steps == mode.derive_steps(config.parse(SFT), rows).learner.steps


def test_epochs_are_settled_from_the_files_and_need_their_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n' * 10)
    parsed = config.parse(SFT, overrides=[f"data.path={path},{path}", "data.epochs=2", "buffer.batch_groups=8"])
    assert files.settle_steps(parsed).learner.steps == 5
    source = config.parse(SFT, overrides=["data.path=", "data.source=a:b", "data.epochs=2"])
    with pytest.raises(ConfigErrors, match=r"set learner\.steps"):
        files.settle_steps(source)


def test_steps_of_the_command_line_count_instead_of_the_epochs_of_a_file(tmp_path: Path) -> None:
    path, rows = tmp_path / "run.toml", tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "response": "b"}\n' * 10)
    path.write_text(SFT.replace('path = "p.jsonl"', f'path = "{rows}"\nepochs = 3') + "[buffer]\nbatch_groups = 1\n")
    assert files.settle_steps(config.load(path)).learner.steps == 30
    found, checked = check_files(path, ["learner.steps=7"])
    assert found is not None and (found.learner.steps, found.data.epochs) == (7, 0)
    assert "data.epochs = 3 does not count: --set learner.steps = 7 does" in checked.notes
    both = config.load(path, ["learner.steps=7", "data.epochs=2"])
    assert files.settle_steps(both).learner.steps == 20


@pytest.mark.parametrize(
    ("text", "row", "missing"),
    [
        (SFT, {"prompt": "a", "answer": "b"}, "'response' (data.response_key)"),
        (DPO, {"prompt": "a", "chosen": "b"}, "'rejected' (data.rejected_key)"),
        (KTO, {"prompt": "a", "completion": "b"}, "'label' (data.label_key)"),
        (KTO, {"prompt": [{"role": "user", "content": "a"}]}, "'label' (data.label_key)"),
        (KTO, {"prompt": "a", "response": "b", "label": True}, "'completion' (data.completion_key)"),
        (KTO, {"prompt": "a", "completion": "b", "label": False}, ""),
        (SPIN, {"prompt": "a"}, "'response' (data.response_key)"),
        (PAIRS, {"prompt": "a", "chosen": "b", "rejected": "c", "Gap": 1}, "'gap' (learner.preference.margin_key)"),
        (PAIRS, {"prompt": "a", "chosen": "b", "rejected": "c", "gap": 1}, ""),
        (SFT, {"prompt": "a", "response": "b"}, ""),
        (SFT, {"prompt": [{"role": "user", "content": "a"}]}, ""),
    ],
)
def test_check_names_missing_columns(text: str, row: dict[str, object], missing: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    found = [error.message for error in files.check_data(config.parse(text, overrides=[f"data.path={path}"]))]
    assert (missing in found[0]) if missing else found == []


@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "reward_model"])
def test_shipped_files_are_valid(name: str) -> None:
    parsed = config.load(ROOT / "configs" / f"{name}.toml")
    assert (parsed.learner.mode, parsed.producers.engine) == (name, "dataset")
    assert parsed.data.epochs > 0
