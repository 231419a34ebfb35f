"""Rules of `[run]`, `[data]`, `[buffer]`, `[log]`, `[[reward]]` and `[network]`.

Example: `buffer.pipeline_depth = 4` with `buffer.max_staleness = 2`: the last two batches would be too old on arrival.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlparse

from asyncrl.config import mode
from asyncrl.config.rules import Conflict, conflict
from asyncrl.config.sections import reward as reward_names
from asyncrl.config.sections.buffer import MOST_IN_FLIGHT_GROUPS
from asyncrl.config.tree import Config
from asyncrl.plugins import is_place

MOST_RATIOS = 100_000  # sum of data.ratios: groups after which the order of data sets begins anew
MOST_PIECES = 256  # of one sample; the buffer accepts twice as many
MOST_IDS = 1 << 23  # of the supports in one message, as `asyncrl.wire.support` has it
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def problems(config: Config) -> Iterator[Conflict]:
    yield from _time_problems(config)
    yield from _buffer_problems(config)
    if bool(config.data.path) == bool(config.data.source):
        yield conflict("data", "set exactly one of data.path and data.source", code="config.data")
    if config.data.as_chat and not config.data.chat_template:
        yield conflict("data.as_chat", "data.as_chat makes chat messages, and data.chat_template is off")
    if config.log.sign and not config.network.key_file:
        yield conflict("log.sign", "log.sign needs a key: network.key_file is empty")
    yield from _ratio_problems(config)
    yield from _choice_problems(config)
    yield from _reward_problems(config)
    yield from _length_problems(config)
    for name in ("buffer", "standby", "weightsync"):
        yield from _address_problems(config, name)


def _time_problems(config: Config) -> Iterator[Conflict]:
    run, twice = config.run, 2 * config.log.heartbeat_s
    if run.silent_timeout_s < twice:
        yield conflict(
            "run.silent_timeout_s",
            f"run.silent_timeout_s = {run.silent_timeout_s:g} is below 2 * log.heartbeat_s = {twice:g}: every process "
            "would be called silent",
        )


def _buffer_problems(config: Config) -> Iterator[Conflict]:
    buffer = config.buffer
    if buffer.depth > buffer.max_staleness:
        yield conflict(
            "buffer.pipeline_depth",
            f"buffer.pipeline_depth = {buffer.depth} is above buffer.max_staleness = {buffer.max_staleness}: work that "
            "deep would be too old when its turn comes",
        )
    if buffer.max_in_flight_groups > MOST_IN_FLIGHT_GROUPS:
        yield conflict(
            "buffer.batch_groups",
            f"(pipeline_depth {buffer.depth} + 1) * batch_groups {buffer.batch_groups} = {buffer.max_in_flight_groups} "
            f"groups ahead of the learner; at most {MOST_IN_FLIGHT_GROUPS} are supported",
        )
    for name in buffer.filters:
        if name not in ("zero_variance", "accuracy_band") and not is_place(name):
            own = "'module:name' or 'file.py:name'"
            what = f"buffer.filters: {name!r} is neither zero_variance, accuracy_band nor {own}"
            yield conflict("buffer.filters", what, code="config.filter")


def _ratio_problems(config: Config) -> Iterator[Conflict]:
    data = config.data
    if not data.ratios:
        return
    parts = sum(bool(part.strip()) for part in data.path.split(","))
    if len(data.ratios) != parts:
        what = f"data.ratios has {len(data.ratios)} numbers, data.path has {parts} parts between commas"
        yield conflict("data.ratios", what)
    if sum(data.ratios) > MOST_RATIOS:
        yield conflict(
            "data.ratios", f"the sum of data.ratios is {sum(data.ratios)}, at most {MOST_RATIOS} is supported"
        )
    for key, setting in (("sampler", data.sampler), ("epochs", data.epochs)):
        if setting:
            yield conflict(
                "data.ratios", f"data.{key} counts all rows as one data set: use either data.ratios or data.{key}"
            )


def _choice_problems(config: Config) -> Iterator[Conflict]:
    if not config.data.chosen_by_buffer:
        return
    if mode.streams(config) or mode.demonstrates(config):
        yield conflict("data.sampler", "data.sampler = 'difficulty' compares rewards of samples, and this run has none")
    elif not config.reward and not any(one.scores for one in config.environments):
        yield conflict("data.sampler", "data.sampler = 'difficulty' compares rewards: add a [[reward]]")


def _reward_problems(config: Config) -> Iterator[Conflict]:
    scored = config.reward or config.teacher or mode.streams(config) or mode.demonstrates(config)
    if not scored and any(one.is_single_turn for one in config.environments):
        yield conflict("reward", "no [[reward]]: at least one reward function is needed", code="config.missing")
    for index, reward in enumerate(config.reward):
        if reward.function and not reward_names.reward_kind(reward.function):
            yield conflict(
                f"reward[{index}].function",
                f"reward.function = {reward.function!r} is not {reward_names.FORMS}",
                code="config.reward",
            )
    labels = [reward.label for reward in config.reward]
    if len(set(labels)) < len(labels):
        yield conflict("reward", f"reward names repeat: {', '.join(labels)}; set reward.name")


def _length_problems(config: Config) -> Iterator[Conflict]:
    row, pair = mode.longest_row(config), mode.is_paired(config)
    if row > config.learner.micro_batch_tokens:
        sum_ = f"{config.data.max_prompt_tokens} + {config.sampling.max_new_tokens}"
        names = "data.max_prompt_tokens + sampling.max_new_tokens"
        yield conflict(
            "learner.micro_batch_tokens",
            f"learner.micro_batch_tokens = {config.learner.micro_batch_tokens} is below "
            f"{f'2 * ({names}) = 2 * ({sum_})' if pair else f'{names} = {sum_}'} = {row}: the longest "
            f"{'pair' if pair else 'sample'} would not fit",
        )
    every, longest, sampling = config.producers.checkpoint_tokens, config.sampling.max_new_tokens, config.sampling
    limit = MOST_IDS // longest
    if config.training_sampling.wants_support and sampling.top_k > limit and sampling.top_p == 1 and not sampling.min_p:
        yield conflict(
            "sampling.top_k",
            f"sampling.top_k = {sampling.top_k} gives a sample of sampling.max_new_tokens = {longest} more ids in its "
            f"supports than a message takes ({MOST_IDS}): set {limit} or less, or top_p or min_p as well",
        )
    if every and longest > MOST_PIECES * every:
        yield conflict(
            "producers.checkpoint_tokens",
            f"producers.checkpoint_tokens = {every} makes more than {MOST_PIECES} pieces of a sample of "
            f"sampling.max_new_tokens = {longest}: at least {-(-longest // MOST_PIECES)} is needed",
        )


def _address_problems(config: Config, name: str) -> Iterator[Conflict]:
    address = getattr(config.network, name)
    if address == ("" if name == "standby" else "auto"):
        return
    parsed, key = urlparse(address), f"network.{name}"
    if parsed.scheme not in ("tcp", "ipc"):
        yield conflict(key, f"network.{name} = {address!r} is not auto, tcp:// or ipc://", code="config.network")
    elif (
        parsed.scheme == "tcp"
        and parsed.hostname not in LOOPBACK
        and not config.network.key_file
        and not config.network.insecure_no_auth
    ):
        yield conflict(
            key,
            f"network.{name} = {address!r} is reachable from other hosts and network.key_file is empty",
            code="config.network",
        )
