"""What `asyncrl init` proposes: limits by the model and the rows, a learning rate by size, sizes by memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_folder import CHAT, write_folder
from vision_models import png, vision_folder

from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.configure.proposal import (
    SHARE,
    Facts,
    find_files,
    fit_lengths,
    fit_memory,
    image_tokens,
    learning_rate,
    proposed_settings,
    read_facts,
    used_bytes,
)
from asyncrl.errors import ConfigError
from asyncrl.images.model_inputs import ImageInputs
from asyncrl.preflight.machine import Machine, device_memory
from asyncrl.runtime import hub

GIB = 1 << 30
HOST = Machine(cores=2, memory_bytes=16 * GIB, devices={}, disk_free_bytes=GIB, shm_free_bytes=GIB)
#: Sizes of Qwen2.5-0.5B.
HALF_BILLION = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "model", max_position_embeddings=256)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": "7" * length, "answer": "7"}) + "\n" for length in range(1, 61))
    )
    (tmp_path / "mine.py").write_text("def right(prompts, completions, **_):\n    return [1.0 for _ in prompts]\n")
    return tmp_path


def answers(data: str = "rows.jsonl") -> dict[str, str]:
    return {"model": "model", "data": data, "reward": "mine.py:right", "preset": "grpo", "name": "first"}


def test_what_is_written_fits_and_says_why(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "a.toml", "--model", "model", "--data", "rows.jsonl", "--reward", "mine.py:right"]) == 0
    made = load(Path("a.toml"))
    assert made.data.prompt_key == "question"
    assert 60 <= made.data.max_prompt_tokens <= made.data.max_prompt_tokens + made.sampling.max_new_tokens <= 256
    assert made.learner.optim.lr == 1e-4
    told = Path("a.toml").read_text()
    assert "256 positions, the longest of 60 prompts has 76 tokens" in told
    assert main(["check", "a.toml"]) == 0
    assert "prompt lengths" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_rows_of_other_files(place: Path, suffix: str) -> None:
    rows = [{"prompt": "7" * 10}, {"prompt": [{"role": "user", "content": "7" * 30}]}][: 2 if suffix == ".json" else 1]
    path = place / f"rows{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    facts = read_facts("model", str(path))
    assert (facts.rows, facts.longest) == ((2, 46) if suffix == ".json" else (1, 26))


def test_prompts_count_the_tokens_of_their_images(place: Path) -> None:
    """As many as the image processor makes of it, or a few more."""
    folder = vision_folder("qwen2_5_vl")
    inputs = ImageInputs(str(folder))
    for width, height in ((48, 48), (100, 30), (16, 130), (1000, 700), (8, 8)):
        made = inputs.pixels(png(width, height)).tokens
        assert made <= image_tokens(folder, width, height) <= 1.3 * made + 4
        row = {
            "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "7" * 10}]}],
            "images": ["picture.png"],
        }
        (place / "picture.png").write_bytes(png(width, height))
        (place / "rows.json").write_text(json.dumps([row]))
        facts = read_facts(str(folder), str(place / "rows.json"))
        assert facts.longest == 10 + 16 + image_tokens(folder, width, height)


def test_what_cannot_be_read_leaves_the_defaults(place: Path) -> None:
    made = proposed_settings(answers("none.jsonl"), HOST)
    assert made["data.max_prompt_tokens"] == 128 and made["sampling.max_new_tokens"] == 128  # of 256 positions
    (place / "model" / "config.json").unlink()
    assert proposed_settings(answers(), HOST)["learner.optim.lr"] == 1e-6


def test_plain_texts_become_messages_for_a_chat_model(place: Path) -> None:
    assert "data.as_chat" not in proposed_settings(answers(), HOST)
    write_folder(place / "model", template=CHAT)
    assert proposed_settings(answers(), HOST)["data.as_chat"] is True


def test_the_home_folder_is_meant_by_its_sign(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.chdir("/")
    located = find_files(answers("~/rows.jsonl") | {"model": "~/model"})
    assert located == ({**answers(str(place / "rows.jsonl")), "model": str(place / "model")}, [])


def test_of_a_name_on_the_hub_all_but_the_weights_is_fetched(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(place / "model", template=CHAT, max_position_embeddings=256)
    fetched = []

    def look_up(text: str, kind: hub.Kind, splits: object = ()) -> hub.OnHub:
        names = ["rows.jsonl"] if kind == "dataset" else ["config.json", "tokenizer.json", "model.safetensors"]
        return hub.OnHub(place if kind == "dataset" else place / "model", dict.fromkeys(names, 10))

    def fetch(found: hub.OnHub, text: str, kind: hub.Kind) -> hub.OnHub:
        fetched.append((text, list(found.files)))
        return found

    monkeypatch.setattr(hub, "look_up", look_up)
    monkeypatch.setattr(hub, "fetch", fetch)
    words = ["--model", "somebody/tiny", "--data", "somebody/sums", "--reward", "mine.py:right"]
    assert main(["init", "a.toml", *words]) == 0
    assert fetched == [("somebody/tiny", ["config.json", "tokenizer.json"]), ("somebody/sums", ["rows.jsonl"])]
    made = load(Path("a.toml"))
    assert (made.model.path, made.data.path) == ("somebody/tiny", "somebody/sums")
    assert made.learner.optim.lr == 1e-4 and made.data.as_chat and made.data.prompt_key == "question"
    assert made.data.max_prompt_tokens < 128 and "note: limits" not in capsys.readouterr().out

    def unreachable(*_: object) -> hub.OnHub:
        raise ConfigError("config.model", "no such folder, and not on the hub: no network")

    monkeypatch.setattr(hub, "look_up", unreachable)
    assert main(["init", "b.toml", *words]) == 2
    said = capsys.readouterr().out
    assert "chat template are defaults: model.path = 'somebody/tiny': no such folder, and not on the hub" in said


@pytest.mark.parametrize(
    ("parameters", "adapters", "rate"),
    [(600_000, False, 1e-4), (494_000_000, False, 1e-5), (7_000_000_000, False, 1e-6), (7_000_000_000, True, 1e-5),
     (494_000_000, True, 1e-4), (600_000, True, 1e-4), (0, False, 1e-6)],
)  # fmt: skip
def test_learning_rates(parameters: int, adapters: bool, rate: float) -> None:
    assert learning_rate(parameters, adapters=adapters) == pytest.approx(rate)


def test_answers_get_what_the_prompts_leave() -> None:
    assert fit_lengths(Facts(0, 0, 0, 0), answer=1024) == (512, 1024)
    assert fit_lengths(Facts(0, 4096, 1000, 9), answer=1024) == (1280, 1024)
    assert fit_lengths(Facts(0, 4096, 4000, 9), answer=1024) == (3072, 1024)
    for longest in range(0, 600, 7):
        prompt, answer = fit_lengths(Facts(0, 512, longest, 9), answer=1024)
        assert prompt > 0 and answer > 0 and prompt + answer <= 512


def test_sizes_follow_the_memory_of_the_accelerators(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's program tells MiB; the smallest device counts, and two processes may share one."""
    write_folder(place / "model", **HALF_BILLION, max_position_embeddings=32768)
    tool = place / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho $MEMORY_MIB\necho 81559\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")

    def slots(mib: int, devices: int) -> tuple[int, float]:
        monkeypatch.setenv("MEMORY_MIB", str(mib))
        made = proposed_settings(answers(), Machine(16, 1 << 40, {"cuda": devices}, GIB, GIB))
        return int(str(made["producers.slots"])), used_bytes(made, devices) / (mib << 20)

    monkeypatch.setenv("MEMORY_MIB", "16384")
    assert device_memory("cuda") == 16384 << 20
    roomy, share = slots(81559, 2)
    assert roomy == 128 and share <= SHARE
    for mib, devices in ((16384, 2), (20480, 1)):
        fewer, share = slots(mib, devices)
        assert 8 <= fewer < 128 and share <= SHARE, (mib, devices, fewer, share)
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert device_memory("cuda") == 0 and slots(16384, 2)[0] == 128
    assert device_memory("npu") == 0  # there is no program


def test_sizes_follow_the_memory(place: Path) -> None:
    write_folder(place / "model", **HALF_BILLION)
    large = proposed_settings(answers(), Machine(2, 1 << 50, {}, GIB, GIB))
    small = proposed_settings(answers(), Machine(2, used_bytes(large), {}, GIB, GIB))
    assert large["producers.slots"] == 32
    assert used_bytes(small) <= SHARE * used_bytes(large) or small["producers.slots"] == 8
    assert used_bytes(small) < used_bytes(large)
    least = fit_memory(large, 1)
    assert (least["producers.slots"], least["buffer.batch_groups"]) == (8, 2)
    row = int(str(least["data.max_prompt_tokens"])) + int(str(least["sampling.max_new_tokens"]))
    assert int(str(least["learner.micro_batch_tokens"])) >= row
