"""`[cluster]`: how a run is placed on machines that a scheduler gives out.

It starts nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.sections.base import Count, Positive, Section

Port = Annotated[int, Meta(ge=1024, le=65533)]


class ClusterConfig(Section, frozen=True):
    """`[cluster]`: for `asyncrl launch --backend slurm|k8s|ray --render DIR`."""

    name: str = ""  # of jobs and services: letters, digits, "-"; empty: made of run.name
    devices: Literal["auto", "share", "own"] = "auto"  # launch all: own: one accelerator per rank and per producer
    producers: Positive = 1  # jobs (pods) of producers, with producers.count processes each
    learner_hosts: Positive = 1  # hosts of the gang, with learner.ranks processes each
    learner_gpus: Count = 0  # accelerators of one host of the learner
    producer_gpus: Count = 0  # accelerators of one producer job
    reward_gpus: Count = 0  # accelerators of the job of reward workers, for judges that are models
    cpus: Positive = 4  # CPU cores of one job
    memory: str = "16G"  # of one job
    port: Port = 5555  # of the buffer; weight sync has the next one, the gang's head the one after
    grace_s: Positive = 300  # between SIGTERM and the kill: a step and a checkpoint must fit
    wait_s: Positive = 3600  # jobs wait so long for the services to start
    folder: str = ""  # where commands run, on storage that all hosts share; empty: the folder of the configuration
    setup: tuple[str, ...] = ()  # lines of shell before every command: module load ..., source .venv/bin/activate
    partition: str = ""  # Slurm
    account: str = ""  # Slurm
    time_limit: str = ""  # Slurm: 24:00:00
    options: tuple[str, ...] = ()  # Slurm: further options of sbatch, such as --exclusive
    gpu_option: str = "--gpus-per-node"  # Slurm: how this cluster is asked for accelerators
    namespace: str = "default"  # Kubernetes
    image: str = "asyncrl:latest"  # Kubernetes: docker/
    claim: str = ""  # Kubernetes: name of a volume claim that all pods can write (run folder, model, data)
    claim_path: str = "/data"  # Kubernetes: where it is mounted
    user: Count = 1000  # Kubernetes: user and group of the containers, who own what they write; 0: root
    gpu_resource: str = "nvidia.com/gpu"  # Kubernetes: huawei.com/Ascend910 on Ascend
    preemptible_class: str = ""  # Kubernetes: priority class of producers and reward workers
