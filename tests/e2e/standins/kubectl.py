#!/usr/bin/env python3
"""Stand-in for kubectl: what apply.sh and end.sh of a rendered run, and the how-to of docs/clusters.md, ask of it.

Objects are files in the folder `KUBECTL_STANDIN`; `kube_node.py` makes pods of them. What it does not know it refuses.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

STATE = Path(os.environ.get("KUBECTL_STANDIN", "."))
KINDS = {
    "configmap": "ConfigMap",
    "deployment": "Deployment",
    "job": "Job",
    "networkpolicy": "NetworkPolicy",
    "persistentvolumeclaim": "PersistentVolumeClaim",
    "pod": "Pod",
    "pvc": "PersistentVolumeClaim",
    "secret": "Secret",
    "service": "Service",
}


def path_of(kind: str, name: str) -> Path:
    return STATE / "objects" / f"{kind}.{name}.json"


def write(path: Path, value: Any) -> None:
    """Replace the file."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value))
    os.replace(temporary, path)


def status() -> dict[str, Any]:
    """What the node says of pods and jobs."""
    path = STATE / "status.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"pods": {}, "jobs": {}}
    return found


def until(what: str, condition: Callable[[], bool], timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return 0
        time.sleep(0.1)
    print(f"error: timed out waiting for {what}", file=sys.stderr)
    return 1


def documents(files: list[str]) -> list[dict[str, Any]]:
    texts = [sys.stdin.read() if name == "-" else Path(name).read_text() for name in files]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def apply(args: argparse.Namespace) -> int:
    for one in documents(args.filename):
        kind, name = one["kind"], one["metadata"]["name"]
        assert kind in KINDS.values(), kind
        path, verb = path_of(kind, name), "created"
        if path.exists():
            old = json.loads(path.read_text())
            if kind == "Job" and old["spec"]["template"] != one["spec"]["template"]:
                print(f'The Job "{name}" is invalid: spec.template: field is immutable', file=sys.stderr)
                return 1
            verb = "unchanged" if old == one else "configured"
        if verb != "unchanged":
            write(path, one)
        print(f"{kind.lower()}/{name} {verb}")
    return 0


def create(args: argparse.Namespace) -> int:
    assert args.words[:2] == ["secret", "generic"] and args.dry_run == "client" and args.output == "yaml", args
    pairs = [word.partition("=") for word in args.from_file]
    data = {key: base64.b64encode(Path(path).read_bytes()).decode() for key, _, path in pairs}
    meta = {"name": args.words[2], "namespace": args.namespace}
    print(yaml.safe_dump({"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": meta, "data": data}))
    return 0


def delete(args: argparse.Namespace) -> int:
    found = [(one["kind"], one["metadata"]["name"]) for one in documents(args.filename)]
    if args.words:
        kind, _, name = args.words[0].partition("/")
        found += [(KINDS[kind], word) for word in ([name] if name else args.words[1:])]
    for kind, name in found:
        if kind == "Pod":
            (STATE / "asked" / f"delete.{name}").write_text("")
            if until(name, lambda name=name: name not in status()["pods"], args.timeout):  # type: ignore[misc]
                return 1
        elif not path_of(kind, name).exists():
            if not args.ignore_not_found:
                print(f'Error from server (NotFound): {kind} "{name}" not found', file=sys.stderr)
                return 1
            continue
        else:
            path_of(kind, name).unlink()
            # Without foreground the pods are left to end by themselves.
            gone = lambda name=name: not any(pod["owner"] == name for pod in status()["pods"].values())  # noqa: E731
            if args.cascade == "foreground" and until(name, gone, args.timeout):
                return 1
        print(f'{kind.lower()} "{name}" deleted')
    return 0


def drain(args: argparse.Namespace) -> int:
    """Evicts the pods that the selector names: their condition is DisruptionTarget."""
    key, _, value = args.pod_selector.partition("=")
    names = [name for name, pod in status()["pods"].items() if pod["labels"].get(key) == value]
    for name in names:
        (STATE / "asked" / f"evict.{name}").write_text("")
        print(f"pod/{name} evicted")
    return until("the pods", lambda: not set(names) & set(status()["pods"]), args.timeout)


def get(args: argparse.Namespace) -> int:
    kind = KINDS[args.words[0].removesuffix("s")]
    if kind == "Pod":
        for name, pod in status()["pods"].items():
            print(f"{name} {pod['phase']} restarts={pod['restarts']}")
        return 0
    if len(args.words) == 2 and not path_of(kind, args.words[1]).exists():
        print(f'Error from server (NotFound): {kind.lower()}s "{args.words[1]}" not found', file=sys.stderr)
        return 1
    for path in sorted((STATE / "objects").glob(f"{kind}.*.json")):
        print(path.name.split(".")[1], status()["jobs"].get(path.name.split(".")[1], ""))
    return 0


def wait(args: argparse.Namespace) -> int:
    condition = args.for_.removeprefix("condition=")
    name = args.words[0].removeprefix("job/")
    return until(name, lambda: status()["jobs"].get(name, {}).get("condition", "").lower() == condition, args.timeout)


def logs(args: argparse.Namespace) -> int:
    print((STATE / "pods" / args.words[0] / "log").read_text())
    return 0


def patch(args: argparse.Namespace) -> int:
    """`--patch` of spec alone: the number of pods."""
    kind, name = args.words
    path, given = path_of(KINDS[kind], name), json.loads(args.patch)
    assert set(given) == {"spec"} and set(given["spec"]) <= {"parallelism", "replicas"}, given
    one = json.loads(path.read_text())
    write(path, {**one, "spec": {**one["spec"], **given["spec"]}})
    return 0


def execute(words: list[str]) -> int:
    """`kubectl exec deploy/NAME -- COMMAND`: in the namespaces of the container, as its user, with its environment."""
    name, command = words[0].removeprefix("deploy/"), words[words.index("--") + 1 :]
    [main] = [pod["main"] for pod in status()["pods"].values() if pod["owner"] == name]
    texts = Path(f"/proc/{main}/environ").read_text().split("\0")
    env = dict(text.split("=", 1) for text in texts if "=" in text)
    about = Path(f"/proc/{main}").stat()
    user = ["setpriv", "--reuid", str(about.st_uid), "--regid", str(about.st_gid), "--clear-groups"]
    namespaces = [f"--{name}" for name in ("mount", "uts", "ipc", "net", "pid", "root", "wd")]
    return subprocess.run(
        ["nsenter", "--target", str(main), *namespaces, *user, "--", *command], env=env, timeout=120, check=False
    ).returncode


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="kubectl", allow_abbrev=False)
    made.add_argument("verb", choices=("apply", "create", "delete", "drain", "get", "logs", "patch", "wait"))
    made.add_argument("words", nargs="*")
    made.add_argument("--filename", "-f", action="append", default=[])
    made.add_argument("--namespace", default="default")
    made.add_argument("--from-file", action="append", default=[])
    made.add_argument("--dry-run", default="")
    made.add_argument("--output", default="")
    made.add_argument("--cascade", default="background")
    made.add_argument("--ignore-not-found", action="store_true")
    made.add_argument("--pod-selector", default="")
    made.add_argument("--patch", "-p", default="{}")
    made.add_argument("--for", dest="for_", default="")
    made.add_argument("--timeout", type=lambda text: float(text.removesuffix("s")), default=60.0)
    return made


if __name__ == "__main__":
    if sys.argv[1] == "exec":
        sys.exit(execute(sys.argv[2:]))
    given = parser().parse_intermixed_args()
    sys.exit(globals()[given.verb](given))
