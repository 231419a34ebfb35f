"""Ray: a driver script that places the same commands.

Pure; only the rendered script imports ray. Keys are files on storage that all hosts share and never pass through Ray.
"""

from __future__ import annotations

import json

from asyncrl.config import Config
from asyncrl.launcher.clusters.commands import WORKER_KEYS, Files, Site, environment, launch, shell, summary

DRIVER = '''"""{summary}. Rendered by asyncrl; run it where `ray.init` finds the cluster: python driver.py"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time

import ray

WORK, KEYS, SETUP = {work}, {keys}, {setup}
ENVIRONMENT = {environment}
PORT, GRACE_S, WAIT_S = {port}, {grace_s}, {wait_s}
COMMANDS = {commands}
PRODUCERS, LEARNER_HOSTS = {producers}, {hosts}
CPUS, PRODUCER_GPUS, REWARD_GPUS, LEARNER_GPUS = {cpus}, {producer_gpus}, {reward_gpus}, {learner_gpus}


def own_address():
    """Of this host, as others reach it."""
    found = [place[4][0] for place in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return next((address for address in found if not address.startswith("127.")), "127.0.0.1")


class Role:
    """One command on one host; it ends with the process that Ray gave us."""

    def address(self):
        return own_address()

    def start(self, command, words):
        words = {{**words, "HOST": own_address()}}
        for name, value in words.items():
            command = command.replace("@" + name + "@", shlex.quote(str(value)))
        lines = "\\n".join(["set -eo pipefail", *SETUP, "set -u", "exec " + command])
        self.child = subprocess.Popen(["bash", "-c", lines], cwd=WORK, env={{**os.environ, **ENVIRONMENT}})
        return self.child.pid

    def wait(self, timeout_s):
        try:
            return self.child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self):
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            try:
                self.child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self.child.kill()
        return self.child.wait()


def place(gpus):
    return ray.remote(Role).options(num_cpus=CPUS, num_gpus=gpus).remote()


def stop_each(roles):
    """What each role ended with. One that cannot be asked, since its actor died, leaves none of the others running."""
    ended = []
    for role in roles:
        try:
            ended.append(ray.get(role.stop.remote(), timeout=GRACE_S + 60))
        except Exception as error:
            ended.append("not stopped: %s: %s" % (type(error).__name__, error))
    return ended


def main():
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"))
    if not os.path.exists(os.path.join(KEYS, "server.key")):
        subprocess.run([sys.executable, "-m", "asyncrl", "keys", KEYS], check=True, cwd=WORK)
    services = place(0)
    connect = "tcp://%s:%d" % (ray.get(services.address.remote(), timeout=WAIT_S), PORT)
    learners = [place(LEARNER_GPUS) for _ in range(LEARNER_HOSTS)]
    head = "%s:%d" % (ray.get(learners[0].address.remote(), timeout=WAIT_S), PORT + 2)
    workers = [place(PRODUCER_GPUS) for _ in range(PRODUCERS)]
    rewards = place(REWARD_GPUS)
    roles = [(services, "services", {{}}), (rewards, "rewards", {{}})]
    roles += [(worker, "producers", {{}}) for worker in workers]
    roles += [(learner, "learner", {{"NODE": rank, "HEAD": head}}) for rank, learner in enumerate(learners)]
    for role, name, words in roles:
        ray.get(role.start.remote(COMMANDS[name], {{"CONNECT": connect, **words}}), timeout=WAIT_S)
        print("started", name, flush=True)
    code = None
    try:
        while code is None:  # bounded: the life of the run; its learner gives up by its own limits
            codes = [ray.get(learner.wait.remote(1.0), timeout=60) for learner in learners]
            code = next((one for one in codes if one), 0 if None not in codes else None)
    finally:
        print("ended", stop_each([*learners, *workers, rewards, services]), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
'''


def render(config: Config, site: Site) -> Files:
    cluster, path = config.cluster, f"{site.folder}/config.toml"
    more = ["--node-rank", "@NODE@", "--head", "@HEAD@"] if cluster.learner_hosts > 1 else []
    join = {"config_path": path, "connect": "@CONNECT@", "host": "@HOST@"}
    workers = {role: launch(config, role, key=f"{site.keys}/{key}.key", **join) for role, key in WORKER_KEYS.items()}
    commands = {
        "services": launch(config, "services", config_path=path),
        **workers,
        "learner": launch(config, "learner", more=more, key=f"{site.keys}/server.key", **join),
    }
    lines = {role: shell(words).replace(" \\\n    ", " ") for role, words in commands.items()}
    text = DRIVER.format(
        summary=f"{config.cluster_name}: {summary(config)}",
        work=repr(site.work),
        keys=repr(site.keys),
        setup=repr(list(cluster.setup)),
        environment=repr(environment(config)),
        port=cluster.port,
        grace_s=cluster.grace_s,
        wait_s=cluster.wait_s,
        commands=json.dumps(lines, indent=4),
        producers=cluster.producers,
        hosts=cluster.learner_hosts,
        cpus=cluster.cpus,
        producer_gpus=cluster.producer_gpus,
        learner_gpus=cluster.learner_gpus,
        reward_gpus=cluster.reward_gpus,
    )
    return {"driver.py": text}
