"""`[learner]` and the sections inside of it: the training gang, its optimizers and the models beside the policy.

Part of `asyncrl.config`, which has all names of here as well. It holds settings and no rule.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.base import Count, Positive, Seconds, Section, Share
from asyncrl.config.sections.lora import LoraConfig
from asyncrl.config.sections.profile import ProfileConfig


class OptimConfig(Section, frozen=True):
    """`[learner.optim]`."""

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"  # 8bit: of its moments; muon: for matrices of the layers
    lr: Annotated[float, Meta(ge=0)] = 1e-6  # learning rate
    beta1: Share = 0.9  # of AdamW
    beta2: Share = 0.999  # of AdamW
    eps: Annotated[float, Meta(gt=0)] = 1e-8  # of AdamW
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0  # decoupled
    momentum: Share = 0.95  # of Muon
    warmup_steps: Count = 0  # linear from 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up, to 0 at learner.steps
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0  # global gradient norm is clipped to it


class CompanionConfig(OptimConfig, frozen=True):
    """A model that trains beside the policy; its optimizer has the settings of `[learner.optim]`."""

    export: bool = True  # at the end of the run, a folder of its own in that of the policy's export


class CriticConfig(CompanionConfig, frozen=True):
    """`[learner.critic]`: the value model of gae and vtrace; its optimizer has the settings of `[learner.optim]`."""

    lr: Annotated[float, Meta(ge=0)] = 1e-5  # its learning rate
    model: str = ""  # folder of its start weights, such as a trained reward model; empty: model.path
    critic_warmup: Count = 0  # steps at the start of the run that train the critic alone
    critic_warmup_until: Share = 0.0  # explained variance that ends them earlier; 0: none does
    value_clip: Annotated[float, Meta(gt=0)] | Literal["off"] = 0.5  # how far a step moves a value
    aggregation: Literal["token-mean", "seq-mean-token-mean"] = "token-mean"  # of the value loss
    bootstrap: bool = False  # responses cut by max_new_tokens end with the value after them instead of 0


class ProcessRewardConfig(CompanionConfig, frozen=True):
    """`[learner.process_reward]`: the process reward model of prime, trained on outcomes in every step."""

    lr: Annotated[float, Meta(ge=0)] = 1e-6  # its learning rate
    model: str = ""  # folder of its start weights, a language model; empty: model.path
    reference: str = ""  # folder of the frozen model that it is compared with; empty: its own start weights
    beta: Annotated[float, Meta(gt=0)] = 0.05  # what a log-ratio to the reference counts
    batch_norm: bool = True  # process rewards are divided by the largest sum of later ones in the batch
    update: Literal["after", "before"] = "after"  # its update after or before it scores the same batch


class PreferenceConfig(Section, frozen=True):
    """`[learner.preference]`: learning from pairs (modes dpo and reward_model)."""

    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"  # dpo: of the difference of log-ratios
    beta: Annotated[float, Meta(gt=0)] = 0.1  # dpo: how much a log-ratio to the reference counts
    label_smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = 0.0  # dpo: share of pairs that are labelled wrongly
    reference_free: bool = False  # dpo: no reference model
    length_average: bool = False  # dpo with ipo: log-ratios are divided by the length of the answer
    center_coeff: Annotated[float, Meta(ge=0)] = 0.0  # reward_model: weight of (chosen + rejected)^2
    margin_key: str = ""  # reward_model: column with how much better the chosen answer is at least; empty: 0


class ParallelConfig(Section, frozen=True):
    """`[learner.parallel]`: how the ranks share a model; what they do not take divides the batch."""

    replicate: Positive = 1  # groups of ranks that each hold all weights between them (HSDP)
    tensor: Positive = 1  # ranks that split every matrix
    sequence: Positive = 1  # ranks that split every packed row (Ulysses, arXiv 2309.14509)
    pipeline: Positive = 1  # stages that the layers are split over (backend megatron)
    expert: Positive = 1  # ranks that split the experts of a mixture-of-experts model


class MegatronConfig(Section, frozen=True):
    """`[learner.megatron]`: of the backend megatron."""

    sequence_parallel: bool = False  # norms on slices of a row over the tensor places; needs TransformerEngine


class LearnerConfig(Section, frozen=True):
    """`[learner]`: the training gang."""

    mode: Literal["rl", "sft", "dpo", "reward_model"] = "rl"  # by reward; or on rows as they are (docs/supervised.md)
    backend: str = "fsdp2"  # fsdp2, megatron, or a name of the entry-point group asyncrl.backends
    ranks: Positive = 1  # processes of the gang on this host
    steps: Positive = 100  # optimizer batches of the whole run
    micro_batch_tokens: Positive = 16384  # token budget of one packed row
    packing: bool = True  # several samples in one row, without padding; false: padded rows
    logprob_chunk_tokens: Positive = 1024  # tokens whose logits exist at once
    threads: Positive = 1  # torch threads of one rank on a CPU
    device: str = "auto"  # auto: the accelerator if there is one, else cpu
    gradient_checkpointing: bool = False  # recompute activations in the backward pass
    cpu_offload: bool = False  # parameters and optimizer state in host memory
    reference_offload: bool = False  # the frozen reference model waits in host memory between its passes
    offload_idle: bool = False  # as that; also models beside the policy, and every optimizer's states between updates
    load: Literal["auto", "parts", "whole"] = "auto"  # start weights: each rank its part, or all; auto: by the files
    liger: bool = False  # Liger's fused kernels for norms, rotary embeddings and gated MLPs; needs a CUDA device
    compile: bool = False  # torch.compile of every decoder layer: minutes at the start, faster steps
    checkpoint_every: Positive = 20  # steps
    checkpoint_keep: Positive = 2  # the last so many stay
    checkpoint_best: Count = 0  # and so many of the best by checkpoint_metric
    checkpoint_metric: str = "reward_mean"  # of the learner's steps, or a figure of evaluations such as val-core/...
    checkpoint_goal: Literal["max", "min"] = "max"  # which values of it are better
    checkpoint_async: bool = False  # written beside the training, from a copy in host memory
    checkpoint_failures: Positive = 3  # that many in a row (a full disk) end the learner
    batch_timeout_s: Seconds = 600.0  # waiting for one batch
    restarts: Count = 3  # in 10 minutes, when started by `launch all`
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    process_reward: ProcessRewardConfig = field(default_factory=ProcessRewardConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
