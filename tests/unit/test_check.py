"""`asyncrl check`: every mistake at once, derived numbers with their arithmetic, nothing heavy imported."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from quick_checks import no_parts_are_tried
from small_folder import write_folder

from asyncrl.config import Config, parse
from asyncrl.net.keys import write_keys
from asyncrl.net.probe import bind_problem, redis_problem
from asyncrl.preflight.check import check, render
from asyncrl.preflight.code import check_plugins, import_problem
from asyncrl.preflight.derived import derive_findings
from asyncrl.preflight.files import check_data, first_row

assert no_parts_are_tried  # a fixture


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, rows and a reward module that all pass."""
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "model")
    rows = [{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}] * 10
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(
        "def good(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n\nnumber = 3\n"
    )
    return tmp_path


def config(**changes: str) -> Config:
    settings = {"model.path": "model", "data.path": "rows.jsonl", "reward": '[{function = "my_rewards:good"}]'}
    settings |= changes
    return parse("", overrides=[f"{key}={value}" for key, value in settings.items()])


def codes(made: Config) -> list[str]:
    return [error.code for error in check(made).errors]


def test_good_configuration(place: Path) -> None:
    assert check(config()).errors == []


def test_all_mistakes_at_once(place: Path) -> None:
    (place / "model" / "model.safetensors").unlink()
    (place / "model" / "tokenizer.json").unlink()
    made = config(**{"data.prompt_key": "question", "producers.engine": "warp", "reward": '[{function = "nowhere:f"}]'})
    assert codes(made) == ["config.model", "config.tokenizer", "config.data", "config.reward", "config.type"]
    texts = " ".join(error.render() for error in check(made).errors)
    assert (
        "question" in texts and "prompt, reward_model" in texts and "nowhere" in texts and "one of dataset, hf" in texts
    )


def test_missing_model_folder_and_data(place: Path) -> None:
    assert codes(config(**{"model.path": "elsewhere", "data.path": "rows.jsonl,none.jsonl"})) == [
        "config.model",
        "config.data",
    ]


def test_missing_folder_of_the_critic(place: Path) -> None:
    settings = {"learner.algorithm.advantage": "gae", "learner.critic.model": "elsewhere"}
    assert codes(config(**settings)) == ["config.model"]


def test_folders_of_the_process_reward_model(place: Path) -> None:
    own = place / "own"
    own.mkdir()
    base = {"learner.algorithm.advantage": "prime", "learner.process_reward.model": "own"}
    write_folder(place / "model", vocab_size=300)

    def said(text: str, **more: str) -> str:
        (own / "config.json").write_text(text)
        return " ".join(error.render() for error in check(config(**base, **more)).errors)

    assert "no *.safetensors" in said('{"vocab_size": 300}')
    (own / "model.safetensors").write_bytes(b"")
    assert said('{"vocab_size": 300, "architectures": ["Qwen3ForCausalLM"]}') == ""
    assert "it is a classifier" in said('{"architectures": ["Qwen3ForSequenceClassification"]}')
    assert "20 tokens, that of model.path 300" in said('{"vocab_size": 20}')
    assert "no config.json" in said("[")
    missing = said('{"vocab_size": 300}', **{"learner.process_reward.reference": "elsewhere"})
    assert "learner.process_reward.reference = 'elsewhere'" in missing and "config.model" in missing


def test_rows_of_every_kind(place: Path) -> None:
    (place / "a.json").write_text('[{"prompt": 1}]')
    (place / "b.jsonl").write_text('\n{"prompt": 2}\n')
    (place / "empty.jsonl").write_text("")
    (place / "broken.jsonl").write_text("{")
    (place / "list.jsonl").write_text("[1]\n")
    assert first_row(place / "a.json") == {"prompt": 1} and first_row(place / "b.jsonl") == {"prompt": 2}
    assert first_row(place / "empty.jsonl") is None
    for name in ("empty.jsonl", "broken.jsonl", "list.jsonl", "rows.csv"):
        assert [error.code for error in check_data(config(**{"data.path": name}))] == ["config.data"], name


def test_parquet_rows(place: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": ["a"], "x": [1]}), place / "rows.parquet")
    assert set(first_row(place / "rows.parquet") or {}) == {"prompt", "x"}
    (place / "bad.parquet").write_text("no")
    assert codes(config(**{"data.path": "bad.parquet"})) == ["config.data"]


def test_rewards_are_tried_elsewhere(place: Path) -> None:
    (place / "exits.py").write_text("import sys\nsys.exit(9)\n")
    assert import_problem("my_rewards:good") == ""
    assert "my_rewards" in import_problem("my_rewards:absent")
    assert "callable" in import_problem("my_rewards:number")
    assert import_problem("exits:f") != ""
    assert "exits" not in sys.modules and "my_rewards" not in sys.modules


def test_reward_that_hangs_at_import(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.preflight.code.IMPORT_TIMEOUT_S", 1.0)
    (place / "hangs.py").write_text("import time\ntime.sleep(60)\n")
    started = time.monotonic()
    assert "longer than 1 s" in import_problem("hangs:f")
    assert time.monotonic() - started < 45


def test_ports(place: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert codes(config(**{"network.buffer": address})) == ["net.port_in_use"]
        assert check(config(**{"network.buffer": address}), ("producer",), joining=True).errors == []
    assert codes(config(**{"network.buffer": address, "network.weightsync": address})) == ["config.conflict"]
    assert bind_problem(address) is None
    assert bind_problem("tcp://127.0.0.1") == ("config.network", "it is not tcp://host:port")


def test_key_file(place: Path) -> None:
    keys = place / "run.key"
    made = config(**{"network.key_file": str(keys)})
    assert check(made).errors == []  # the owner of the buffer makes it
    assert [error.code for error in check(made, ("producer",), joining=True).errors] == ["config.network"]
    write_keys(keys)
    assert check(made, ("producer",), joining=True).errors == []
    keys.chmod(0o644)
    assert codes(made) == ["config.network"]


class FakeRedis(threading.Thread):
    """Answers one connection with the given lines, one per command."""

    def __init__(self, *answers: bytes) -> None:
        super().__init__(daemon=True)
        self.answers = answers
        self.got: list[bytes] = []
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(10)
        self.port = self.server.getsockname()[1]
        self.start()

    def run(self) -> None:
        connection, _ = self.server.accept()
        with connection, self.server:
            for answer in self.answers:
                self.got.append(connection.recv(4096))
                connection.sendall(answer)


def test_redis_without_its_library() -> None:
    server = FakeRedis(b"+OK\r\n", b"+PONG\r\n")
    assert redis_problem(f"redis://:s%40cret@127.0.0.1:{server.port}/0") == ""
    assert server.got == [b"*2\r\n$4\r\nAUTH\r\n$6\r\ns@cret\r\n", b"*1\r\n$4\r\nPING\r\n"]
    server = FakeRedis(b"-WRONGPASS no\r\n")
    problem = redis_problem(f"redis://:hidden@127.0.0.1:{server.port}")
    assert "refused the password" in problem and "hidden" not in problem
    server = FakeRedis(b"-NOAUTH Authentication required.\r\n")
    assert "NOAUTH" in redis_problem(f"redis://127.0.0.1:{server.port}")
    assert "no Redis at" in redis_problem("redis://127.0.0.1:1")
    assert "no Redis at" in redis_problem("unix:///nowhere/redis.sock")
    assert "scheme" in redis_problem("http://x")


def test_store_is_looked_at_by_its_owner_only(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(**{"buffer.store": "redis"})
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert codes(made) == ["store.no_server"]
    assert check(made, ("producer",), joining=True).errors == []
    silent = {"buffer.store": "redis", "buffer.redis_url": "redis://127.0.0.1:1"}
    assert codes(config(**silent)) == ["store.unreachable"]


@pytest.mark.redis
@pytest.mark.skipif(not shutil.which("redis-server"), reason="no redis-server")
def test_a_real_redis_answers(tmp_path: Path) -> None:
    path = tmp_path / "r.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(tmp_path)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 90
        while (problem := redis_problem(f"unix://{path}")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert problem == ""
    finally:
        server.terminate()
        server.wait(timeout=60)


@pytest.fixture
def findings(place: Path) -> Iterator[dict[str, tuple[str, str]]]:
    made = config(**{"learner.steps": "5", "buffer.batch_groups": "4", "producers.count": "2"})
    yield {finding.name: (finding.value, finding.arithmetic) for finding in derive_findings(made)}


def test_derived_numbers_show_their_arithmetic(findings: dict[str, tuple[str, str]]) -> None:
    assert findings["max in flight"] == ("20 groups", "(pipeline_depth 4 + 1) x batch_groups 4")
    assert findings["samples per step"] == ("32", "batch_groups 4 x group_size 8")
    assert findings["total groups"] == ("20", "steps 5 x batch_groups 4")
    assert findings["groups per producer"] == (
        "16",
        "ceil(2 x slots 64 / group_size 8), fewer where the K/V holds fewer",
    )
    assert findings["epochs"] == ("2.00", "total groups 20 / rows 10")
    assert findings["what starts"][0].endswith("= 6 processes")


def test_render(place: Path) -> None:
    text = render(check(config(**{"learner.algorithm.minibatches": "2", "producers.threads": "400"})))
    assert "max in flight" in text and "note: minibatches = 2" in text and "CPU cores" in text


def test_a_backend_without_its_package_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.preflight.code.BACKEND_PACKAGES", {"megatron": "no_such_package"})
    (found,) = [error for error in check_plugins(config(**{"learner.backend": "megatron"})) if "backend" in error.where]
    assert found.code == "config.extra" and "no_such_package" in found.message and "asyncrl[megatron]" in found.remedy
    assert not list(check_plugins(config()))


def test_what_lacks_its_package_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (found,) = check_plugins(config(**{"learner.liger": "true"}))
    assert found.code == "config.extra" and found.where == "learner.liger" and "asyncrl[cuda]" in found.remedy
    (found,) = check_plugins(config(**{"learner.critic.name": "adamw_8bit"}))
    assert found.code == "config.extra" and found.where == "learner.critic.name" and "optim-8bit" in found.remedy
    assert not list(check_plugins(config()))


def test_texts_for_a_model_with_a_chat_template_are_noted(place: Path) -> None:
    (place / "model" / "chat_template.jinja").write_text("{{ messages }}")
    said = "the prompts are plain text"
    assert any(said in note for note in check(config()).notes)
    assert not any(said in note for note in check(config(**{"data.as_chat": "true"})).notes)
    (place / "model" / "chat_template.jinja").unlink()
    assert not any(said in note for note in check(config()).notes)


def test_names_of_the_hub_say_how_to_fetch_them(place: Path) -> None:
    errors = check(config(**{"model.path": "Qwen/Qwen3-0.6B", "data.path": "openai/gsm8k"})).errors
    remedies = " ".join(error.remedy for error in errors)
    assert "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B" in remedies
    assert "hf download openai/gsm8k --repo-type dataset" in remedies
