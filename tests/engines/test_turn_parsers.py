"""Turns read by vLLM's and SGLang's own parsers, in their environments: calls and reasoning of models' formats."""

# ruff: noqa: RUF001 (DeepSeek's tokens have these letters)

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from rigs import lacks
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from asyncrl.config.sections.environment import EnvironmentConfig
from asyncrl.environment import ToolCall
from asyncrl.errors import ConfigError
from producers.data.tokenizer import Tokenizer
from producers.tools.engine_parsers import make_splitter
from producers.tools.turn_reader import TurnReader

pytestmark = pytest.mark.timeout(300)

SPECIAL = (
    "<|end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|tool_call>", "<tool_call|>", '<|"|>',
    "<|channel>", "<channel|>",
)  # fmt: skip
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
JSON = '{"city": "Paris", "days": 3}'
#: A call as models of this format write it.
FORMATS = {
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    f"{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "hermes": f'<tool_call>{{"name": "weather", "arguments": {JSON}}}</tool_call>',
    "gemma4": '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
}
#: Parsers of reasoning, and of calls where they are not called as above.
REASONING = {"qwen3_coder": "qwen3", "glm45": "glm45", "kimi_k2": "kimi_k2", "gemma4": ""}
SGLANG = {"deepseek_v3": "deepseekv3", "deepseek_v31": "deepseekv31"}
R1 = {"vllm": "deepseek_r1", "sglang": "deepseek-r1"}
PACKAGES = [
    pytest.param(name, marks=pytest.mark.skipif(bool(lacks(name, name)()), reason=f"no {name} here"))
    for name in ("vllm", "sglang")
]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = ToolCall("weather", {"city": "Paris", "days": 3})


def make_folder(folder: Path) -> Tokenizer:
    """A tokenizer of bytes with the tokens of all formats; `<|end|>` ends an answer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|end|>").save_pretrained(folder)
    return Tokenizer(folder, trust_remote_code=False)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_folder(tmp_path_factory.mktemp("tokenizer"))


def reader(tokenizer: Tokenizer, package: str, name: str, *, thinks: bool = False) -> TurnReader:
    calls = SGLANG.get(name, name) if package == "sglang" else name
    thought = REASONING.get(name, R1[package]) if thinks else ""
    parsers = {"reasoning_parser": f"{package}:{thought}"} if thought else {}
    return TurnReader(EnvironmentConfig(parser=f"{package}:{calls}", **parsers), tokenizer)


def said(tokenizer: Tokenizer, text: str) -> tuple[str, list[int]]:
    """The text without special tokens and the ids, as an engine and the tokenizer give them."""
    ids = [*tokenizer.encode_part(text), *tokenizer.eos_ids]
    return tokenizer.decode(ids), ids


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("package", PACKAGES)
def test_calls_and_reasoning(tokenizer: Tokenizer, package: str, name: str) -> None:
    call = FORMATS[name]
    found = reader(tokenizer, package, name).read(*said(tokenizer, f"Sure. {call}"), [TOOL])
    assert (found.text, found.calls, found.malformed, found.reasoning) == ("Sure.", (CALL,), (), "")
    if REASONING.get(name, "r1"):
        text, ids = said(tokenizer, f"<think>Let me see.</think>\n\nSure. {call}")
        both = reader(tokenizer, package, name, thinks=True)
        found = both.read(text, ids, [TOOL])
        assert (found.text, found.calls, found.reasoning.strip()) == ("Sure.", (CALL,), "Let me see.")
        kept = both.cut_reasoning(ids, found.reasoning)
        assert kept == tuple(ids[-len(kept) :]) and tokenizer.decode(kept[:5]) == "Sure."


@pytest.mark.parametrize("package", PACKAGES)
def test_our_parser_reads_what_is_behind_the_reasoning(tokenizer: Tokenizer, package: str) -> None:
    """A call that the model only thinks of is none."""
    config = EnvironmentConfig(parser="hermes", reasoning_parser=f"{package}:{R1[package]}")
    turn = said(tokenizer, f"Maybe {FORMATS['hermes']}?</think>No, I know it: 12.")
    found = TurnReader(config, tokenizer).read(*turn, [TOOL])
    assert found.calls == () and found.text == "No, I know it: 12." and "weather" in found.reasoning


@pytest.mark.parametrize("package", PACKAGES[:1])
def test_harmony_is_read_from_token_ids(tokenizer: Tokenizer, package: str) -> None:
    """gpt-oss: its tokens are those of the package openai_harmony, so their text does not matter."""
    harmony = pytest.importorskip("openai_harmony")
    try:
        encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except Exception as error:
        pytest.skip(f"its vocabulary is a download: {error}")
    ids = encoding.encode(
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{JSON}<|call|>",
        allowed_special="all",
    )
    split = make_splitter(package, calls="openai", reasoning="openai_gptoss", tokenizer=tokenizer)
    found = split(encoding.decode(ids), ids, [TOOL])
    assert found.reasoning == "Let me see." and found.calls == [("weather", JSON)]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_name_that_the_package_does_not_have(tokenizer: Tokenizer, package: str) -> None:
    with pytest.raises(ConfigError, match="no parser 'qwen4'") as raised:
        reader(tokenizer, package, "qwen4")
    assert "qwen3_coder" in str(raised.value.remedy)


@pytest.mark.parametrize("package", PACKAGES[:1])
def test_a_tokenizer_without_the_tokens_of_the_format(tmp_path: Path, package: str) -> None:
    with pytest.raises(ConfigError, match=r"llama3_json.*python_tag"):
        reader(make_folder(tmp_path), package, "llama3_json")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("package", PACKAGES)
def test_no_text_of_a_policy_raises(tokenizer: Tokenizer, package: str, name: str) -> None:
    draws = Random(name)
    pieces = [*SPECIAL[1:], *MARKS, *FORMATS[name].split("\n"), "x", "{", '"', "\n"]
    reads = reader(tokenizer, package, name, thinks=True)
    for _ in range(20):
        text = "".join(draws.choices(pieces, k=draws.randrange(12)))
        found = reads.read(*said(tokenizer, text), [TOOL])
        assert all(isinstance(call.arguments, dict) for call in found.calls)
