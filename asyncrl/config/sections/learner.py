"""`[learner]` and its subsections: the training gang, its optimizers and further models."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.base import Count, Positive, Seconds, Section, Share, one_of_or_place
from asyncrl.config.sections.lora import LoraConfig
from asyncrl.config.sections.profile import ProfileConfig
from asyncrl.config.sections.teacher import DistillationConfig

Schedule = Annotated[str, one_of_or_place("constant", "linear", "cosine")]


class OptimConfig(Section, frozen=True):
    """`[learner.optim]`: the optimizer."""

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"  # 8bit: 8-bit moments; muon: for matrices of the layers
    lr: Annotated[float, Meta(ge=0)] = 1e-6  # learning rate
    beta1: Share = 0.9  # AdamW
    beta2: Share = 0.999  # AdamW
    eps: Annotated[float, Meta(gt=0)] = 1e-8  # AdamW
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0  # decoupled weight decay
    momentum: Share = 0.95  # Muon
    warmup_steps: Count = 0  # linear warm-up from 0
    schedule: Schedule = "constant"  # after the warm-up; decays to 0 at learner.steps; or your own, as 'file.py:name'
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0  # clip the global gradient norm to this


class CompanionConfig(OptimConfig, frozen=True):
    """A further model that trains with the policy; its optimizer has the settings of `[learner.optim]`."""

    export: bool = True  # export it at the end of the run, in a folder inside the policy's export


class CriticConfig(CompanionConfig, frozen=True):
    """`[learner.critic]`: the value model of gae and vtrace; its optimizer has the settings of `[learner.optim]`."""

    lr: Annotated[float, Meta(ge=0)] = 1e-5  # its learning rate
    model: str = ""  # folder of its start weights, such as a trained reward model; empty: model.path
    critic_warmup: Count = 0  # steps at the start of the run that train only the critic
    critic_warmup_until: Share = 0.0  # end the warm-up early at this explained variance; 0: never
    value_clip: Annotated[float, Meta(gt=0)] | Literal["off"] = 0.5  # largest change of a value in one step
    aggregation: Literal["token-mean", "seq-mean-token-mean"] = "token-mean"  # weight of the value loss
    bootstrap: bool = False  # truncated responses bootstrap from the next value instead of 0


class ProcessRewardConfig(CompanionConfig, frozen=True):
    """`[learner.process_reward]`: the process reward model of prime, trained on outcomes in every step."""

    lr: Annotated[float, Meta(ge=0)] = 1e-6  # its learning rate
    model: str = ""  # folder of its start weights, a language model; empty: model.path
    reference: str = ""  # folder of its frozen reference model; empty: its own start weights
    beta: Annotated[float, Meta(gt=0)] = 0.05  # factor of the log-ratio to the reference
    batch_norm: bool = True  # divide process rewards by the largest sum of later ones in the batch
    update: Literal["after", "before"] = "after"  # update it after or before it scores the same batch


class PreferenceConfig(Section, frozen=True):
    """`[learner.preference]`: learning from pairs (modes dpo and reward_model) or judged answers (kto)."""

    loss: Literal["sigmoid", "hinge", "ipo", "robust", "simpo", "orpo"] = "sigmoid"  # dpo; simpo, orpo: no reference
    beta: Annotated[float, Meta(gt=0)] = 0.1  # dpo, kto: factor of the log-ratio; orpo: weight of odds; simpo: take 2
    gamma: Annotated[float, Meta(ge=0)] = 0.5  # dpo with simpo: margin between beta times the mean log-probs
    label_smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = 0.0  # dpo: share of pairs with a wrong label
    reference_free: bool = False  # dpo: use no reference model
    length_average: bool = False  # dpo with ipo: divide log-ratios by the length of the answer
    demonstrations: bool = False  # dpo, generated: the row's answer (data.response_key) is chosen, a sample rejected
    iteration: Count = 0  # versions after which the reference becomes the policy (dpo, kto); 0: it stays
    desirable_weight: Annotated[float, Meta(ge=0)] = 1.0  # kto: weight of the rows with label true
    undesirable_weight: Annotated[float, Meta(ge=0)] = 1.0  # kto: weight of the rows with label false
    center_coeff: Annotated[float, Meta(ge=0)] = 0.0  # reward_model: weight of (chosen + rejected)^2
    margin_key: str = ""  # reward_model: column with the smallest margin of the chosen answer; empty: 0

    @property
    def has_reference(self) -> bool:
        """Whether DPO or KTO compares with a frozen reference model."""
        return not self.reference_free and self.loss not in ("simpo", "orpo")


class ParallelConfig(Section, frozen=True):
    """`[learner.parallel]`: how the ranks share a model; the remaining factor splits the batch."""

    replicate: Positive = 1  # groups of ranks with a full copy of the weights each (HSDP)
    tensor: Positive = 1  # ranks that split every matrix
    sequence: Positive = 1  # ranks that split every packed row; beyond the heads it is context parallelism
    pipeline: Positive = 1  # pipeline stages (backend megatron)
    expert: Positive = 1  # ranks that split the experts of a mixture-of-experts model


class MegatronConfig(Section, frozen=True):
    """`[learner.megatron]`: settings of the backend megatron."""

    sequence_parallel: bool = False  # norms on slices of a row over the tensor ranks; tensor > 1 with experts needs it


class VisionConfig(Section, frozen=True):
    """`[learner.vision]`: what trains of a vision-language model besides its language part."""

    tower: bool = True  # train the vision tower
    projector: bool = True  # train the layers between the tower and the language part
    tower_lr_scale: Annotated[float, Meta(gt=0)] = 1.0  # its learning rate, as a multiple of learner.optim.lr
    projector_lr_scale: Annotated[float, Meta(gt=0)] = 1.0  # the same for the projector


class LearnerConfig(Section, frozen=True):
    """`[learner]`: the training gang."""

    mode: Literal["rl", "sft", "dpo", "kto", "reward_model"] = "rl"  # rl: by reward; else docs/supervised.md
    backend: str = "fsdp2"  # fsdp2, megatron, 'file.py:name', or an entry point of asyncrl.backends
    ranks: Positive = 1  # processes of the gang on this host
    steps: Positive = 100  # optimizer steps of the whole run
    micro_batch_tokens: Positive = 16384  # tokens of one packed row
    packing: bool = True  # pack several samples into one row; false: padded rows
    logprob_chunk_tokens: Positive = 1024  # tokens whose logits are in memory at once
    threads: Count = 0  # torch threads of one rank on a CPU; 0: the cores are shared with the engines
    device: str = "auto"  # auto: an accelerator if the host has one, else cpu
    gradient_checkpointing: bool = False  # recompute activations in the backward pass
    cpu_offload: bool = False  # keep parameters and optimizer state in host memory
    reference_offload: bool = False  # keep the frozen reference model in host memory between its passes
    offload_idle: bool = False  # also other models, and the optimizer states between updates
    load: Literal["auto", "parts", "whole"] = "auto"  # start weights: each rank its part, or all; auto: by files
    liger: bool = False  # fused norms and activations of liger-kernel, on CUDA devices
    router_replay: bool = False  # a mixture of experts: log-probs with the experts that the engine chose (R3)
    engine_gap: Literal["stop", "warn"] = "stop"  # if log-probs of engine and learner are far apart in step 1
    compile: bool = False  # torch.compile of every decoder layer: minutes at the start, then faster steps
    checkpoint_every: Positive = 20  # steps between checkpoints
    checkpoint_keep: Positive = 2  # newest checkpoints to keep
    checkpoint_best: Count = 0  # best checkpoints to keep, by checkpoint_metric
    checkpoint_metric: str = "reward_mean"  # metric of the learner, or an evaluation figure such as val-core/...
    checkpoint_goal: Literal["max", "min"] = "max"  # whether larger or smaller values are better
    checkpoint_async: bool = False  # write in the background, from a copy in host memory
    checkpoint_failures: Positive = 3  # consecutive failures (a full disk) that end the learner
    batch_timeout_s: Seconds = 600.0  # longest wait for one batch
    restarts: Count = 3  # in 10 minutes, when started by `launch all`
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    process_reward: ProcessRewardConfig = field(default_factory=ProcessRewardConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @property
    def torch_threads(self) -> int:
        """`threads`, or one where no launcher has chosen a number."""
        return self.threads or 1

    @property
    def trains_vision(self) -> bool:
        """Whether the vision tower of a model that has one, or its projector, changes."""
        return not self.lora.rank and (self.vision.tower or self.vision.projector)
