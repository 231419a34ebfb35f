"""Kubernetes: manifests that one can read, and a script that makes the secrets and applies them.

    config.yaml       the configuration, a ConfigMap
    services.yaml     buffer (with its Redis, where it has a private one) and weight sync: one pod and its Service
    producers.yaml    a Deployment of `cluster.producers` pods, preemptible; reward workers too
    learner.yaml      an Indexed Job of `cluster.learner_hosts` pods that meet at the first one
    apply.sh          makes the keys if there are none, the secrets from them, and applies the manifests

Called by `asyncrl.clusters`. Pure. The run folder, the model and the data lie on the volume of `cluster.claim`.
"""

from __future__ import annotations

import shlex
from typing import Any

from asyncrl.cluster_config import name_of
from asyncrl.clusters.commands import Files, Site, environment, launch, summary
from asyncrl.clusters.yaml import document
from asyncrl.config import Config, dump
from asyncrl.errors import ConfigError

CONFIG = "/etc/asyncrl/config.toml"
KEYS = "/etc/asyncrl-keys"


def render(config: Config, site: Site) -> Files:
    """The manifests by name. Raises `config.missing` without a volume that all pods share."""
    if not config.cluster.claim:
        raise ConfigError("config.missing", "pods need a volume that all of them can write", where="cluster.claim",
                          remedy="set cluster.claim to the name of a ReadWriteMany volume claim")  # fmt: skip
    pods = _Pods(config)
    return {
        "config.yaml": document(pods.config_map()),
        "services.yaml": "---\n".join(map(document, [pods.service(), pods.services()])),
        "producers.yaml": "---\n".join(map(document, [pods.workers("producers"), pods.workers("rewards")])),
        "learner.yaml": "---\n".join(map(document, [pods.meeting(), pods.learner()])),
        "apply.sh": _apply(config, site),
    }


class _Pods:
    """The objects of one run."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.cluster = config.cluster
        self.name = name_of(config)
        self.connect = f"tcp://{self.name}-services:{self.cluster.port}"

    def _meta(self, role: str) -> dict[str, Any]:
        return {"name": f"{self.name}-{role}", "namespace": self.cluster.namespace, "labels": self._labels(role)}

    def _labels(self, role: str) -> dict[str, str]:
        return {"app.kubernetes.io/name": "asyncrl", "app.kubernetes.io/instance": self.name,
                "app.kubernetes.io/component": role}  # fmt: skip

    def config_map(self) -> dict[str, Any]:
        """What every role reads."""
        from pathlib import PurePosixPath

        import msgspec

        network = msgspec.structs.replace(self.config.network, key_file=f"{KEYS}/server.key")
        config = msgspec.structs.replace(self.config, network=network)
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": self._meta("config"),
                "data": {PurePosixPath(CONFIG).name: dump(config)}}  # fmt: skip

    def service(self) -> dict[str, Any]:
        """The name by which the services are found."""
        port = self.cluster.port
        ports = [{"name": name, "port": number} for name, number in (("buffer", port), ("weightsync", port + 1))]
        return {"apiVersion": "v1", "kind": "Service", "metadata": self._meta("services"),
                "spec": {"selector": self._labels("services"), "ports": ports}}  # fmt: skip

    def services(self) -> dict[str, Any]:
        """One pod: a new one starts after the old one has ended, since both would write one store."""
        words = launch(self.config, "services", config_path=CONFIG)
        pod = self._pod("services", words, key="server", gpus=0)
        return self._deployment("services", 1, pod, {"type": "Recreate"})

    def workers(self, role: str) -> dict[str, Any]:
        """Producers or reward workers: they may be ended and started again at any time."""
        words = launch(self.config, role, config_path=CONFIG, connect=self.connect, key=f"{KEYS}/join.key",
                       host="$(POD_IP)")  # fmt: skip
        producers = role == "producers"
        pod = self._pod(
            role, words, key="join", gpus=self.cluster.producer_gpus if producers else self.cluster.reward_gpus
        )
        if self.cluster.preemptible_class:
            pod["priorityClassName"] = self.cluster.preemptible_class
        return self._deployment(role, self.cluster.producers if producers else 1, pod, {"type": "RollingUpdate"})

    def meeting(self) -> dict[str, Any]:
        """Names of the learner's pods, before they are ready: they meet by them."""
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": self._labels("learner"),
                "ports": [{"name": "gang", "port": self.cluster.port + 2}]}  # fmt: skip
        return {"apiVersion": "v1", "kind": "Service", "metadata": self._meta("learner"), "spec": spec}

    def learner(self) -> dict[str, Any]:
        """The gang: pod N is host N."""
        hosts = self.cluster.learner_hosts
        more = []
        if hosts > 1:
            head = f"{self.name}-learner-0.{self.name}-learner:{self.cluster.port + 2}"
            more = ["--node-rank", "$(JOB_COMPLETION_INDEX)", "--head", head]
        words = launch(self.config, "learner", config_path=CONFIG, connect=self.connect, key=f"{KEYS}/server.key",
                       host="$(POD_IP)", more=more)  # fmt: skip
        pod = self._pod("learner", words, key="server", gpus=self.cluster.learner_gpus)
        pod |= {"subdomain": f"{self.name}-learner", "restartPolicy": "OnFailure"}
        spec = {
            "completions": hosts, "parallelism": hosts, "completionMode": "Indexed", "backoffLimit": 20 * hosts,
            "template": {"metadata": {"labels": self._labels("learner")}, "spec": pod},
        }  # fmt: skip
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": self._meta("learner"), "spec": spec}

    def _deployment(self, role: str, count: int, pod: dict[str, Any], strategy: dict[str, str]) -> dict[str, Any]:
        spec = {"replicas": count, "strategy": strategy, "selector": {"matchLabels": self._labels(role)},
                "template": {"metadata": {"labels": self._labels(role)}, "spec": pod}}  # fmt: skip
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": self._meta(role), "spec": spec}

    def _pod(self, role: str, words: list[str], *, key: str, gpus: int) -> dict[str, Any]:
        cluster = self.cluster
        if cluster.setup:
            lines = "\n".join([*cluster.setup, 'exec "$@"'])
            words = ["bash", "-euc", lines, "asyncrl", *words]
        limits: dict[str, Any] = {"memory": _quantity(cluster.memory)}
        limits |= {cluster.gpu_resource: gpus} if gpus else {}
        address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        container: dict[str, Any] = {
            "name": role, "image": cluster.image, "workingDir": cluster.folder or cluster.claim_path,
            "command": [str(word) for word in words],
            "env": [address, *({"name": name, "value": value} for name, value in environment(self.config).items())],
            "resources": {"requests": {"cpu": cluster.cpus, "memory": limits["memory"]}, "limits": limits},
            "securityContext": {"allowPrivilegeEscalation": False},
            "volumeMounts": [
                {"name": "config", "mountPath": CONFIG.rpartition("/")[0], "readOnly": True},
                {"name": "keys", "mountPath": KEYS, "readOnly": True},
                {"name": "data", "mountPath": cluster.claim_path},
                {"name": "shm", "mountPath": "/dev/shm"},
            ],
        }  # fmt: skip
        # A mounted key is root's and nobody else's (0400): that is what roles ask of a key file.
        secret = {"secretName": f"{self.name}-{key}-key", "defaultMode": 0o400}
        return {
            "terminationGracePeriodSeconds": cluster.grace_s,
            "automountServiceAccountToken": False,
            "containers": [container],
            "volumes": [
                {"name": "config", "configMap": {"name": f"{self.name}-config"}},
                {"name": "keys", "secret": secret},
                {"name": "data", "persistentVolumeClaim": {"claimName": cluster.claim}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
        }


def _quantity(memory: str) -> str:
    """Slurm's 16G is Kubernetes' 16Gi."""
    return f"{memory}i" if memory[-1] in "KMGT" else memory


def _apply(config: Config, site: Site) -> str:
    name, space, keys = name_of(config), config.cluster.namespace, shlex.quote(site.keys)
    lines = [
        "#!/bin/bash", f"# {summary(config)}", "set -euo pipefail", 'cd "$(dirname "$0")"',
        f"[ -e {keys}/server.key ] || python -m asyncrl keys {keys}",
        "for key in server join; do",
        f"    kubectl create secret generic {name}-$key-key --namespace {space} \\",
        f"        --from-file=$key.key={keys}/$key.key --dry-run=client --output yaml | kubectl apply -f -",
        "done",
        "kubectl apply -f config.yaml -f services.yaml -f producers.yaml -f learner.yaml",
        f'echo "kubectl --namespace {space} logs --follow job/{name}-learner"',
        'echo "when it has ended: kubectl delete -f producers.yaml -f services.yaml -f learner.yaml -f config.yaml"',
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
