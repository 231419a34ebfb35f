#!/usr/bin/env python3
"""Stand-in for a Kubernetes cluster of one node: makes pods of the objects that `kubectl.py` keeps, and keeps them up.

Run as root inside the cluster's network namespace: kube_node.py STATE CLUSTER. What it does of Kubernetes: Deployments,
Jobs (indexed ones, and queues of work without completions), podFailurePolicy, backoffLimit; names of Services, with an
address of their own that leads to a pod which is ready; deletion and eviction with their grace.
"""

from __future__ import annotations

import ipaddress
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from kube_pod import BACKOFF_S, Pod, ip, known
from kubectl import write

JOB_FIELDS = {"backoffLimit", "completionMode", "completions", "parallelism", "podFailurePolicy", "template"}
DEPLOYMENT_FIELDS = {"replicas", "selector", "strategy", "template"}


class Job:
    """Counts of one Job."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.failed = self.ignored = 0
        self.condition = ""
        self.again = 0.0

    def about(self) -> dict[str, Any]:
        return {
            "succeeded": len(self.done),
            "failed": self.failed,
            "ignored": self.ignored,
            "condition": self.condition,
        }


class Node:
    """All pods. `loop` returns at SIGTERM."""

    def __init__(self, state: Path, cluster: str) -> None:
        self.state, self.cluster = state, cluster
        self.pods: dict[str, Pod] = {}
        self.jobs: dict[str, Job] = {}
        self.addresses: dict[str, str] = {}  # of services
        self.leads: dict[str, str] = {}  # service -> pod that has its address
        self.count, self.stop = 0, False
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stop", True))

    def loop(self) -> None:
        while not self.stop:
            self.objects = [json.loads(path.read_text()) for path in (self.state / "objects").glob("*.json")]
            self._heed()
            for one in self.objects:
                if one["kind"] == "Deployment":
                    self._deployment(one)
                elif one["kind"] == "Job":
                    self._job(one)
            names = {one["metadata"]["name"] for one in self.objects if one["kind"] in ("Deployment", "Job")}
            self.jobs = {name: job for name, job in self.jobs.items() if name in names}
            for pod in list(self.pods.values()):
                if pod.owner not in names:
                    pod.end()
            self._names()
            for pod in list(self.pods.values()):
                pod.step()
                if pod.phase in ("Succeeded", "Failed"):
                    self._gone(pod)
            pods = {name: pod.about() for name, pod in self.pods.items()}
            write(self.state / "status.json", {"pods": pods, "jobs": {k: job.about() for k, job in self.jobs.items()}})
            time.sleep(0.1)
        for pod in self.pods.values():
            pod.kill()
            pod.remove()

    def _heed(self) -> None:
        """Deletions and evictions of single pods."""
        for path in (self.state / "asked").iterdir():
            verb, _, name = path.name.partition(".")
            path.unlink()
            if name in self.pods:
                self.pods[name].end(evicted=verb == "evict")

    def _make(self, owner: dict[str, Any], *, index: int | None = None) -> None:
        self.count += 1
        template, name = owner["spec"]["template"], owner["metadata"]["name"]
        middle = "" if index is None else f"-{index}"
        self.pods[f"{name}{middle}-{self.count:05x}"] = Pod(
            f"{name}{middle}-{self.count:05x}",
            template["spec"],
            template["metadata"]["labels"],
            state=self.state,
            number=self.count,
            cluster=self.cluster,
            owner=name,
            index=index,
            hostname=f"{name}{middle}" * bool(middle),
        )

    def _mine(self, owner: dict[str, Any]) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.owner == owner["metadata"]["name"]]

    def _deployment(self, one: dict[str, Any]) -> None:
        known(one["spec"], DEPLOYMENT_FIELDS, "Deployment")
        assert one["spec"]["template"]["metadata"]["labels"].items() >= one["spec"]["selector"]["matchLabels"].items()
        pods = self._mine(one)
        for pod in pods[one["spec"]["replicas"] :]:
            pod.end()
        # A pod that ends still counts where the next one may not run beside it.
        recreate = one["spec"]["strategy"]["type"] == "Recreate"
        counted = [pod for pod in pods if recreate or pod.ending is None]
        for _ in range(one["spec"]["replicas"] - len(counted)):
            self._make(one)

    def _job(self, one: dict[str, Any]) -> None:
        known(one["spec"], JOB_FIELDS, "Job")
        job = self.jobs.setdefault(one["metadata"]["name"], Job())
        pods, parallel = self._mine(one), one["spec"]["parallelism"]
        if job.condition:
            for pod in pods:
                pod.end()
            return
        if one["spec"].get("completionMode") == "Indexed":
            if len(job.done) == one["spec"]["completions"]:
                job.condition = "Complete"
            for index in range(parallel):
                free = index not in job.done and index not in {pod.index for pod in pods}
                if free and time.monotonic() > job.again:
                    self._make(one, index=index)
            return
        assert "completions" not in one["spec"], "a fixed count without an index is not made here"
        if job.done:  # a queue of work: after the first success no pod is made
            job.condition = "" if pods else "Complete"
        elif time.monotonic() > job.again:
            for _ in range(parallel - len(pods)):
                self._make(one)

    def _gone(self, pod: Pod) -> None:
        """Its pod has ended: what that is to its Job."""
        log = self.state / "ended" / f"{pod.name}.json"
        write(log, pod.about())
        del self.pods[pod.name]
        pod.remove()
        job = self.jobs.get(pod.owner)
        one = next((one for one in self.objects if (one["kind"], one["metadata"]["name"]) == ("Job", pod.owner)), None)
        if job is None or one is None or job.condition:
            return
        if pod.phase == "Succeeded":
            job.done.add(pod.index if pod.index is not None else pod.number)
            return
        job.again = time.monotonic() + BACKOFF_S
        action = self._action(one["spec"].get("podFailurePolicy", {"rules": []})["rules"], pod)
        if action == "Ignore":
            job.ignored += 1
            return
        job.failed += 1
        if action == "FailJob" or job.failed > one["spec"]["backoffLimit"]:
            job.condition = "Failed"

    @staticmethod
    def _action(rules: list[dict[str, Any]], pod: Pod) -> str:
        for rule in rules:
            for condition in rule.get("onPodConditions", []):
                assert condition["type"] == "DisruptionTarget", condition
                if pod.evicted:
                    return str(rule["action"])
            codes = rule.get("onExitCodes")
            if codes and codes["operator"] == "In" and pod.exit_code in codes["values"]:
                return str(rule["action"])
        return "Count"

    def _names(self) -> None:
        """What DNS and the proxy of services do: names, and addresses that lead to pods which are ready."""
        names: dict[str, str] = {}
        for one in self.objects:
            if one["kind"] != "Service":
                continue
            name, spec = one["metadata"]["name"], one["spec"]
            pods = [pod for pod in self.pods.values() if pod.labels.items() >= spec["selector"].items()]
            if spec.get("clusterIP") == "None":
                open_to = [pod for pod in pods if pod.ready or spec.get("publishNotReadyAddresses")]
                names |= {f"{pod.hostname}.{name}": pod.address for pod in open_to if pod.spec.get("subdomain") == name}
                continue
            first = int(ipaddress.ip_address("10.96.0.10"))
            address = self.addresses.setdefault(name, str(ipaddress.ip_address(first + len(self.addresses))))
            names[name] = address
            self._lead(name, address, [pod for pod in pods if pod.ready and pod.ending is None])
        for pod in self.pods.values():
            pod.write_hosts(names)

    def _lead(self, name: str, address: str, ready: list[Pod]) -> None:
        now = self.pods.get(self.leads.get(name, ""))
        if now is not None and now in ready:
            return
        if now is not None:
            ip("-n", now.net, "addr", "del", f"{address}/32", "dev", "eth0")
        self.leads[name] = ready[0].name if ready else ""
        if ready:
            ip("-n", ready[0].net, "addr", "add", f"{address}/32", "dev", "eth0")
        for pod in self.pods.values():
            ip("-n", pod.net, "neigh", "flush", "all")


if __name__ == "__main__":
    Node(Path(sys.argv[1]), sys.argv[2]).loop()
