"""One TOML for all roles: read, checked as a whole, frozen.

Called by the front door and by every role at its start. Guarantees:
1. unknown keys, wrong types, bad values and contradictions are all reported at once, with file, line and a suggestion;
2. one value has one name, the TOML name, on its way to the decision; units are in the name (`_s`, `_bytes`);
3. derived numbers are properties with their formula, never second settings;
4. the structs are frozen and the resolved form (`dump`) reads back to the same value.
It imports no role, no torch and no redis; files that the settings name are looked at by `asyncrl.check`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import tomli_w
from msgspec import Meta, field

from asyncrl import (
    algorithms,
    checkpoint_config,
    cluster_config,
    evaluation_config,
    modes,
    parallel,
    presets,
    profile_config,
    redis_secret,
)
from asyncrl.algorithm_config import AlgorithmConfig
from asyncrl.cluster_config import ClusterConfig
from asyncrl.errors import AsyncRLError, ConfigError, ConfigErrors
from asyncrl.evaluation_config import EvaluationConfig
from asyncrl.lora import LoraConfig
from asyncrl.profile_config import ProfileConfig
from asyncrl.sections import Count, Positive, Seconds, Section, Share

__all__ = ["AlgorithmConfig", "Config", "Section", "all_keys", "conflicts_of", "dump", "load", "parse", "schema"]


class RunConfig(Section, frozen=True):
    """`[run]`: the run itself."""

    name: str = "run"  # shown in reports; part of the run's identity
    dir: str = "runs/run"  # everything the run writes; the same folder again resumes it
    seed: int = 0  # of the order of prompts and of sampling
    silent_timeout_s: Seconds = 10.0  # a process without a sign of life for this long is named (nothing is ended)
    hang_timeout_s: Seconds = 600.0  # no step for this long ends the run with a diagnosis (exit code 70)


class ModelConfig(Section, frozen=True):
    """`[model]`: the policy, a folder in Hugging Face format."""

    path: str  # folder with config.json, weights and tokenizer
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # of compute and of generation
    trust_remote_code: bool = False  # run code that comes with the model
    attn_implementation: str = "auto"  # auto: flash_attention_2 where installed, else sdpa by sequence; varlen: torch's


class DataConfig(Section, frozen=True):
    """`[data]`: the prompts. Column names of verl are accepted as they are."""

    path: str = ""  # .parquet, .jsonl or .json; or several, joined by commas
    source: str = ""  # instead of path: 'module:function' that returns an iterable of rows
    prompt_key: str = "prompt"  # text, or a list of chat messages
    shuffle: bool = True  # a new order in every epoch, by run.seed
    max_prompt_tokens: Positive = 1024  # longer prompts are set aside with the reason
    response_key: str = "response"  # engine = dataset, mode sft: the answer (or the last message of the prompt)
    chosen_key: str = "chosen"  # engine = dataset, modes dpo and reward_model: the better answer
    rejected_key: str = "rejected"  # the worse answer of the same row
    epochs: Count = 0  # passes over the rows: learner.steps is derived from it; 0: learner.steps as set
    chat_template: bool = True  # render lists of messages by the tokenizer's template; plain text is encoded as it is


class SamplingConfig(Section, frozen=True):
    """`[sampling]`: how producers sample."""

    group_size: Positive = 8  # samples of one prompt (GRPO's G)
    over_issue: Count = 0  # more samples asked for; the first group_size that arrive count, the rest is cancelled
    max_new_tokens: Positive = 1024  # longest response
    temperature: Annotated[float, Meta(gt=0)] = 1.0  # the learner divides its logits by it too
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # 1: off
    top_k: Count = 0  # 0: off
    greedy_baseline: bool = False  # one more sample per prompt, greedy: a baseline (ReMax), not trained

    @property
    def group_samples(self) -> int:
        """group_size, and 1 with greedy_baseline: samples of a complete group."""
        return self.group_size + self.greedy_baseline

    @property
    def asked_samples(self) -> int:
        """group_samples + over_issue: samples of one group that producers are asked for."""
        return self.group_samples + self.over_issue


class BufferConfig(Section, frozen=True):
    """`[buffer]`: staleness, admission and storage."""

    max_staleness: Count = 4  # largest lag that may reach a gradient; 0 is synchronous
    pipeline_depth: Count | Literal["max", "auto"] = "max"  # batches of work ahead of the one in training
    learner_idle_target: Share = 0.03  # pipeline_depth = auto: the smallest depth with the learner idle for less
    batch_groups: Positive = 16  # B: groups that one learner step consumes
    on_late: Literal["wait", "drop", "train"] = "wait"  # what happens to a group that is due and not ready
    late_timeout_s: Seconds = 120.0  # on_late = wait: then dropped
    max_reissue: Count = 3  # attempts of a prompt after a lost lease or a late drop
    lease_timeout_s: Seconds = 30.0  # a producer silent for this long loses its leases
    store: Literal["auto", "sqlite", "redis"] = "sqlite"  # auto: redis where a URL or a server is found
    redis_url: str = ""  # empty with store = redis: a private server is started; a password is kept out of every dump
    redis_max_outage_s: Seconds = 60.0  # then the buffer ends with exit code 69
    fsync: Literal["never", "everysec", "always"] = "everysec"  # what a loss of power may cost; a crash costs nothing
    segment_bytes: Positive = 256 << 20  # size of one payload file
    cache_bytes: Count = 256 << 20  # payloads kept in memory; the rest is read back from the segments
    place_bytes: Count = 16 << 10  # payloads from here on go by file where producer and buffer share a host
    max_poison_rate: Share = 0.5  # of the last 64 groups; above it the run ends with the top reason
    max_reuse: Positive = 1  # steps that may train one group, all of them within its bound
    replay_order: Literal["deadline", "priority"] = "deadline"  # of used groups; priority: drawn by reward spread
    fresh_first: bool = True  # used groups fill only what the fresh ones leave; false: both by replay_order
    priority_exponent: Annotated[float, Meta(ge=0)] = 1.0  # replay_order = priority: weight is spread to this power
    filters: tuple[str, ...] = ()  # zero_variance, accuracy_band, or 'module:function': reasons not to train a group
    max_filtered_rate: Share = 0.98  # of the last 256 groups; at or above it the run ends with the top reason

    @property
    def depth(self) -> int:
        """Pipeline depth in batches: `pipeline_depth`; max_staleness where it says max, at most that where auto."""
        return self.max_staleness if isinstance(self.pipeline_depth, str) else self.pipeline_depth

    @property
    def max_in_flight_groups(self) -> int:
        """(depth + 1) * batch_groups: the batch in training and `depth` more."""
        return (self.depth + 1) * self.batch_groups


class ProducersConfig(Section, frozen=True):
    """`[producers]`: processes that generate, one engine each."""

    count: Positive = 1  # processes on this host
    engine: str = "hf"  # hf, dataset (rows of the data), or a name of the entry-point group asyncrl.engines
    slots: Positive = 64  # samples that one engine decodes at once
    max_groups_in_flight: Count = 0  # groups one producer holds; 0: by the engine's capacity and what samples cost
    checkpoint_tokens: Count = 0  # longer samples are sent in pieces of about so many, so that others can go on; 0: off
    kv_at_swap: Literal["keep", "recompute"] = "keep"  # KV cache of samples under way when weights change
    threads: Positive = 1  # torch threads of one engine on a CPU
    device: str = "auto"  # auto: the accelerator if there is one, else cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: model.dtype
    restarts: Count = 5  # in 10 minutes
    python: str = ""  # interpreter of the engine's environment; empty: this one, or .venv-ENGINE beside it
    url: tuple[str, ...] = ()  # engines behind HTTP: their servers; the producer with number i has the i-th
    engine_args: dict[str, Any] = field(default_factory=dict)  # handed to the engine as they are: its own names

    def groups_in_flight(self, group_size: int) -> int:
        """Groups one producer holds: the setting, or `ceil(2 * slots / group_size)` where its K/V holds them."""
        return self.max_groups_in_flight or max(1, -(-2 * self.slots // group_size))


class RewardFunctionConfig(Section, frozen=True):
    """`[[reward]]`: one reward function; several are summed by weight."""

    function: str  # module:name
    name: str = ""  # empty: the function's name
    weight: float = 1.0  # factor in the sum
    data_sources: tuple[str, ...] = ()  # only for rows of these; empty: all

    @property
    def label(self) -> str:
        """The name in metrics: `name`, or what follows the colon of `function`."""
        return self.name or self.function.rpartition(":")[2]


class RewardWorkersConfig(Section, frozen=True):
    """`[reward_workers]`: processes that score."""

    count: Positive = 1  # processes on this host
    timeout_s: Seconds = 30.0  # of one call
    retries: Count = 2  # on other workers, then the group is dead with its reason
    batch_samples: Positive = 64  # leased at once
    memory_bytes: Count = 0  # of one process that runs functions; 0: half of the machine's
    max_processes: Positive = 512  # that the functions of one worker may start; more is a failure of the sample
    max_failed_groups: Count = 64  # of the run; then it ends with the function's name
    restarts: Count = 5  # in 10 minutes


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


class WeightSyncConfig(Section, frozen=True):
    """`[weightsync]`: parameters back to the generators."""

    transport: Literal["auto", "local", "collective", "stream", "disk"] = "auto"  # auto: by where a member is
    encoding: Literal["full", "delta"] = "full"  # delta: who holds a recent version gets the changed elements alone
    delta_chain: Count = 4  # so many deltas are kept and applied one after the other; then the whole weights
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # cast on send; auto: model.dtype
    in_place: bool = False  # engines without room for a second copy: they stand still from the first byte on
    bucket_bytes: Positive = 64 << 20  # weights travel in pieces of this size
    timeout_s: Seconds = 30.0  # of a round, for one member
    member_timeout_s: Seconds = 20.0  # silent for this long: dead
    collective_host: str = "127.0.0.1"  # address of this host for the Gloo / NCCL rendezvous
    collective_backend: Literal["auto", "gloo", "nccl", "hccl"] = "auto"  # auto: by the devices of both ends
    stream_host: str = "127.0.0.1"  # address of this host where versions are pulled from
    stream_chunk_bytes: Positive = 4 << 20  # of one answer; four are asked for ahead
    relay_fanout: Count = 2  # pulls that one source serves at a time; members pass a version on; 0: none do
    disk_dir: str = ""  # folder or URL of the disk transport; empty: the run folder


class NetworkConfig(Section, frozen=True):
    """`[network]`: where services listen."""

    buffer: str = "auto"  # auto: ipc in the run folder; else tcp://host:port
    weightsync: str = "auto"  # like buffer
    key_file: str = ""  # CURVE keys; needed beyond loopback; made if missing
    insecure_no_auth: bool = False  # listen beyond loopback without keys
    max_message_bytes: Positive = 256 << 20  # larger messages are refused
    request_timeout_s: Seconds = 60.0  # a service that does not answer for this long is unreachable


class LogConfig(Section, frozen=True):
    """`[log]`: what is written."""

    tensorboard: bool = True  # curves in the run folder
    samples_per_step: Count = 2  # kept for the report
    heartbeat_s: Seconds = 1.0  # how often workers report
    archive: bool = False  # keep the batch of every step, for trace and replay: about 8 bytes per token, never removed


class Config(Section, frozen=True, kw_only=True):
    """The whole file."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    producers: ProducersConfig = field(default_factory=ProducersConfig)
    reward: tuple[RewardFunctionConfig, ...] = ()
    reward_workers: RewardWorkersConfig = field(default_factory=RewardWorkersConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    weightsync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def total_groups(self) -> int:
        """learner.steps * buffer.batch_groups: groups that the whole run trains."""
        return self.learner.steps * self.buffer.batch_groups

    @property
    def longest_response(self) -> int:
        """The longest response that an engine must hold, of training and of evaluations."""
        return max(self.sampling.max_new_tokens, self.evaluation.enabled * self.evaluation.max_new_tokens)

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.run.dir)


# ---------------------------------------------------------------- reading


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a TOML file with `key=value` overrides on top.

    Raises:
        ConfigErrors: every mistake at once.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigErrors([ConfigError("config.file", f"{error.strerror or error}", where=str(path))]) from None
    return parse(text, file=str(path), overrides=overrides)


def parse(text: str, *, file: str = "<toml>", overrides: Sequence[str] = ()) -> Config:
    """Like `load`, from text."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigErrors([ConfigError("config.file", str(error), where=file)]) from None
    lines = _Lines(file, text)
    errors: list[AsyncRLError] = []
    try:
        tree, lines.preset = presets.with_preset(tree, dict(map(_split, overrides)))
    except ConfigError as error:
        raise ConfigErrors([error]) from None
    for override in overrides:
        _override(tree, override, lines, errors)
    _walk(Config, tree, (), lines, errors)
    if errors:
        raise ConfigErrors(errors)
    config = with_derived(msgspec.convert(tree, Config))
    conflicts = list(conflicts_of(config, lines))
    if conflicts:
        raise ConfigErrors(conflicts)
    return config


def with_derived(config: Config) -> Config:
    """The configuration with the settings that stand for another one where they are 0."""
    algorithm = algorithms.with_derived(config.learner.algorithm, longest=config.sampling.max_new_tokens)
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, algorithm=algorithm))


def dump(config: Config) -> str:
    """The resolved configuration as TOML, without passwords; `parse` gives the rest back."""
    return tomli_w.dumps(msgspec.to_builtins(redacted(config)))


def redacted(config: Config) -> Config:
    """The configuration as it may be shown: `***` instead of the password of Redis."""
    buffer = msgspec.structs.replace(config.buffer, redis_url=redis_secret.without_password(config.buffer.redis_url))
    return msgspec.structs.replace(config, buffer=buffer)


def schema() -> dict[str, Any]:
    """JSON schema of the file, for editors."""
    return msgspec.json.schema(Config)


class _Lines:
    """Where a dotted key stands: `file:line`, or `--set`."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.overridden: set[str] = set()
        self.preset: dict[str, Any] = {}  # what came from the preset
        self._at: dict[str, int] = {}
        table = ""
        counts: dict[str, int] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if header := re.match(r"\s*(\[\[?)\s*([\w.\-\"]+)\s*\]", line):
                table = header[2].replace('"', "")
                if header[1] == "[[":
                    index = counts.get(table, 0)
                    counts[table] = index + 1
                    table = f"{table}[{index}]"
                self._at.setdefault(table, number)
            elif key := re.match(r"\s*([\w.\-\"]+)\s*=", line):
                name = key[1].replace('"', "")
                self._at.setdefault(f"{table}.{name}" if table else name, number)

    def where(self, path: Sequence[str]) -> str:
        """The place of the key, or of the nearest table above it."""
        dotted = _dotted(path)
        if dotted in self.overridden:
            return f"--set {dotted}"
        if dotted not in self._at and self._in_preset(path):
            return f"{self.file}, from its preset"
        while dotted:
            if dotted in self._at:
                return f"{self.file}:{self._at[dotted]}"
            dotted = dotted.rpartition(".")[0]
        return self.file

    def _in_preset(self, path: Sequence[str]) -> bool:
        node: Any = self.preset
        for key in path:
            if not isinstance(node, dict) or key not in node:
                return False
            node = node[key]
        return bool(path)


def _split(override: str) -> tuple[str, Any]:
    """The key and the value of `key=value`."""
    key, _, text = override.partition("=")
    try:
        return key.strip(), tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), text.strip()  # a bare word is a string: buffer.store=redis


def _override(tree: dict[str, Any], override: str, lines: _Lines, errors: list[AsyncRLError]) -> None:
    key, value = _split(override)
    if "=" not in override or not key:
        errors.append(ConfigError("usage", f"{override!r} is not key=value", where="--set"))
        return
    *tables, leaf = key.split(".")
    node: Any = tree
    for table in tables:
        node = node.setdefault(table, {})
        if not isinstance(node, dict):
            errors.append(ConfigError("config.unknown_key", f"{key}: {table} is not a table", where="--set"))
            return
    node[leaf] = value
    lines.overridden.add(key)


def _walk(
    kind: type[Section], tree: dict[str, Any], path: tuple[str, ...], lines: _Lines, errors: list[AsyncRLError]
) -> None:
    hints = typing.get_type_hints(kind, include_extras=True)
    known = {item.name: item for item in msgspec.structs.fields(kind)}
    for key, value in tree.items():
        here = (*path, key)
        if key not in known:
            errors.append(_unknown(here, known, lines))
        elif isinstance(value, str) and hints[key] == tuple[str, ...]:
            tree[key] = [value]  # one is as good as a list of one: --set producers.url=http://host:port
        else:
            _check_value(hints[key], value, here, lines, errors)
    for name, item in known.items():
        if item.required and name not in tree:
            dotted = _dotted((*path, name))
            errors.append(ConfigError("config.missing", f"{dotted} is required", where=lines.where((*path, name))))


def _check_value(hint: Any, value: Any, here: tuple[str, ...], lines: _Lines, errors: list[AsyncRLError]) -> None:
    if isinstance(hint, type) and issubclass(hint, Section) and isinstance(value, dict):
        _walk(hint, value, here, lines, errors)
        return
    item = get_args(hint)[0] if get_origin(hint) is tuple else None
    if isinstance(item, type) and issubclass(item, Section) and isinstance(value, list):
        for index, entry in enumerate(value):
            if isinstance(entry, dict):
                _walk(item, entry, (*here, f"[{index}]"), lines, errors)
        return
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        expected = f"{_dotted(here)} = {value!r}: {error}{_choices(hint, value)}"
        errors.append(ConfigError("config.type", expected, where=lines.where(here)))


def _choices(hint: Any, value: Any) -> str:
    options = [option for option in _literals(hint) if isinstance(option, str)]
    if not options or not isinstance(value, str):
        return ""
    near = difflib.get_close_matches(value, options, n=1)
    return f"; one of {', '.join(options)}" + (f"; did you mean {near[0]!r}?" if near else "")


def _literals(hint: Any) -> Iterable[Any]:
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    elif get_origin(hint) in (typing.Union, types.UnionType):
        for option in get_args(hint):
            yield from _literals(option)


def _unknown(here: tuple[str, ...], known: dict[str, Any], lines: _Lines) -> AsyncRLError:
    near = difflib.get_close_matches(here[-1], known, n=1, cutoff=0.6)
    elsewhere = [dotted for dotted in all_keys() if dotted.rpartition(".")[2] == here[-1]]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    if elsewhere:
        hint = f"; it belongs to {elsewhere[0]}"
    return ConfigError("config.unknown_key", f"{_dotted(here)} is not a setting{hint}", where=lines.where(here))


def _dotted(path: Sequence[str]) -> str:
    return ".".join(path).replace(".[", "[")


def all_keys(kind: type[Section] = Config, prefix: str = "") -> list[str]:
    """Every dotted key, in order."""
    keys: list[str] = []
    hints = typing.get_type_hints(kind)
    for item in msgspec.structs.fields(kind):
        hint = hints[item.name]
        inner = get_args(hint)[0] if get_origin(hint) is tuple else hint
        if isinstance(inner, type) and issubclass(inner, Section):
            keys += all_keys(inner, f"{prefix}{item.name}.")
        else:
            keys.append(f"{prefix}{item.name}")
    return keys


# ---------------------------------------------------------------- rules across fields

MOST_PIECES = 256  # of one sample; the buffer takes twice as many


def conflicts_of(config: Config, lines: _Lines | None = None) -> Iterable[AsyncRLError]:
    """Settings that contradict each other, with the arithmetic."""
    where = lines or _Lines("<config>", "")
    buffer, learner = config.buffer, config.learner

    def conflict(code: str, message: str, *path: str) -> AsyncRLError:
        return ConfigError(code, message, where=where.where(path))

    if config.run.silent_timeout_s < 2 * config.log.heartbeat_s:
        yield conflict(
            "config.conflict",
            f"run.silent_timeout_s = {config.run.silent_timeout_s:g} is below 2 * log.heartbeat_s = "
            f"{2 * config.log.heartbeat_s:g}: everybody would be called silent", "run", "silent_timeout_s",
        )  # fmt: skip
    if buffer.depth > buffer.max_staleness:
        yield conflict(
            "config.conflict",
            f"buffer.pipeline_depth = {buffer.depth} is above buffer.max_staleness = {buffer.max_staleness}: "
            "work that deep would be too old when its turn comes", "buffer", "pipeline_depth",
        )  # fmt: skip
    built_in = ("zero_variance", "accuracy_band")
    wrong = [name for name in buffer.filters if name not in built_in and not re.fullmatch(r"[\w.]+:[\w.]+", name)]
    for name in wrong:
        what = f"buffer.filters: {name!r} is neither zero_variance, accuracy_band nor 'module:function'"
        yield conflict("config.filter", what, "buffer", "filters")
    if bool(config.data.path) == bool(config.data.source):
        yield conflict("config.data", "set exactly one of data.path and data.source", "data")
    for code, message, path in (*modes.conflicts(config), *_too_many_pieces(config)):
        yield conflict(code, message, *path)
    if not config.reward and not modes.streams(config):
        yield conflict("config.missing", "no [[reward]]: at least one reward function is needed", "reward")
    for index, reward in enumerate(config.reward):
        if not re.fullmatch(r"[\w.]+:[\w.]+", reward.function):
            yield conflict(
                "config.reward", f"reward.function = {reward.function!r} is not 'module:name'",
                "reward", f"[{index}]", "function",
            )  # fmt: skip
    labels = [reward.label for reward in config.reward]
    if len(set(labels)) < len(labels):
        yield conflict("config.conflict", f"reward names repeat: {', '.join(labels)}; set reward.name", "reward")
    row, pair = modes.longest_row(config), modes.is_paired(config)
    if row > learner.micro_batch_tokens:
        yield conflict(
            "config.conflict",
            f"learner.micro_batch_tokens = {learner.micro_batch_tokens} is below {'2 * (' if pair else ''}"
            f"data.max_prompt_tokens + sampling.max_new_tokens{')' if pair else ''} = {row}: the longest "
            f"{'pair' if pair else 'sample'} would not fit", "learner", "micro_batch_tokens",
        )  # fmt: skip
    found = (*parallel.problems(config), *algorithms.problems(config), *evaluation_config.problems(config),
             *checkpoint_config.problems(config), *profile_config.problems(config),
             *cluster_config.problems(config))  # fmt: skip
    for code, message, path in found:
        yield conflict(code, message, *path)
    for name in ("buffer", "weightsync"):
        yield from _check_address(config, name, where)


def _too_many_pieces(config: Config) -> Iterable[tuple[str, str, tuple[str, ...]]]:
    every, longest = config.producers.checkpoint_tokens, config.sampling.max_new_tokens
    if every and longest > MOST_PIECES * every:
        message = (
            f"producers.checkpoint_tokens = {every} makes more than {MOST_PIECES} pieces of a sample of "
            f"sampling.max_new_tokens = {longest}: at least {-(-longest // MOST_PIECES)} is needed"
        )
        yield "config.conflict", message, ("producers", "checkpoint_tokens")


def _check_address(config: Config, name: str, where: _Lines) -> Iterable[AsyncRLError]:
    from urllib.parse import urlparse

    address = getattr(config.network, name)
    if address == "auto":
        return
    parsed = urlparse(address)
    place = where.where(("network", name))
    if parsed.scheme not in ("tcp", "ipc"):
        yield ConfigError("config.network", f"network.{name} = {address!r} is not auto, tcp:// or ipc://", where=place)
    elif (
        parsed.scheme == "tcp"
        and parsed.hostname not in ("127.0.0.1", "localhost", "::1")
        and not config.network.key_file
        and not config.network.insecure_no_auth
    ):
        message = f"network.{name} = {address!r} is reachable from other hosts and network.key_file is empty"
        yield ConfigError("config.network", message, where=place)
