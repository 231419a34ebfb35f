"""Kubernetes: manifests that one can read, and a script that makes the secrets and applies them.

    config.yaml       the configuration, a ConfigMap
    network.yaml      a NetworkPolicy: learner, producers and reward workers are reached by pods of the run alone
    services.yaml     buffer (with its Redis, where it has a private one) and weight sync: one pod and its Service
    producers.yaml    a Job of `cluster.producers` pods, preemptible, which end when the run has; reward workers too
    learner.yaml      an Indexed Job of `cluster.learner_hosts` pods that meet at the first one
    apply.sh          makes the keys if there are none, the secrets from them, and applies the manifests
    end.sh            ends the run, the learner first; also what removes the objects of a run that is over

Pure. The run folder, the model and the data lie on the volume of `cluster.claim`. Pods
keep the rules of the Pod Security Standard "restricted", unless `cluster.user` is root.
"""

from __future__ import annotations

import math
import shlex
from pathlib import PurePosixPath
from typing import Any

import msgspec
import yaml

from asyncrl.config import Config, dump
from asyncrl.errors import EXIT_CONFIG, EXIT_DATA, EXIT_HANDSHAKE, ConfigError
from asyncrl.launcher.clusters.commands import WORKER_KEYS, Files, Site, environment, launch, summary


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, and no references between values."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value anew wherever it stands."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def documents(*values: Any) -> str:
    """Documents one after the other.

    >>> print(documents({"a": [1, {"b": "x: y"}], "c": {}}, ["yes"]), end="")
    a:
    - 1
    - b: 'x: y'
    c: {}
    ---
    - 'yes'
    """
    return yaml.dump_all(values, Dumper=_Dumper, sort_keys=False, width=math.inf)


CONFIG = "/etc/asyncrl/config.toml"
KEYS = "/etc/asyncrl-keys"
SECRET = "/etc/asyncrl-secret"
FORGIVEN = 20  # ends of a pod of the learner by its own fault; preemptions do not count
FORGIVEN_WORKERS = 1000  # of producers: they hold nothing that could be lost


def render(config: Config, site: Site) -> Files:
    """The manifests by name. Raises `config.missing` without a volume that all pods share."""
    if not config.cluster.claim:
        raise ConfigError(
            "config.missing",
            "pods need a volume that all of them can write",
            where="cluster.claim",
            remedy="set cluster.claim to the name of a ReadWriteMany volume claim",
        )
    pods = _Pods(config)
    return {
        "config.yaml": documents(pods.config_map()),
        "network.yaml": documents(pods.network()),
        "services.yaml": documents(pods.service(), pods.services()),
        "producers.yaml": documents(pods.workers("producers"), pods.workers("rewards")),
        "learner.yaml": documents(pods.meeting(), pods.learner()),
        "apply.sh": _apply(config, site),
        "end.sh": _end(config),
    }


_CONFINED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def _object_name(config: Config) -> str:
    """`cluster_name` as names of Services allow it (RFC 1035): they begin with a letter."""
    name = config.cluster_name
    return f"run-{name}" if name[0].isdigit() else name


class _Pods:
    """The objects of one run."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.cluster = config.cluster
        self.name = _object_name(config)
        self.connect = f"tcp://{self.name}-services:{self.cluster.port}"

    def _meta(self, role: str) -> dict[str, Any]:
        return {"name": f"{self.name}-{role}", "namespace": self.cluster.namespace, "labels": self._labels(role)}

    def _labels(self, role: str) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "asyncrl",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": role,
        }

    def config_map(self) -> dict[str, Any]:
        """What every role reads."""
        network = msgspec.structs.replace(self.config.network, key_file=f"{KEYS}/server.key")
        config = msgspec.structs.replace(self.config, network=network)
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._meta("config"),
            "data": {PurePosixPath(CONFIG).name: dump(config)},
        }

    def service(self) -> dict[str, Any]:
        """The name by which the services are found."""
        port = self.cluster.port
        ports = [{"name": name, "port": number} for name, number in (("buffer", port), ("weightsync", port + 1))]
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._meta("services"),
            "spec": {"selector": self._labels("services"), "ports": ports},
        }

    def services(self) -> dict[str, Any]:
        """One pod: a new one starts after the old one has ended, since both would write one store."""
        words = launch(self.config, "services", config_path=CONFIG)
        pod = self._pod("services", words, key="server", gpus=0)
        ports = [{"name": port["name"], "containerPort": port["port"]} for port in self.service()["spec"]["ports"]]
        pod["containers"][0] |= {
            "ports": ports,
            "readinessProbe": {"tcpSocket": {"port": "buffer"}, "periodSeconds": 5},
        }
        spec = {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": self._labels("services")},
            "template": {"metadata": {"labels": self._labels("services")}, "spec": pod},
        }
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": self._meta("services"), "spec": spec}

    def workers(self, role: str) -> dict[str, Any]:
        """Producers or reward workers: they may be ended and started again at any time.

        A Job without a number of completions is a queue of work: a pod that ends with 0 found the run complete, and
        none is made after it. A Deployment would start producers of a run that is over again and again.
        """
        key, producers = WORKER_KEYS[role], role == "producers"
        words = launch(
            self.config, role, config_path=CONFIG, connect=self.connect, key=f"{KEYS}/{key}.key", host="$(POD_IP)"
        )
        pod = self._pod(
            role, words, key=key, gpus=self.cluster.producer_gpus if producers else self.cluster.reward_gpus
        )
        if self.cluster.preemptible_class:
            pod["priorityClassName"] = self.cluster.preemptible_class
        count = self.cluster.producers if producers else 1
        return self._job(role, pod, {"parallelism": count, "backoffLimit": FORGIVEN_WORKERS * count})

    def meeting(self) -> dict[str, Any]:
        """Names of the learner's pods before they are ready, for their rendezvous."""
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": self._labels("learner"),
            "ports": [{"name": "gang", "port": self.cluster.port + 2}],
        }
        return {"apiVersion": "v1", "kind": "Service", "metadata": self._meta("learner"), "spec": spec}

    def learner(self) -> dict[str, Any]:
        """The gang: pod N is host N."""
        hosts = self.cluster.learner_hosts
        more = []
        if hosts > 1:
            head = f"{self.name}-learner-0.{self.name}-learner:{self.cluster.port + 2}"
            more = ["--node-rank", "$(JOB_COMPLETION_INDEX)", "--head", head]
        words = launch(
            self.config,
            "learner",
            config_path=CONFIG,
            connect=self.connect,
            key=f"{KEYS}/server.key",
            host="$(POD_IP)",
            more=more,
        )
        pod = self._pod("learner", words, key="server", gpus=self.cluster.learner_gpus)
        pod["subdomain"] = f"{self.name}-learner"
        return self._job(
            "learner",
            pod,
            {"completions": hosts, "parallelism": hosts, "completionMode": "Indexed", "backoffLimit": FORGIVEN * hosts},
        )

    def network(self) -> dict[str, Any]:
        """Ranks, and weights by `collective`, have connections without authentication: only pods of this run may
        connect.

        The services accept all pods, because they require a key. So does the metrics page beyond loopback.
        """
        others = {"key": "app.kubernetes.io/component", "operator": "NotIn", "values": ["services"]}
        run = {"app.kubernetes.io/instance": self.name}
        rules: list[dict[str, Any]] = [{"from": [{"podSelector": {"matchLabels": run}}]}]
        if port := self.config.trackers.prometheus_port:
            rules.append({"ports": [{"port": port}]})
        spec = {
            "podSelector": {"matchLabels": run, "matchExpressions": [others]},
            "policyTypes": ["Ingress"],
            "ingress": rules,
        }
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": self._meta("network"),
            "spec": spec,
        }

    def _job(self, role: str, pod: dict[str, Any], counts: dict[str, Any]) -> dict[str, Any]:
        """Pods that restart until they end with 0, except after a mistake that would repeat."""
        final = [EXIT_CONFIG, EXIT_DATA, EXIT_HANDSHAKE]
        rules: list[dict[str, Any]] = [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "FailJob", "onExitCodes": {"containerName": role, "operator": "In", "values": final}},
        ]
        pod = {"restartPolicy": "Never", **pod}  # required by podFailurePolicy
        spec = {
            **counts,
            "podFailurePolicy": {"rules": rules},
            "template": {"metadata": {"labels": self._labels(role)}, "spec": pod},
        }
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": self._meta(role), "spec": spec}

    def _pod(self, role: str, words: list[str], *, key: str, gpus: int) -> dict[str, Any]:
        cluster = self.cluster
        pod = {
            "terminationGracePeriodSeconds": cluster.grace_s,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            # The pod's first process: it takes SIGTERM from the start, and reaps orphans.
            "shareProcessNamespace": True,
            "initContainers": [self._key_container(key)],
            "containers": [self._container(role, words, gpus=gpus)],
            "volumes": [
                {"name": "config", "configMap": {"name": f"{self.name}-config"}},
                {"name": "secret", "secret": {"secretName": f"{self.name}-{key}-key", "defaultMode": 0o440}},
                {"name": "keys", "emptyDir": {"medium": "Memory"}},
                {"name": "data", "persistentVolumeClaim": {"claimName": cluster.claim}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
                {"name": "tmp", "emptyDir": {}},
            ],
        }  # fmt: skip
        if cluster.user:
            # OnRootMismatch: at every new start, private files would become readable by the group.
            pod["securityContext"] = {
                "runAsNonRoot": True,
                "runAsUser": cluster.user,
                "runAsGroup": cluster.user,
                "fsGroup": cluster.user,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            }
        return pod

    def _container(self, role: str, words: list[str], *, gpus: int) -> dict[str, Any]:
        cluster = self.cluster
        if cluster.setup:
            words = ["bash", "-ec", "\n".join([*cluster.setup, 'exec "$@"']), "asyncrl", *words]
        limits: dict[str, Any] = {"memory": _quantity(cluster.memory)}
        limits |= {cluster.gpu_resource: gpus} if gpus else {}
        address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        # A user that the image does not know has no home and no name; libraries ask for both.
        own = {**environment(self.config), "HOME": "/tmp", "USER": "asyncrl"}
        return {
            "name": role,
            "image": cluster.image,
            "workingDir": cluster.folder or cluster.claim_path,
            "command": [str(word) for word in words],
            "env": [address, *({"name": name, "value": value} for name, value in own.items())],
            "resources": {"requests": {"cpu": cluster.cpus, "memory": limits["memory"]}, "limits": limits},
            "securityContext": _CONFINED,
            "volumeMounts": [
                {"name": "config", "mountPath": CONFIG.rpartition("/")[0], "readOnly": True},
                {"name": "keys", "mountPath": KEYS, "readOnly": True},
                {"name": "data", "mountPath": cluster.claim_path},
                {"name": "shm", "mountPath": "/dev/shm"},
                {"name": "tmp", "mountPath": "/tmp"},
            ],
        }

    def _key_container(self, key: str) -> dict[str, Any]:
        """Copies the key: a mounted Secret belongs to root and a group, and a key file must belong to its owner
        alone.
        """
        return {
            "name": "key",
            "image": self.cluster.image,
            "command": ["install", "-m", "0400", f"{SECRET}/{key}.key", f"{KEYS}/{key}.key"],
            "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "64Mi"}},
            "securityContext": _CONFINED,
            "volumeMounts": [
                {"name": "secret", "mountPath": SECRET, "readOnly": True},
                {"name": "keys", "mountPath": KEYS},
            ],
        }


def _quantity(memory: str) -> str:
    """Slurm's 16G is Kubernetes' 16Gi; Slurm's 16000 are megabytes."""
    return f"{memory}i" if memory[-1] in "KMGT" else f"{memory}Mi"


def _apply(config: Config, site: Site) -> str:
    name, space, keys = _object_name(config), config.cluster.namespace, shlex.quote(site.keys)
    lines = [
        "#!/bin/bash", f"# {summary(config)}", "set -euo pipefail", 'cd "$(dirname "$0")"',
        f"kubectl get persistentvolumeclaim {config.cluster.claim} --namespace {space} >/dev/null",
        "# A Job that is over is not started again by applying it.",
        f"if kubectl get job {name}-learner --namespace {space} >/dev/null 2>&1; then",
        f'    echo "{name} is there already: end.sh removes it, then apply.sh resumes it" >&2',
        "    exit 1",
        "fi",
        f"[ -e {keys}/server.key ] || python -m asyncrl keys {keys}",
        "for key in server producer reward; do",
        f"    kubectl create secret generic {name}-$key-key --namespace {space} \\",
        f"        --from-file=$key.key={keys}/$key.key --dry-run=client --output yaml | kubectl apply -f -",
        "done",
        "kubectl apply -f config.yaml -f network.yaml -f services.yaml -f producers.yaml -f learner.yaml",
        f'echo "to watch it: kubectl --namespace {space} logs --follow job/{name}-learner"',
        'echo "to end it, or when it has ended: end.sh; to resume it: end.sh, then apply.sh"',
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _end(config: Config) -> str:
    name, cluster = _object_name(config), config.cluster
    delete = f"kubectl delete --namespace {cluster.namespace} --ignore-not-found"
    # in the foreground: also wait until the pods are gone
    wait = f"--cascade=foreground --timeout={cluster.grace_s + 60}s"
    lines = [
        "#!/bin/bash", f"# Ends {name} and removes its objects; run folder and keys stay.", "set -euo pipefail",
        'cd "$(dirname "$0")"',
        "# The learner writes a checkpoint while the others still answer.",
        f"{delete} job {name}-learner {wait}",
        f"{delete} job {name}-producers {name}-rewards {wait}",
        f"{delete} deployment {name}-services {wait}",
        "kubectl delete --ignore-not-found -f learner.yaml -f producers.yaml -f services.yaml -f network.yaml \\",
        "    -f config.yaml",
        f"{delete} secret {name}-server-key {name}-producer-key {name}-reward-key",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
