"""The newest metrics of a run for Prometheus: `asyncrl metrics RUN --port N`, or `trackers.prometheus_port`.

Guarantees:
1. names are `asyncrl_` and the catalogue's, with its meaning and unit as help, and the labels run, role and name;
   members of open families have the part after the slash as a label (`asyncrl_reward{part="exact"}`);
2. it answers only GET /metrics, and listens on loopback unless there is a key that every request must have
   (`Authorization: Bearer KEY`, else 401). On loopback another Host is refused (a web page that resolves its name to
   127.0.0.1), and no page of another origin may read the answer;
3. it only reads files of the run, so no role notices a scrape. Workers without a line for `STALE_S` are left out;
   `asyncrl_line_age_s` is the age of each newest line, until the buffer forgets its worker.
"""

from __future__ import annotations

import errno
import math
import os
import re
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

from asyncrl.config import Config, load
from asyncrl.config.sections.tracker import read_prometheus_access
from asyncrl.errors import ConfigError, error_for
from asyncrl.metrics import CATALOGUE, OPEN, Metric
from asyncrl.net.http_access import LOCAL, Access, read_access
from asyncrl.net.http_server import LimitedHandler, LimitedHTTPServer
from asyncrl.runtime import role
from asyncrl.runtime.liveness import Sign, Ticker
from asyncrl.runtime.metrics_tail import Following, Heard
from asyncrl.runtime.run_dir import RunDir

HOSTS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)
STALE_S = 60.0
FORGET_S = 3600.0  # as the buffer forgets silent workers (`buffers.groups.workers`): they may have been ended for good
LOOK_S = 0.5
CONTENT = "text/plain; version=0.0.4; charset=utf-8"
HEADERS = {401: ("WWW-Authenticate", "Bearer"), 405: ("Allow", "GET")}  # headers that a refusal must have
SINCE_START = "since the start"  # words of the catalogue for numbers that only grow while their process lives
WORKERS = frozenset({"producer", "reward"})
#: Open family -> its name here, and the name of its label.
FAMILIES = {
    "reward/": ("reward", "part"),
    "pass_at/": ("pass_at", "k"),
    "val-core/": ("val_core", "figure"),
    "val-aux/": ("val_aux", "figure"),
}
AGE = Metric("s", "all", "age of the newest line of a process")

Labels = tuple[tuple[str, str], ...]


# ---------------------------------------------------------------- the text


def text_of(newest: Mapping[tuple[str, str], Heard], *, run: str, now: float, forget_s: float = FORGET_S) -> str:
    """The exposition of the newest numbers of all processes of a run, without workers silent for `forget_s`."""
    series: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
    about: dict[str, Metric] = {"asyncrl_line_age_s": AGE}
    for (kind, who), heard in sorted(newest.items()):
        age = max(0.0, now - heard.t)
        if kind in WORKERS and age > forget_s:
            continue
        own = (("run", run), ("role", kind), ("name", who))
        series["asyncrl_line_age_s"].append((own, age))
        if kind in WORKERS and age > STALE_S:
            continue
        for name, value in sorted(heard.values.items()):
            shown, labels, metric = series_of(name)
            about[shown] = metric
            series[shown].append(((*own, *labels), value))
    lines: list[str] = []
    for shown in sorted(series):
        metric = about[shown]
        lines += [f"# HELP {shown} {_help(metric)}", f"# TYPE {shown} {_type(metric)}"]
        lines += [f"{shown}{{{_labels(labels)}}} {value:.10g}" for labels, value in series[shown]]
    return "\n".join(lines) + "\n"


def series_of(name: str) -> tuple[str, Labels, Metric]:
    """The exported name of a metric, its own labels, and its catalogue entry.

    >>> series_of("lag/2/ess")[:2], series_of("pass_at/4")[:2]
    (('asyncrl_lag_ess', (('lag', '2'),)), ('asyncrl_pass_at', (('k', '4'),)))
    """
    if name.startswith("lag/"):
        lag, _, figure = name.removeprefix("lag/").partition("/")
        if not figure:
            lag, figure = "", lag
        meaning = CATALOGUE.get(figure, CATALOGUE["lag/tokens_share"])
        return f"asyncrl_lag_{figure}", (("lag", lag),), meaning._replace(meaning=f"of samples that old: {meaning[2]}")
    if name.startswith("judge/"):
        which, _, figure = name.removeprefix("judge/").rpartition("/")
        same = [known for key, known in CATALOGUE.items() if key.startswith("judge/") and key.endswith(f"/{figure}")]
        metric = same[0] if same else Metric("1", "buffer", "of a judge")
        return f"asyncrl_judge_{figure}", (("judge", which),), metric
    for prefix, (shown, label) in FAMILIES.items():
        if name.startswith(prefix):
            known = next((metric for key, metric in CATALOGUE.items() if key.startswith(prefix)), None)
            metric = known or Metric("1", "learner", "part of the reward, mean over the batch")
            return f"asyncrl_{shown}", ((label, name.removeprefix(prefix)),), metric
    return f"asyncrl_{name}", (), CATALOGUE[name]


def shown_names() -> set[str]:
    """Every name that can be exported (for the dashboard's test)."""
    lags = {f"lag/0/{name.rpartition('/')[2]}" for name in CATALOGUE if not name.startswith(OPEN)}
    families = {f"{prefix}x" for prefix in FAMILIES}
    plain = {name for name in CATALOGUE if not name.startswith(OPEN) or name.startswith("judge/")}
    return {series_of(name)[0] for name in plain | families | lags | {"lag/0/tokens_share"}} | {"asyncrl_line_age_s"}


def _help(metric: Metric) -> str:
    unit = "" if metric.unit in ("1", "bool") else f" ({metric.unit})"
    return f"{metric.meaning}{unit}".replace("\\", "\\\\").replace("\n", " ")


def _type(metric: Metric) -> str:
    return "counter" if SINCE_START in metric.meaning and "mean" not in metric.meaning else "gauge"


def _labels(labels: Labels) -> str:
    return ",".join(f'{key}="{_escape(value)}"' for key, value in labels)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# ---------------------------------------------------------------- the server


class Newest:
    """The newest numbers of a run, read on demand. Thread-safe."""

    def __init__(self, run: RunDir, *, clock: Callable[[], float] = time.time) -> None:
        self._following = Following(run)
        config = load(run.config)
        self._name = config.run.name
        self._forget_s = max(FORGET_S, 10 * config.buffer.lease_timeout_s)
        self._lock = threading.Lock()
        self._clock = clock
        self._looked = -LOOK_S

    def text(self) -> str:
        with self._lock:
            now = self._clock()
            if not 0 <= now - self._looked < LOOK_S:
                self._looked = now
                self._following.poll()
                left = math.inf
                while 0 < (behind := self._following.behind_bytes) < left:  # a poll reads a part of a long file
                    left = behind
                    self._following.poll()
            return text_of(self._following.newest, run=self._name, now=now, forget_s=self._forget_s)


class Handler(LimitedHandler):
    """GET /metrics: on loopback for its own names, with the key if there is one."""

    server_version = "asyncrl"
    sys_version = ""
    newest: Newest
    access: Access

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        """Send the metrics, or the reason of a refusal."""
        if self.access.is_local and not HOSTS.fullmatch(self.headers.get("Host", "")):
            self._answer(403, "this answers to 127.0.0.1, localhost and [::1] alone\n")
        elif not self.access.admits(self.headers.get("Authorization", "")):
            self._answer(401, "Authorization: Bearer KEY\n")
        elif self.path.partition("?")[0] != "/metrics":
            self._answer(404, "GET /metrics\n")
        else:
            self._answer(200, self.newest.text(), content=CONTENT)

    def __getattr__(self, name: str) -> object:
        if name.startswith("do_"):  # every other method
            return self._refuse
        raise AttributeError(name)

    def _refuse(self) -> None:
        self._answer(405, "GET alone\n")

    def _answer(self, code: int, text: str, *, content: str = "text/plain; charset=utf-8") -> None:
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", content)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        if code in HEADERS:
            self.send_header(*HEADERS[code])
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not logged."""


class Server(LimitedHTTPServer):
    """Port 0 takes a free one (`server_port`). Raises `net.port_in_use`, or `config.network` for a foreign address."""

    allow_reuse_address = True

    def __init__(self, run: RunDir, port: int, access: Access = LOCAL) -> None:
        self.access = access
        self.address_family = socket.AF_INET6 if ":" in access.host else socket.AF_INET
        handler = type("RunHandler", (Handler,), {"newest": Newest(run), "access": access})
        try:
            super().__init__((access.host, port), handler, tls=access.tls)
        except OSError as error:
            code = "net.port_in_use" if error.errno == errno.EADDRINUSE else "config.network"
            what = f"{access.join_port(port)}: {error.strerror}"
            raise error_for(code, what, where="prometheus", remedy="choose another address or port") from None

    @property
    def url(self) -> str:
        return f"http{'s' * bool(self.access.tls)}://{self.access.join_port(self.server_port)}/metrics"


def serve(run: RunDir, port: int, access: Access, stop: role.Stop, *, say: Callable[[str], None]) -> None:
    """Answer until the end is requested."""
    server = Server(run, port, access)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
    thread.start()
    say(f"metrics of {run.root} at {server.url}")
    try:
        while not stop.wait(1.0):
            pass
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5.0)


def metrics_command(
    folder: Path, *, port: int | None, host: str = LOCAL.host, key_file: str = "", cert_file: str = ""
) -> int:
    """`asyncrl metrics RUN`: print them once, or serve them until Ctrl-C."""
    run = RunDir(folder).require()
    access = read_access(host, key_file=key_file, cert_file=cert_file)
    if port is None:
        if access != LOCAL:
            raise ConfigError("usage", "--host, --key-file and --cert-file are for --port")
        sys.stdout.write(Newest(run).text())
        return 0
    stop = role.Stop()
    role.install_signals(stop)
    serve(run, port, access, stop, say=lambda text: print(text, flush=True))
    return 0


def body(args: role.RoleArgs, config: Config, stop: role.Stop) -> None:
    """The body of the exporter process."""
    os.nice(10)
    run, trackers = RunDir(config.run_dir), config.trackers
    access = read_prometheus_access(trackers)
    with Ticker(Sign(run.alive, role="tracker", name=args.name), every_s=config.log.heartbeat_s):
        serve(run, trackers.prometheus_port, access, stop, say=lambda text: print(text, flush=True))


def main() -> int:
    """Entry point of the process."""
    return role.run("tracker", body)


if __name__ == "__main__":
    sys.exit(main())
