"""`[cluster]`: how a scheduler places a run on machines."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.sections.base import Count, Positive, Section

Port = Annotated[int, Meta(ge=1024, le=65533)]


class ClusterConfig(Section, frozen=True):
    """`[cluster]`: for `asyncrl launch --backend slurm|k8s|ray --render DIR`."""

    name: str = ""  # of jobs and services: letters, digits, "-"; empty: derived from run.name
    devices: Literal["auto", "share", "own", "turns"] = "auto"  # own: one per rank and producer; turns: same for both
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
