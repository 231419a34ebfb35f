"""Supervised fine-tuning, the tiny model's tokenizer and the warm start."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from padded_rows import Example, collate, completion_loss

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tokenizers import Tokenizer  # noqa: E402, RUF100
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402, RUF100

from asyncrl.demo import tasks
from learners.warm_start import arithmetic, calculator, code
from learners.warm_start.arithmetic import main, sampled_accuracy
from learners.warm_start.tiny_model import count_parameters, make_tiny_qwen3, make_tokenizer, save_model
from learners.warm_start.training import Recipe, Stage, batches, build, demonstration, train

SMALL = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "mlp_size": 64}
TEXT = "a3b5c2= a3:3b5:8c2:0#0  12+07=-19"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_model(seed: int = 0) -> torch.nn.Module:
    return make_tiny_qwen3(len(tasks.CHARACTERS) + 3, seed=seed, **SMALL)


def test_tokenizer_round_trips_exactly(tmp_path: Path) -> None:
    made = make_tokenizer(tmp_path)
    loaded = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in (TEXT, tasks.CHARACTERS, " ", ""):
        ids = made.encode(text)
        assert len(ids) == len(text)
        assert loaded.encode(text) == ids == plain.encode(text).ids
        assert made.decode(ids) == loaded.decode(ids) == plain.decode(ids) == text
    assert loaded.padding_side == "left"
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (0, 1, 2)
    assert loaded.decode([*loaded.encode("19"), 2], skip_special_tokens=True) == "19"
    assert loaded(["1", "123"], padding=True)["input_ids"][0][:2] == [0, 0]


def test_tokenizer_refuses_a_bad_alphabet(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="repeats"):
        make_tokenizer(tmp_path, characters="aa")


def test_default_model_has_about_600k_parameters_and_is_deterministic() -> None:
    before = torch.random.get_rng_state()
    one, two, other = (make_tiny_qwen3(46, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert 550_000 < count_parameters(one) < 650_000
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("sizes", "kind"), [({"layer": 2}, TypeError), ({"kv_heads": 3}, ValueError)])
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, int], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=min(sizes)):
        make_tiny_qwen3(46, **sizes)  # type: ignore[arg-type]


def test_saved_model_loads_as_an_ordinary_checkpoint(tmp_path: Path) -> None:
    model = small_model()
    make_tokenizer(tmp_path)
    save_model(tmp_path, model)
    loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path), local_files_only=True)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(model(input_ids=ids).logits, loaded(input_ids=ids).logits)
    assert loaded.generation_config.eos_token_id == 2
    assert (tmp_path / "model.safetensors").is_file()
    assert not list(tmp_path.glob("*.bin"))


RECIPES = [*arithmetic.RECIPES.values(), calculator.RECIPE, code.RECIPE]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.task)
def test_a_batch_holds_prompts_and_answers_of_the_task(recipe: Recipe, tmp_path: Path) -> None:
    tokenizer = recipe.tokenizer(tmp_path)
    stage = recipe.stages[-1]
    rows = next(batches(recipe, stage, tokenizer, random.Random(0)))
    sizes = [row.tokens.size for row in rows]
    assert sum(sizes) >= stage.tokens > sum(sizes) - 2 * max(sizes)
    rng, texts = random.Random(0), []
    while len(texts) < len(rows):
        texts += recipe.draw(stage, rng)
    for row, (prompt, answer) in zip(rows, texts, strict=True):
        assert tokenizer.decode(row.tokens[: row.prompt_tokens]) == prompt
        assert tokenizer.decode(row.tokens[row.prompt_tokens : -1]) == answer
        assert row.tokens[-1] == 2
        assert row.mask.tolist() == [1] * (row.tokens.size - row.prompt_tokens)


def test_the_loss_is_the_cross_entropy_of_the_answers_in_plain_torch(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    rows = [demonstration(tokenizer, *texts) for texts in (("12+07=", "19"), ("3+4=", "7"), ("1+", "100"))]
    plain = [Example(row.tokens[: row.prompt_tokens], row.tokens[row.prompt_tokens :]) for row in rows]
    expected = completion_loss(small_model(), collate(plain, pad_id=0)).item()
    stage = Stage(steps=1, lr=1e-3, noise=0.0)
    assert next(train(small_model(), iter([rows]), stage)) == pytest.approx(expected, abs=1e-5)


def test_training_lowers_the_loss_and_is_deterministic(tmp_path: Path) -> None:
    stage = Stage(steps=60, lr=5e-3, noise=0.0, tokens=256, terms=(2, 3), warmup=5)
    recipe = arithmetic.RECIPES["running_sum"]
    tokenizer = make_tokenizer(tmp_path)

    def run() -> tuple[list[float], list[torch.Tensor]]:
        model = small_model()
        history = list(train(model, batches(recipe, stage, tokenizer, random.Random(0)), stage))
        return history, [parameter.detach() for parameter in model.parameters()]

    first, second = run(), run()
    assert len(first[0]) == 60
    assert first[0] == second[0]
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    assert sum(first[0][-3:]) / 3 < 0.6 * first[0][0]


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path) -> None:
    model = small_model()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    rows = [demonstration(make_tokenizer(tmp_path), "1+2=", "3")]
    with pytest.raises(FloatingPointError):
        next(train(model, itertools.repeat(rows), Stage(steps=1, lr=1e-3, noise=0.0)))


@pytest.mark.parametrize("task", tasks.TASKS)
def test_warm_start_is_a_checkpoint_and_is_built_once(task: str, tmp_path: Path) -> None:
    stages = [Stage(steps=2, lr=1e-3, noise=0.1, tokens=200)]
    recipe = replace(arithmetic.RECIPES[task], stages=stages)
    lines: list[str] = []

    def made(seed: int) -> float:
        build(recipe, tmp_path, seed=seed, sizes=SMALL, report=lines.append, report_every_s=0.0)
        return (tmp_path / "model.safetensors").stat().st_mtime_ns

    first = made(0)
    assert any("step 2/2" in line for line in lines)
    assert made(0) == first
    assert "up to date" in lines[-1]
    assert made(1) > first
    (tmp_path / "warm_start.json").write_text("torn {", encoding="utf-8")
    made(1)
    marker = json.loads((tmp_path / "warm_start.json").read_text(encoding="utf-8"))
    assert marker["task"] == task
    assert len(marker["losses"]) == 2
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path), local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert 0.0 <= sampled_accuracy(model, tokenizer, task=task, size=4) <= 1.0


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    short = replace(arithmetic.RECIPES["add"], stages=[Stage(steps=1, lr=1e-3, noise=0.0, tokens=100)])
    monkeypatch.setattr(arithmetic, "RECIPES", {"add": short})
    assert main(["--task", "add", "--out", str(tmp_path), "--measure", "2"]) == 0
    shown = capsys.readouterr().out
    assert "saved to" in shown
    assert "sampled accuracy" in shown
