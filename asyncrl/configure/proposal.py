"""Settings that fit a model, its prompts and this machine: what `asyncrl init` writes and `asyncrl.train` starts from.

Guarantees:
1. prompts and answers fit into the model's positions; the longest of up to `ROWS` prompts fits with a quarter to spare;
2. the learning rate follows the size of the model and whether adapters are trained (`learning_rate`);
3. slots, tokens per pass and, without an accelerator, the batch are halved until the estimated memory is within `SHARE`
   of what there is: of all processes in the host, or of the fullest accelerator, if its driver tells its size.
What cannot be read leaves the defaults: the check that follows names it. `find_files` fetches names on a hub first.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from asyncrl.config import Config, DataConfig, ModelConfig, parse
from asyncrl.config.locations import Places
from asyncrl.config.paths import settle_paths
from asyncrl.errors import AsyncRLError
from asyncrl.images.decoding import check_image
from asyncrl.images.digests import IMAGES, image_digests
from asyncrl.images.rows import normalise_row, takes_images
from asyncrl.preflight.files import data_paths, has_template, has_texts, prompt_column
from asyncrl.preflight.hub import settle_hub
from asyncrl.preflight.machine import REDIS_SERVERS, Machine, device_memory
from asyncrl.preflight.memory import estimate
from asyncrl.preflight.model_shape import model_shape
from asyncrl.process_plan.plan import TARGETS
from asyncrl.runtime.data_files import read_table
from asyncrl.runtime.model_folder import find_positions, model_json

ROWS = 256  # prompts that are measured
SHARE = 0.7  # of the host's memory
TEMPLATE_TOKENS = 16  # of a chat template, per message
LEAST_PIXELS, MOST_PIXELS = 56 * 56, 28 * 28 * 1280  # of an image, where the model's folder does not say
UNIT = 32  # limits are multiples of it
SMALL, LARGE = 50e6, 1e9  # parameters


class Facts(NamedTuple):
    """What the files say; 0: not known."""

    parameters: int
    positions: int
    longest: int  # tokens of the longest of `rows` prompts
    rows: int

    def __str__(self) -> str:
        known = [
            f"{self.parameters:,} parameters" if self.parameters else "",
            f"{self.positions:,} positions" if self.positions else "",
            f"the longest of {self.rows} prompts has {self.longest} tokens" if self.longest else "",
        ]
        return ", ".join(filter(None, known))


class Located(NamedTuple):
    """Answers whose model and data are paths on this machine, and why a name on a hub is still a name."""

    answers: dict[str, str]
    errors: list[AsyncRLError]


def find_files(answers: Mapping[str, str], *, hub: str = "") -> Located:
    """Where model and data of the answers are. Of a name on a hub (`hub`: a value of `model.hub`) the rows are fetched,
    and the files of the model without its weights: the launch fetches those after all checks.
    """
    paths = settle_paths({name: {"path": answers[name]} for name in ("model", "data")}, Places())
    model = ModelConfig(path=paths["model"]["path"], hub="modelscope" if hub == "modelscope" else "huggingface")
    found = settle_hub(Config(model=model, data=DataConfig(path=paths["data"]["path"])), fetch=True, weights=False)
    return Located({**answers, "model": found.config.model.path, "data": found.config.data.path}, found.errors)


def read_facts(model: str, data: str) -> Facts:
    """Size and positions of the model, and lengths of the prompts."""
    tree = model_json(model)
    shape = model_shape(tree)
    lengths = list(prompt_lengths(Path(model), data))
    return Facts(shape.parameters if shape else 0, find_positions(tree) or 0, max(lengths, default=0), len(lengths))


def prompt_lengths(model: Path, data: str) -> Iterator[int]:
    """Tokens of the first prompts; none if the tokenizer or the rows cannot be read here."""
    paths = data_paths(data)
    try:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        column, sees = prompt_column(paths), takes_images(model)
        for row in islice(first_rows(paths[0]), ROWS) if paths else ():
            images = 0
            if sees:
                row, files = normalise_row(  # noqa: PLW2901
                    dict(row), prompt_key=column, image_key=IMAGES, folder=paths[0].parent
                )
                images = sum(image_tokens(model, *check_image(files[digest])) for digest in image_digests(row))
            prompt = row.get(column)
            messages = prompt if isinstance(prompt, list) else [{"content": prompt}]
            texts = [_text(one.get("content")) for one in messages if isinstance(one, dict)]
            yield images + sum(len(tokenizer.encode(text).ids) + TEMPLATE_TOKENS for text in texts)
    except Exception:  # the package of tokenizers raises bare Exception; the check says what is wrong with the files
        return


def _text(content: Any) -> str:
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(str(part.get("text") or "") for part in parts)


def image_tokens(model: Path, width: int, height: int) -> int:
    """Most tokens of an image of these pixels, by the model's preprocessor_config.json: sides of whole tokens, and an
    area within its limits (`smart_resize` of Qwen2-VL).
    """
    try:
        found = json.loads((model / "preprocessor_config.json").read_bytes())
    except (OSError, ValueError):
        found = {}
    size, side = found.get("size") or {}, found.get("patch_size", 14) * found.get("merge_size", 2)
    least = found.get("min_pixels") or size.get("shortest_edge") or LEAST_PIXELS
    most = found.get("max_pixels") or size.get("longest_edge") or MOST_PIXELS
    return int(min(max(-(-width // side) * -(-height // side), -(-least // side**2)), most // side**2))


def first_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix in (".parquet", ".arrow"):
        yield from read_table(path).slice(0, ROWS).to_pylist()
    elif path.suffix == ".json":
        yield from json.loads(path.read_text(encoding="utf-8"))
    else:
        with path.open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.strip())


def learning_rate(parameters: int, *, adapters: bool) -> float:
    """1e-6 from a billion parameters on, as published recipes have it, 1e-5 from 50 million, 1e-4 below; ten times that
    with adapters (Schulman et al., "LoRA Without Regret", 2025), at most 1e-4.

    >>> learning_rate(7_000_000_000, adapters=False), learning_rate(7_000_000_000, adapters=True)
    (1e-06, 1e-05)
    """
    whole = 1e-6 if parameters >= LARGE or not parameters else 1e-5 if parameters >= SMALL else 1e-4
    return min(1e-4, round(whole * 10, 10)) if adapters else whole


def fit_lengths(facts: Facts, *, answer: int) -> tuple[int, int]:
    """Limits of prompts and answers in tokens.

    >>> fit_lengths(Facts(0, 512, 90, 256), answer=1024)
    (128, 384)
    """
    prompt = -(-facts.longest * 5 // 4 // UNIT) * UNIT if facts.longest else 512
    if facts.positions:
        prompt = min(prompt, max(facts.positions // 2, facts.positions - answer))
        answer = min(answer, facts.positions - prompt)
    return prompt, answer


def proposed_settings(
    answers: Mapping[str, str], machine: Machine, *, adapters: bool = False, facts: Facts | None = None
) -> dict[str, object]:
    """Dotted key -> value, in the order of the file. `answers`: as `find_files` located them; `adapters`: they are what
    is trained.
    """
    kind, name = machine.accelerator, answers["name"]
    facts = facts or read_facts(answers["model"], answers["data"])
    prompt, answer = fit_lengths(facts, answer=1024 if kind else 128)
    half = max(1, machine.devices.get(kind, 0) // 2)
    settings: dict[str, object] = {
        "run.name": name,
        "run.dir": f"runs/{name}",
        "model.path": answers["model"],
        "model.dtype": "bfloat16" if kind else "float32",
        "data.path": answers["data"],
        "data.prompt_key": prompt_column(data_paths(answers["data"])),
        **({"data.as_chat": True} if wants_chat(answers) else {}),
        "data.max_prompt_tokens": prompt,
        "sampling.group_size": 8,
        "sampling.max_new_tokens": answer,
        "sampling.temperature": 1.0,
        "buffer.batch_groups": 64 if kind else 8,
        "buffer.max_staleness": 4,
        "buffer.store": "redis" if any(shutil.which(server) for server in REDIS_SERVERS) else "sqlite",
        "producers.engine": "hf",
        "producers.count": half,
        "producers.slots": 128 if kind else 32,
        "reward.function": answers["reward"],
        "reward_workers.count": 2 if kind else 1,
        "learner.ranks": half,
        "learner.steps": 200,
        "learner.micro_batch_tokens": max(16384 if kind else 2048, prompt + answer),
        "learner.gradient_checkpointing": bool(kind),
        "learner.checkpoint_every": 20,
        "learner.algorithm.preset": answers["preset"],
        "learner.optim.lr": learning_rate(facts.parameters, adapters=adapters),
        "learner.optim.warmup_steps": 5,
        "log.archive": False,
    }
    if not kind:
        return fit_memory(settings, machine.memory_bytes)
    size = device_memory(kind)
    return fit_memory(settings, size, devices=machine.devices[kind]) if size else settings


def fit_memory(settings: Mapping[str, object], memory_bytes: int, *, devices: int = 0) -> dict[str, object]:
    """The settings with smaller slots and passes, if the memory asks for it: of a device, or without any of the host,
    which also takes smaller batches.
    """
    fitted = dict(settings)
    row = int(str(fitted["data.max_prompt_tokens"])) + int(str(fitted["sampling.max_new_tokens"]))
    least = {"producers.slots": 8, "learner.micro_batch_tokens": row} | ({} if devices else {"buffer.batch_groups": 2})
    while used_bytes(fitted, devices) > SHARE * memory_bytes:
        large = [key for key, low in least.items() if int(str(fitted[key])) // 2 >= low]
        if not large:
            break
        fitted |= {key: int(str(fitted[key])) // 2 for key in large}
    return fitted


def used_bytes(settings: Mapping[str, object], devices: int = 0) -> int:
    """Estimated memory of all processes in the host, or on the fullest device; 0 if it cannot be estimated."""
    plain = {key: value for key, value in settings.items() if not key.startswith("reward.")}
    words = [f"{key}={json.dumps(value)}" for key, value in plain.items()]
    try:
        config = parse("", overrides=[*words, 'reward=[{function="a:b"}]'])
    except AsyncRLError:  # the check reports it
        return 0
    found = estimate(config, model_json(config.model.path), TARGETS["all"], accelerator=devices > 0)
    place = "device" if devices else "host"
    sizes = [one.total_bytes for one in found if one.place == place for _ in range(one.count)]
    if devices and len(sizes) <= devices:
        return max(sizes, default=0)
    return sum(sizes) // max(1, devices)  # processes share the devices, or the host


def wants_chat(answers: Mapping[str, str]) -> bool:
    """Plain texts become messages if the model has a chat template."""
    paths = data_paths(answers["data"])
    return has_template(Path(answers["model"])) and has_texts(paths, prompt_column(paths))
