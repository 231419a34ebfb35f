"""Metrics for Prometheus: the text format, who is refused, and that the dashboard names what exists."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from made_certificate import make_certificate
from synthetic_run import START, write_run

from asyncrl.errors import ConfigError
from asyncrl.metrics import CATALOGUE
from asyncrl.metrics.log import TAIL_BYTES
from asyncrl.monitor.prometheus import CONTENT, Newest, Server, metrics_command, series_of, shown_names, text_of
from asyncrl.net.http_access import LOCAL, Access, read_access
from asyncrl.process_plan.plan import TARGETS, plan
from asyncrl.runtime.metrics_tail import Following, Heard
from asyncrl.runtime.run_dir import RunDir

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "configs" / "grafana" / "asyncrl.json"
RULES = ROOT / "configs" / "prometheus" / "asyncrl.rules.yml"
SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*)\} (-?[0-9.e+-]+)')


def parsed(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The series of an exposition, checked against the format: help and type once per name, before its lines."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    helped: list[str] = []
    typed: list[str] = []
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped.append(line.split(" ", 3)[2])
            assert len(line.split(" ", 3)[3]) > 3
        elif line.startswith("# TYPE "):
            name, kind = line.split(" ")[2:]
            assert name == helped[-1] and kind in ("gauge", "counter")
            typed.append(name)
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] == typed[-1], "the lines of a name stand together"
            labels = dict(re.findall(r'([a-z]+)="((?:[^"\\]|\\.)*)"', match[2]))
            found.setdefault(match[1], []).append((labels, float(match[3])))
    assert len(set(typed)) == len(typed)
    return found


def heard(**values: float) -> Heard:
    return Heard(100.0, values, "")


def test_every_metric_of_the_catalogue_can_be_shown_with_its_meaning() -> None:
    values = dict.fromkeys(CATALOGUE, 1.5)
    text = text_of({("learner", "learner"): Heard(100.0, values, "")}, run="r", now=101.0)
    found = parsed(text)
    assert found.keys() - {"asyncrl_line_age_s"} == {series_of(name)[0] for name in CATALOGUE}
    assert "# HELP asyncrl_lag_max largest lag in the batch (steps)\n" in text
    kinds = {
        "generated_tokens": "counter",
        "refused_samples": "counter",
        "lag_max": "gauge",
        "memory_peak_bytes": "gauge",
    }
    assert all(f"# TYPE asyncrl_{name} {kind}\n" in text for name, kind in kinds.items())


def test_labels_and_open_families() -> None:
    newest = {
        ("learner", "learner"): heard(
            **{
                "reward/exact": 0.5,
                "lag/2/ess": 0.9,
                "pass_at/4": 1.0,
                "val-core/add/acc/pass@4/mean": 0.25,
                "reward_mean": 0.75,
            }
        ),
        ("producer", 'bad"name\\\n'): heard(busy_share=0.5),
    }
    found = parsed(text_of(newest, run="my run", now=100.0))
    who = {"run": "my run", "role": "learner", "name": "learner"}
    assert found["asyncrl_reward"] == [({**who, "part": "exact"}, 0.5)]
    assert found["asyncrl_lag_ess"] == [({**who, "lag": "2"}, 0.9)]
    assert found["asyncrl_pass_at"] == [({**who, "k": "4"}, 1.0)]
    assert found["asyncrl_val_core"] == [({**who, "figure": "add/acc/pass@4/mean"}, 0.25)]
    assert found["asyncrl_reward_mean"] == [(who, 0.75)]
    assert found["asyncrl_busy_share"][0][0]["name"] == 'bad\\"name\\\\\\n'


def test_a_worker_that_is_silent_is_left_out_and_its_silence_is_shown() -> None:
    newest = {("producer", "p"): heard(busy_share=0.5), ("learner", "learner"): heard(lag_mean=1.0)}
    found = parsed(text_of(newest, run="r", now=200.0))
    assert "asyncrl_busy_share" not in found and "asyncrl_lag_mean" in found  # a step may take longer than that
    assert {labels["name"]: age for labels, age in found["asyncrl_line_age_s"]} == {"p": 100.0, "learner": 100.0}


def test_a_worker_that_left_the_run_is_forgotten() -> None:
    newest = {("producer", "p"): heard(busy_share=0.5), ("learner", "learner"): heard(lag_mean=1.0)}
    for now, names in ((3600.0, {"p", "learner"}), (3800.0, {"learner"})):
        found = parsed(text_of(newest, run="r", now=now))
        assert {labels["name"] for labels, _ in found["asyncrl_line_age_s"]} == names


@pytest.mark.parametrize("torn", [b"", b'{"t":'])
def test_a_long_file_is_read_to_its_end_at_once(torn: bytes, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    beat = {"t": START, "role": "producer", "name": "p", "busy_share": 0.25}
    lines = [msgspec.json.encode({**beat, "t": START + second}) + b"\n" for second in range(20_000)]
    assert TAIL_BYTES < sum(map(len, lines)) < 2 * TAIL_BYTES
    (run.metrics / "roles.jsonl").write_bytes(b"".join(lines) + torn)
    found = parsed(Newest(run, clock=lambda: START + 20_000).text())
    assert found["asyncrl_busy_share"][0][1] == 0.25
    assert ({"run": "synthetic <run>", "role": "producer", "name": "p"}, 1.0) in found["asyncrl_line_age_s"]


def test_a_run_as_it_was_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=12)
    found = parsed(Newest(run, clock=lambda: START + 15).text())
    assert found["asyncrl_step"] == [({"run": "synthetic <run>", "role": "learner", "name": "learner"}, 12.0)]
    assert [labels["name"] for labels, _ in found["asyncrl_busy_share"]] == ["producer-0", "producer-1", "reward-0"]
    assert found.keys() <= shown_names()
    following = Following(run)
    assert [point.step for point in following.poll()] == list(range(1, 13))


def test_a_heartbeat_of_the_learner_hides_no_number_of_its_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=12)
    before = parsed(Newest(run, clock=lambda: START + 15).text())
    beat = {"t": START + 14.6, "role": "learner", "name": "learner", "step": 12.0, "wait_s": 0.5, "busy_share": 0.25}
    with (run.metrics / "roles.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(beat) + b"\n")
    after = parsed(Newest(run, clock=lambda: START + 15).text())
    assert before.keys() <= after.keys() and "asyncrl_lag_mean" in after
    assert after["asyncrl_wait_s"][0][1] == 0.5


def test_the_dashboard_names_metrics_that_exist() -> None:
    board = json.loads(DASHBOARD.read_text())
    texts = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    texts += [variable["query"] for variable in board["templating"]["list"]]
    names = {name for text in texts for name in re.findall(r"\basyncrl_\w+", text)}
    assert len(names) > 40 and names <= shown_names()
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert rows == ["health", "learning", "speed", "faults"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) and "asyncrl_lag_mean_" not in names


def test_the_alerts_name_metrics_that_exist() -> None:
    names = set(re.findall(r"\basyncrl_\w+", RULES.read_text()))
    assert len(names) > 10 and names <= shown_names()


# ---------------------------------------------------------------- the server


@contextmanager
def serving(folder: Path, access: Access = LOCAL) -> Iterator[Server]:
    made = Server(write_run(folder / "run", steps=3), 0, access)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()
        thread.join(timeout=60)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as made:
        yield made


def ask(
    server: Server,
    method: str,
    path: str,
    *,
    host: str = "",
    authorization: str = "",
    tls: ssl.SSLContext | None = None,
) -> http.client.HTTPResponse:
    if tls is None:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    else:
        connection = http.client.HTTPSConnection("localhost", server.server_port, timeout=30, context=tls)
    given = {"Host": host, "Authorization": authorization}
    connection.request(method, path, headers={name: value for name, value in given.items() if value})
    answer = connection.getresponse()
    answer.body = answer.read().decode()  # type: ignore[attr-defined]
    connection.close()
    return answer


def test_it_answers_a_scrape(server: Server) -> None:
    for host in ("", "localhost", "localhost:9464", "[::1]:9464", "127.0.0.1"):
        answer = ask(server, "GET", "/metrics", host=host)
        assert (answer.status, answer.getheader("Content-Type")) == (200, CONTENT)
        assert parsed(answer.body)["asyncrl_step"][0][1] == 3.0  # type: ignore[attr-defined]
        assert not [name for name, _ in answer.getheaders() if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9464", "127.0.0.1.evil.example", "localhost:x", "10.0.0.1"]
)
def test_a_page_that_rebinds_its_name_is_refused(server: Server, host: str) -> None:
    answer = ask(server, "GET", "/metrics", host=host)
    assert answer.status == 403 and "asyncrl_" not in answer.body  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("POST", "/metrics", 405),
        ("OPTIONS", "/metrics", 405),
        ("HEAD", "/metrics", 405),
        ("DELETE", "/", 405),
        ("GET", "/", 404),
        ("GET", "/../../etc/passwd", 404),
    ],
)
def test_everything_else_is_refused(server: Server, method: str, path: str, code: int) -> None:
    assert ask(server, method, path).status == code


def test_it_listens_on_loopback_alone(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"


KEY = "correct-horse-battery"


def secret(path: Path, text: str = f"{KEY}\n", mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_with_a_key_every_request_needs_it(tmp_path: Path, host: str) -> None:
    with serving(tmp_path, read_access(host, key_file=secret(tmp_path / "key"))) as server:
        wrong = (
            "",
            KEY,
            f"Basic {KEY}",
            "Bearer",
            "Bearer ",
            f"Bearer {KEY}x",
            f"Bearer {KEY[:-1]}",
            f"Bearer \xe4{KEY}",
        )
        for authorization in wrong:
            answer = ask(server, "GET", "/metrics", authorization=authorization)
            assert (answer.status, answer.getheader("WWW-Authenticate")) == (401, "Bearer"), authorization
            assert "asyncrl_" not in answer.body  # type: ignore[attr-defined]
        for authorization in (f"Bearer {KEY}", f"bearer {KEY}"):
            assert ask(server, "GET", "/metrics", authorization=authorization).status == 200
        assert ask(server, "GET", "/", authorization=f"Bearer {KEY}").status == 404
        assert ask(server, "GET", "/").status == 401, "without the key nothing is told"
        other = ask(server, "GET", "/metrics", authorization=f"Bearer {KEY}", host="gpu-1:9464").status
        assert other == (403 if host == "127.0.0.1" else 200), "its own name beyond loopback is any"


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "10.0.0.1", "gpu-1"])
def test_nothing_beyond_loopback_without_a_key(host: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_access(host, where="trackers.prometheus_")
    error = refused.value
    assert error.code == "config.network" and error.where.startswith("trackers.prometheus_host")
    assert "openssl rand" in error.remedy and "trackers.prometheus_key_file" in error.remedy


@pytest.mark.parametrize(
    ("text", "mode", "code", "words"),
    [
        (None, 0o600, "config.file", "No such file"),
        ("\n", 0o600, "config.type", "is empty"),
        (KEY, 0o640, "config.type", "others may read it"),
        ("too-short-a-key", 0o600, "config.type", "at least 16"),
        ("two words of a key that is long", 0o600, "config.type", "one word"),
    ],
)
def test_a_key_that_protects_nothing_is_refused(
    tmp_path: Path, text: str | None, mode: int, code: str, words: str
) -> None:
    path = tmp_path / "key"
    if text is not None:
        secret(path, text, mode)
    with pytest.raises(ConfigError, match=words) as refused:
        read_access("0.0.0.0", key_file=str(path))
    assert refused.value.code == code and refused.value.remedy and KEY not in refused.value.render()


def test_with_a_certificate_it_speaks_https_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trusted, pem = make_certificate(tmp_path)
    access = read_access("127.0.0.1", key_file=secret(tmp_path / "key"), cert_file=str(pem))
    client = ssl.create_default_context(cafile=str(trusted))
    with serving(tmp_path, access) as server:
        assert server.url == f"https://127.0.0.1:{server.server_port}/metrics"
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=30):  # shakes no hands
            answer = ask(server, "GET", "/metrics", authorization=f"Bearer {KEY}", tls=client)
        assert answer.status == 200 and "asyncrl_step" in answer.body  # type: ignore[attr-defined]
        assert ask(server, "GET", "/metrics", tls=client).status == 401
        with pytest.raises((http.client.HTTPException, OSError)):
            ask(server, "GET", "/metrics", authorization=f"Bearer {KEY}")
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(server, "GET", "/metrics", tls=ssl.create_default_context())
        assert ask(server, "GET", "/metrics", authorization=f"Bearer {KEY}", tls=client).status == 200
    assert "Traceback" not in capfd.readouterr().err, "a client of another kind is no bug"


def test_a_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PEM") as refused:
        read_access("127.0.0.1", cert_file=secret(tmp_path / "metrics.pem", "no certificate"))
    assert refused.value.code == "config.type"


def test_the_command_refuses_what_the_configuration_refuses(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    with pytest.raises(ConfigError) as refused:
        metrics_command(run.root, port=0, host="0.0.0.0")
    assert refused.value.code == "config.network"
    with pytest.raises(ConfigError, match="for --port") as refused:
        metrics_command(run.root, port=None, key_file=secret(tmp_path / "key"))
    assert refused.value.code == "usage"


def test_the_command_prints_and_serves(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    command = [sys.executable, "-m", "asyncrl", "metrics", str(run.root)]
    once = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert parsed(once.stdout)["asyncrl_step"][0][1] == 3.0
    with subprocess.Popen([*command, "--port", "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        address = serving.stdout.readline().split()[-1]
        port = int(address.split(":")[2].partition("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/metrics")
        assert connection.getresponse().status == 200
        taken = subprocess.run(
            [*command, "--port", str(port)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert taken.returncode == 2 and "net.port_in_use" in taken.stderr
        serving.send_signal(signal.SIGINT)
        assert serving.wait(timeout=30) == 0


def test_it_is_a_process_beside_the_learner(tmp_path: Path) -> None:
    from asyncrl.config import parse

    text = (tmp_path / "run").as_posix()
    config = parse(
        f'run.dir = "{text}"\nmodel.path = "m"\ndata.path = "d"\n[[reward]]\nfunction = "a:b"\n'
        "[trackers]\nuse = ['wandb']\nprometheus_port = 9464\n"
    )
    plans = {one.name: one for one in plan(config, TARGETS["all"], config_path=Path("c.toml"))}
    assert [name for name in plans if name.startswith("tracker")] == ["tracker-wandb", "tracker-prometheus"]
    assert plans["tracker-prometheus"].argv[2] == "asyncrl.monitor.prometheus"
    producers = plan(config, TARGETS["producers"], config_path=Path("c.toml"))
    assert not [one for one in producers if one.role == "tracker"]
    assert msgspec.to_builtins(config.trackers)["every_s"] == 2.0
    assert RunDir(config.run_dir).trackers.name == "trackers"
