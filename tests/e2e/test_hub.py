"""Models and data by their names on a hub: a local server that answers as the Hugging Face hub does."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from asyncrl.config import load
from asyncrl.errors import ConfigError
from asyncrl.runtime.hub import OnHub, is_hub_name, split_files

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOML = """
[run]
dir = "run"
[model]
path = "somebody/tiny"
dtype = "float32"
[data]
path = "somebody/sums"
max_prompt_tokens = 32
[sampling]
group_size = 2
max_new_tokens = 8
[buffer]
batch_groups = 2
store = "sqlite"
[producers]
slots = 4
[learner]
steps = 2
micro_batch_tokens = 256
[[reward]]
function = "mine.py:length"
"""


class Hub(NamedTuple):
    """A server with repositories, the requests that it got, and the settings of a process that asks it."""

    asked: list[str]
    env: dict[str, str]
    place: Path

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """`asyncrl ...` in the folder."""
        return subprocess.run(
            [sys.executable, "-m", "asyncrl", *words],
            cwd=self.place,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    @property
    def fetched(self) -> list[str]:
        return [path.rpartition("/")[2] for path in self.asked if path.startswith("GET") and "/resolve/" in path]


def serve(repositories: dict[str, dict[str, bytes]], asked: list[str]) -> ThreadingHTTPServer:
    """The three answers of the hub that `snapshot_download` needs: the commit, the tree, the files."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            asked.append(f"{self.command} {path}")
            name = next((name for name in repositories if f"/{name}/" in path), "")
            files = repositories.get(name, {})
            inside = path.partition(f"/resolve/{COMMIT}/")[2]
            if not name or ("/resolve/" in path and inside not in files):
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound" if not name else "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            sent = files.get(inside, b"")
            if "/tree/" in path:
                sent = json.dumps([entry(one, content) for one, content in files.items()]).encode()
            elif "/revision/" in path:
                siblings = [{"rfilename": one} for one in files]
                sent = json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha1(sent).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            if body:
                self.wfile.write(sent)

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def entry(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@pytest.fixture
def hub(tmp_path: Path, tiny_model: Path) -> Iterator[Hub]:
    model = {path.name: path.read_bytes() for path in tiny_model.iterdir() if path.is_file()}
    rows = "".join(json.dumps({"prompt": f"{one}+1="}) + "\n" for one in range(9)).encode()
    sums = {"train.jsonl": rows, "test.jsonl": rows[:13], "README.md": b"sums"}
    two = {"easy/train.jsonl": rows, "hard/train.jsonl": rows}
    asked: list[str] = []
    repositories = {"somebody/tiny": model | {"pytorch_model.bin": b"x"}, "somebody/sums": sums, "somebody/two": two}
    server = serve(repositories, asked)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    (tmp_path / "my.toml").write_text(TOML)
    (tmp_path / "mine.py").write_text(
        "def length(prompts, completions, **_):\n    return [len(c) for c in completions]\n"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    env |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    yield Hub(asked, env, tmp_path)
    server.shutdown()
    thread.join(timeout=60)
    server.server_close()


def test_check_says_what_would_be_fetched_and_a_launch_fetches_it_once(hub: Hub) -> None:
    checked = hub.run("check", "my.toml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"model.path: somebody/tiny is revision {COMMIT[:12]} on the hub" in checked.stdout
    assert "will be fetched" in checked.stdout and hub.fetched == []
    done = hub.run("launch", "all", "my.toml", "--plain")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Fetching" in done.stderr and "Fetching" not in checked.stderr  # the progress bar
    assert "step 2/2" in done.stdout and "audit     OK" in done.stdout
    fetched = hub.fetched
    assert "model.safetensors" in fetched and "train.jsonl" in fetched
    assert not {"pytorch_model.bin", "test.jsonl", "README.md"} & {*fetched}
    resolved = load(hub.place / "run" / "config.toml")
    assert COMMIT in resolved.model.path and resolved.data.path.endswith("train.jsonl") and COMMIT in resolved.data.path
    again = hub.run("check", "my.toml", HF_HUB_OFFLINE="1")  # without a network, from the cache
    assert again.returncode == 0 and "in the cache" in again.stdout, again.stdout + again.stderr
    assert hub.fetched == fetched


def test_what_is_not_there_is_an_error_before_anything_starts(hub: Hub) -> None:
    wrong = hub.run("launch", "all", "my.toml", "--set", "model.path=somebody/nothing")
    assert wrong.returncode == 2 and "error[config.model] --set model.path" in wrong.stderr
    assert "no such folder, and not on the hub" in wrong.stderr and not (hub.place / "run").exists()
    several = hub.run("check", "my.toml", "--set", "data.path=somebody/two")
    assert several.returncode == 2 and "name one: somebody/two/easy, somebody/two/hard" in several.stderr
    one = hub.run("check", "my.toml", "--set", "data.path=somebody/two/easy")
    assert one.returncode == 0, one.stderr
    offline = hub.run("check", "my.toml", HF_HUB_OFFLINE="1")
    assert offline.returncode == 2 and "without a network name a folder" in offline.stderr


def test_names_are_told_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_hub_name("Qwen/Qwen3-0.6B") and is_hub_name("openai/gsm8k/main")
    assert not any(map(is_hub_name, ("models/Qwen", "/a/b", "rows.jsonl", "a b/c", "./a/b")))


def test_the_files_of_a_split(tmp_path: Path) -> None:
    def found(*names: str) -> OnHub:
        return OnHub(tmp_path, dict.fromkeys(names, 0))

    assert split_files(
        found("data/train-0.parquet", "data/train-1.parquet", "data/test-0.parquet"), "a/b", ["train"]
    ) == [
        "data/train-0.parquet",
        "data/train-1.parquet",
    ]
    assert split_files(found("rows.jsonl"), "a/b", ["train"]) == ["rows.jsonl"]
    assert split_files(found("x/train.jsonl", "x/train.parquet"), "a/b", ["train"]) == ["x/train.parquet"]
    for names in (("a.jsonl", "b.jsonl"), ("one/train.jsonl", "two/train.jsonl")):
        with pytest.raises(ConfigError, match="folders"):
            split_files(found(*names), "a/b", ["train"])
