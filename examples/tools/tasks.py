"""Tasks that a tiny model solves with a tool, a teacher that makes mistakes, and their reward.

Pure Python. Everything is a function of (tool, split, seed, index). The prompt is one message of the user; the answer
is a number that only the tool's answers tell. A village has numbers of people, wells and towers, which `fact` draws.

Example, tool `browser`: "wells of kodira?" -> open("kodira.html") shows "kodira\n[1] towers\n[2] people\n[3] wells"
-> click("wells") shows "37" -> "37".
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

TOOLS = ("python", "search", "shell", "mcp", "browser")
SPLITS = ("demonstrations", "train", "heldout")
FACTS = ("people", "wells", "towers")
VILLAGES, HELD_OUT = 1000, 100  # the last ones are only in held-out prompts
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
#: Each is one token of the tokenizer, in addition to the characters of ASCII; a longer one comes before its beginning.
WORDS = (
    '<tool_call>{"name": "', '", "arguments": {"', '"}}</tool_call>', '": "', '", "',
    "browser_open", "browser_click", "python", "search", "shell", "lookup",
    "command", "village", "query", "code", "page", "target", "fact",
    "people", "wells", "towers", ".html", ": ", "[1] ", "[2] ", "[3] ",
    "seq ", " > n", "grep -c ", " n", " with ", " of ", "assistant", "user", "tool", "system",
)  # fmt: skip


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, str]


class Task(NamedTuple):
    """A prompt, the calls that solve it, and the answer."""

    prompt: str
    calls: tuple[Call, ...]
    answer: str


def village(number: int) -> str:
    """The name of a village; another one for each number below 343,000."""
    rest, letters = number * 123_457 % 343_000, ""  # coprime
    for alphabet in (CONSONANTS, VOWELS) * 3:
        rest, place = divmod(rest, len(alphabet))
        letters += alphabet[place]
    return letters


def fact(name: str, kind: str) -> str:
    """A number of a village, two or three digits."""
    return str(random.Random(f"examples/tools/{name}/{kind}").randint(11, 999))


def links(name: str) -> list[str]:
    """The links of the page of a village, in their order."""
    return random.Random(f"examples/tools/{name}/links").sample(FACTS, len(FACTS))


def document(name: str, kind: str) -> str:
    """What the corpus says of a number of a village."""
    return f"{kind} of {name}: {fact(name, kind)}"


def task(tool: str, *, seed: int, index: int, split: str) -> Task:
    """Raises ValueError for an unknown tool or split."""
    if tool not in TOOLS or split not in SPLITS:
        raise ValueError(f"unknown tool {tool!r} or split {split!r}; known: {', '.join((*TOOLS, *SPLITS))}")
    rng = random.Random(f"examples/tools/{tool}/{split}/{seed}/{index}")
    if tool == "python":
        one, other, more = rng.randint(11, 99), rng.randint(11, 99), rng.randint(11, 99)
        calls = (Call("python", {"code": f"x={one}*{other}"}), Call("python", {"code": f"x+{more}"}))
        return Task(f"x={one}*{other}, x+{more}?", calls, str(one * other + more))
    if tool == "shell":
        first, last, digit = rng.randint(1, 49), rng.randint(50, 99), rng.randint(1, 9)
        found = str(sum(str(digit) in str(number) for number in range(first, last + 1)))
        made, counted = f"seq {first} {last} > n", f"grep -c {digit} n"
        calls = (Call("shell", {"command": made}), Call("shell", {"command": counted}))
        return Task(f"{first} {last} with {digit}?", calls, found)
    numbers = (VILLAGES - HELD_OUT, VILLAGES) if split == "heldout" else (0, VILLAGES - HELD_OUT)
    name, kind = village(rng.randrange(*numbers)), rng.choice(FACTS)
    calls = {
        "search": (Call("search", {"query": f"{kind} of {name}"}),),
        "mcp": (Call("lookup", {"village": name, "fact": kind}),),
        "browser": (Call("browser_open", {"page": f"{name}.html"}), Call("browser_click", {"target": kind})),
    }[tool]
    return Task(f"{kind} of {name}?", calls, fact(name, kind))


# ---------------------------------------------------------------- a teacher with mistakes


def demonstration(found: Task, *, noise: float, rng: random.Random) -> list[tuple[str, str]]:
    """Turns of the teacher, each with what the tool answers; the last turn, without a call, is the answer.

    `noise`: the chance of a guess instead of the calls, and of another fact; a tenth of it: that of a wrong character.
    """
    if rng.random() < noise:
        return [(str(rng.randint(11, 999)), "")]
    turns, shown, folder = list[tuple[str, str]](), "", dict[str, str]()
    for call in found.calls:
        given = {key: _miscopy(value, noise / 10, rng) for key, value in call.arguments.items()}
        if given.get("target", given.get("fact")) in FACTS and rng.random() < noise:
            given["target" if "target" in given else "fact"] = rng.choice(FACTS)
        shown = observe(call.name, given, folder)
        turns.append((call_text(call.name, given), shown))
    numbers = [word for word in shown.split() if word.isdigit()] or [str(rng.randint(11, 999))]
    return [*turns, (_miscopy(numbers[0], noise / 10, rng), "")]


def _miscopy(text: str, noise: float, rng: random.Random) -> str:
    """The text with wrong digits, and wrong letters in names of villages."""

    def changed(character: str, letters: str) -> str:
        pool = "123456789" if character.isdigit() else letters if character in letters else ""
        return rng.choice(pool) if pool and noise and rng.random() < noise else character

    words = []
    for word in text.split(" "):
        stem, dot, ending = word.partition(".")
        letters = CONSONANTS + VOWELS if stem in NAMES else ""
        words.append("".join(changed(character, letters) for character in stem) + dot + ending)
    return " ".join(words)


def call_text(name: str, arguments: dict[str, str]) -> str:
    """A call, as a policy writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


NAMES = frozenset(village(number) for number in range(VILLAGES))


def observe(tool: str, given: dict[str, str], state: dict[str, str]) -> str:
    """What the tool answers to a call of the teacher. `state` holds what earlier calls of the sample left."""
    if tool == "python":
        name, mark, product = given["code"].partition("=")
        if mark:
            one, other = product.split("*")
            state[name] = str(int(one) * int(other))
            return ""
        return f"{int(state['x']) + int(given['code'].partition('+')[2])}\n"
    if tool == "shell":
        words = given["command"].split()
        if words[0] == "seq":
            state["n"] = " ".join(map(str, range(int(words[1]), int(words[2]) + 1)))
            return ""
        found = sum(words[2] in number for number in state["n"].split())
        return f"{found}\n" if found else "0\n\n[exit code 1]"
    if tool == "search":
        kind, _, name = given["query"].split()
        return f"[1] {document(name if name in NAMES else village(0), kind)}"  # the first of all that hold the others
    if tool == "lookup":
        return fact(given["village"], given["fact"]) if given["village"] in NAMES else "error: unknown"
    if tool == "browser_open":
        state["page"] = given["page"].removesuffix(".html")
        if state["page"] not in NAMES:
            return "error: no such page"
        return "\n".join([state["page"], *(f"[{n}] {kind}" for n, kind in enumerate(links(state["page"]), start=1))])
    return fact(state["page"], given["target"]) if state["page"] in NAMES else "error: no page is open"


# ---------------------------------------------------------------- files


def rows(tool: str, size: int, seed: int, *, split: str) -> list[dict[str, Any]]:
    """`size` rows of prompts with verl's column names."""
    made = [task(tool, seed=seed, index=index, split=split) for index in range(size)]
    return [
        {
            "data_source": tool,
            "prompt": [{"role": "user", "content": found.prompt}],
            "reward_model": {"style": "rule", "ground_truth": found.answer},
            "extra_info": {"index": index, "split": split},
        }
        for index, found in enumerate(made)
    ]


def demonstration_rows(tool: str, size: int, seed: int, *, noise: float) -> list[dict[str, Any]]:
    """`size` rows with a turn of the teacher in column `response`; the prompt holds what came before it."""
    made: list[dict[str, Any]] = []
    index = 0
    while len(made) < size:
        rng = random.Random(f"examples/tools/teacher/{tool}/{seed}/{index}")
        found = task(tool, seed=seed, index=index, split="demonstrations")
        messages = [{"role": "user", "content": found.prompt}]
        for said, shown in demonstration(found, noise=noise, rng=rng):
            made.append({"data_source": tool, "prompt": messages, "response": said})
            messages = [*messages, {"role": "assistant", "content": said}, {"role": "tool", "content": shown}]
        index += 1
    return made[:size]


def write_corpus(path: Path) -> None:
    """The documents that the tool `search` finds."""
    pairs = [(village(number), kind) for number in range(VILLAGES) for kind in FACTS]
    path.write_text("".join(json.dumps({"text": document(*pair)}) + "\n" for pair in pairs))


def write_site(folder: Path) -> None:
    """The pages that the tool `browser` opens: one for each village, with links to its numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (village(number) for number in range(VILLAGES)):
        lines = "".join(f'<p><a href="{name}-{kind}.html">{kind}</a></p>' for kind in links(name))
        (folder / f"{name}.html").write_text(f"<!doctype html><title>{name}</title><p>{name}</p>{lines}")
        for kind in FACTS:
            (folder / f"{name}-{kind}.html").write_text(
                f"<!doctype html><title>{name}</title><p>{fact(name, kind)}</p>"
            )


def reward(sample: Any) -> float:
    """1.0 if the last turn is exactly the answer, else 0.0."""
    said = sample.turns[-1] if sample.turns else sample.response
    return float(said.strip() == str(sample.ground_truth))
