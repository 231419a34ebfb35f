"""Supervised fine-tuning, the tiny model's tokenizer and the warm start."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from padded_rows import collate

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tokenizers import Tokenizer  # noqa: E402, RUF100
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402, RUF100

from asyncrl.demo import tasks
from learners.warm_start import arithmetic
from learners.warm_start.arithmetic import Stage, main, make_warm_start, sampled_accuracy, stage_batches
from learners.warm_start.sft import IGNORE, Example, completion_loss, learning_rate_factor, pack, sft
from learners.warm_start.tiny_model import count_parameters, make_tiny_qwen3, make_tokenizer, save_model

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


def examples(count: int, *, seed: int = 0) -> list[Example]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        width = rng.randint(2, 9)
        rows.append(Example([rng.randint(3, 20) for _ in range(width)], [rng.randint(3, 20), 2]))
    return rows


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


def test_collate_labels_completion_tokens_only() -> None:
    batch = collate([Example([5, 6, 7], [8, 2]), Example([9], [10, 11, 2])], pad_id=0)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 2], [9, 10, 11, 2, 0]]
    assert batch["labels"].tolist() == [[IGNORE, IGNORE, IGNORE, 8, 2], [IGNORE, 10, 11, 2, IGNORE]]


def test_pack_labels_completion_tokens_only_and_restarts_positions() -> None:
    batch = pack([Example([9], [10, 2]), Example([5, 6], [8, 2]), Example([], [7, 2])], width=8, pad_id=0)
    assert batch["input_ids"].tolist() == [[5, 6, 8, 2, 9, 10, 2, 0], [7, 2, 0, 0, 0, 0, 0, 0]]
    skip = IGNORE
    assert batch["labels"].tolist() == [[skip, skip, 8, 2, skip, 10, 2, skip], [skip, 2] + [skip] * 6]
    assert batch["position_ids"].tolist()[0] == [0, 1, 2, 3, 0, 1, 2, 0]


def test_prompt_tokens_do_not_enter_the_loss() -> None:
    model = small_model()
    batch = collate([Example([5, 6, 7], [8, 2])], pad_id=0)
    logits = model(input_ids=batch["input_ids"]).logits[0].log_softmax(-1)
    expected = -(logits[2, 8] + logits[3, 2]) / 2
    assert completion_loss(model, batch).item() == pytest.approx(expected.item(), abs=1e-5)
    with pytest.raises(ValueError, match="label"):
        completion_loss(model, {**batch, "labels": torch.full_like(batch["labels"], IGNORE)})


def test_packed_and_padded_batches_have_the_same_loss_and_gradient() -> None:
    rows = examples(12)
    gradients, losses = [], []
    for batch in (collate(rows, pad_id=0), pack(rows, width=24, pad_id=0)):
        model = small_model()
        loss = completion_loss(model, batch)
        loss.backward()
        losses.append(loss.item())
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("make", [lambda rows: collate(rows, pad_id=0), lambda rows: pack(rows, width=4, pad_id=0)])
def test_rows_without_completion_are_refused(make: object) -> None:
    assert callable(make)
    for rows in ([], [Example([3], [])]):
        with pytest.raises(ValueError, match="completion"):
            make(rows)


def test_a_row_wider_than_a_line_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        pack([Example([3, 4, 5], [6, 2])], width=4, pad_id=0)


def test_learning_rate_rises_stays_and_falls() -> None:
    factors = [learning_rate_factor(step, steps=100, warmup=10, decay=0.4) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[10:60] == [1.0] * 50
    assert factors[99] == pytest.approx(1 / 40)
    assert factors[60:] == sorted(factors[60:], reverse=True)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_sft_lowers_the_loss_and_is_deterministic(optimizer: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    stage = Stage(steps=60, lr=5e-3, noise=0.0, tokens=256, width=28, terms=(2, 3))

    def run() -> tuple[list[float], list[torch.Tensor]]:
        model = small_model()
        batches = stage_batches("running_sum", stage, tokenizer=tokenizer, rng=random.Random(0))
        history = sft(model, batches, lr=stage.lr, steps=stage.steps, warmup=5, optimizer=optimizer)  # type: ignore[arg-type]
        return history, [parameter.detach() for parameter in model.parameters()]

    first, second = run(), run()
    assert len(first[0]) == 60
    assert first[0] == second[0]
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    assert sum(first[0][-3:]) / 3 < 0.6 * first[0][0]


def test_sft_refuses_bad_input() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="ran out after 1 of 2"):
        sft(model, [collate(examples(2), pad_id=0)], lr=1e-3, steps=2)
    with pytest.raises(ValueError, match="negative"):
        sft(model, [], lr=1e-3, steps=-1)
    with pytest.raises(ValueError, match="optimizer"):
        sft(model, [], lr=1e-3, steps=0, optimizer="sgd")  # type: ignore[arg-type]
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(FloatingPointError):
        sft(model, [collate(examples(2), pad_id=0)], lr=1e-3, steps=1)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_warm_start_is_a_checkpoint_and_is_built_once(task: str, tmp_path: Path) -> None:
    stages = [Stage(steps=2, lr=1e-3, noise=0.1, tokens=200, width=352)]
    lines: list[str] = []

    def build(seed: int) -> float:
        make_warm_start(
            task, tmp_path, seed=seed, stages=stages, model_options=SMALL, report=lines.append, report_every_s=0.0
        )
        return (tmp_path / "model.safetensors").stat().st_mtime_ns

    first = build(0)
    assert any("step 2/2" in line for line in lines)
    assert build(0) == first
    assert "up to date" in lines[-1]
    assert build(1) > first
    (tmp_path / "warm_start.json").write_text("torn {", encoding="utf-8")
    build(1)
    marker = json.loads((tmp_path / "warm_start.json").read_text(encoding="utf-8"))
    assert marker["task"] == task
    assert len(marker["losses"]) == 2
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path), local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert 0.0 <= sampled_accuracy(model, tokenizer, task=task, size=4) <= 1.0


def test_an_unknown_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown task"):
        make_warm_start("multiply", tmp_path)


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stages = {"add": (Stage(steps=1, lr=1e-3, noise=0.0, tokens=100, width=40),)}
    monkeypatch.setattr(arithmetic, "WARM_START_STAGES", stages)
    assert main(["--task", "add", "--out", str(tmp_path), "--measure", "2"]) == 0
    shown = capsys.readouterr().out
    assert "saved to" in shown
    assert "sampled accuracy" in shown
