"""One TOML for all roles: read, checked as a whole, frozen.

Guarantees:
1. unknown keys, wrong types, bad values and contradictions are all reported at once, with file, line and a suggestion;
2. one value has one name, the TOML name, on its way to the decision; units are in the name (`_s`, `_bytes`);
3. derived numbers are properties with their formula, never second settings;
4. the structs are frozen and the resolved form (`dump`) reads back to the same value.
It imports no role, no torch and no redis; files that the settings name are looked at by `asyncrl.preflight.check`.
The parts:
`config_read` (TOML to a checked tree), `config_places` (lines), `config_names` (suggestions), `config_conflicts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import tomli_w
from msgspec import Meta, field

from asyncrl.config import conflicts as config_conflicts
from asyncrl.config import reader as config_read
from asyncrl.config import redis_url as redis_secret
from asyncrl.config import suggestions as config_names
from asyncrl.config.locations import Places
from asyncrl.config.sections import algorithm_catalogue as algorithms
from asyncrl.config.sections import checkpoint as checkpoint_config
from asyncrl.config.sections import cluster as cluster_config
from asyncrl.config.sections import environment as environment_config
from asyncrl.config.sections import evaluation as evaluation_config
from asyncrl.config.sections import judge as judge_config
from asyncrl.config.sections import judge_models, parallel
from asyncrl.config.sections import mode as modes
from asyncrl.config.sections import profile as profile_config
from asyncrl.config.sections import reward as reward_names
from asyncrl.config.sections import sandbox as sandbox_config
from asyncrl.config.sections import tracker as tracker_config
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.base import Count, Positive, Seconds, Section, Share
from asyncrl.config.sections.cluster import ClusterConfig
from asyncrl.config.sections.environment import EnvironmentConfig
from asyncrl.config.sections.evaluation import EvaluationConfig
from asyncrl.config.sections.judge import JudgeConfig
from asyncrl.config.sections.learner import (
    CompanionConfig,
    CriticConfig,
    LearnerConfig,
    MegatronConfig,
    OptimConfig,
    ParallelConfig,
    PreferenceConfig,
    ProcessRewardConfig,
)
from asyncrl.config.sections.sandbox import SandboxConfig
from asyncrl.config.sections.tracker import TrackersConfig
from asyncrl.errors import UNREADABLE, AsyncRLError, ConfigError, ConfigErrors

__all__ = [
    "AlgorithmConfig",
    "CompanionConfig",
    "Config",
    "CriticConfig",
    "LearnerConfig",
    "Loaded",
    "MegatronConfig",
    "OptimConfig",
    "ParallelConfig",
    "PreferenceConfig",
    "ProcessRewardConfig",
    "Section",
    "all_keys",
    "conflicts_of",
    "dump",
    "load",
    "load_all",
    "parse",
    "schema",
]


class RunConfig(Section, frozen=True):
    """`[run]`: the run itself."""

    name: str = "run"  # shown in reports; part of the run's identity
    dir: str = "runs/run"  # everything the run writes; the same folder again resumes it
    seed: int = 0  # of the order of prompts and of sampling
    silent_timeout_s: Seconds = 10.0  # a process without a sign of life for this long is named (nothing is ended)
    hang_timeout_s: Seconds = 600.0  # no step for this long ends the run with a diagnosis (exit code 70)
    start_timeout_s: Seconds = 600.0  # from a learner's start to its first step, where that is longer


class ModelConfig(Section, frozen=True):
    """`[model]`: the policy, a folder in Hugging Face format."""

    path: str  # folder with config.json, weights and tokenizer
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # of compute and of generation
    trust_remote_code: bool = False  # run code that comes with the model
    attn_implementation: str = "auto"  # auto: flash_attention_2 where installed, else sdpa by sequence; varlen: torch's


class DataConfig(Section, frozen=True):
    """`[data]`: the prompts. Column names of verl are accepted as they are."""

    path: str = ""  # .parquet, .jsonl, .json, .arrow; a pattern; what `datasets` saved; several are joined by commas
    source: str = ""  # instead of path: 'module:function' that returns an iterable of rows
    prompt_key: str = "prompt"  # text, or a list of chat messages
    shuffle: bool = True  # a new order in every epoch, by run.seed
    max_prompt_tokens: Positive = 1024  # longer prompts are set aside with the reason
    response_key: str = "response"  # engine = dataset, mode sft: the answer (or the last message of the prompt)
    chosen_key: str = "chosen"  # engine = dataset, modes dpo and reward_model: the better answer
    rejected_key: str = "rejected"  # the worse answer of the same row
    epochs: Count = 0  # passes over the rows: learner.steps is derived from it; 0: learner.steps as set
    chat_template: bool = True  # render lists of messages by the tokenizer's template; plain text is encoded as it is
    as_chat: bool = False  # take a plain text for a message of the user, so that the template renders it
    system_prompt: str = ""  # a first message for prompts that have none of the role system


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

    function: str = ""  # module:name, path/file.py:name, builtin:name, an address; none where its judge is a model
    name: str = ""  # empty: the function's name, or the judge's
    weight: float = 1.0  # factor in the sum
    data_sources: tuple[str, ...] = ()  # only for rows of these; empty: all
    judge: str = ""  # name of the [[judge]] whose workers score it; empty: those of reward_workers
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the function, class or scorer

    @classmethod
    def also_required(cls, tree: Mapping[str, Any]) -> tuple[str, ...]:
        """Without a judge, which may be a model, there is nothing but a function."""
        return () if "judge" in tree else ("function",)

    @property
    def label(self) -> str:
        """The name in metrics: `name`, or the last part of `function`, or the judge's name."""
        return self.name or reward_names.label_of(self.function) or self.judge


class RewardWorkersConfig(Section, frozen=True):
    """`[reward_workers]`: processes that score."""

    count: Positive = 1  # processes on this host
    timeout_s: Seconds = 30.0  # of one call
    retries: Count = 2  # on other workers, then the group is dead with its reason
    batch_samples: Positive = 64  # leased at once
    memory_bytes: Count = 0  # of one process that runs functions; 0: half of the machine's
    max_processes: Positive = 512  # that the functions of one worker may start; more is a failure of the sample
    max_failed_groups: Count = 64  # of the run, by rewards, filters or environments each; then it ends with the reason
    restarts: Count = 5  # in 10 minutes


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
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    weightsync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    log: LogConfig = field(default_factory=LogConfig)
    judge: tuple[JudgeConfig, ...] = ()
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
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


class Loaded(NamedTuple):
    """What was read, with its mistakes; `config` is None where these leave nothing to look at."""

    config: Config | None
    errors: list[AsyncRLError]
    places: Places
    doubtful: frozenset[str] = frozenset()  # settings whose value is not known, because of a mistake


def load(path: Path | Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """The configuration of a TOML file, or of several from left to right, with `key=value` overrides on top.

    Raises:
        ConfigErrors: every mistake at once.
    """
    return _whole(load_all(path, overrides))


def load_all(path: Path | Sequence[Path], overrides: Sequence[str] = ()) -> Loaded:
    """Like `load`, with the mistakes instead of an exception, so that others can be found beside them."""
    sources, errors = list[config_read.Source](), list[AsyncRLError]()
    for file in [path] if isinstance(path, Path) else path:
        try:
            sources.append(config_read.Source(str(file), file.read_text(encoding="utf-8")))
        except OSError as error:
            errors.append(ConfigError("config.file", f"{error.strerror or error}", where=str(file)))
        except UNREADABLE as error:
            errors.append(ConfigError("config.file", f"it is no UTF-8 text: {error}", where=str(file)))
    return Loaded(None, errors, Places()) if errors else _read(sources, overrides)


def parse(text: str, *, file: str = "<toml>", overrides: Sequence[str] = ()) -> Config:
    """Like `load`, from text."""
    return _whole(_read([config_read.Source(file, text)], overrides))


def _whole(loaded: Loaded) -> Config:
    if loaded.errors or loaded.config is None:
        raise ConfigErrors(loaded.errors)
    return loaded.config


def _read(sources: Sequence[config_read.Source], overrides: Sequence[str]) -> Loaded:
    try:
        tree, places, errors, doubtful = config_read.read(Config, sources, overrides)
    except ConfigErrors as error:
        return Loaded(None, error.errors, Places())
    try:
        config = with_derived(msgspec.convert(tree, Config))
    except msgspec.ValidationError:
        if not errors:
            raise
        return Loaded(None, errors, places, doubtful)
    if not doubtful & {"learner.mode", "producers.engine"}:  # nearly every rule depends on them
        errors = errors + config_read.beside(conflicts_of(config, places), doubtful)
    return Loaded(config, errors, places, doubtful)


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
    """JSON schema of the file, for editors: with the meaning of every setting."""
    from asyncrl.config.json_schema import schema_of

    return schema_of(Config)


def all_keys(kind: type[Section] = Config, prefix: str = "") -> list[str]:
    """Every dotted key, in order."""
    return list(config_names.keys_of(kind, prefix))


def conflicts_of(config: Config, places: Places | None = None) -> Iterable[AsyncRLError]:
    """Settings that contradict each other, with the arithmetic."""
    where = places or Places()
    found = (*config_conflicts.problems(config), *modes.conflicts(config),
             *parallel.problems(config), *algorithms.problems(config), *evaluation_config.problems(config),
             *checkpoint_config.problems(config), *profile_config.problems(config),
             *environment_config.problems(config), *judge_config.problems(config),
             *judge_models.problems(config), *sandbox_config.problems(config),
             *tracker_config.problems(config), *cluster_config.problems(config))  # fmt: skip
    for code, message, path in found:
        meant = re.search(r"did you mean '?([\w.]+)'?\?", message)
        yield ConfigError(code, message, where=where.where(path), suggestion=meant[1] if meant else "")
