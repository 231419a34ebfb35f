"""Models and data by their names on a hub: a local server that answers as the Hugging Face hub or ModelScope does."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

import pytest

from asyncrl.config import load
from asyncrl.errors import ConfigError
from asyncrl.runtime import modelscope
from asyncrl.runtime.hub import OnHub, is_hub_name, split_files

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOML = """
[run]
dir = "run"
[model]
path = "somebody/tiny"
hub = "HUB"
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

Repositories = dict[str, dict[str, bytes]]
#: Status, headers, body, and the file that it is; of a path and its query.
Answer = tuple[int, dict[str, str], bytes, str]


class Hub(NamedTuple):
    """A server with repositories, the files that were fetched from it, and the settings of a process that asks it."""

    fetched: list[str]
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


def hugging_face(repositories: Repositories, path: str, _: dict[str, str]) -> Answer:
    """The three answers that `snapshot_download` needs: the commit, the tree, the files."""
    name = next((name for name in repositories if f"/{name}/" in path), "")
    files = repositories.get(name, {})
    inside = path.partition(f"/resolve/{COMMIT}/")[2]
    if not name or ("/resolve/" in path and inside not in files):
        return 404, {"X-Error-Code": "EntryNotFound" if name else "RepoNotFound"}, b"", ""
    sent = files.get(inside, b"")
    if "/tree/" in path:
        rows = [(one, len(content), hashlib.sha1(content).hexdigest()) for one, content in files.items()]
        tree = [{"type": "file", "path": one, "size": size, "oid": digest} for one, size, digest in rows]
        sent = json.dumps(tree).encode()
    elif "/revision/" in path:
        sent = json.dumps({"id": name, "sha": COMMIT, "siblings": [{"rfilename": one} for one in files]}).encode()
    return 200, {"ETag": f'"{hashlib.sha1(sent).hexdigest()}"', "X-Repo-Commit": COMMIT}, sent, inside


def model_scope(repositories: Repositories, path: str, query: dict[str, str]) -> Answer:
    """The newest commit of a branch, pages of the files of a commit, and a file."""

    def data(value: dict[str, object]) -> Answer:
        return 200, {}, json.dumps({"Code": 200, "Success": True, "Message": "", "Data": value}).encode(), ""

    found = re.fullmatch(r"/api/v1/(?:model|dataset)s/([^/]+/[^/]+)/(commits|repo/files|repo/tree|repo)", path)
    files = repositories.get(found[1]) if found else None
    if found is None or files is None or query.get("Revision", COMMIT) != COMMIT:
        return 404, {}, json.dumps({"Code": 10010205001, "Success": False, "Message": "no such name"}).encode(), ""
    if found[2] == "commits":
        return data({"Commit": [{"Id": COMMIT if query["Ref"] == "master" else "", "Message": "all"}], "TotalCount": 1})
    if found[2] == "repo":
        return 200, {}, files[query["FilePath"]].removeprefix(SPOILED), query["FilePath"]
    rows: list[dict[str, object]] = [{"Path": "a", "Type": "tree", "Size": 0, "Sha256": ""}]
    for one, sent in files.items():
        size, digest = len(sent.removeprefix(SPOILED)), hashlib.sha256(sent).hexdigest()
        rows.append({"Path": one, "Type": "blob", "Size": size, "Sha256": digest})
    if found[2] == "repo/files":  # whole, whatever page is asked for
        return data({"Files": rows})
    start = (int(query["PageNumber"]) - 1) * int(query["PageSize"])
    return data({"Files": rows[start : start + int(query["PageSize"])]})


#: Beginning of a file whose list has another digest than what is sent.
SPOILED = b"spoiled"
ANSWERS = {"huggingface": hugging_face, "modelscope": model_scope}


def serve(hub: str, repositories: Repositories, fetched: list[str]) -> ThreadingHTTPServer:
    """A server on a free port that notes the files it sent."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            asked = urlsplit(self.path)
            status, headers, sent, file = ANSWERS[hub](repositories, asked.path, dict(parse_qsl(asked.query)))
            if file and body:
                fetched.append(PurePosixPath(file).name)
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            if body:
                self.wfile.write(sent)

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@contextmanager
def serving(kind: str, repositories: Repositories, place: Path) -> Iterator[Hub]:
    fetched: list[str] = []
    server = serve(kind, repositories, fetched)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "MODELSCOPE"))}
    env |= {"HF_HOME": str(place / "cache"), "MODELSCOPE_CACHE": str(place / "cache")}
    env |= {"HF_ENDPOINT": address, "MODELSCOPE_ENDPOINT": address, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    try:
        yield Hub(fetched, env, place)
    finally:
        server.shutdown()
        thread.join(timeout=60)
        server.server_close()


@pytest.fixture(params=["huggingface", pytest.param("modelscope", marks=pytest.mark.chaos)])
def hub(request: pytest.FixtureRequest, tmp_path: Path, tiny_model: Path) -> Iterator[Hub]:
    model = {path.name: path.read_bytes() for path in tiny_model.iterdir() if path.is_file()}
    rows = "".join(json.dumps({"prompt": f"{one}+1="}) + "\n" for one in range(9)).encode()
    sums = {"train.jsonl": rows, "test.jsonl": rows[:13], "README.md": b"sums"}
    two = {"easy/train.jsonl": rows, "hard/train.jsonl": rows}
    repositories = {"somebody/tiny": model | {"pytorch_model.bin": b"x"}, "somebody/sums": sums, "somebody/two": two}
    (tmp_path / "my.toml").write_text(TOML.replace("HUB", request.param))
    (tmp_path / "mine.py").write_text(
        "def length(prompts, completions, **_):\n    return [len(c) for c in completions]\n"
    )
    with serving(request.param, repositories, tmp_path) as made:
        yield made


def test_check_says_what_would_be_fetched_and_a_launch_fetches_it_once(hub: Hub) -> None:
    checked = hub.run("check", "my.toml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"model.path: somebody/tiny is revision {COMMIT[:12]} on the hub" in checked.stdout
    assert "will be fetched" in checked.stdout and hub.fetched == []
    done = hub.run("launch", "all", "my.toml", "--plain")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Fetching" in done.stderr and "Fetching" not in checked.stderr  # the progress bar
    assert "step 2/2" in done.stdout and "audit     OK" in done.stdout
    fetched = [*hub.fetched]
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


def test_a_list_in_pages_and_a_file_that_is_not_what_the_list_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {f"all/train-{one}.jsonl": b"{}" for one in range(2 * modelscope.PAGE + 7)}
    files = {"somebody/parts": parts, "somebody/bad": {"train.jsonl": SPOILED + b"{}"}}
    files["somebody/outside"] = {"../train.jsonl": b"{}"}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the suite sets it
    with serving("modelscope", files, tmp_path) as hub:
        for key in ("MODELSCOPE_ENDPOINT", "MODELSCOPE_CACHE"):
            monkeypatch.setenv(key, hub.env[key])
        found = modelscope.look_up("somebody/parts", "dataset", ["train"])
        assert found.files == dict.fromkeys(sorted(parts), 2) and found.revision == COMMIT
        bad = modelscope.look_up("somebody/bad", "dataset", ["train"])
        with pytest.raises(ConfigError, match="SHA-256"):
            modelscope.fetch(bad, "somebody/bad", "dataset")
        assert not (bad.folder / "train.jsonl").exists()
        with pytest.raises(ConfigError, match="cannot have a folder in the cache"):
            modelscope.look_up("somebody/outside", "dataset", ["train"])
    with pytest.raises(ConfigError, match="not on the hub"):  # the server has ended, and nothing was fetched whole
        modelscope.look_up("somebody/bad", "dataset", ["train"])


def test_names_are_told_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_hub_name("Qwen/Qwen3-0.6B", "model") and is_hub_name("openai/gsm8k/main", "dataset")
    for path in ("models/Qwen", "/a/b", "rows.jsonl", "a b/c", "./a/b"):
        assert not is_hub_name(path, "model") and not is_hub_name(path, "dataset"), path
    assert not is_hub_name("runs/models/mine", "model") and not is_hub_name("made/rows/train.jsonl", "dataset")


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
