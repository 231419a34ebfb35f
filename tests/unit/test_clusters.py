"""The rendered jobs: whole, readable by those who run them, and without a secret in them."""

import ast
import functools
import json
import operator
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from quick_checks import no_parts_are_tried  # noqa: F401

from asyncrl.config import Config, parse
from asyncrl.config.sections.cluster import ClusterConfig
from asyncrl.errors import ConfigError, ConfigErrors
from asyncrl.launcher.clusters import memory_notes, missing_devices, render, render_command, unmet_addresses
from asyncrl.launcher.clusters.commands import Shell, Site, cluster_config, shell
from asyncrl.launcher.clusters.kubernetes import documents
from asyncrl.net.keys import write_keys

TEXT = """
[model]
path = "/data/model"
[data]
path = "/data/prompts.jsonl"
[[reward]]
function = "a:b"
[run]
name = "My run_3"
dir = "/data/my runs/it's"
[buffer]
redis_url = "redis://u:topsecret@host"
store = "redis"
"""
SITE = Site(
    folder="/shared/my jobs", work="/shared/it's work", keys="/shared/my jobs/keys", programs="/shared/it's env/bin"
)


def config(**settings: Any) -> Config:
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return cluster_config(parse(TEXT, overrides=[word.replace("__", ".", 1) for word in words]), SITE)


def made(backend: str, **settings: Any) -> dict[str, str]:
    if backend == "k8s":
        settings.setdefault("cluster__claim", "shared")
    return render(config(**settings), SITE, backend=backend)


BACKENDS = ("slurm", "k8s", "ray")


def test_keys_may_be_made_after_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other mistakes are reported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text(TEXT + '[network]\nkey_file = "keys/server.key"\n')
    with pytest.raises(ConfigErrors) as caught:
        render_command([tmp_path / "a.toml"], (), backend="slurm", folder=tmp_path / "jobs")
    assert caught.value.errors and not [one for one in caught.value.errors if "key" in one.where]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_configuration_gives_the_same_files_without_a_secret(backend: str, tmp_path: Path) -> None:
    files = made(backend)
    assert files == made(backend)
    assert not [name for name, text in files.items() if "topsecret" in text]
    again = parse(files["config.toml"])
    assert again.network.buffer == "tcp://0.0.0.0:5555" and again.network.weightsync == "tcp://0.0.0.0:5556"
    assert again.network.key_file.endswith("keys/server.key"), "beyond loopback there are keys"
    text = "".join(files.values())
    for role in ("services", "producers", "rewards", "learner"):
        assert f"launch {role}" in text.replace('"', "").replace(",\n", " ") or f"- {role}" in text
    for name in (
        ("producer.key", "reward.key", "server.key") if backend != "k8s" else ("producer", "reward", "server.key")
    ):
        assert name in text


def directives(text: str) -> dict[str, str]:
    lines = [word for line in text.splitlines() if line.startswith("#SBATCH ") for word in shlex.split(line)[1:]]
    lines = [line.removeprefix("--") for line in lines]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_slurm_scripts_are_shell_and_say_what_they_need() -> None:
    settings: dict[str, Any] = {
        "cluster__producers": 7,
        "cluster__producer_gpus": 2,
        "cluster__learner_gpus": 4,
        "cluster__partition": "long",
        "cluster__account": "a1",
        "cluster__time_limit": "24:00:00",
        "cluster__options": ["--exclusive"],
        "cluster__setup": ["module load cuda"],
        "cluster__grace_s": 120,
        "learner__ranks": 4,
    }
    files = made("slurm", **settings)
    for name, text in files.items():
        if name.endswith((".sh", ".sbatch")):
            done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=60, check=False)
            assert done.returncode == 0, (name, done.stderr)
            # Under pipefail, who stops reading early ends the script by the broken pipe of who still writes.
            assert "| head" not in text and "exit}" not in text
            assert "module load cuda" in text and f"cd {shlex.quote(SITE.work)}" in text
    producers, learner = directives(files["producers.sbatch"]), directives(files["learner.sbatch"])
    assert learner["output"] == "/shared/my jobs/logs/learner-%j.out", "one word, spaces and all"
    assert producers["array"] == "0-6" and producers["gpus-per-node"] == "2" and "requeue" in producers
    assert learner["gpus-per-node"] == "4" and learner["nodes"] == "1" and "array" not in learner
    for one in (producers, learner, directives(files["services.sbatch"])):
        assert one["partition"] == "long" and one["account"] == "a1"
        assert one["time"] == "24:00:00" and "exclusive" in one
    assert learner["signal"] == "B:TERM@120", "and the services are not stopped before it"
    assert not [name for name, text in files.items() if name != "learner.sbatch" and "--signal=B" in text]
    assert "producer.key" in files["producers.sbatch"] and "server.key" not in files["producers.sbatch"]
    assert "server.key" in files["learner.sbatch"]
    assert "gpus-per-node" not in directives(files["services.sbatch"])


PYTHON = '#!/bin/sh\n[ "$1" = -c ] && exec true\necho "$0" "$@"\n'


@pytest.mark.parametrize("chosen", ["rendered", "setup", "nowhere"])
def test_slurm_scripts_use_the_environment_that_rendered_them(tmp_path: Path, chosen: str) -> None:
    """Or the one that `cluster.setup` activates; without either a message names both the host and the environment."""
    site = Site(str(tmp_path), str(tmp_path), str(tmp_path / "keys"), programs=str(tmp_path / "my env" / "bin"))
    places = {"rendered": site.programs, "setup": str(tmp_path / "other"), "bare": str(tmp_path / "bare")}
    for name, place in places.items():
        Path(place).mkdir(parents=True)
        if name in (chosen, "bare"):
            (Path(place) / "python").write_text(PYTHON if name == chosen else "#!/bin/sh\nexit 1\n")
            (Path(place) / "python").chmod(0o755)
    setup = [f"export PATH={places['setup']}:$PATH"] if chosen == "setup" else []
    rendered = cluster_config(parse(TEXT, overrides=[f"cluster.setup={json.dumps(setup)}"]), site)
    script = render(rendered, site, backend="slurm")["services.sbatch"]
    env = {"PATH": f"{places['bare']}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60, check=False)
    if chosen == "nowhere":
        assert done.returncode == 2 and site.programs in done.stderr and places["bare"] in done.stderr, done.stderr
        assert "cluster.setup" in done.stderr and not (tmp_path / "address").exists(), "nothing was started"
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{places[chosen]}/python -m asyncrl launch services"), done.stdout


def test_a_gang_on_several_hosts_meets_at_the_first() -> None:
    text = made("slurm", cluster__learner_hosts=3)["learner.sbatch"]
    cpus = directives(text)["cpus-per-task"]
    assert directives(text)["nodes"] == "3" and f'srun --cpus-per-task="${{SLURM_CPUS_PER_TASK:-{cpus}}}" ' in text
    assert '--node-rank "$SLURM_NODEID"' in text
    assert '--head "$HEAD:5557"' in text and "scontrol show hostnames" in text
    assert "| head" not in text and "exit}" not in text
    job = objects("k8s", "learner.yaml", cluster__learner_hosts=3)[1]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3
    words = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert words[words.index("--head") + 1] == "my-run-3-learner-0.my-run-3-learner:5557"
    assert "@NODE@" in made("ray", cluster__learner_hosts=3)["driver.py"]


def test_reward_workers_with_judges_get_accelerators() -> None:
    assert directives(made("slurm", cluster__reward_gpus=2)["rewards.sbatch"])["gpus-per-node"] == "2"
    rewards = objects("k8s", "producers.yaml", cluster__reward_gpus=2)[1]["spec"]["template"]["spec"]["containers"][0]
    assert rewards["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert "PRODUCER_GPUS, REWARD_GPUS, LEARNER_GPUS = 4, 0, 2, 0" in made("ray", cluster__reward_gpus=2)["driver.py"]


def objects(backend: str, name: str, **settings: Any) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(made(backend, **settings)[name]))


#: Every kind of manifest that settings can make.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gang of two hosts": {
        "cluster__producers": 3,
        "cluster__producer_gpus": 1,
        "cluster__learner_gpus": 8,
        "cluster__learner_hosts": 2,
        "cluster__preemptible_class": "spot",
        "learner__ranks": 8,
    },
    "root with lines of set-up": {
        "cluster__user": 0,
        "cluster__folder": "/data/work",
        "cluster__setup": ["source /data/venv/bin/activate", 'echo "it\'s: on"'],
    },
    "judges on NPUs": {
        "cluster__reward_gpus": 2,
        "cluster__gpu_resource": "huawei.com/Ascend910",
        "cluster__memory": "16000",
        "cluster__namespace": "team",
    },
    "open networks": {
        "trackers__prometheus_port": 9100,
        "trackers__prometheus_host": "0.0.0.0",
        "trackers__prometheus_key_file": "/data/metrics.key",
        "weightsync__transport": "collective",
    },
}
OLDEST = "1.29"  # older schemas require both onPodConditions and onExitCodes of a rule; the servers refuse both
#: Maps of Kubernetes whose keys are free.
FREE = {"labels", "matchLabels", "data", "limits", "requests"}


@pytest.fixture
def validate(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any], str], None]:
    """Refuses what the schema of a version of Kubernetes does not know, or knows of another type."""
    package = pytest.importorskip("kubernetes_validate", reason="the schemas come with kubernetes-validate")
    monkeypatch.setattr(package.utils, "schema_contents", functools.cache(package.utils.schema_contents))
    return lambda document, version: package.validate(document, version or package.latest_version(), strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_kubernetes_manifests_fit_their_schemas(validate: Callable[[dict[str, Any], str], None], variant: str) -> None:
    files = made("k8s", **VARIANTS[variant])
    seen = []
    for name in (name for name in files if name.endswith(".yaml")):
        for one in yaml.safe_load_all(files[name]):
            for version in (OLDEST, "1.31", ""):
                validate(one, version)
            seen.append((one["kind"], one["metadata"]["name"]))
    assert sorted(seen) == [
        ("ConfigMap", "my-run-3-config"),
        ("Deployment", "my-run-3-services"),
        ("Job", "my-run-3-learner"),
        ("Job", "my-run-3-producers"),
        ("Job", "my-run-3-rewards"),
        ("NetworkPolicy", "my-run-3-network"),
        ("Service", "my-run-3-learner"),
        ("Service", "my-run-3-services"),
    ]


def tables(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all maps in a document whose keys Kubernetes names."""
    if isinstance(value, dict):
        if not FREE & {*path[-1:]}:
            yield path
            for key, inner in value.items():
                yield from tables(inner, (*path, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from tables(inner, (*path, place))


def test_a_wrong_field_anywhere_does_not_fit(validate: Callable[[dict[str, Any], str], None]) -> None:
    files, tried = made("k8s", **VARIANTS["gang of two hosts"]), 0
    for name in (name for name in files if name.endswith(".yaml")):
        for document in yaml.safe_load_all(files[name]):
            for path in tables(document):
                if document["kind"] == "Service" and path[-1:] == ("selector",):
                    continue  # there a map of labels
                wrong = yaml.safe_load(yaml.safe_dump(document))
                functools.reduce(operator.getitem, path, wrong)["wrongField"] = "x"
                with pytest.raises(Exception, match="wrongField"):
                    validate(wrong, "1.31")
                tried += 1
    assert tried > 150, tried


def test_pods_get_what_their_role_needs_and_no_more() -> None:
    def pods(name: str) -> list[dict[str, Any]]:
        found = objects("k8s", name, cluster__preemptible_class="spot", cluster__producer_gpus=1)
        return [one["spec"]["template"]["spec"] for one in found if "template" in one["spec"]]

    producers, rewards = pods("producers.yaml")
    [services], [learner] = pods("services.yaml"), pods("learner.yaml")
    for pod, key in ((producers, "producer"), (rewards, "reward"), (services, "server"), (learner, "server")):
        [secret] = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
        assert secret == {"secretName": f"my-run-3-{key}-key", "defaultMode": 0o440}
        assert f"/etc/asyncrl-secret/{key}.key" in pod["initContainers"][0]["command"]
        assert pod["terminationGracePeriodSeconds"] == 300 and pod["automountServiceAccountToken"] is False
        assert ("priorityClassName" in pod) == (key in ("producer", "reward"))
    limits = [pod["containers"][0]["resources"]["limits"] for pod in (producers, rewards)]
    assert limits == [{"memory": "16Gi", "nvidia.com/gpu": 1}, {"memory": "16Gi"}]
    [plain] = [one for one in objects("k8s", "learner.yaml", cluster__memory="16000") if one["kind"] == "Job"]
    assert plain["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "16000Mi"
    [config_map] = objects("k8s", "config.yaml")
    inside = parse(config_map["data"]["config.toml"])
    assert inside.network.key_file == "/etc/asyncrl-keys/server.key"
    words = producers["containers"][0]["command"]
    assert words[:5] == ["python", "-m", "asyncrl", "launch", "producers"]
    assert "weightsync.stream_host=$(POD_IP)" in words, "the kubelet puts the address of the pod there"
    with pytest.raises(ConfigError, match="volume"):
        render(config(), SITE, backend="k8s")


def test_the_driver_of_ray_is_python_and_asyncrl_needs_no_ray() -> None:
    text = made("ray", cluster__setup=["module load 'x y'"])["driver.py"]
    tree = ast.parse(text)
    assert any(isinstance(node, ast.Import) and node.names[0].name == "ray" for node in tree.body)
    root = Path(__file__).parents[2]
    for path in root.glob("asyncrl/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [name for name in names if name.split(".")[0] == "ray"], path


RAY = '''
"""Stands in for ray: actors are objects of this process; those of producers, which have a GPU, die at their end."""
class Call:
    def __init__(self, work): self.work = work
class Method:
    def __init__(self, work): self.work = work
    def remote(self, *given): return Call(lambda: self.work(*given))
class Actor:
    def __init__(self, gpus): self.gpus = gpus
    def __getattr__(self, name): return Method(getattr(self, "do_" + name))
    def do_address(self): return "10.0.0.1"
    def do_start(self, command, words): self.name = command.split("launch ")[1].split()[0]
    def do_wait(self, timeout_s): return 0
    def do_stop(self):
        if self.gpus:
            raise RuntimeError("the actor died")
        print("stopped", self.name)
        return 0
class Class:
    def options(self, num_cpus, num_gpus): self.gpus = num_gpus; return self
    def remote(self): return Actor(self.gpus)
def init(address): pass
def remote(kind): return Class()
def get(call, timeout): return call.work()
'''


def test_an_actor_that_died_leaves_no_other_role_running(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text(RAY)
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "server.key").touch()
    site = Site(str(tmp_path), str(tmp_path), str(tmp_path / "keys"), "/bin")
    rendered = cluster_config(parse(TEXT, overrides=["cluster.producers=2", "cluster.producer_gpus=1"]), site)
    (tmp_path / "driver.py").write_text(render(rendered, site, backend="ray")["driver.py"])
    done = subprocess.run(
        [sys.executable, "driver.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("stopped")] == [
        "stopped learner", "stopped rewards", "stopped services",
    ], done.stdout + done.stderr  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("not stopped: RuntimeError: the actor died") == 2, done.stdout


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, {"b": "x: y", "c": []}], "d": {}, "e": "yes", "f": "1", "g": "", "h": "#", "i": True, "j": None},
        {"text": "one\n\n  two: 'x'\n# three\n", "lines": ["a\nb\n", " lead\n", "tab\t"], "n": [["x"], [{"y": "-"}]]},
        [["a", "b"], {"c": {"d": [{"e": 1, "f": 2}, 3]}}],
        {"on": "off", "a b": "\u00fc", "0x1": "1e3", "~": "null"},
    ],
)
def test_yaml_says_what_was_meant(value: Any) -> None:
    assert yaml.safe_load(documents(value)) == value, documents(value)


def test_words_stay_words_in_a_shell() -> None:
    words = ["printf", "%s\\n", "--a", "it's $HOME", "--b", Shell('"$X"'), "; rm -rf /", "--", "`id`"]
    done = subprocess.run(
        ["bash", "-c", shell(words)],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
        env={**os.environ, "X": "x y"},
    )
    assert done.stdout.splitlines() == ["--a", "it's $HOME", "--b", "x y", "; rm -rf /", "--", "`id`"]


def test_names_are_of_dns_and_strange_settings_are_refused() -> None:
    assert config().cluster_name == "my-run-3" and config(run__name="___").cluster_name == "run"
    assert len(config(run__name="x-" * 60).cluster_name) <= 40
    for setting, value in (
        ("name", "Upper"),
        ("partition", "a\n#SBATCH --x"),
        ("account", "a b"),
        ("memory", "1 G"),
        ("image", "x;y"),
        ("options", ["rm -rf /"]),
        ("options", ["--x\nrm"]),
        ("port", 80),
        ("learner_gpus", 1),
    ):
        with pytest.raises(ConfigErrors):
            config(**{f"cluster__{setting}": value, "learner__ranks": 2})
    assert {field.name for field in msgspec.structs.fields(ClusterConfig)} >= {"devices", "producers", "learner_hosts"}


@pytest.mark.parametrize(
    ("engine", "size", "gpus", "says"),
    [
        ("hf", 1, 1, "is below producers.count = 2: every producer has one"),
        ("hf", 1, 2, ""),
        ("vllm", 2, 1, "is below producers.count = 2: every producer has one"),
        ("vllm", 2, 3, "cluster.producer_gpus = 3, and 2 producers use 2 each (producers.engine_args)"),
        ("vllm", 2, 4, ""),
        ("vllm_http", 2, 1, ""),
    ],
)
def test_accelerators_of_a_producer_job_are_those_of_its_engines(engine: str, size: int, gpus: int, says: str) -> None:
    words = [f"producers.engine={engine}", f"producers.engine_args.tensor_parallel_size={size}", "producers.count=2"]
    words += ["producers.url=['http://h:1', 'http://h:2']"] * (engine == "vllm_http")
    messages: list[str] = []
    try:
        given = parse(TEXT, overrides=[*words, f"cluster.producer_gpus={gpus}"])
        messages = [one.message for one in missing_devices(given)]
    except ConfigErrors as caught:
        messages = [one.message for one in caught.errors]
    assert [says in message for message in messages] == [True] * bool(says), messages


@pytest.mark.parametrize("settings", [{"run__name": "2024 math"}, {"cluster__name": "7b" + "-x" * 19}])
def test_objects_of_kubernetes_begin_with_a_letter(settings: dict[str, str]) -> None:
    """Services need it (RFC 1035), and the others have the same name."""
    name = "run-" + config(**settings).cluster_name
    files = made("k8s", **settings)
    found = [one for file in files if file.endswith(".yaml") for one in yaml.safe_load_all(files[file])]
    assert len(found) > 5
    for one in found:
        written = one["metadata"]["name"]
        assert written.startswith(f"{name}-") and re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", written), written
    assert f"tcp://{name}-services:5555" in files["producers.yaml"] and f"job {name}-learner " in files["end.sh"]
    assert f"job {name}-learner " in files["apply.sh"] and f"generic {name}-$key-key" in files["apply.sh"]


def test_the_command_writes_files_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    for name, text in (("config.json", "{}"), ("model.safetensors", ""), ("tokenizer.json", "{}")):
        (model / name).write_text(text)
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "my.toml").write_text(
        '[model]\npath = "model"\n[data]\npath = "p.jsonl"\n[[reward]]\n'
        'function = "asyncrl.demo.tasks:running_sum_reward"\n'
    )
    target = tmp_path / "jobs"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    assert render_command(Path("my.toml"), [], backend="slurm", folder=target) == 0
    assert (target / "notes.txt").read_text() == "mine" and not (target / "keys").exists()
    assert os.access(target / "submit.sh", os.X_OK) and not os.access(target / "config.toml", os.X_OK)
    assert not (tmp_path / "runs").exists(), "nothing was started"
    assert parse((target / "config.toml").read_text()).run.dir == str(tmp_path / "runs" / "run")
    write_keys_before = target / "keys"
    write_keys_before.mkdir()
    write_keys(write_keys_before / "server.key")
    assert render_command(Path("my.toml"), [], backend="slurm", folder=target) == 0
    with pytest.raises(ConfigErrors, match="would not meet"):
        words = ["network.buffer=tcp://0.0.0.0:7777", "network.key_file=a.key"]
        render_command(Path("my.toml"), words, backend="slurm", folder=target)
    with pytest.raises(ConfigErrors, match="nowhere"):
        render_command(Path("my.toml"), ["model.path=nowhere"], backend="slurm", folder=target)


@pytest.mark.parametrize(
    ("settings", "backends"),
    [
        (["network.buffer=tcp://0.0.0.0:7777"], BACKENDS),
        (["network.buffer=tcp://0.0.0.0:5555", "cluster.port=6000"], BACKENDS),
        (["network.buffer=tcp://127.0.0.1:5555"], BACKENDS),
        (["network.weightsync=ipc:///tmp/w.sock"], BACKENDS),
        (["network.weightsync=tcp://0.0.0.0:7777", "cluster.port=7777"], BACKENDS),
        (["network.weightsync=tcp://0.0.0.0:5555"], BACKENDS),
        (["network.weightsync=tcp://0.0.0.0:7777"], ("k8s",)),
        (["network.buffer=tcp://0.0.0.0:7777", "network.weightsync=tcp://0.0.0.0:7778", "cluster.port=7777"], ()),
    ],
)
def test_services_that_the_jobs_would_not_meet_are_refused(settings: list[str], backends: tuple[str, ...]) -> None:
    given = parse(TEXT, overrides=["network.key_file=server.key", *settings])
    for backend in BACKENDS:
        errors = list(unmet_addresses(given, backend=backend))
        assert len(errors) == (backend in backends), backend
        for error in errors:
            assert error.code == "config.conflict" and error.where.startswith("network.") and error.remedy
            assert f"cluster.port = {given.cluster.port}" in error.message


def test_pods_find_their_files_on_the_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text(TEXT.replace("/data/my runs/it's", "runs/mine"))
    target = tmp_path / "jobs"
    settings = ["cluster.claim=shared", "buffer.redis_url=redis://host", "trackers.prometheus_port=9464"]
    settings += ["trackers.prometheus_host=0.0.0.0", "trackers.prometheus_key_file=/data/metrics.key"]
    assert render_command(Path("my.toml"), settings, backend="k8s", folder=target) == 0
    inside = parse(yaml.safe_load((target / "config.yaml").read_text())["data"]["config.toml"])
    assert (inside.run.dir, inside.model.path) == ("runs/mine", "/data/model"), "from where the pods begin"
    key = "trackers.prometheus_key_file=/etc/metrics.key"
    for setting in ("run.dir=/home/me/run", "model.path=/models/x", "data.path=/data/a.jsonl,/b.jsonl", key):
        with pytest.raises(ConfigErrors, match="volume"):
            render_command(Path("my.toml"), [*settings, setting], backend="k8s", folder=target)
    with pytest.raises(ConfigErrors, match="max_staleness"):  # what can be known here is still said here
        render_command(Path("my.toml"), [*settings, "buffer.max_staleness=-1"], backend="k8s", folder=target)


def restricted(pod: dict[str, Any]) -> list[str]:
    """What the Pod Security Standard `restricted` of Kubernetes forbids in it."""
    about, wrong = pod.get("securityContext", {}), []
    if about.get("runAsNonRoot") is not True or not about.get("runAsUser"):
        wrong.append("root")
    if about.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        wrong.append("seccomp")
    allowed = {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}
    wrong += [volume["name"] for volume in pod["volumes"] if not set(volume) - {"name"} <= allowed]
    for container in (*pod["initContainers"], *pod["containers"]):
        inside = container["securityContext"]
        if inside["allowPrivilegeEscalation"] or inside["capabilities"] != {"drop": ["ALL"]}:
            wrong.append(container["name"])
    return wrong


def test_pods_are_restricted_and_jobs_end_as_they_should() -> None:
    pods, jobs = [], {}
    for name in ("services.yaml", "producers.yaml", "learner.yaml"):
        for one in objects("k8s", name):
            if "template" in one["spec"]:
                pods.append(one["spec"]["template"]["spec"])
                jobs[one["metadata"]["name"]] = one["spec"]
    assert [restricted(pod) for pod in pods] == [[]] * 4
    assert all(
        "securityContext" not in one["spec"]["template"]["spec"]
        for one in objects("k8s", "producers.yaml", cluster__user=0)
    )
    assert "completions" not in jobs["my-run-3-producers"], "a queue of work ends with the first pod that ends with 0"
    for name in ("learner", "producers", "rewards"):
        ignored, fatal = jobs[f"my-run-3-{name}"]["podFailurePolicy"]["rules"]
        assert ignored["action"] == "Ignore" and ignored["onPodConditions"][0]["type"] == "DisruptionTarget"
        assert fatal["onExitCodes"]["values"] == [2, 65, 78] and fatal["onExitCodes"]["containerName"] == name
        assert 143 not in fatal["onExitCodes"]["values"], "a stopped job is started again"
        assert "--job" in jobs[f"my-run-3-{name}"]["template"]["spec"]["containers"][0]["command"]
    end = made("k8s")["end.sh"]
    assert end.index("my-run-3-learner --") < end.index("my-run-3-producers") < end.index("my-run-3-services")


def test_jobs_that_need_more_memory_than_they_get_are_named() -> None:
    model = {
        "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
    }  # fmt: skip
    config = parse(TEXT.replace("[model]", "cluster = { memory = '16G', learner_gpus = 8 }\n[model]"))
    learner, producer = memory_notes(config, model)
    assert (
        "a host of the learner needs" in learner
        and "a job of producers needs" in producer
        and "cluster.memory = '16G'" in learner
    )
    enough = parse(TEXT.replace("[model]", "cluster = { memory = '1T', learner_gpus = 8 }\n[model]"))
    assert list(memory_notes(enough, model)) == [] == list(memory_notes(config, {}))
