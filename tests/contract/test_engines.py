"""What every engine promises, checked on the hf engine with tiny random models on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import GPT2Config, Lfm2Config, LlamaConfig, MistralConfig, PreTrainedModel, Qwen3Config

from asyncrl.config import Config, parse
from asyncrl.engine import GenDelta, GenRequest, join_deltas
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.plugins import find
from asyncrl.versions import expand
from asyncrl.wire import Manifest, Tensor
from producers.engines.hf.engine import HFEngine
from producers.engines.ngram import Drafter
from weightsync.plan.buckets import TensorSpec, plan_buckets
from weightsync.plan.digest import digest_tensors

VOCAB = 40
EOS = 2
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def _qwen3(**more: Any) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        initializer_range=0.2,
        **more,
    )


def _llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        initializer_range=0.2,
    )


def _gpt2() -> GPT2Config:
    return GPT2Config(
        vocab_size=VOCAB,
        n_positions=256,
        n_embd=32,
        n_layer=2,
        n_head=4,
        eos_token_id=EOS,
        bos_token_id=1,
        initializer_range=0.2,
    )


def _mistral() -> MistralConfig:
    """A window that every test's samples leave: decoded by slots."""
    return MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        sliding_window=8,
        eos_token_id=EOS,
        initializer_range=0.2,
    )


def _lfm2() -> Lfm2Config:
    """Convolutions beside attention: decoded by transformers' caches."""
    return Lfm2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        layer_types=["conv", "full_attention"],
        eos_token_id=EOS,
        initializer_range=0.2,
    )


def make(shape: Any, *, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa", dtype=dtype).eval()


def save(folder: Path, shape: Any, *, dtype: torch.dtype = torch.float32) -> Path:
    make(shape, seed=0, dtype=dtype).save_pretrained(folder)
    Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save(root / name, make_shape()) for name, make_shape in SHAPES.items()}


SHAPES: dict[str, Callable[[], Any]] = {
    "qwen3": _qwen3,
    "llama": _llama,
    "gpt2": _gpt2,
    "mistral": _mistral,
    "lfm2": _lfm2,
}
KINDS = pytest.mark.parametrize("kind", ["qwen3", "mistral", "lfm2"])  # full attention, a window, a hybrid


def config_of(folder: Path, **producers: Any) -> Config:
    dtype = producers.pop("dtype", "float32")
    lines = "\n".join(f"{key} = {value!r}".replace("'", '"') for key, value in producers.items())
    return parse(f"""
[model]
path = "{folder}"
dtype = "{dtype}"
[data]
path = "unused.jsonl"
max_prompt_tokens = 24
[sampling]
max_new_tokens = 64
[producers]
device = "cpu"
{lines}
[[reward]]
function = "unused:unused"
""")


def layout(model: PreTrainedModel, *, bucket_bytes: int = 4096) -> tuple[list[Tensor], Manifest, list[bytes]]:
    """What a publisher sends for these weights: tensors, manifest (without version) and the bucket bytes."""
    held = dict(model.named_parameters())
    plan = plan_buckets(
        [TensorSpec(n, NAMES[p.dtype], tuple(p.shape)) for n, p in held.items()], bucket_bytes=bucket_bytes
    )
    raw = {name: p.detach().contiguous().flatten().view(torch.uint8).numpy() for name, p in held.items()}
    buckets = [bytearray(size) for size in plan.bucket_bytes]
    for tensor in plan.tensors:
        buckets[tensor.bucket][tensor.offset : tensor.offset + tensor.nbytes] = raw[tensor.name].tobytes()
    digests, whole = digest_tensors(plan.tensors, lambda name: raw[name])
    manifest = Manifest(0, plan.digest, tuple(plan.bucket_bytes), digests, whole)
    return list(plan.tensors), manifest, [bytes(bucket) for bucket in buckets]


async def push(engine: HFEngine, model: PreTrainedModel, version: int) -> tuple[str, str]:
    """Send a version; the digests that the publisher and the engine name."""
    return await stage(engine, model, version), await engine.commit_update()


async def stage(engine: HFEngine, model: PreTrainedModel, version: int) -> str:
    """Send a version without committing it; its digest."""
    tensors, manifest, buckets = layout(model)
    manifest = Manifest(version, manifest.plan, manifest.bucket_bytes, manifest.bucket_digests, manifest.digest)
    await engine.begin_update(manifest, tensors)
    for number, data in enumerate(buckets):
        await engine.apply_bucket(number, memoryview(data))
    return manifest.digest


def request(name: str, prompt: list[int], indices: tuple[int, ...] = (0,), *, seed: int = 5, **more: Any) -> GenRequest:
    settings: dict[str, Any] = {"max_new_tokens": 20, "stop_ids": (EOS,)} | more
    return GenRequest(name, np.asarray(prompt, dtype=np.int32), indices, seed, **settings)


async def tokens_made(engine: HFEngine, count: int) -> None:
    while engine.health().generated_tokens < count:
        await asyncio.sleep(0.001)


async def all_of(engine: HFEngine, wanted: GenRequest) -> dict[int, GenDelta]:
    return {item.index: item async for item in engine.generate(wanted)}


@torch.inference_mode()
def plain_logprobs(model: PreTrainedModel, prompt: list[int], tokens: np.ndarray, *, temperature: float) -> np.ndarray:
    ids = torch.tensor([*prompt, *tokens.tolist()])
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    table = torch.log_softmax(logits / temperature, -1)
    return table.gather(1, ids[len(prompt) :, None])[:, 0].numpy()


def run(config: Config, body: Callable[[HFEngine], Any], *, start: bool = True) -> Any:
    async def whole() -> Any:
        engine = find("asyncrl.engines", "hf")(config)
        if start:
            await engine.start()
        try:
            return await asyncio.wait_for(body(engine), 60)
        finally:
            await engine.close(grace_s=5)

    return asyncio.run(whole())


PROMPTS = [[3, 4, 5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22], [30, 31]]


# ---------------------------------------------------------------- log-probs, seeds, slots


@pytest.mark.parametrize("family", sorted(SHAPES))
def test_logprobs_equal_a_plain_forward(folders: dict[str, Path], family: str) -> None:
    model = make(SHAPES[family](), seed=1)

    async def body(engine: HFEngine) -> list[dict[int, GenDelta]]:
        await push(engine, model, 0)
        wanted = [request(f"g{n}", prompt, (0, 1, 2), temperature=0.7) for n, prompt in enumerate(PROMPTS)]
        return list(await asyncio.gather(*(all_of(engine, item) for item in wanted)))

    # 5 slots for 12 samples: rows are refilled and moved on the way.
    for prompt, group in zip(PROMPTS, run(config_of(folders[family], slots=5), body), strict=True):
        assert sorted(group) == [0, 1, 2]
        for item in group.values():
            assert len(item.token_ids) == len(item.logprobs) == sum(count for _, count in item.runs)
            assert item.token_ids.dtype == np.int32 and item.logprobs.dtype == np.float32
            expected = plain_logprobs(model, prompt, item.token_ids, temperature=0.7)
            assert np.abs(expected - item.logprobs).max() < 1e-4
            assert item.finish == ("stop" if item.token_ids[-1] == EOS else "length")
            assert EOS not in item.token_ids[:-1]
            assert item.finish == "stop" or len(item.token_ids) == 20


@KINDS
def test_tokens_depend_on_seed_and_index_alone(folders: dict[str, Path], kind: str) -> None:
    model = make(SHAPES[kind](), seed=1)

    async def alone(engine: HFEngine) -> dict[int, GenDelta]:
        await push(engine, model, 0)
        return await all_of(engine, request("x", PROMPTS[0], (2,), seed=77))

    async def crowded(engine: HFEngine) -> tuple[dict[int, GenDelta], dict[int, GenDelta]]:
        await push(engine, model, 0)
        others = [request(f"o{n}", prompt, tuple(range(4)), seed=n) for n, prompt in enumerate(PROMPTS)]
        other_seed = request("y", PROMPTS[0], (2,), seed=78)
        results = await asyncio.gather(
            all_of(engine, others[0]),
            all_of(engine, others[1]),
            all_of(engine, request("x", PROMPTS[0], (0, 1, 2), seed=77)),
            all_of(engine, others[2]),
            all_of(engine, others[3]),
            all_of(engine, other_seed),
        )
        return results[2], results[5]

    single = run(config_of(folders[kind], slots=1), alone)[2]
    group, other = run(config_of(folders[kind], slots=6), crowded)
    assert single.token_ids.tolist() == group[2].token_ids.tolist()
    assert np.abs(single.logprobs - group[2].logprobs).max() < 1e-4
    assert group[0].token_ids.tolist() != group[1].token_ids.tolist()
    assert other[2].token_ids.tolist() != single.token_ids.tolist()


def test_top_k_and_top_p_cut_what_is_drawn_but_not_the_logprob(folders: dict[str, Path]) -> None:
    model = make(_qwen3(), seed=1)

    async def body(engine: HFEngine) -> list[dict[int, GenDelta]]:
        await push(engine, model, 0)
        return list(
            await asyncio.gather(
                all_of(engine, request("k", PROMPTS[0], tuple(range(8)), top_k=2, stop_ids=())),
                all_of(engine, request("p", PROMPTS[0], tuple(range(8)), top_p=0.3, stop_ids=())),
                all_of(engine, request("free", PROMPTS[0], tuple(range(8)), stop_ids=())),
            )
        )

    cut_k, cut_p, free = run(config_of(folders["qwen3"], slots=24), body)
    for group, inside in ((cut_k, _inside_top_k), (cut_p, _inside_top_p), (free, None)):
        outside = 0
        for item in group.values():
            expected = plain_logprobs(model, PROMPTS[0], item.token_ids, temperature=1.0)
            assert np.abs(expected - item.logprobs).max() < 1e-4
            outside += 0 if inside is None else int((~inside(model, PROMPTS[0], item.token_ids)).sum())
        assert outside == 0
    assert not all(_inside_top_k(model, PROMPTS[0], item.token_ids).all() for item in free.values())


def _table(model: PreTrainedModel, prompt: list[int], tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([*prompt, *tokens.tolist()])
    with torch.inference_mode():
        return model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].float().softmax(-1), ids[len(prompt) :, None]


def _inside_top_k(model: PreTrainedModel, prompt: list[int], tokens: np.ndarray) -> np.ndarray:
    probs, ids = _table(model, prompt, tokens)
    return (probs.topk(2, -1).indices == ids).any(1).numpy()


def _inside_top_p(model: PreTrainedModel, prompt: list[int], tokens: np.ndarray) -> np.ndarray:
    probs, ids = _table(model, prompt, tokens)
    above = (probs * (probs > probs.gather(1, ids))).sum(-1)
    return (above < 0.3 + 1e-5).numpy()


# ---------------------------------------------------------------- weights


def _swap_in_flight(
    folder: Path, kind: str, kv: str, drafts: int = 0
) -> tuple[PreTrainedModel, PreTrainedModel, dict[int, GenDelta], list[Any]]:
    old, new = make(SHAPES[kind](), seed=1), make(SHAPES[kind](), seed=2)

    async def body(engine: HFEngine) -> tuple[dict[int, GenDelta], list[Any]]:
        digests = [await push(engine, old, 3)]
        sent = await stage(engine, new, 4)  # beforehand, so that on a busy machine the swap comes in time
        wanted = request("x", PROMPTS[0], tuple(range(6)), max_new_tokens=64, stop_ids=())
        going = asyncio.create_task(all_of(engine, wanted))
        await tokens_made(engine, 4 * 8)
        digests.append((sent, await engine.commit_update()))
        return await going, [digests, engine.health()]

    group, rest = run(config_of(folder, slots=4, kv_at_swap=kv, speculative_tokens=drafts), body)
    return old, new, group, rest


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize(("kind", "drafts"), [("qwen3", 0), ("mistral", 0), ("lfm2", 0), ("qwen3", 4), ("mistral", 4)])
def test_swap_in_flight_has_exact_runs(
    folders: dict[str, Path], kind: str, drafts: int, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drafter, "decide", lambda _, lines: max(len(line.draft) for line in lines))
    fed: list[int] = []
    learn = Drafter.learn
    monkeypatch.setattr(Drafter, "learn", lambda self, *made: (fed.append(made[2]), learn(self, *made)))
    old, new, group, (digests, health) = _swap_in_flight(folders[kind], kind, kv, drafts)
    assert max(fed, default=0) == drafts
    assert [sent == held for sent, held in digests] == [True, True] and digests[0] != digests[1]
    assert health.version == 4 and health.swap_s > 0
    assert ("drafted_tokens" in health.numbers()) is (health.drafted > 0) is (drafts > 0)
    assert 0 <= health.accepted_drafts <= health.drafted
    mixed = [item for item in group.values() if len(item.runs) == 2]
    assert len(mixed) >= 4, "the swap came after the samples had ended"
    for item in group.values():
        versions = expand(item.runs)
        assert len(versions) == len(item.token_ids) == 64
        before = plain_logprobs(old, PROMPTS[0], item.token_ids, temperature=1.0)
        after = plain_logprobs(new, PROMPTS[0], item.token_ids, temperature=1.0)
        assert np.abs(before - item.logprobs)[versions == 3].max(initial=0.0) < 1e-4
        gap = np.abs(after - item.logprobs)[versions == 4]
        if kv == "recompute" or len(item.runs) == 1:
            assert gap.max() < 1e-4
        elif len(item.runs) == 2:
            assert gap.max() > 1e-3, "old K/V under new weights cannot give the new model's log-probs"


@KINDS
def test_an_unfinished_update_changes_nothing(folders: dict[str, Path], kind: str) -> None:
    model, other = make(SHAPES[kind](), seed=1), make(SHAPES[kind](), seed=2)

    async def body(engine: HFEngine) -> tuple[Any, ...]:
        await push(engine, model, 0)
        first = await all_of(engine, request("a", PROMPTS[0]))
        tensors, manifest, buckets = layout(other)
        await engine.begin_update(manifest, tensors)
        await engine.apply_bucket(0, buckets[0])
        with pytest.raises(AsyncRLError, match="without buckets") as early:
            await engine.commit_update()
        await engine.abort_update()
        return first, await all_of(engine, request("b", PROMPTS[0])), early.value.code, engine.health().version

    first, second, code, version = run(config_of(folders[kind], slots=2), body)
    assert first[0].token_ids.tolist() == second[0].token_ids.tolist()
    assert (code, version) == ("sync.failed", 0)


def test_another_layout_is_refused(folders: dict[str, Path]) -> None:
    async def body(engine: HFEngine) -> list[str]:
        tensors, manifest, _ = layout(make(_qwen3(), seed=1))
        first = tensors[0]
        renamed = Tensor("nobody.weight", first.dtype, first.shape, first.bucket, first.offset, first.nbytes)
        reshaped = Tensor(first.name, first.dtype, (1, *first.shape), first.bucket, first.offset, first.nbytes)
        wider = Tensor(first.name, "F64", first.shape, first.bucket, first.offset, first.nbytes)
        messages = []
        for wrong in ([renamed, *tensors[1:]], [reshaped, *tensors[1:]], [wider, *tensors[1:]], tensors[1:]):
            with pytest.raises(AsyncRLError) as caught:
                await engine.begin_update(manifest, wrong)
            assert caught.value.code == "sync.plan"
            messages.append(caught.value.message)
        return messages

    unknown, shape, dtype, missing = run(config_of(folders["qwen3"], slots=1), body)
    assert "nobody.weight" in unknown and "sent" in shape and "float32" in dtype and "lacks 1 " in missing


def test_bfloat16_engine_holds_what_was_sent(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", _qwen3(), dtype=torch.bfloat16)
    model = make(_qwen3(), seed=1, dtype=torch.bfloat16)

    async def body(engine: HFEngine) -> tuple[tuple[str, str], dict[int, GenDelta]]:
        return await push(engine, model, 0), await all_of(engine, request("x", PROMPTS[0], (0, 1)))

    (sent, held), group = run(config_of(folder, slots=2, dtype="bfloat16"), body)
    assert sent == held
    assert all(np.isfinite(item.logprobs).all() for item in group.values())


# ---------------------------------------------------------------- requests that end early, or do not fit


@KINDS
def test_abort_ends_the_iterator_and_frees_the_slots(folders: dict[str, Path], kind: str) -> None:
    model = make(SHAPES[kind](), seed=1)

    async def body(engine: HFEngine) -> tuple[Any, ...]:
        await push(engine, model, 0)
        long = request("x", PROMPTS[0], tuple(range(9)), max_new_tokens=64, stop_ids=())
        going = asyncio.create_task(all_of(engine, long))
        other = asyncio.create_task(all_of(engine, request("y", PROMPTS[1], (0, 1), stop_ids=())))
        await tokens_made(engine, 8)
        count = await engine.abort(["x"])
        got = await asyncio.wait_for(going, 60)
        kept = await asyncio.wait_for(other, 60)
        return got, count, kept, await all_of(engine, request("x", PROMPTS[0])), engine.health()

    got, count, kept, again, health = run(config_of(folders[kind], slots=4), body)
    assert len(got) + count == 9 and count > 0
    assert sorted(kept) == [0, 1] and sorted(again) == [0]
    assert (health.running, health.waiting) == (0, 0)


def test_leaving_the_iterator_gives_the_request_up(folders: dict[str, Path]) -> None:
    model = make(_qwen3(), seed=1)

    async def body(engine: HFEngine) -> Any:
        await push(engine, model, 0)
        wanted = request("x", PROMPTS[0], tuple(range(8)), max_new_tokens=64, stop_ids=())
        going = asyncio.create_task(all_of(engine, wanted))
        await tokens_made(engine, 8)
        going.cancel()
        await asyncio.wait([going])
        for _ in range(500):
            if engine.health().running == engine.health().waiting == 0:
                return True
            await asyncio.sleep(0.01)
        return False

    assert run(config_of(folders["qwen3"], slots=2), body)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": list(range(25))}, "max_prompt_tokens"),
        ({"max_new_tokens": 65}, "max_new_tokens"),
        ({"prompt": [VOCAB]}, "vocabulary"),
        ({"prompt": []}, "0 tokens"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(folders: dict[str, Path], change: dict[str, Any], words: str) -> None:
    async def body(engine: HFEngine) -> None:
        await push(engine, make(_qwen3(), seed=1), 0)
        settings = dict(change)
        with pytest.raises(AsyncRLError, match=words):
            await all_of(engine, request("x", settings.pop("prompt", [3]), **settings))

    run(config_of(folders["qwen3"], slots=1), body)


def test_no_samples_before_the_first_weights(folders: dict[str, Path]) -> None:
    async def body(engine: HFEngine) -> int:
        with pytest.raises(AsyncRLError, match="no weights"):
            await all_of(engine, request("x", [3]))
        return engine.health().version

    assert run(config_of(folders["qwen3"], slots=1), body) == -1


def test_a_failing_forward_ends_everything_with_engine_broken(folders: dict[str, Path]) -> None:
    model = make(_qwen3(), seed=1)

    async def body(engine: HFEngine) -> tuple[str, str, bool]:
        await push(engine, model, 0)

        def explode(*_: Any, **__: Any) -> Any:
            raise RuntimeError("out of memory, say")

        engine._model.forward = explode  # type: ignore[union-attr, method-assign]
        with pytest.raises(AsyncRLError, match="out of memory") as under_way:
            await asyncio.wait_for(all_of(engine, request("x", PROMPTS[0])), 60)
        with pytest.raises(AsyncRLError) as later:
            await push(engine, model, 1)
        return under_way.value.code, later.value.code, engine.health().alive

    assert run(config_of(folders["qwen3"], slots=2), body) == ("engine.broken", "engine.broken", False)


# ---------------------------------------------------------------- start


def _refusal(folder: Path, **producers: Any) -> ConfigError:
    async def body(engine: HFEngine) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            await engine.start()
        return caught.value

    return run(config_of(folder, **producers), body, start=False)


def test_a_model_that_no_decoder_fits_is_refused(tmp_path: Path) -> None:
    from transformers import RwkvConfig, RwkvForCausalLM

    shape = RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    RwkvForCausalLM(shape).save_pretrained(tmp_path)
    error = _refusal(tmp_path, slots=2)
    assert error.code == "config.model" and "slots: " in error.message and "caches: " in error.message


def test_a_model_that_ignores_positions_is_decoded_otherwise(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from producers.engines.hf import kv_cache as kv

    right = kv.SlotCache.__init__

    def off_by_one(self: Any, store: Any, rows: Any, positions: Any, visible: int, **more: Any) -> None:
        right(self, store, rows, (positions + 1).clamp(max=visible - 1), visible, **more)

    monkeypatch.setattr(kv.SlotCache, "__init__", off_by_one)
    model = make(_qwen3(), seed=1)

    async def body(engine: HFEngine) -> tuple[dict[int, GenDelta], str]:
        await push(engine, model, 0)
        return await all_of(engine, request("x", PROMPTS[0], (0, 1))), engine.health().detail

    group, detail = run(config_of(folders["qwen3"], slots=2), body)
    assert "caches" in detail and "differ" in detail
    for item in group.values():
        gap = plain_logprobs(model, PROMPTS[0], item.token_ids, temperature=1.0) - item.logprobs
        assert np.abs(gap).max() < 1e-4


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("Qwen3Moe", {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
        ("Mixtral", {"num_local_experts": 4}),
        ("GPTNeoX", {}),
        ("Gemma", {"head_dim": 8}),
        ("OPT", {"ffn_dim": 32, "word_embed_proj_dim": 32}),
    ],
)
def test_other_families_start_and_pass_the_self_check(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    import transformers

    shape = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS,
        **more,
    )

    async def body(engine: HFEngine) -> int:
        return engine.health().version

    assert run(config_of(save(tmp_path / "m", shape), slots=3), body) == -1


def test_a_missing_folder_and_too_many_slots_are_configuration_errors(folders: dict[str, Path], tmp_path: Path) -> None:
    assert _refusal(tmp_path / "nothing", slots=1).code == "config.model"
    error = _refusal(folders["qwen3"], slots=10**9)
    assert error.code == "config.conflict" and "producers.slots" in error.message


def test_fingerprint_covers_model_tokenizer_and_dtype(folders: dict[str, Path], tmp_path: Path) -> None:
    same = HFEngine(config_of(folders["qwen3"])).fingerprint()
    assert same == HFEngine(config_of(folders["qwen3"], slots=9)).fingerprint()
    other_tokenizer = save(tmp_path / "m", _qwen3())
    assert HFEngine(config_of(other_tokenizer)).fingerprint() == same  # another folder, the same files
    (other_tokenizer / "tokenizer.json").write_text("{}")
    others = {
        HFEngine(config_of(other_tokenizer)).fingerprint(),
        HFEngine(config_of(folders["llama"])).fingerprint(),
        HFEngine(config_of(folders["qwen3"], dtype="bfloat16")).fingerprint(),
    }
    assert len(others | {same}) == 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# ---------------------------------------------------------------- deltas, continued samples, priorities, pauses


@KINDS
def test_deltas_follow_each_other_and_give_the_whole_sample(folders: dict[str, Path], kind: str) -> None:
    """Deltas of some tokens, over a swap, joined: what the engine gives whole."""
    old, new = make(SHAPES[kind](), seed=1), make(SHAPES[kind](), seed=2)

    async def body(engine: HFEngine) -> tuple[list[GenDelta], dict[int, GenDelta]]:
        await push(engine, old, 3)
        await stage(engine, new, 4)
        deltas: list[GenDelta] = []
        wanted = request("x", PROMPTS[0], tuple(range(6)), max_new_tokens=50, stop_ids=(), delta_tokens=8)
        async for delta in engine.generate(wanted):
            deltas.append(delta)
            if len(deltas) == 10:
                await engine.commit_update()
        return deltas, await all_of(engine, request("y", PROMPTS[0], (0,), max_new_tokens=20, stop_ids=()))

    deltas, later = run(config_of(folders[kind], slots=4), body)
    for index in range(6):
        parts = [delta for delta in deltas if delta.index == index]
        assert [part.finish for part in parts] == ["", "", "", "", "", "", "length"]
        assert [(part.start, len(part.token_ids)) for part in parts] == [*((8 * n, 8) for n in range(6)), (48, 2)]
        whole = join_deltas(parts)
        versions = expand(whole.runs)
        assert len(versions) == len(whole.token_ids) == 50
        before = plain_logprobs(old, PROMPTS[0], whole.token_ids, temperature=1.0)
        assert np.abs(before - whole.logprobs)[versions == 3].max(initial=0.0) < 1e-4
    assert any(len(join_deltas(part for part in deltas if part.index == index).runs) == 2 for index in range(6))
    assert later[0].start == 0 and later[0].finish == "length"


@KINDS
def test_a_continued_sample_is_the_one_without_a_break(folders: dict[str, Path], kind: str) -> None:
    model = make(SHAPES[kind](), seed=1)

    async def body(engine: HFEngine) -> tuple[dict[int, GenDelta], dict[int, GenDelta]]:
        await push(engine, model, 0)
        whole = await all_of(engine, request("a", PROMPTS[0], (0, 1, 2), max_new_tokens=40, stop_ids=()))
        rest = {}
        for index, item in whole.items():
            prompt = [*PROMPTS[0], *item.token_ids[:25].tolist()]
            again = request(f"b{index}", prompt, (index,), max_new_tokens=15, stop_ids=(), begun=25)
            rest |= await all_of(engine, again)
        return whole, rest

    whole, rest = run(config_of(folders[kind], slots=3), body)
    for index, item in whole.items():
        assert rest[index].token_ids.tolist() == item.token_ids[25:].tolist()
        assert np.abs(rest[index].logprobs - item.logprobs[25:]).max() < 1e-4


def test_the_urgent_come_first_and_a_pause_stands_still(folders: dict[str, Path]) -> None:
    model = make(_qwen3(), seed=1)

    async def body(engine: HFEngine) -> tuple[list[str], list[int], Any]:
        await push(engine, model, 0)
        ended: list[str] = []

        async def one(name: str, priority: int) -> None:
            await all_of(engine, request(name, PROMPTS[0], max_new_tokens=30, stop_ids=(), priority=priority))
            ended.append(name)

        tasks = [asyncio.create_task(one(f"late{n}", 1)) for n in range(3)]
        await tokens_made(engine, 3)
        tasks += [asyncio.create_task(one("urgent", 0))]
        await tokens_made(engine, 6)
        await engine.pause()
        made = [engine.health().generated_tokens]
        paused = engine.health().paused
        await asyncio.sleep(0.2)
        made.append(engine.health().generated_tokens)
        await engine.resume()
        await asyncio.gather(*tasks)
        return ended, made, paused

    ended, made, paused = run(config_of(folders["qwen3"], slots=1), body)
    assert ended == ["late0", "urgent", "late1", "late2"]
    assert paused and made[0] == made[1] < 4 * 30


def test_a_pause_can_wait_for_what_is_decoded_or_give_it_up(folders: dict[str, Path]) -> None:
    model = make(_qwen3(), seed=1)

    async def body(engine: HFEngine) -> list[Any]:
        await push(engine, model, 0)
        wanted = request("x", PROMPTS[0], (0, 1, 2), max_new_tokens=30, stop_ids=())
        going = asyncio.create_task(all_of(engine, wanted))
        await tokens_made(engine, 4)
        await engine.pause("wait")
        first = engine.health()
        await engine.resume()
        whole = await going
        cut = asyncio.create_task(all_of(engine, wanted))
        await tokens_made(engine, 3 * 30 + 4)
        await engine.pause("abort")
        given_up = await cut
        await engine.resume()
        return [first, whole, given_up, await all_of(engine, request("y", PROMPTS[0]))]

    first, whole, given_up, later = run(config_of(folders["qwen3"], slots=2), body)
    assert first.running == 0 and first.waiting == 1 and first.generated_tokens == 2 * 30
    assert sorted(whole) == [0, 1, 2] and all(len(item.token_ids) == 30 for item in whole.values())
    assert len(given_up) < 3 and sorted(later) == [0]


def test_deltas_that_do_not_follow_each_other_are_refused() -> None:
    def delta(start: int, count: int, finish: str = "") -> GenDelta:
        return GenDelta(
            "x", 0, np.arange(count, dtype=np.int32), np.zeros(count, np.float32), ((1, count),), finish, start
        )

    assert join_deltas([delta(0, 3), delta(3, 2, "stop")]).runs == ((1, 5),)
    for wrong in (
        [delta(0, 3), delta(4, 2, "stop")],
        [delta(1, 3, "stop")],
        [delta(0, 3, "stop"), delta(3, 1, "stop")],
    ):
        with pytest.raises(AsyncRLError, match="a delta starts at"):
            join_deltas(wrong)
