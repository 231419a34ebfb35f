"""Slurm: one batch script per role and a script that submits them.

    services.sbatch    buffer and weight sync; writes its address to DIR/address
    producers.sbatch   an array of jobs, requeued when they are preempted
    rewards.sbatch     reward workers
    learner.sbatch     the gang, on `cluster.learner_hosts` hosts; ends the others when the run is complete
    submit.sh          makes the keys if there are none, submits all four, prints their numbers

Each script uses the environment that rendered it, unless a line of `cluster.setup` chooses another, and ends with a
message on a host that has neither. Pure. DIR and the environment lie on storage that all hosts share.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from asyncrl.config import Config
from asyncrl.errors import EXIT_CONFIG
from asyncrl.launcher.clusters.commands import (
    WORKER_KEYS,
    Files,
    Shell,
    Site,
    environment,
    launch,
    setup_lines,
    shell,
    summary,
)

ADDRESS = Shell('"$ADDRESS"')
HOST = '"$HOST"'
OWN_ADDRESS = (
    "HOST=$(getent ahostsv4 \"$(hostname)\" | awk '$1 !~ /^127\\./ && !found++ {print $1}' || true)",
    "HOST=${HOST:-127.0.0.1}",
)


def render(config: Config, site: Site) -> Files:
    """The scripts by name."""
    return {
        "services.sbatch": _services(config, site),
        "producers.sbatch": _worker(config, site, "producers"),
        "rewards.sbatch": _worker(config, site, "rewards"),
        "learner.sbatch": _learner(config, site),
        "submit.sh": _submit(config, site),
    }


def _header(config: Config, site: Site, role: str, *, gpus: int = 0, nodes: int = 1, more: Sequence[str] = ()) -> str:
    cluster = config.cluster
    logs = f"{site.folder}/logs/{role}-%{'A_%a' if role == 'producers' else 'j'}.out"
    options = [
        f"--job-name={config.cluster_name}-{role}", f"--output={shlex.quote(logs)}", f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cluster.cpus}", f"--mem={cluster.memory}",
        "--open-mode=append",
        *more,
    ]  # fmt: skip
    options += [f"{cluster.gpu_option}={gpus}"] if gpus else []
    for option, value in (
        ("partition", cluster.partition),
        ("account", cluster.account),
        ("time", cluster.time_limit),
    ):
        options += [f"--{option}={value}"] if value else []
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in (*options, *cluster.options))]
    lines += ["set -eo pipefail", *(f"export {name}={value}" for name, value in environment(config).items())]
    lines += [*_activate(config, site), "# The address of this host as others reach it.", *OWN_ADDRESS]
    return "\n".join(lines) + "\n"


def _activate(config: Config, site: Site) -> list[str]:
    """The working directory, and a Python that has asyncrl."""
    programs = shlex.quote(site.programs)
    return [
        f"cd {shlex.quote(site.work)}",
        "# The environment that rendered this; cluster.setup, which follows, may choose another.",
        f'export PATH={programs}:"$PATH"',
        *setup_lines(config.cluster.setup),
        "python -c 'import asyncrl, msgspec, zmq' || {",
        "    printf '%s: its python (%s) has no asyncrl. Put %s, which rendered this, on storage that all hosts '\\",
        "'share, or activate another environment in cluster.setup.\\n' \\",
        f'        "$(hostname)" "$(command -v python || echo none)" {programs} >&2',
        f"    exit {EXIT_CONFIG}",
        "}",
    ]


def _services(config: Config, site: Site) -> str:
    port = config.cluster.port
    address = shlex.quote(f"{site.folder}/address")
    lines = [
        _header(config, site, "services", more=["--requeue"]),
        f'echo "tcp://$HOST:{port}" > {address}.new && mv {address}.new {address}',
        "exec " + shell(launch(config, "services", config_path=f"{site.folder}/config.toml")),
    ]
    return "\n".join(lines) + "\n"


def _find_services(config: Config, site: Site) -> str:
    """Wait until the services of this submission have written their address."""
    address = shlex.quote(f"{site.folder}/address")
    return "\n".join(
        [
            "# The services say where they listen; nothing can begin before.",
            f"for ((second = 0; second < {config.cluster.wait_s}; second++)); do",
            f"    [ -s {address} ] && break",
            "    sleep 1",
            "done",
            f"ADDRESS=$(cat {address})",
        ]
    )


def _worker(config: Config, site: Site, role: str) -> str:
    cluster, more, key = config.cluster, ["--requeue"], f"{site.keys}/{WORKER_KEYS[role]}.key"
    if role == "producers":
        more.append(f"--array=0-{cluster.producers - 1}")
    command = launch(config, role, config_path=f"{site.folder}/config.toml", connect=ADDRESS, key=key, host=HOST)
    gpus = cluster.producer_gpus if role == "producers" else cluster.reward_gpus
    lines = [_header(config, site, role, gpus=gpus, more=more), _find_services(config, site), "exec " + shell(command)]
    return "\n".join(lines) + "\n"


def _learner(config: Config, site: Site) -> str:
    cluster = config.cluster
    several = cluster.learner_hosts > 1
    more = ["--node-rank", Shell('"$SLURM_NODEID"'), "--head", Shell(f'"$HEAD:{cluster.port + 2}"')] if several else []
    command = shell(
        launch(
            config,
            "learner",
            config_path=f"{site.folder}/config.toml",
            connect=ADDRESS,
            key=f"{site.keys}/server.key",
            host=HOST,
            more=more,
        )
    )
    lines = [
        # To the script itself, early enough for a step and a checkpoint before SIGKILL. The other jobs get no such
        # signal, since the services must outlast the learner.
        _header(
            config,
            site,
            "learner",
            gpus=cluster.learner_gpus,
            nodes=cluster.learner_hosts,
            more=["--requeue", f"--signal=B:TERM@{cluster.grace_s}"],
        ),
        _find_services(config, site),
    ]
    if several:
        lines += [
            'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
            "export ADDRESS HEAD",
            "# Each host has an address of its own, which it finds out itself.",
            "run_on_each_host() {",
            *(f"    {line}" for line in OWN_ADDRESS),
            f"    exec {command}",
            "}",
            "export -f run_on_each_host",
            # A failed host ends the others; SIGTERM goes to all of them. Since Slurm 22.05 srun takes no number of CPUs
            # from sbatch; `cluster.options` may have set another number than `cluster.cpus`.
            f'srun --cpus-per-task="${{SLURM_CPUS_PER_TASK:-{cluster.cpus}}}" --kill-on-bad-exit=1 --export=ALL \\',
            "    bash -c run_on_each_host &",
        ]
    else:
        lines.append(f"{command} &")
    lines += [
        "LEARNER=$!",
        "trap 'kill -TERM $LEARNER' TERM",
        "code=0; wait $LEARNER || code=$?",
        "# A trap ends `wait` early: wait for the end itself.",
        "while kill -0 $LEARNER 2>/dev/null; do code=0; wait $LEARNER || code=$?; done",
        "# The run is complete: no job has work left.",
        'if [ "$code" = 0 ] && [ -n "${OTHERS:-}" ] && ' + _complete(config) + "; then scancel $OTHERS; fi",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _complete(config: Config) -> str:
    return f"grep -q '\"done\":true' {shlex.quote(config.run.dir + '/result.json')}"


def _submit(config: Config, site: Site) -> str:
    folder, keys = shlex.quote(site.folder), shlex.quote(site.keys)
    lines = [
        "#!/bin/bash",
        f"# {summary(config)}",
        "set -eo pipefail",
        *_activate(config, site),
        f"mkdir -p {folder}/logs",
        f"rm -f {folder}/address",
        f"[ -e {keys}/server.key ] || python -m asyncrl keys {keys}",
        f"services=$(sbatch --parsable {folder}/services.sbatch)",
        f"producers=$(sbatch --parsable --dependency=after:$services {folder}/producers.sbatch)",
        f"rewards=$(sbatch --parsable --dependency=after:$services {folder}/rewards.sbatch)",
        'export OTHERS="$services $producers $rewards"',
        f"learner=$(sbatch --parsable --export=ALL --dependency=after:$services {folder}/learner.sbatch)",
        'echo "services $services, producers $producers, rewards $rewards, learner $learner"',
        "# scancel without a signal kills after the cluster's KillWait (30 s), checkpoint or not.",
        'echo "to end it early: scancel --batch --signal=TERM $learner; when it has ended: scancel $OTHERS"',
        'echo "to resume it: this script again"',
    ]
    return "\n".join(lines) + "\n"
