"""`[run]`, `[network]`, `[log]`, `[sandbox]`, `[cluster]` and `[trackers]`: the run, its services, and what it writes.

Guarantees for `[trackers]`:
1. the configuration never holds a secret, because it is written to the run folder and to every checkpoint: the secret
   comes from the tracker's environment variable or from a file;
2. online trackers do not slow the run down: each runs in a separate process that reads the files
   (`learners.trackers.main`).

Example: `use = ["wandb"]`, `project = "my-model"`, `key_file = {wandb = "/home/me/.wandb-key"}`, `options = {wandb =
{entity = "team", tags = ["grpo"]}}`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from asyncrl.config.sections.base import Count, Positive, Seconds, Section


class RunConfig(Section, frozen=True):
    """`[run]`: the run itself."""

    name: str = "run"  # shown in reports; part of the run's identity
    dir: str = "runs/run"  # folder of everything the run writes; a launch in the same folder resumes the run
    seed: int = 0  # seed of the order of prompts and of sampling
    silent_timeout_s: Seconds = 10.0  # report a process without a sign of life for this long (nothing is stopped)
    hang_timeout_s: Seconds = 600.0  # no step for this long ends the run with a diagnosis (exit code 70)
    start_timeout_s: Seconds = 600.0  # from a learner's start to its first step, if that is longer


class NetworkConfig(Section, frozen=True):
    """`[network]`: where services listen."""

    buffer: str = "auto"  # auto: ipc in the run folder; else tcp://host:port
    weightsync: str = "auto"  # like buffer
    key_file: str = ""  # CURVE keys; required beyond loopback; created if missing
    insecure_no_auth: bool = False  # listen beyond loopback without keys
    max_message_bytes: Positive = 256 << 20  # refuse larger messages
    request_timeout_s: Seconds = 60.0  # a service that does not answer for this long is unreachable


class LogConfig(Section, frozen=True):
    """`[log]`: what the run writes."""

    tensorboard: bool = True  # TensorBoard files in the run folder
    samples_per_step: Count = 2  # samples kept for the report
    heartbeat_s: Seconds = 1.0  # interval of the workers' heartbeats
    archive: bool = False  # keep the batch of every step for trace and replay: about 8 bytes per token, never removed


class SandboxConfig(Section, frozen=True):
    """`[sandbox]`: where programs that the model wrote run."""

    kind: str = "bubblewrap"  # bubblewrap; http(s) address of a SandboxFusion server; none: unprotected
    timeout_s: Seconds = 10.0  # of one program, unless its reward or tool sets another
    memory_bytes: Positive = 536870912  # of one program with all its processes
    output_bytes: Positive = 1048576  # of each stream; more ends the program
    disk_bytes: Positive = 67108864  # of its folder, in memory
    max_processes: Positive = 32  # of one program
    paths: tuple[str, ...] = ()  # folders that programs can read and import from, such as site-packages


Port = Annotated[int, Meta(ge=1024, le=65533)]


class ClusterConfig(Section, frozen=True):
    """`[cluster]`: for `asyncrl launch --backend slurm|k8s|ray --render DIR`."""

    name: str = ""  # of jobs and services: letters, digits, "-"; empty: derived from run.name
    devices: Literal["auto", "share", "own"] = "auto"  # launch all with own: one accelerator per rank and per producer
    producers: Positive = 1  # jobs (pods) of producers, with producers.count processes each
    learner_hosts: Positive = 1  # hosts of the gang, with learner.ranks processes each
    learner_gpus: Count = 0  # accelerators per learner host
    producer_gpus: Count = 0  # accelerators per producer job
    reward_gpus: Count = 0  # accelerators of the reward workers' job, for judges that are models
    cpus: Positive = 4  # CPU cores per job
    memory: str = "16G"  # memory per job
    port: Port = 5555  # port of the buffer; weight sync uses the next one, the gang's head the one after
    grace_s: Positive = 300  # between SIGTERM and SIGKILL: long enough for a step and a checkpoint
    wait_s: Positive = 3600  # how long jobs wait for the services to start
    folder: str = ""  # working directory, on storage that all hosts share; empty: the folder of the configuration
    setup: tuple[str, ...] = ()  # shell lines before every command: module load ..., source .venv/bin/activate
    partition: str = ""  # Slurm
    account: str = ""  # Slurm
    time_limit: str = ""  # Slurm: 24:00:00
    options: tuple[str, ...] = ()  # Slurm: more options of sbatch, such as --exclusive
    gpu_option: str = "--gpus-per-node"  # Slurm: option that requests accelerators on this cluster
    namespace: str = "default"  # Kubernetes
    image: str = "asyncrl:latest"  # Kubernetes: docker/
    claim: str = ""  # Kubernetes: volume claim that all pods can write (run folder, model, data)
    claim_path: str = "/data"  # Kubernetes: mount path of the claim
    user: Count = 1000  # Kubernetes: user and group of the containers and of the files they write; 0: root
    gpu_resource: str = "nvidia.com/gpu"  # Kubernetes: huawei.com/Ascend910 on Ascend
    preemptible_class: str = ""  # Kubernetes: priority class of producers and reward workers


#: Built-in trackers: name -> their package, and the environment variable of their secret.
ONLINE: dict[str, tuple[str, str]] = {
    "wandb": ("wandb", "WANDB_API_KEY"),
    "mlflow": ("mlflow", "MLFLOW_TRACKING_TOKEN"),
    "swanlab": ("swanlab", "SWANLAB_API_KEY"),
    "trackio": ("trackio", "HF_TOKEN"),
}


class TrackersConfig(Section, frozen=True):
    """`[trackers]`: destinations of metrics in addition to the JSONL files; TensorBoard is `log.tensorboard`."""

    use: tuple[str, ...] = ()  # wandb, mlflow, swanlab, trackio, or names of the entry-point group asyncrl.trackers
    project: str = "asyncrl"  # project or experiment there; the run has the name run.name
    offline: bool = False  # send nothing: the data to send is in RUN/trackers
    every_s: Seconds = 2.0  # tracker -> file with its secret; else an environment variable
    key_file: dict[str, str] = field(default_factory=dict)  # tracker -> file with its secret; else its variable
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # tracker -> arguments of its library
    prometheus_port: Annotated[int, Meta(ge=0, le=65535)] = 0  # metrics at http://127.0.0.1:PORT/metrics; 0: off


def secret_of(config: TrackersConfig, name: str) -> str:
    """The secret of `trackers.key_file`; empty without one. Raises OSError if the file cannot be read."""
    path = config.key_file.get(name, "")
    return Path(path).expanduser().read_text(encoding="utf-8").strip() if path else ""
