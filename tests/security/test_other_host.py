"""Another host, as a network namespace: with a key of the run it works for the run, without one nothing answers.

Needs root and `ip netns`; skipped with the reason otherwise.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.net.keys import write_keys

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HERE, THERE = "10.231.77.1", "10.231.77.2"
BUFFER, SYNC, METRICS = 15555, 15556, 15557
SCRAPE = """
import sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Authorization": f"Bearer {sys.argv[2]}"})
try:
    print(urllib.request.urlopen(request, timeout=30).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def there() -> Iterator[list[str]]:
    """The words before a command that runs it on the other host."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and `ip` (iproute2)")
    name = f"asyncrl-{os.getpid()}"
    made = ip("netns", "add", name)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        inside, outside = f"arl{os.getpid() % 10000}i", f"arl{os.getpid() % 10000}o"
        steps = [
            ["link", "add", outside, "type", "veth", "peer", "name", inside],
            ["link", "set", inside, "netns", name],
            ["addr", "add", f"{HERE}/30", "dev", outside],
            ["link", "set", outside, "up"],
            ["-n", name, "addr", "add", f"{THERE}/30", "dev", inside],
            ["-n", name, "link", "set", inside, "up"],
            ["-n", name, "link", "set", "lo", "up"],
        ]
        for step in steps:
            done = ip(*step)
            if done.returncode:
                pytest.skip(f"ip {' '.join(step)}: {done.stderr.strip()}")
        named = ["unshare", "--uts", "sh", "-c", 'hostname other-host; exec "$@"', "sh"]  # weights go by the name
        yield ["ip", "netns", "exec", name, *named]
    finally:
        ip("netns", "delete", name)  # and the pair of interfaces with it


def status_from(there: list[str], run: Any, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*there, sys.executable, "-m", "asyncrl", "status", "--connect", f"tcp://{HERE}:{BUFFER}", *words]
    return subprocess.run(
        command, env=run.environment(), cwd=run.folder, capture_output=True, text=True, timeout=60, check=False
    )


def scrapes_from(there: list[str], run: Any) -> list[str]:
    """Answers of the metrics page to the other host: with the key of the page, and with another one."""
    key = run.folder / "metrics.key"
    key.touch(mode=0o600)
    key.write_text("correct-horse-battery")
    words = ("--port", str(METRICS), "--host", HERE, "--key-file", str(key))
    url = run.start("metrics", str(run.dir), *words).stdout.readline().split()[-1]
    assert url == f"http://{HERE}:{METRICS}/metrics"
    commands = [[*there, sys.executable, "-c", SCRAPE, url, word] for word in (key.read_text(), "another-long-key")]
    return [
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
        for command in commands
    ]


def producers_of(run: Any) -> set[str]:
    return {line["producer"] for line in run.lines("history.jsonl") if line.get("e") == "sample"}


def wide(run: Any) -> list[str]:
    """Settings of services that every host reaches, with keys that are made here."""
    write_keys(run.folder / "server.key")
    (run.folder / "stranger").mkdir()
    write_keys(run.folder / "stranger" / "server.key")
    settings = [
        f"network.buffer=tcp://0.0.0.0:{BUFFER}",
        f"network.weightsync=tcp://0.0.0.0:{SYNC}",
        f"network.key_file={run.folder / 'server.key'}",
        f"weightsync.stream_host={HERE}",
        "producers.count=1",
        "learner.steps=2000",
    ]
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.long
@pytest.mark.xdist_group("other host")
def test_another_host_is_answered_with_a_key_of_the_run_alone(run: Any, there: list[str]) -> None:
    main = run.start("launch", "services", str(run.config), *wide(run))
    run.wait("the services", lambda: len(run.living()) == 2)
    join, stranger = run.folder / "observer.key", run.folder / "stranger" / "observer.key"
    with_key = status_from(there, run, "--key", str(join))
    refused = [status_from(there, run), status_from(there, run, "--key", str(stranger))]
    assert with_key.returncode == 0, with_key.stdout + with_key.stderr + run.logs()
    assert [one.returncode for one in refused] == [69, 69], refused
    assert scrapes_from(there, run) == ["200", "401"]
    main.terminate()
    main.communicate(timeout=60)


@pytest.mark.long
@pytest.mark.xdist_group("other host")
def test_a_producer_of_another_host_works_for_the_run(run: Any, there: list[str]) -> None:
    main = run.start("launch", "all", str(run.config), *wide(run))
    run.wait("step 1", lambda: 1 in run.steps())
    join = run.folder / "producer.key"
    elsewhere = [
        "--connect",
        f"tcp://{HERE}:{BUFFER}",
        "--key",
        str(join),
        "--set",
        f"run.dir={run.folder / 'elsewhere'}",
        "--set",
        "producers.count=1",
        "--set",
        f"weightsync.stream_host={THERE}",
    ]
    command = [*there, sys.executable, "-m", "asyncrl", "launch", "producers", str(run.config), *elsewhere]
    log = run.folder / "there.log"
    with log.open("w") as output:
        other = subprocess.Popen(command, env=run.environment(), cwd=run.folder, stdout=output, stderr=output)
    try:
        joined_by = time.monotonic() + 150
        while len(producers_of(run)) < 2 and time.monotonic() < joined_by and other.poll() is None:
            time.sleep(0.3)
        assert len(producers_of(run)) == 2, log.read_text() + run.logs()
        ways = [line["ways"] for line in run.lines("metrics/weightsync.jsonl") if line.get("ways")]
        by_network = [way for each in ways for name, way in each.items() if name not in ("producer-0",)]
        assert any(way["transport"] == "stream" and way["bytes"] for way in by_network), ways[-3:]
    finally:
        other.terminate()
        other.wait(60)
        main.terminate()
        main.communicate(timeout=90)
    assert run.audit()["lost"] == 0


def test_without_keys_nothing_listens_beyond_loopback(run: Any) -> None:
    """And the override says so, and says it again every minute."""
    settings = ("--set", f"network.buffer=tcp://0.0.0.0:{BUFFER}", "--set", "learner.steps=1000")
    done = run.command("launch", "buffer", str(run.config), *settings, timeout=60)
    assert done.returncode == 2 and "error[config.network]" in done.stdout and "key_file" in done.stdout
    main = run.start("launch", "buffer", str(run.config), *settings, "--insecure-no-auth")
    log: Path = run.dir / "logs" / "buffer.log"
    run.wait("the warning", lambda: log.exists() and "it has no keys" in log.read_text())
    main.terminate()
    main.communicate(timeout=60)
