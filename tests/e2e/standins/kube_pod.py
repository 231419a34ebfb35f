"""One pod of the stand-in for Kubernetes: volumes as files, containers as processes in namespaces of their own.

A pod has its network namespace with an address, its host name and its processes'
numbers; a container sees the image (read-only: this host's programs and the checkout), its mounts, and nothing else,
and runs as the user of its securityContext without capabilities. Fields that are not known are refused, so that none
is passed over in silence. Limits of memory and CPU, seccomp and NetworkPolicy are accepted and not enforced.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
POD_FIELDS = {
    "automountServiceAccountToken",
    "containers",
    "enableServiceLinks",
    "initContainers",
    "priorityClassName",
    "restartPolicy",
    "securityContext",
    "shareProcessNamespace",
    "subdomain",
    "terminationGracePeriodSeconds",
    "volumes",
}
CONTAINER_FIELDS = {
    "command",
    "env",
    "image",
    "livenessProbe",
    "name",
    "ports",
    "readinessProbe",
    "resources",
    "securityContext",
    "volumeMounts",
    "workingDir",
}
POD_SECURITY = {"fsGroup", "fsGroupChangePolicy", "runAsGroup", "runAsNonRoot", "runAsUser", "seccompProfile"}
SECURITY = {"allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem"}
IMAGE = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/etc/alternatives", "/etc/ld.so.cache", "/sys")
BACKOFF_S = 1.0  # 10 s and more in Kubernetes


def known(found: dict[str, Any], fields: set[str], where: str) -> None:
    strange = set(found) - fields
    assert not strange, f"{where}: this stand-in does not know {sorted(strange)}"


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


class Pod:
    """A pod on this node. `step` is called again and again until `phase` is Succeeded or Failed."""

    def __init__(
        self,
        name: str,
        spec: dict[str, Any],
        labels: dict[str, str],
        *,
        state: Path,
        number: int,
        cluster: str,
        owner: str,
        index: int | None = None,
        hostname: str = "",
    ) -> None:
        known(spec, POD_FIELDS, name)
        self.name, self.spec, self.labels, self.owner, self.index = name, spec, labels, owner, index
        self.hostname = hostname or name
        self.state, self.folder, self.number = state, state / "pods" / name, number
        self.address = f"10.244.{number // 250}.{number % 250 + 2}"
        self.net = f"{cluster}p{number}"
        self.phase, self.ready, self.restarts, self.killed, self.evicted = "Pending", False, 0, False, False
        self.exit_code: int | None = None
        self.ending: float | None = None  # deadline of the end
        self.process: subprocess.Popen[bytes] | None = None
        self.waiting = list(spec.get("initContainers", []))
        self.again, self.probed, self.failures, self.started = 0.0, 0.0, 0, 0.0
        self.folder.mkdir(parents=True)
        self.volumes = {volume["name"]: self._volume(volume) for volume in spec["volumes"]}
        self._network(cluster)

    # ---------------------------------------------------------------- what it is made of

    def _network(self, cluster: str) -> None:
        ip("netns", "add", self.net)
        veth = f"v{self.number}"
        ip("link", "add", veth, "netns", cluster, "type", "veth", "peer", "name", "eth0", "netns", self.net)
        ip("-n", cluster, "link", "set", veth, "master", "br0", "up")
        ip("-n", self.net, "link", "set", "lo", "up")
        ip("-n", self.net, "addr", "add", f"{self.address}/16", "dev", "eth0")
        ip("-n", self.net, "link", "set", "eth0", "up")
        ip("-n", self.net, "route", "add", "10.96.0.0/16", "dev", "eth0")

    def _object(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.state / "objects" / f"{kind}.{name}.json").read_text())
        return found

    def _volume(self, volume: dict[str, Any]) -> tuple[Path, bool]:
        """Where it lies on the node, and whether it is read-only."""
        [kind] = set(volume) - {"name"}
        about, folder = volume[kind], self.folder / "volumes" / volume["name"]
        group = self.spec.get("securityContext", {}).get("fsGroup")
        if kind == "persistentVolumeClaim":
            claim = Path(self._object("PersistentVolumeClaim", about["claimName"])["path"])
            if group is not None and claim.stat().st_gid != group:  # fsGroupChangePolicy: OnRootMismatch
                for path in (claim, *claim.rglob("*")):
                    os.chown(path, -1, group, follow_symlinks=False)
                    path.chmod(path.stat().st_mode | (0o2770 if path.is_dir() else 0o660))
            return claim, False
        if kind == "emptyDir":
            known(about, {"medium", "sizeLimit"}, volume["name"])
            if about.get("medium") == "Memory":
                folder = Path("/dev/shm") / f"{self.net}-{volume['name']}"
            folder.mkdir(parents=True, exist_ok=True)
            os.chown(folder, 0, group or 0)
            folder.chmod(0o2777 if group is not None else 0o777)
            return folder, False
        return self._files(kind, about, folder, group), True

    def _files(self, kind: str, about: dict[str, Any], folder: Path, group: int | None) -> Path:
        """Keys of a Secret or a ConfigMap as files: links into a folder that is swapped whole, as the kubelet does."""
        if kind == "secret":
            known(about, {"secretName", "defaultMode"}, "secret")
            pairs = self._object("Secret", about["secretName"])["data"].items()
            data = {name: base64.b64decode(text) for name, text in pairs}
        else:
            assert kind == "configMap", kind
            known(about, {"name"}, "configMap")
            data = {name: text.encode() for name, text in self._object("ConfigMap", about["name"])["data"].items()}
        (folder / "..1").mkdir(parents=True)
        (folder / "..data").symlink_to("..1")
        for name, content in data.items():
            path = folder / "..1" / name
            path.write_bytes(content)
            path.chmod(about.get("defaultMode", 0o644) | (0o440 if group is not None else 0))
            os.chown(path, 0, group or 0)
            (folder / name).symlink_to(f"..data/{name}")
        for path in (folder, folder / "..1"):
            path.chmod(0o755)
        return folder

    def write_hosts(self, names: dict[str, str]) -> None:
        """Names that the cluster's DNS would answer. In place: the file is mounted."""
        lines = ["127.0.0.1 localhost", f"{self.address} {self.hostname}"]
        text = "\n".join([*lines, *(f"{address} {name}" for name, address in names.items())]) + "\n"
        path = self.folder / "hosts"
        if not path.exists() or path.read_text() != text:
            with path.open("r+" if path.exists() else "w") as file:
                file.write(text)
                file.truncate()

    # ---------------------------------------------------------------- containers

    def _environment(self, container: dict[str, Any]) -> dict[str, str]:
        env = {
            "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "HOME": "/",
            "HOSTNAME": self.hostname,
        }  # the image and the runtime
        assert self.spec.get("enableServiceLinks") is False, "variables of services are not made here"
        if self.index is not None:
            env["JOB_COMPLETION_INDEX"] = str(self.index)
        fields = {"status.podIP": self.address, "metadata.name": self.name, "status.hostIP": "10.244.0.1"}
        for one in container.get("env", []):
            known(one, {"name", "value", "valueFrom"}, "env")
            env[one["name"]] = one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        return env

    def _bwrap(self, container: dict[str, Any], env: dict[str, str], *, info: int | None) -> list[str]:
        known(container, CONTAINER_FIELDS, f"{self.name}: container")
        inside = container.get("securityContext", {})
        known(inside, SECURITY, "securityContext")
        assert inside.get("readOnlyRootFilesystem") is True, "an image that can be written is not made here"
        words = [
            "ip",
            "netns",
            "exec",
            self.net,
            "bwrap",
            "--die-with-parent",
            "--unshare-pid",
            "--unshare-ipc",
            "--unshare-uts",
            "--hostname",
            self.hostname,
            "--clearenv",
        ]
        words += ["--as-pid-1"] if not self.spec.get("shareProcessNamespace") else []
        words += ["--info-fd", str(info)] if info is not None else []
        binds = [(path, path, True) for path in (*IMAGE, str(ROOT), sys.prefix, sys.base_prefix)]
        binds += [
            (str(self.state / "etc" / name), f"/etc/{name}", True) for name in ("passwd", "group", "nsswitch.conf")
        ]
        binds += [(str(self.folder / "hosts"), "/etc/hosts", True)]
        for mount in container.get("volumeMounts", []):
            known(mount, {"name", "mountPath", "readOnly"}, "volumeMounts")
            folder, read_only = self.volumes[mount["name"]]
            binds.append((str(folder), mount["mountPath"], read_only or mount.get("readOnly", False)))
        words += ["--proc", "/proc", "--dev", "/dev"]
        # Folders above a mount would be for root alone.
        above = dict.fromkeys(str(one) for _, path, _ in binds for one in reversed(Path(path).parents[:-1]))
        words += [word for path in above for word in ("--perms", "0755", "--dir", path)]
        for source, path, read_only in binds:
            if os.path.islink(source) and source in IMAGE:
                words += ["--symlink", os.readlink(source), path]
            elif os.path.exists(source):
                words += ["--ro-bind" if read_only else "--bind", source, path]
        words += ["--remount-ro", "/", "--chdir", container.get("workingDir", "/")]
        for name, value in env.items():
            words += ["--setenv", name, value]
        return [*words, *self._user(inside)]

    def _user(self, inside: dict[str, Any]) -> list[str]:
        about = self.spec.get("securityContext", {})
        known(about, POD_SECURITY, "securityContext of the pod")
        user = about.get("runAsUser", 0)
        assert not (about.get("runAsNonRoot") and user == 0), "runAsNonRoot with user 0"
        words = [
            "setpriv",
            "--reuid",
            str(user),
            "--regid",
            str(about.get("runAsGroup", 0)),
            "--groups",
            str(about.get("fsGroup", about.get("runAsGroup", 0))),
        ]
        words += ["--no-new-privs"] if inside.get("allowPrivilegeEscalation") is False else []
        dropped = inside.get("capabilities", {}).get("drop") == ["ALL"]
        return [*words, *(["--bounding-set", "-all", "--inh-caps", "-all"] if dropped or user else []), "--"]

    def _start(self, container: dict[str, Any]) -> None:
        env = self._environment(container)
        command = [expanded(word, env) for word in container["command"]]
        reader, writer = os.pipe()
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self._bwrap(container, env, info=writer), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[writer],
                start_new_session=True,
            )
        os.close(writer)
        with os.fdopen(reader) as file:
            said = file.read()
        self.first = json.loads(said)["child-pid"] if said else 0
        self.started, self.failures = time.monotonic(), 0

    def main(self) -> int:
        """Number on the node of the container's own process, 0 while there is none."""
        if not self.spec.get("shareProcessNamespace"):
            return self.first
        return next(iter(children(self.first)), 0)

    # ---------------------------------------------------------------- its life

    def step(self) -> None:
        """Look at the container once: start it, see its end, probe it."""
        if self.process is None:
            if self.ending is not None:
                self._over(self.exit_code or 0)
            elif time.monotonic() >= self.again:
                self._start(self.waiting[0] if self.waiting else self.spec["containers"][0])
                self.phase = "Running" if not self.waiting else "Pending"
            return
        code = self.process.poll()
        if code is not None:
            self._ended(code if code >= 0 else 128 - code)
        elif self.ending is not None and time.monotonic() > self.ending:
            self.killed = True
            self.kill()
        elif not self.waiting and self.ending is None:
            self._probe(self.spec["containers"][0])

    def _ended(self, code: int) -> None:
        self.process, self.ready = None, False
        policy = self.spec.get("restartPolicy", "Always")
        if self.ending is not None:
            self._over(code)
        elif self.waiting and code == 0:
            self.waiting.pop(0)
        elif (policy == "Always" and not self.waiting) or (policy != "Never" and code):
            self.restarts += 1
            self.again = time.monotonic() + BACKOFF_S
        else:
            self._over(code)

    def _over(self, code: int) -> None:
        self.exit_code, self.ready = code, False
        self.phase = "Failed" if code else "Succeeded"

    def _probe(self, container: dict[str, Any]) -> None:
        probe = container.get("readinessProbe")
        assert "livenessProbe" not in container, "liveness is not looked at here"
        if probe is None:
            self.ready = True
            return
        known(probe, {"tcpSocket", "periodSeconds", "failureThreshold", "timeoutSeconds"}, "readinessProbe")
        now = time.monotonic()
        if now - self.probed < probe.get("periodSeconds", 10):
            return
        self.probed = now
        port = probe["tcpSocket"]["port"]
        port = next((one["containerPort"] for one in container.get("ports", []) if one["name"] == port), port)
        self.failures = 0 if self._answers(int(port)) else self.failures + 1
        self.ready = self.failures == 0 or (self.ready and self.failures < probe.get("failureThreshold", 3))

    def _answers(self, port: int) -> bool:
        """From the node, as the kubelet does: through the network of the pods."""
        try:
            socket.create_connection((self.address, port), timeout=1).close()
        except OSError:
            return False
        return True

    def end(self, *, evicted: bool = False) -> None:
        """SIGTERM to the container's own process; it is killed after its grace."""
        if self.ending is not None:
            return
        self.evicted = self.evicted or evicted
        self.ending = time.monotonic() + self.spec.get("terminationGracePeriodSeconds", 30)
        if self.process is not None and (main := self.main()):
            os.kill(main, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to all of the container."""
        if self.process is not None and self.first and self.process.poll() is None:
            os.kill(self.first, signal.SIGKILL)

    def remove(self) -> None:
        """Its network and what it had in memory."""
        ip("netns", "delete", self.net)
        for folder, _ in self.volumes.values():
            if str(folder).startswith("/dev/shm/"):
                shutil.rmtree(folder, ignore_errors=True)

    def about(self) -> dict[str, Any]:
        """For `kubectl get`."""
        return {
            "phase": self.phase,
            "ready": self.ready,
            "restarts": self.restarts,
            "owner": self.owner,
            "labels": self.labels,
            "main": self.main() if self.process is not None else 0,
            "first": self.first if self.process is not None else 0,
            "address": self.address,
            "code": self.exit_code,
            "killed": self.killed,
        }


def expanded(word: str, env: dict[str, str]) -> str:
    """$(NAME) as the kubelet puts it into a command."""
    for name, value in env.items():
        word = word.replace(f"$({name})", value)
    return word


def children(pid: int) -> list[int]:
    """Processes whose parent it is."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return sorted(found)
