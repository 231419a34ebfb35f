"""What the contract suite of engines needs: a tiny model, its weights as a publisher sends them, the log-probs that a
plain forward gives, and an engine on an event loop of its own."""

from __future__ import annotations

import asyncio
import copy
import os
import threading
from collections.abc import Coroutine, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen3Config

from asyncrl.config import Config, parse
from asyncrl.engine import Engine, GenDelta, GenRequest, join_deltas
from asyncrl.wire import Instruction, Manifest, Tensor
from producers.engines.staged_weights import PREFIX, SHARED_MEMORY
from weightsync.encoding.quantised import dequantise, is_matrix, quantise, quantise_all, quantised_specs
from weightsync.plan.buckets import Plan, TensorSpec, plan_buckets
from weightsync.plan.digest import digest_tensors
from weightsync.receiver.transfer import Transfer
from weightsync.staging import Slot, Staging
from weightsync.transports.shared_memory import LocalInbox

T = TypeVar("T")
VOCAB, EOS, SLOTS, MAX_PROMPT, MAX_NEW = 128, 2, 8, 320, 64
LIMIT = 1e-4  # of a log-prob against a plain forward, both in float32
BUCKET_BYTES = 40_000
SHAPE = Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    eos_token_id=EOS,
    bos_token_id=1,
    initializer_range=0.2,
    architectures=["Qwen3ForCausalLM"],
)


@cache
def model_of(seed: int) -> PreTrainedModel:
    """Random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(SHAPE, attn_implementation="sdpa", dtype=torch.float32).eval()


def save_model(folder: Path) -> Path:
    """A folder in Hugging Face format whose weights no test uses."""
    model_of(0).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    kind = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t2", "bos_token": "t1"}'
    (folder / "tokenizer_config.json").write_text(kind)
    return folder


def config_of(folder: Path, *, engine: str, kv: str, more: str = "") -> Config:
    """The configuration of one engine; `more` are lines of `[producers]`."""
    return parse(f"""
[run]
dir = "{folder / "run"}"
[model]
path = "{folder}"
dtype = "float32"
[data]
path = "unused.jsonl"
max_prompt_tokens = {MAX_PROMPT}
[sampling]
max_new_tokens = {MAX_NEW}
[producers]
engine = "{engine}"
device = "cpu"
slots = {SLOTS}
kv_at_swap = "{kv}"
{more}
[[reward]]
function = "unused:unused"
""")


@cache
def decoded_model(seed: int, kind: str) -> PreTrainedModel:
    """The model of an engine that got these weights in int8 or fp8."""
    made = copy.deepcopy(model_of(seed))
    with torch.no_grad():
        for name, value in made.named_parameters():
            if is_matrix(name, tuple(value.shape)):
                value.copy_(dequantise(*quantise(value, kind), value.dtype))
    return made


@cache
def layout(seed: int, kind: str = "") -> tuple[tuple[Tensor, ...], Manifest, tuple[bytes, ...]]:
    """What a publisher sends for these weights: tensors, manifest (of version 0) and the bytes of the buckets. `kind`:
    of their codes."""
    held = {name: value.detach() for name, value in model_of(seed).named_parameters()}
    specs = [(name, "F32", tuple(value.shape)) for name, value in held.items()]
    if kind:
        specs, held = list(quantised_specs(specs, kind)), dict(quantise_all(held.items(), kind))
    plan = plan_buckets([TensorSpec(*spec) for spec in specs], bucket_bytes=BUCKET_BYTES)
    raw = {name: value.contiguous().flatten().view(torch.uint8).numpy() for name, value in held.items()}
    buckets = [bytearray(size) for size in plan.bucket_bytes]
    for tensor in plan.tensors:
        buckets[tensor.bucket][tensor.offset : tensor.offset + tensor.nbytes] = raw[tensor.name].tobytes()
    digests, whole = digest_tensors(plan.tensors, lambda name: raw[name])
    manifest = Manifest(0, plan.digest, tuple(plan.bucket_bytes), digests, whole)
    return tuple(plan.tensors), manifest, tuple(bytes(bucket) for bucket in buckets)


def manifest_of(seed: int, version: int, kind: str = "") -> Manifest:
    """The manifest of these weights as that version."""
    manifest = layout(seed, kind)[1]
    return Manifest(version, manifest.plan, manifest.bucket_bytes, manifest.bucket_digests, manifest.digest)


async def stage(engine: Engine, seed: int, version: int, kind: str = "") -> Manifest:
    """Send a version, every bucket as a transport does (into lent room where there is some), and do not commit it."""
    tensors, _, buckets = layout(seed, kind)
    manifest = manifest_of(seed, version, kind)
    await engine.begin_update(manifest, tensors)
    for number, data in enumerate(buckets):
        lend = getattr(engine, "bucket_room", lambda _number: None)
        room = lend(number)
        if room is not None:
            room[:] = data
        digest = await engine.apply_bucket(number, room if room is not None else memoryview(data))
        assert digest in ("", manifest.bucket_digests[number])
    return manifest


def fill_slot(staging: Staging, seed: int) -> Slot:
    """These weights in a slot of a publisher."""
    tensors, manifest, buckets = layout(seed)
    data = [np.frombuffer(buckets[one.bucket], np.uint8)[one.offset :][: one.nbytes] for one in tensors]
    plan = Plan(tensors, manifest.bucket_bytes, manifest.plan)
    return staging.fill(plan, zip((one.name for one in tensors), data, strict=True))[0]


async def receive_slot(engine: Engine, slot: Slot, seed: int, version: int) -> Manifest:
    """Receive a version by transport `local`, and do not commit it."""
    manifest, tensors = manifest_of(seed, version), layout(seed)[0]
    order = Instruction("receive", 1, manifest, tensors, "local", str(slot.path), deadline_s=60.0)
    await Transfer(engine, order, tensors, LocalInbox(order)).run()
    return manifest


def own_copies() -> list[Path]:
    """Files with weights of this process that are no links to slots."""
    every = SHARED_MEMORY.glob(f"{PREFIX}{os.getuid()}-{os.getpid()}-*")
    return [path for path in every if path.stat().st_nlink == 1]


async def push(engine: Engine, seed: int, version: int) -> Manifest:
    """Send a version and commit it; the engine holds just these weights then."""
    manifest = await stage(engine, seed, version)
    assert await engine.commit_update() == manifest.digest
    assert engine.health().version == version
    return manifest


def request(name: str, prompt: Sequence[int], indices: tuple[int, ...] = (0,), **more: Any) -> GenRequest:
    """A request with the settings of most tests: 24 tokens, no stop token."""
    settings: dict[str, Any] = {"seed": 5, "max_new_tokens": 24, "stop_ids": ()} | more
    return GenRequest(name, np.asarray(prompt, dtype=np.int32), indices, **settings)


async def deltas_of(engine: Engine, wanted: GenRequest) -> list[GenDelta]:
    """All deltas, in the order in which they came."""
    return [delta async for delta in engine.generate(wanted)]


async def all_of(engine: Engine, wanted: GenRequest) -> dict[int, GenDelta]:
    """The whole samples by index."""
    deltas = await deltas_of(engine, wanted)
    return {n: join_deltas(d for d in deltas if d.index == n) for n in sorted({d.index for d in deltas})}


async def tokens_made(engine: Engine, more: int) -> None:
    """Wait until that many more tokens were generated."""
    until = engine.health().generated_tokens + more
    while engine.health().generated_tokens < until:
        await asyncio.sleep(0.001)


@torch.inference_mode()
def plain_logprobs(
    seed: int, prompt: Sequence[int], tokens: npt.NDArray[np.int32], *, temperature: float = 1.0, kind: str = ""
) -> npt.NDArray[np.float32]:
    """Log-probs of the tokens by one forward without a cache, f4 `[T]`. `kind`: of an engine with decoded weights."""
    ids = torch.tensor([*prompt, *tokens.tolist()])
    model = decoded_model(seed, kind) if kind else model_of(seed)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    table = torch.log_softmax(logits / temperature, -1)
    found: npt.NDArray[np.float32] = table.gather(1, ids[len(prompt) :, None])[:, 0].numpy()
    return found


@torch.inference_mode()
def kept_logprobs(old: int, new: int, prompt: Sequence[int], tokens: npt.NDArray[np.int32], cut: int) -> Any:
    """Log-probs where the first `cut` tokens (1 at least) come from `old` and the others from `new` on the K/V of old:
    the step of token `cut` feeds the token before it under the new weights."""
    ids = torch.tensor([*prompt, *tokens.tolist()])[None]
    seen = len(prompt) + cut - 1
    cache = DynamicCache()
    first = model_of(old)(input_ids=ids[:, :seen], past_key_values=cache, use_cache=True).logits[0]
    second = model_of(new)(input_ids=ids[:, seen:], past_key_values=cache, use_cache=True).logits[0]
    logits = torch.cat([first, second])[len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


class Bench:
    """One engine on the event loop of a thread. `version` is the newest that was pushed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.version = -1
        self._names = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], *, limit_s: float = 180.0) -> T:
        """The result of the coroutine on the engine's loop."""
        bounded = asyncio.wait_for(work, limit_s)
        return asyncio.run_coroutine_threadsafe(bounded, self._loop).result(limit_s + 5)

    def push(self, seed: int) -> int:
        """Push these weights as the next version."""
        self.version += 1
        self.run(push(self.engine, seed, self.version))
        return self.version

    def name(self) -> str:
        """A request id that was not used before."""
        self._names += 1
        return f"r{self._names}"

    def ask(self, prompt: Sequence[int], indices: tuple[int, ...] = (0,), **more: Any) -> dict[int, GenDelta]:
        """The whole samples of a request."""
        return self.run(all_of(self.engine, request(self.name(), prompt, indices, **more)))

    def close(self) -> None:
        """Stop the engine, then the loop."""
        try:
            self.run(self.engine.close(grace_s=10), limit_s=60)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(60)
