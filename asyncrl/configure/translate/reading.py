"""Settings of a launch script, a Python file, a TOML or a YAML file, by their full names. Nothing is run.

Guarantees:
1. scripts are split into words, with their own variables expanded; arrays of flags are read like the flags themselves;
2. Python is parsed: constants are read, other values are reported;
3. references of YAML (`${actor.path}`, `${oc.select:KEY,DEFAULT}`) are resolved within the file.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config.suggestions import flatten
from asyncrl.errors import UNREADABLE, ConfigError

VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^${}]*))?\}|\$(\w+)")
ARITHMETIC = re.compile(r"\$\[(.*?)\]")  # $((...)) is read as the older $[...]
NESTED = 4  # variables in the defaults of variables
OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
FLAG = re.compile(r"--([A-Za-z][\w.\-]*)(?:=(.*))?", re.DOTALL)
NO_VALUE = re.compile(r"\n|--|[()\\]|-[A-Za-z].*|.*\[@\].*|[|&;<>].*", re.DOTALL)  # ends the values of a flag
REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^}]*))?\}")
CALL = re.compile(r"(Config|Trainer|Arguments)$")  # calls in Python files: GRPOConfig(...), GRPOTrainer(...)
#: Arguments of calls that stand for whole objects, not for settings.
OBJECTS = ("args", "peft_config", "processing_class", "tokenizer", "callbacks", "config")
REFERENCES = 8  # references that lead to references

Settings = tuple[dict[str, Any], list[str]]


def read_settings(path: Path) -> Settings:
    """Settings of a file by full names, in order, and notes about non-constant values. Raises `config.file`."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return dict(flatten(tomllib.loads(text))), []
        if path.suffix in (".yaml", ".yml"):
            return read_yaml(text)
        return read_python(text) if path.suffix == ".py" else read_shell(text)
    except OSError as error:
        raise ConfigError("config.file", error.strerror or str(error), where=str(path)) from None
    except (SyntaxError, yaml.YAMLError, *UNREADABLE) as error:
        raise ConfigError("config.file", str(error), where=str(path)) from None


def read_yaml(text: str) -> Settings:
    """The first document that is a table, with its references resolved."""
    tree = next((one for one in yaml.safe_load_all(text) if isinstance(one, dict)), {})
    for _ in range(REFERENCES):
        tree = _resolve(tree, tree, ())
    given = dict(flatten(tree))
    # YAML 1.1 reads 1e-6, without a dot, as text
    return {key: parse_value(value) if isinstance(value, str) else value for key, value in given.items()}, []


def _resolve(value: Any, tree: Mapping[str, Any], at: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {str(key): _resolve(item, tree, (*at, str(key))) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    if whole := REFERENCE.fullmatch(value):
        found = _follow(tree, whole[1], at)
        return found if found is not None else value if whole[2] is None else parse_value(whole[2])
    return REFERENCE.sub(lambda part: str(_follow(tree, part[1], at) or part[0]), value)


def _follow(tree: Mapping[str, Any], name: str, at: tuple[str, ...]) -> Any:
    """The value of a reference; `.name` is relative to the table of the setting. None if there is none."""
    dots = len(name) - len(name.lstrip("."))
    node: Any = tree
    for part in (*(at[: len(at) - dots] if dots else ()), *filter(None, name.split("."))):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def read_python(text: str) -> Settings:
    """Constant keywords of calls such as `GRPOConfig(...)`."""
    given, notes = dict[str, Any](), list[str]()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not CALL.search(ast.unparse(node.func)):
            continue
        for keyword in node.keywords:
            if keyword.arg is None:
                continue
            try:
                given[keyword.arg] = ast.literal_eval(keyword.value)
            except ValueError:
                notes += _python_note(keyword.arg, ast.unparse(keyword.value))
    return given, notes


def _python_note(name: str, text: str) -> Iterator[str]:
    if name == "reward_funcs":
        yield f"reward_funcs = {text}: put them into a file that trains nothing; one [[reward]] for each"
    elif name in ("train_dataset", "eval_dataset"):
        where = "data.path" if name == "train_dataset" else "evaluation.path"
        yield f"{name} = {text}: save it with save_to_disk(FOLDER) or to_parquet(FILE), and name that in {where}"
    elif name not in OBJECTS:
        yield f"{name} = {text}: no constant"


def read_shell(text: str) -> Settings:
    """`key.of.hydra=value`, `--flag value` and `--flag=value` of a launch script, with its own variables expanded."""
    variables: dict[str, str] = {}
    given: dict[str, Any] = {}
    flag, values = "", list[str]()

    for raw in [*split_words(text), "\n"]:
        word = expand(raw, variables)
        found = FLAG.fullmatch(word)
        ends = found or OVERRIDE.fullmatch(word) or NO_VALUE.fullmatch(word)
        if flag and not ends and not (values and word.endswith(".py")):  # --nproc_per_node 8 train.py
            values.append(word)
            continue
        if flag:
            parsed = [parse_value(value) for value in values]
            given[flag] = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
            flag, values = "", []
        if found is not None:
            name = found[1] if "." in found[1] else found[1].replace("-", "_")
            if found[2] is None:
                flag = name
            else:
                given[name] = parse_value(found[2])
        elif found := OVERRIDE.fullmatch(word):
            variables[found[1]] = found[2]
            if "." in found[1]:
                given[found[1]] = parse_value(found[2])
    return given, []


def expand(word: str, variables: Mapping[str, str]) -> str:
    """The word with variables and arithmetic replaced; what is not known stays.

    >>> expand("$[1024 * N]/${DIR:-data}/$X", {"N": "2"})
    '2048/data/$X'
    """

    def value_of(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        return variables.get(name, os.environ.get(name, found[2] or found[0]))

    for _ in range(NESTED):
        word = VARIABLE.sub(value_of, word)
    return ARITHMETIC.sub(lambda found: _calculate(found, variables), word)


def _calculate(found: re.Match[str], variables: Mapping[str, str]) -> str:
    """A sum or product of whole numbers, by the rules of a shell."""
    text = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), found[1])
    if not re.fullmatch(r"[\d\s+\-*/%()]+", text) or "**" in text:
        return found[0]
    try:
        return str(int(_value(ast.parse(text.strip(), mode="eval").body)))
    except (SyntaxError, ZeroDivisionError, KeyError):
        return found[0]


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        sums = {ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__, ast.Mod: int.__mod__}
        return left // right if isinstance(node.op, ast.Div | ast.FloorDiv) else sums[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise KeyError(ast.dump(node))


def split_words(text: str) -> Iterator[str]:
    r"""The words of a script; ends of lines are words "\n". Lines that cannot be split are left out.

    >>> list(split_words("A=(--use-x 1)\nrun ${A[@]}  # start"))
    ['A=(', '--use-x', '1', ')', '\n', 'run', '${A[@]}']
    """
    text = re.sub(r"""(?m)^\s*#.*$|(?<=\s)#[^\n"']*$""", "", text).replace("\\\n", " ").replace("${#", "${")
    text = re.sub(r"\$\(\(([^\n]*?)\)\)(?!\))", lambda found: f"$[{re.sub(chr(32), '', found[1])}]", text)
    for _ in range(NESTED):
        text = re.sub(r"\$\([^()\n]*\)", "$COMMAND", text)  # its output is not known
    text = re.sub(r"(?m)(\w=\()", r"\1 ", text)  # NAME=( starts an array
    text = re.sub(r"(?m)(?<=[^\s$(])\)\s*$", " )", text) if "=( " in text else text
    try:
        yield from [*_lex(text)]
    except ValueError:  # a quote that is left open: line by line
        for line in text.splitlines():
            try:
                yield from [*_lex(line), "\n"]
            except ValueError:
                continue


def _lex(text: str) -> Iterator[str]:
    words = shlex.shlex(text, posix=True, punctuation_chars="\n")
    words.whitespace, words.whitespace_split = " \t\r", True
    for word in words:
        yield "\n" if word.strip("\n") == "" and word else word


def parse_value(text: str) -> Any:
    """Parse a value as Hydra does: `True`, `null`, `1e-6`, `[a.parquet,b.parquet]`, else text."""
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        inner = re.fullmatch(r"\[(.*)\]", text)
        return [part.strip(" '\"") for part in inner[1].split(",")] if inner else text
