"""Prompts: files and sources, the mapping from groups to rows, token ids, and what is wrong with them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from bare_config import BARE
from tokenizers import Regex, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from asyncrl.config import DataConfig, parse
from asyncrl.errors import ConfigError, ConfigErrors
from producers.data.prompts import BadPrompt, Prompts, encode_prompt, plain_value
from producers.data.tokenizer import Tokenizer

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+= :<>|\n"
VOCABULARY = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *CHARACTERS])}


def verl_rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "data_source": "gsm",
            "prompt": [{"role": "user", "content": f"q{number}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number, "split": "train"},
        }
        for number in range(count)
    ]


def text_rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{number}+1=", "ground_truth": str(number + 1)} for number in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "model")


def make_tokenizer(folder: Path, *, bos: bool = False, eos: bool = False, template: str = "") -> Path:
    folder.mkdir()
    fast = FastTokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    fast.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    if bos or eos:
        single = f"{'<bos> ' if bos else ''}$A{' <eos>' if eos else ''}"
        fast.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<bos>", 1), ("<eos>", 2)])
    fast.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "bos_token": "<bos>"}
    if template:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 2}))
    return folder


def ids_of(text: str) -> list[int]:
    return [VOCABULARY[character] for character in text]


# ---------------------------------------------------------------- reading


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return path


@pytest.mark.parametrize("kind", [".parquet", ".jsonl", ".json"])
def test_the_columns_of_verl_come_through_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / f"train{kind}", verl_rows(5))
    prompts = Prompts(DataConfig(path=str(path), shuffle=False), seed=0)
    assert [prompts.row_for(group) for group in range(5)] == verl_rows(5)
    msgspec.json.encode(prompts.row_for(3))


def test_several_files_are_one_data_set(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", text_rows(3))
    second = write(tmp_path / "b.parquet", text_rows(5)[3:])
    prompts = Prompts(DataConfig(path=f"{first}, {second}", shuffle=False), seed=0)
    assert [prompts.row_for(group) for group in range(5)] == text_rows(5)


def test_parquet_values_become_json(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "prompt": ["x"],
            "score": [float("nan")],
            "image": pyarrow.array([b"\x00\x01"]),
            "when": pyarrow.array([0], type=pyarrow.timestamp("s")),
            "vector": [[1.0, 2.0]],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    row = Prompts(DataConfig(path=str(tmp_path / "a.parquet")), seed=0).row_for(0)
    assert row == {"prompt": "x", "score": None, "when": "1970-01-01 00:00:00", "vector": [1.0, 2.0]}
    assert plain_value({"a": np.arange(2), "b": (np.float32(1.0), None)}) == {"a": [0, 1], "b": [1.0, None]}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": \n', "a.jsonl:2"),
        ("a.json", '{"prompt": "x"}', "not a list"),
        ("a.jsonl", "", "no rows"),
        ("a.jsonl", '{"question": "x", "answer": "y"}\n', "answer, question"),
        ("a.jsonl", '"text"\n', "row 0 is a str"),
        ("a.csv", "prompt\nx\n", ".csv"),
        ("a.parquet", "not parquet", "a.parquet"),
        ("a.json", "[1", "a.json"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        Prompts(DataConfig(path=str(tmp_path / name)), seed=0)
    assert caught.value.code == "config.data" and words in caught.value.render()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.parquet"):
        Prompts(DataConfig(path=str(tmp_path / "absent.parquet")), seed=0)


# ---------------------------------------------------------------- the mapping


def test_every_epoch_is_a_permutation_of_its_own(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.jsonl", text_rows(50)))
    prompts = Prompts(DataConfig(path=path), seed=3)
    epochs = [[prompts.row_for(50 * epoch + place)["prompt"] for place in range(50)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(row["prompt"] for row in text_rows(50))
    assert epochs[0] != epochs[1] != epochs[2]
    again, other = Prompts(DataConfig(path=path), seed=3), Prompts(DataConfig(path=path), seed=4)
    backwards = [again.row_for(group)["prompt"] for group in reversed(range(150))][::-1]
    assert backwards == [prompt for epoch in epochs for prompt in epoch]
    assert [other.row_for(group)["prompt"] for group in range(50)] != epochs[0]


def test_without_shuffle_the_order_is_that_of_the_file(tmp_path: Path) -> None:
    prompts = Prompts(DataConfig(path=str(write(tmp_path / "a.jsonl", text_rows(5))), shuffle=False), seed=3)
    assert prompts.row_for(12) == text_rows(5)[2]  # 12 = 2 x 5 + 2


taken: list[int] = []


def endless() -> Iterator[dict[str, Any]]:
    for number in itertools.count():
        taken.append(number)
        yield {"prompt": f"p{number}"}


def four() -> Iterator[dict[str, Any]]:
    yield from text_rows(4)


def as_list() -> list[dict[str, Any]]:
    return text_rows(4)


def nothing() -> Iterator[dict[str, Any]]:
    return iter(())


def number() -> int:
    return 3


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_an_endless_source_is_read_as_far_as_needed() -> None:
    import test_prompts as module

    module.taken.clear()
    prompts = Prompts(DataConfig(source="test_prompts:endless"), seed=0)
    assert prompts.row_for(10) == {"prompt": "p10"} and len(module.taken) == 11
    assert prompts.row_for(3) == {"prompt": "p3"} and len(module.taken) == 11


def test_an_iterable_that_ends_starts_again_permuted() -> None:
    prompts = Prompts(DataConfig(source="test_prompts:four"), seed=1)
    assert [prompts.row_for(group) for group in range(4)] == text_rows(4)
    later = [prompts.row_for(group)["prompt"] for group in range(4, 40)]
    assert all(sorted(later[at : at + 4]) == sorted(r["prompt"] for r in text_rows(4)) for at in range(0, 36, 4))
    jumped = Prompts(DataConfig(source="test_prompts:four"), seed=1)
    assert [jumped.row_for(group)["prompt"] for group in range(39, 3, -1)][::-1] == later


def test_a_source_with_a_length_is_permuted_from_the_start() -> None:
    prompts = Prompts(DataConfig(source="test_prompts:as_list"), seed=0)
    assert sorted(prompts.row_for(group)["prompt"] for group in range(4)) == sorted(r["prompt"] for r in text_rows(4))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("test_prompts:nothing", "no rows"),
        ("test_prompts:number", "int"),
        ("test_prompts:absent", "absent"),
        ("no_such_module:f", "no_such_module"),
    ],
)
def test_what_is_wrong_with_a_source_is_named(source: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Prompts(DataConfig(source=source), seed=0)
    assert caught.value.code == "config.data" and words in caught.value.render()


# ---------------------------------------------------------------- token ids


def test_plain_text_is_encoded_as_it_is(folder: Path) -> None:
    tokenizer = Tokenizer(folder, trust_remote_code=False)
    ids = encode_prompt({"prompt": "12+7="}, DataConfig(path="x"), tokenizer)
    assert ids.dtype == np.int32 and ids.tolist() == ids_of("12+7=")
    assert tokenizer.decode([1, *ids.tolist(), 2]) == "1 2 + 7 =" and tokenizer.eos_ids == (2,)


def test_a_bos_comes_only_where_the_tokenizer_adds_one_and_an_eos_never(tmp_path: Path) -> None:
    with_bos = Tokenizer(make_tokenizer(tmp_path / "a", bos=True), trust_remote_code=False)
    with_both = Tokenizer(make_tokenizer(tmp_path / "b", bos=True, eos=True), trust_remote_code=False)
    assert with_bos.encode("1+") == with_both.encode("1+") == [1, *ids_of("1+")]


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_chat_messages_go_through_the_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_tokenizer(tmp_path / "chat", bos=True, template=TEMPLATE), trust_remote_code=False)
    row = {"prompt": [{"role": "user", "content": "hi"}]}
    ids = encode_prompt(row, DataConfig(path="x"), tokenizer).tolist()
    assert ids == ids_of("<user>hi\n<assistant>")  # the template writes all special tokens: no BOS on top


def test_chat_messages_without_a_template_or_switched_off_stop_the_run(folder: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "hi"}]}
    with pytest.raises(ConfigError, match="no chat template") as caught:
        encode_prompt(row, DataConfig(path="x"), Tokenizer(folder, trust_remote_code=False))
    assert caught.value.code == "config.tokenizer"
    with pytest.raises(ConfigError, match="chat_template is off") as caught:
        encode_prompt(row, DataConfig(path="x", chat_template=False), Tokenizer(folder, trust_remote_code=False))
    assert caught.value.code == "config.data"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("1" * 9, "too_long: 9 tokens"),
        ("", "no tokens"),
        (None, "missing"),
        (7, "a int"),
        ([], "a list"),
        (["text"], "a list"),
    ],
)
def test_a_bad_row_has_a_reason(folder: Path, prompt: Any, reason: str) -> None:
    with pytest.raises(BadPrompt) as caught:
        encode_prompt(
            {"prompt": prompt}, DataConfig(path="x", max_prompt_tokens=8), Tokenizer(folder, trust_remote_code=False)
        )
    assert reason in caught.value.reason


def test_a_row_that_template_or_tokenizer_refuses_is_a_bad_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(folder, trust_remote_code=False)
    refuses = "{% if messages[0].role != 'user' %}{{ raise_exception('no system messages') }}{% endif %}"
    tokenizer.transformers().chat_template = refuses + "{{ messages[0].content + '.' }}"
    data = DataConfig(path="x")
    for message in ({"role": "system", "content": "hi"}, {"role": "user", "content": None}):
        with pytest.raises(BadPrompt, match="template: it refuses the messages"):
            encode_prompt({"prompt": [message]}, data, tokenizer)
    assert encode_prompt({"prompt": [{"role": "user", "content": "1"}]}, data, tokenizer).size

    def encode(text: str) -> list[int]:
        raise Exception("Missing [UNK] token from the vocabulary")

    monkeypatch.setattr(tokenizer, "encode", encode)
    with pytest.raises(BadPrompt, match="UNK"):
        encode_prompt({"prompt": "x"}, data, tokenizer)


def test_all_ends_of_sequence_count(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": None, "text_config": {"eos_token_id": 7}}))
    assert Tokenizer(folder, trust_remote_code=False).eos_ids == (2, 5, 7)


def test_a_tokenizer_that_cannot_be_used_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="end of sequence") as caught:
        Tokenizer(folder, trust_remote_code=False)
    assert caught.value.code == "config.tokenizer"
    (folder / "tokenizer.json").write_text("{}")
    for place in (folder, tmp_path / "absent"):
        with pytest.raises(ConfigError) as caught:
            Tokenizer(place, trust_remote_code=False)
        assert caught.value.code == "config.tokenizer"


# ---------------------------------------------------------------- chats


@pytest.mark.parametrize(
    ("prompt", "settings", "roles"),
    [
        ("2+2", {}, None),
        ("2+2", {"as_chat": True}, ["user"]),
        ("2+2", {"as_chat": True, "system_prompt": "Be brief."}, ["system", "user"]),
        ("2+2", {"system_prompt": "Be brief."}, None),  # a plain text has no messages
        ([{"role": "user", "content": "2+2"}], {"system_prompt": "Be brief."}, ["system", "user"]),
        (
            [{"role": "system", "content": "x"}, {"role": "user", "content": "q"}],
            {"system_prompt": "y"},
            ["system", "user"],
        ),
    ],
)
def test_texts_become_chats_and_get_a_system_prompt(
    tmp_path: Path, prompt: Any, settings: dict[str, Any], roles: list[str] | None
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "answer": "4"}))
    row = Prompts(DataConfig(path=str(path), **settings), seed=0).row_for(0)
    assert row["answer"] == "4"
    if roles is None:
        assert row["prompt"] == prompt
    else:
        assert [message["role"] for message in row["prompt"]] == roles
        first = "x" if isinstance(prompt, list) and len(prompt) == 2 else "Be brief."
        assert row["prompt"][0]["content"] == (first if roles[0] == "system" else "2+2")


def test_a_text_as_chat_is_rendered_by_the_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}|"
    tokenizer = Tokenizer(make_tokenizer(tmp_path / "model", template=template), trust_remote_code=False)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "2+2"}))
    data = DataConfig(path=str(path), as_chat=True, system_prompt="sys")
    ids = encode_prompt(Prompts(data, seed=0).row_for(0), data, tokenizer)
    assert ids.tolist() == [VOCABULARY[character] for character in "<sys><2+2>|"]


# ---------------------------------------------------------------- several data sets


def mixed(tmp_path: Path, ratios: list[int], sizes: tuple[int, ...] = (7, 50, 3), **more: Any) -> Prompts:
    paths = []
    for part, size in enumerate(sizes):
        path = tmp_path / f"{'abc'[part]}.jsonl"
        path.write_text(
            "".join(json.dumps({"prompt": f"{number}", "data_source": "abc"[part]}) + "\n" for number in range(size))
        )
        paths.append(str(path))
    return Prompts(DataConfig(path=",".join(paths), ratios=tuple(ratios), **more), seed=3)


@pytest.mark.parametrize("ratios", [[5, 3, 2], [50, 30, 20], [1, 1, 1], [97, 2, 1], [1, 60, 7]])
def test_data_sets_are_mixed_exactly_at_every_moment(tmp_path: Path, ratios: list[int]) -> None:
    prompts = mixed(tmp_path, ratios)
    counts = dict.fromkeys("abc", 0)
    for group in range(400):
        counts[prompts.row_for(group)["data_source"]] += 1
        for name, ratio in zip("abc", ratios, strict=True):
            assert abs(counts[name] - (group + 1) * ratio / sum(ratios)) < 1, (group, counts)


def test_each_data_set_has_its_own_epochs(tmp_path: Path) -> None:
    prompts = mixed(tmp_path, [5, 3, 2])
    rows = [prompts.row_for(group) for group in range(400)]
    for name, size in zip("abc", (7, 50, 3), strict=True):
        mine = [int(row["prompt"]) for row in rows if row["data_source"] == name]
        for start in range(0, len(mine) - size + 1, size):
            assert sorted(mine[start : start + size]) == list(range(size)), (name, start)
    again = mixed(tmp_path, [5, 3, 2])
    assert [again.row_for(group) for group in (399, 12, 260, 3)] == [rows[group] for group in (399, 12, 260, 3)]
    plain = mixed(tmp_path, [1, 1, 1], shuffle=False)
    assert [plain.row_for(group)["prompt"] for group in (0, 3, 6)] == ["0", "1", "2"]


def test_an_empty_part_of_a_mix_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="part 2 has no rows"):
        mixed(tmp_path, [1, 1, 1], (3, 0, 2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["data.path=a.jsonl,b.jsonl", "data.ratios=[1]"], "1 numbers, data.path has 2 parts"),
        (["data.path=a.jsonl,b.jsonl", "data.ratios=[1, 100000]"], "at most 100000"),
        (["data.path=a.jsonl,b.jsonl", "data.ratios=[1, 1]", "data.epochs=2"], "use either"),
        (["data.path=a.jsonl,b.jsonl", "data.ratios=[1, 1]", "data.sampler=m:f"], "use either"),
    ],
)
def test_ratios_that_cannot_be_kept(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        parse(BARE, overrides=settings)
    assert any(words in error.message for error in caught.value.errors), caught.value.errors
