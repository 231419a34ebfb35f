"""A real run under the tools that users watch runs with: a Prometheus server, promtool, the Perfetto UI.

`make test-trackers`. Where Prometheus or a Chromium is missing, its part is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_run import Run
from made_certificate import make_certificate

from asyncrl.runtime.run_dir import RunDir
from asyncrl.trace.history import history_events

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "configs" / "grafana" / "asyncrl.json"
RULES = ROOT / "configs" / "prometheus" / "asyncrl.rules.yml"
LOOPBACK = "127.0.0.1"
#: An interpreter with viztracer and playwright.
PYTHON = os.environ.get("WATCHING_PYTHON", "")
KEY = "correct-horse-battery"
#: A CPU has no peak that is known (docs/profiling.md).
WITHOUT_A_GPU = {"asyncrl_mfu", "asyncrl_mfu_step"}
#: Names are the catalogue's, everywhere (docs/trackers.md).
TOLERATED = ('counter metrics should have "_total" suffix', "metric names should not contain abbreviated units")

pytestmark = pytest.mark.skipif(not PYTHON, reason="make test-trackers: with Prometheus and the Perfetto UI")


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as free:
        port: int = free.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def going(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, metrics_port: int) -> Iterator[Run]:
    """A run that goes on until somebody stops it; every host may read its metrics, with the key."""
    run = Run(tmp_path_factory.mktemp("watched"), tiny_model)
    key = run.folder / "metrics.key"
    key.write_text(f"{KEY}\n")
    key.chmod(0o600)
    settings = ["learner.steps=100000", f"trackers.prometheus_port={metrics_port}"]
    settings += ["trackers.prometheus_host=0.0.0.0", f"trackers.prometheus_key_file={key}"]
    try:
        child = run.start("launch", "all", str(run.config), *(word for one in settings for word in ("--set", one)))
        run.wait("four steps", lambda: len(run.steps()) >= 4 or child.poll() is not None, timeout=120)
        yield run
    finally:
        run.close()


# ---------------------------------------------------------------- Prometheus


class Prometheus:
    """A server that scrapes the run every second: with the key, without it, and by https."""

    def __init__(self, folder: Path, metrics_port: int, https_port: int, trusted: Path) -> None:
        self._url = f"http://{LOOPBACK}:{free_port()}"
        config = folder / "prometheus.yml"
        key = f"authorization: {{credentials_file: '{folder / 'metrics.key'}'}}"
        https = f"scheme: https, tls_config: {{ca_file: '{trusted}'}}"
        jobs = {
            "asyncrl": (metrics_port, f", {key}"),
            "without": (metrics_port, ""),
            "https": (https_port, f", {key}, {https}"),
        }
        config.write_text(
            f"global: {{scrape_interval: 1s}}\nrule_files: ['{RULES}']\nscrape_configs:\n"
            + "".join(
                f"  - {{job_name: {name}, static_configs: [{{targets: ['{LOOPBACK}:{port}']}}]{more}}}\n"
                for name, (port, more) in jobs.items()
            )
        )
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self._url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=log,
            )

    def get(self, path: str, **words: str) -> Any:
        with urllib.request.urlopen(f"{self._url}{path}?{urllib.parse.urlencode(words)}", timeout=60) as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        return said["data"]

    def query(self, expression: str) -> list[Any]:
        found: list[Any] = self.get("/api/v1/query", query=expression)["result"]
        return found

    def until(self, what: str, condition: Callable[[], object], timeout: float = 60) -> None:
        deadline, last = time.monotonic() + timeout, "no answer"
        while time.monotonic() < deadline:
            try:
                if condition():
                    return
                last = "not yet"
            except OSError as error:  # it is starting
                last = str(error)
            time.sleep(0.5)
        raise AssertionError(f"waited {timeout} s for {what}: {last}")


@pytest.fixture(scope="module")
def prometheus(going: Run, metrics_port: int) -> Iterator[Prometheus]:
    if not (shutil.which("prometheus") and shutil.which("promtool")):
        pytest.skip("prometheus and promtool are not installed (Debian: apt-get install prometheus)")
    trusted, pem = make_certificate(going.folder)
    https_port = free_port()
    key = going.folder / "metrics.key"
    going.start("metrics", str(going.dir), "--port", str(https_port), "--key-file", str(key), "--cert-file", str(pem))
    server = Prometheus(going.folder, metrics_port, https_port, trusted)
    try:
        server.until("a scrape of steps", lambda: server.query("asyncrl_step{job='asyncrl'}"))
        yield server
    finally:
        server.process.terminate()
        server.process.wait(timeout=30)


def test_every_expression_of_the_dashboard_has_data(prometheus: Prometheus) -> None:
    board = json.loads(DASHBOARD.read_text())
    wanted = [target["expr"].replace("$run", ".*") for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(wanted) > 40
    missing = {expression for expression in wanted if expression.partition("{")[0] not in WITHOUT_A_GPU}
    assert len(missing) == len(set(wanted)) - len(WITHOUT_A_GPU)

    def all_there() -> bool:
        missing.difference_update({expression for expression in missing if prometheus.query(expression)})
        return not missing

    try:
        prometheus.until("data of every expression", all_there)
    except AssertionError:
        pytest.fail(f"no data: {sorted(missing)}")
    now = time.time()
    span = {"start": str(now - 30), "end": str(now), "step": "1"}  # as a panel asks
    for expression in wanted:
        if expression.partition("{")[0] not in WITHOUT_A_GPU:
            assert prometheus.get("/api/v1/query_range", query=expression, **span)["result"], expression
    [variable] = [one for one in board["templating"]["list"] if one["type"] == "query"]
    assert variable["query"] == "label_values(asyncrl_step, run)"
    assert prometheus.get("/api/v1/label/run/values", **{"match[]": "asyncrl_step"}) == ["test"]
    names = {one["metric"]["name"] for one in prometheus.query("asyncrl_line_age_s")}
    assert names >= {"buffer", "learner", "producer-0", "producer-1", "reward-0", "weightsync"}


def test_it_reads_the_metrics_with_the_key_alone(prometheus: Prometheus) -> None:
    prometheus.until("a scrape by https", lambda: prometheus.query("asyncrl_step{job='https'}"))
    targets = {one["labels"]["job"]: one for one in prometheus.get("/api/v1/targets")["activeTargets"]}
    assert {name: one["health"] for name, one in targets.items()} == {"asyncrl": "up", "https": "up", "without": "down"}
    assert "401" in targets["without"]["lastError"], targets["without"]


def test_the_text_is_what_promtool_takes(prometheus: Prometheus, metrics_port: int) -> None:
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{metrics_port}/metrics", headers={"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
    said = (done.stdout + done.stderr).decode().splitlines()
    assert not [line for line in said if not line.endswith(TOLERATED)] and done.returncode in (0, 3)
    assert len(said) < text.count(b"# TYPE")


def test_alerts_are_loaded_and_a_healthy_run_raises_none(prometheus: Prometheus) -> None:
    [group] = prometheus.get("/api/v1/rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"} and len(group["rules"]) >= 10
    for rule in group["rules"]:
        prometheus.query(rule["query"])
    assert not [one for one in prometheus.query("ALERTS") if one["metric"]["severity"] == "critical"]


def test_alerts_do_what_they_say() -> None:
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    for words in (("check", "rules", str(RULES)), ("test", "rules", str(ROOT / "tests/trackers/alerts_test.yml"))):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------- Perfetto


@pytest.fixture(scope="module")
def ended(going: Run) -> Run:
    assert going.command("stop", str(going.dir), timeout=60).returncode == 0
    going.wait("the end", (going.dir / "result.json").exists, timeout=60)
    going.children[0].wait(timeout=60)
    return going


SLICES = "select count(*) from slice join track on track_id = track.id where track.name = '{}' and slice.name glob '{}'"
ARROWS = """select count(*) from flow join slice a on a.id = slice_out join slice b on b.id = slice_in
            join track ta on ta.id = a.track_id join track tb on tb.id = b.track_id
            where ta.name = '{}' and tb.name = '{}' and a.ts <= b.ts"""
BACKWARDS = (
    "select count(*) from flow join slice a on a.id = slice_out join slice b on b.id = slice_in where b.ts < a.ts"
)


def test_perfetto_reads_all_of_it(ended: Run) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("a Chromium is not installed (Debian: apt-get install chromium)")
    trace = ended.folder / "run.pftrace.gz"
    assert ended.command("trace", str(ended.dir), "--perfetto", str(trace), timeout=60).returncode == 0
    history = list(history_events(RunDir(ended.dir)))
    of_kind = Counter(event["e"] for event in history)
    steps = ended.lines("metrics/learner.jsonl")
    trained = sum(len(line["groups_of_step"]) for line in steps)
    wanted = {
        SLICES.format("steps", "step *"): len(steps), SLICES.format("groups held", "*"): of_kind["lease"],
        SLICES.format("groups waiting", "*"): of_kind["ready"] + of_kind["unscored"],
        SLICES.format("rounds", "*"): len(ended.lines("metrics/weightsync.jsonl")),
        ARROWS.format("groups waiting", "steps"): trained,
        BACKWARDS: 0,
    }  # fmt: skip
    queries = [word for query in wanted for word in ("--query", query)]
    done = subprocess.run(
        [PYTHON, str(ROOT / "docs/perfetto_ui.py"), str(trace), "--chromium", chromium, *queries],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["errors"] == [] and len(steps) >= 4
    assert dict(zip(wanted, (rows[0][0] for rows in said["rows"]), strict=True)) == wanted
