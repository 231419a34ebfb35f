"""Writes the reference pages (configuration, errors, metrics, wire, commands) from the code: `make docs`.

A test checks drift.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import re
import typing
from pathlib import Path
from typing import Any

import msgspec

from asyncrl import cli, config, errors, metrics, wire
from asyncrl.config import capabilities, media, presets
from asyncrl.config.features import FEATURES, OF_ENGINES, OF_LEARNERS
from asyncrl.config.json_schema import field_meanings
from asyncrl.config.mode import explain_update
from asyncrl.config.sections import algorithm_catalogue as algorithms
from asyncrl.config.sections.base import names_in
from asyncrl.configure import preset_pages
from asyncrl.configure.explain import error_texts

FOLDER = Path(__file__).parent


def configuration() -> str:
    """One table per section; the meaning is the comment beside the field."""
    parts = [
        "# Configuration",
        "",
        "Generated from `asyncrl/config/__init__.py`. One TOML for all roles; `--set key=value` wins.",
    ]
    for path, kind in sections(config.Config, ""):
        title = (kind.__doc__ or "").strip().splitlines()[0]
        parts += ["", f"## {title}", "", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        comments = field_meanings(kind)
        hints = typing.get_type_hints(kind, include_extras=True)
        for item in msgspec.structs.fields(kind):
            if is_section(hints[item.name]):
                continue
            default = "required" if item.required else f"`{show(item)}`"
            row = [f"`{path}{item.name}`", type_name(hints[item.name]), default, comments.get(item.name, "")]
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(parts) + "\n"


def sections(kind: type, prefix: str) -> list[tuple[str, type]]:
    """Every section with its dotted prefix, in order."""
    found: list[tuple[str, type]] = []
    hints = typing.get_type_hints(kind)
    for item in msgspec.structs.fields(kind):
        if inner := is_section(hints[item.name]):
            name = f"{prefix}{item.name}."
            found += [(name, inner), *sections(inner, name)]
    return found


def is_section(hint: object) -> type | None:
    """The section type behind a hint, if it is one (or a tuple of one)."""
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
    return inner if isinstance(inner, type) and issubclass(inner, config.Section) else None


def type_name(hint: object) -> str:
    """A short name of a type."""
    if names := names_in(hint):
        return " / ".join(f"`{name}`" for name in (*names, "module:name"))
    if typing.get_origin(hint) is typing.Annotated:
        return type_name(typing.get_args(hint)[0])
    if typing.get_origin(hint) is typing.Literal:
        return " / ".join(f"`{option}`" for option in typing.get_args(hint))
    if typing.get_origin(hint) is dict:
        return "table"
    if args := typing.get_args(hint):
        return " or ".join(type_name(arg) for arg in args if arg is not Ellipsis)
    return getattr(hint, "__name__", str(hint))


def show(item: msgspec.structs.FieldInfo) -> str:
    """The default as TOML shows it."""
    value = item.default if item.default is not msgspec.NODEFAULT else item.default_factory()  # type: ignore[misc]
    return msgspec.json.encode(value).decode()


def error_codes() -> str:
    """The table of codes."""
    rows = [
        "# Errors",
        "",
        "Generated from `asyncrl/errors.py` and `asyncrl/configure/error_texts.toml`; `asyncrl explain CODE`",
        "prints the same. Exit codes 0, 2, 65, 75 and 78 are final; a supervisor restarts after the others within",
        "a budget.",
        "",
        "| code | meaning | what to do | exit code |",
        "| --- | --- | --- | --- |",
    ]
    rows += [
        f"| `{code}` | {info.title} | {info.remedy} | {info.exit_code} |" for code, info in errors.CATALOGUE.items()
    ]
    for code, text in error_texts().items():
        rows += [
            "",
            f"## `{code}`: {errors.CATALOGUE[code].title}",
            "",
            text.cause,
            "",
            "```",
            text.example,
            "```",
            "",
            text.do,
        ]
    return "\n".join(rows) + "\n"


def command_line() -> str:
    """Every command with its arguments, options and example."""
    rows = [
        "# Command line",
        "",
        "Generated from `asyncrl/commands`; `asyncrl COMMAND --help` prints the same.",
        "",
        "Mistakes are text and an exit code: 0 done, 1 failed, 2 wrong configuration or command, 65 what is made",
        "cannot be trained on, 69 something outside does not answer, 70 an internal error or a hang, 75 another",
        "process has taken over, 78 the peers do not fit ([errors](errors.md)).",
        "",
        "| command | what it does |",
        "| --- | --- |",
    ]
    commands = subcommands(cli.parser())
    rows += [f"| [`asyncrl {name}`](#asyncrl-{name}) | {cell(text)} |" for name, (_, text) in commands.items()]
    for name, (one, _) in commands.items():
        usage = " ".join(one.format_usage().removeprefix("usage: ").replace("[-h] ", "").split())
        rows += ["", f"## `asyncrl {name}`", "", one.description or "", "", "```", usage, "```", ""]
        rows += ["| argument | meaning |", "| --- | --- |"]
        rows += [
            f"| {argument(action)} | {cell(action.help or '')} |" for action in one._actions if action.dest != "help"
        ]
        rows += ["", "```", *(line.rstrip() for line in (one.epilog or "").strip().splitlines()), "```"]
    return "\n".join(rows) + "\n"


def subcommands(parser: argparse.ArgumentParser) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """Name -> its parser and what it says of itself in one line."""
    [group] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    texts = {choice.dest: choice.help or "" for choice in group._choices_actions}
    return {name: (one, texts[name]) for name, one in group.choices.items()}


def argument(action: argparse.Action) -> str:
    """`--set KEY=VALUE`, or the name of a positional argument."""
    value = action.metavar if isinstance(action.metavar, str) else ""
    if not action.option_strings:
        return f"`{value or action.dest}`"
    if action.nargs == 0:
        return ", ".join(f"`{option}`" for option in action.option_strings)
    shown = value or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper())
    return ", ".join(f"`{option} {shown}`" for option in action.option_strings)


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return text.replace("%%", "%").replace("|", "\\|")


def metric_names() -> str:
    """The table of metrics."""
    rows = [
        "# Metrics",
        "",
        "Generated from `asyncrl/metrics/__init__.py`. Files: `metrics/*.jsonl` in the run folder.",
        "",
        "| name | unit | written by | meaning |",
        "| --- | --- | --- | --- |",
    ]
    rows += [f"| `{name}` | {m.unit} | {m.role} | {m.meaning} |" for name, m in metrics.CATALOGUE.items()]
    return "\n".join(rows) + "\n"


def wire_messages() -> str:
    """Every message with its fields in order."""
    parts = [
        "# Wire protocol",
        "",
        f"Generated from `asyncrl/wire/`, schema {wire.SCHEMA}. ZeroMQ: DEALER asks, ROUTER",
        "answers. A message is `[prefix][header][payload]...`:",
        "",
        "- prefix, 32 bytes little-endian: `magic 4s = ARL1, schema u8, kind u8",
        "  (0 request, 1 reply, 2 request that takes `Replies`),",
        "  payload frames u16, request u64, payload bytes u64, check u64`: xxh3_64 of header and payloads, xor that of",
        "  the prefix before it;",
        "- header: msgpack array `[tag, field, field, ...]` in the order below; surplus fields are refused;",
        "- payload: field-major arrays, little-endian, each start aligned to 64 bytes, named in the header.",
        "",
        "A reply carries the request's number. A request may be sent again with the same number: services are",
        "idempotent. Conformance vectors for other languages: `tests/vectors/wire.json` (other-languages.md).",
    ]
    for kind in typing.get_args(wire.AnyMessage):
        parts += ["", f"## {kind.__struct_config__.tag}: {kind.__name__}", "", inspect.getdoc(kind) or "", ""]
        comments = field_meanings(kind)
        for item in msgspec.structs.fields(kind):
            note = f": {comments[item.name]}" if item.name in comments else ""
            parts.append(f"- `{item.name}` ({plain(item.type)}){note}")
    return "\n".join(parts) + "\n"


def security() -> str:
    """`docs/security.md` with the table of roles and messages."""
    from asyncrl.net.auth import ALLOWED
    from asyncrl.net.keys import GUESTS, OWNER

    roles = (OWNER, *GUESTS)
    lines = ["| message | " + " | ".join(roles) + " |", "| --- |" + " --- |" * len(roles)]
    for kind, allowed in ALLOWED.items():
        marks = ("as its own role" if role != OWNER else "yes" for role in roles)
        if kind not in (wire.Hello, wire.Heartbeat):
            marks = ("yes" if role in allowed else "-" for role in roles)
        lines.append(f"| `{kind.__name__}` | " + " | ".join(marks) + " |")
    begin, end = "<!-- begin: messages by role -->", "<!-- end: messages by role -->"
    before, _, rest = (FOLDER / "security.md").read_text().partition(begin)
    return "\n".join([before + begin, *lines, end]) + rest.partition(end)[2]


def algorithm_names() -> str:
    """Names, options, papers and presets, from the tables, the signatures and the files."""
    parts = [
        "# Algorithms",
        "",
        "Generated from `asyncrl/config/sections/algorithm_catalogue.py`, signatures in `learners/algorithms` and",
        "`configs/presets`. What is chosen by name under `[learner.algorithm]`; options go into `advantage_options`,",
        "`loss_options` and `correction_options`, where the word `off` stands for no value. Your own are",
        "named by their place, `module:name` or `file.py:name` ([examples](own-parts.md#a-loss));",
        "`asyncrl check` explains what does not fit together.",
    ]
    for kind, entries in algorithms.TABLES.items():
        parts += ["", f"## {kind}", "", "| name | options | needs | arXiv |", "| --- | --- | --- | --- |"]
        for name, entry in entries.items():
            known = algorithms.option_types()[kind][name]
            options = ", ".join(f"`{key} = {_toml(option['default'])}`" for key, option in known.items())
            parts.append(f"| `{name}` | {options} | {_needs(entry)} | {entry.paper} |")
    parts += [
        "",
        "## Presets",
        "",
        '`preset = "NAME"` under `[learner.algorithm]`, or `--preset NAME`. Settings of',
        "your file win over a preset that it names; a preset of the command line wins over the file.",
        "",
        "Values of the paper that depend on model and data are advice: `asyncrl presets NAME` prints them, and nothing",
        "sets them. They were collected by hand from papers and published scripts; a missing one was not found. A",
        "preset asks for at most as many updates per batch as `buffer.batch_groups`.",
        "",
        "| name | what | algorithm | where in the paper | acts | the paper's values, not set |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in presets.names():
        recipe = presets.load_recipe(name)
        advice = ", ".join(
            f"`{key.rpartition('.')[2]} = {value}`" for key, value in preset_pages.list_advice(name).items()
        )
        cells = (
            presets.read_title(name),
            f"`{explain_update(preset_pages.config_of(name))}`",
            recipe.equation,
            f"`{recipe.acts}`",
            advice,
        )
        parts.append(f"| `{name}` | " + " | ".join(cells) + " |")
    parts += ["", "### Differences from the papers", ""]
    parts += [f"- `{name}`: {'; '.join(preset_pages.list_differences(name))}." for name in presets.names()]
    return "\n".join(parts) + "\n"


def _toml(default: object) -> str:
    return default if default == "required" else msgspec.json.encode(default).decode()


def _needs(entry: algorithms.Entry) -> str:
    words = list(entry.needs)
    if entry.aggregation:
        words.append(f"aggregation {entry.aggregation}")
    if entry.ratio == "behaviour":
        words.append("correction none")
    return ", ".join(words)


def capability_tables() -> str:
    """What back-ends, engines, devices and readers of data refuse."""

    def answer(part: str, name: str) -> str:
        if name in capabilities.UNUSED.get(part, ()):
            return "no effect"
        why = capabilities.REFUSED[part].get(name)
        return f"refused: {cell(why[0])}; {cell(why[1])}" if why else "yes"

    parts = [
        "# Capabilities",
        "",
        "Generated from `asyncrl/config/capabilities.py`. `asyncrl check` and the roles at their start refuse what",
        "these tables refuse, from the same data. Sizes that do not divide, and settings that exclude each other, are",
        "checked too and explained where they occur. Engines and back-ends of other packages refuse by themselves.",
    ]
    tables = (
        ("Back-ends (`learner.backend`)", capabilities.BACKENDS, OF_LEARNERS),
        ("Engines (`producers.engine`)", capabilities.ENGINES, OF_ENGINES),
    )
    for title, names, asked in tables:
        parts += ["", f"## {title}", "", f"| | {' | '.join(names)} |", f"|{' --- |' * (len(names) + 1)}"]
        parts += [f"| {FEATURES[one].title} | {' | '.join(answer(name, one) for name in names)} |" for one in asked]
    kinds, needs = capabilities.DEVICES, {name: one.needs for name, one in FEATURES.items() if one.needs}
    parts += ["", "## Devices (`learner.device`)", "", f"| | {' | '.join(kinds)} |", f"|{' --- |' * (len(kinds) + 1)}"]
    parts += [
        f"| {FEATURES[name].title} | "
        + " | ".join("yes" if need in kinds[kind] else f"refused: needs {need}" for kind in kinds)
        + " |"
        for name, need in needs.items()
    ]
    parts += [
        "",
        f"Other names ({', '.join(capabilities.OTHER_NAMES)}) are refused: torch calls AMD's devices `cuda`.",
        "`auto` is the device of the machine that checks or starts.",
        "",
        "## Rows of the data",
        "",
        "Prompts may hold images for a model that sees them ([images](images.md)). Video files and audio are refused.",
        "",
        "For any other model rows are text. A row is refused if a column",
        f"{', '.join(f'`{name}`' for name in media.MEDIA_COLUMNS)}",
        f"is not empty, or if the type or a key of a part of a message contains {', '.join(media.MEDIA_WORDS)}.",
        "`asyncrl check` searches the files; every reader refuses too: prompts, held-out prompts, and rows for SFT,",
        "preferences and reward models.",
    ]
    return "\n".join(parts) + "\n"


def option_data() -> str:
    """`asyncrl/config/sections/algorithm_options.json`: needs torch."""
    from learners.algorithms.registry import option_table

    return msgspec.json.format(msgspec.json.encode(option_table()), indent=1).decode() + "\n"


def plain(hint: object) -> str:
    """A type as text without module names."""
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    text = re.sub(r"typing\.Annotated\[int, msgspec\.Meta\(ge=(-?\d), le=\d+\)\]", r"int from \1 to 2^62", text)
    text = re.sub(r"typing\.Annotated\[str, msgspec\.Meta\(max_length=(\d+)\)\]", r"str of at most \1 characters", text)
    return re.sub(r"asyncrl\.wire\.\w+\.", "", text).replace("|", "or")


def status_schema() -> str:
    """`docs/status.schema.json`: the form of `asyncrl status --json`."""
    from asyncrl.monitor.status_schema import schema_text

    return schema_text()


def load_script(name: str) -> Any:
    """A module of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def architecture_drawing() -> str:
    """`docs/images/architecture-imports.svg`."""
    drawing: str = load_script("draw_architecture").draw()
    return drawing


PAGES = {
    "status.schema.json": status_schema,
    "configuration.md": configuration,
    "errors.md": error_codes,
    "metrics.md": metric_names,
    "wire.md": wire_messages,
    "security.md": security,
    "../asyncrl/config/sections/algorithm_options.json": option_data,
    "algorithms.md": algorithm_names,
    "capabilities.md": capability_tables,
    "matrix.md": load_script("matrix_page").make_page,
    "cli.md": command_line,
    "images/architecture-imports.svg": architecture_drawing,
    **{f"images/gallery-{name}.svg": draw for name, draw in load_script("draw_gallery").PICTURES.items()},
    **{f"images/growth-{name}.svg": draw for name, draw in load_script("draw_growth").PICTURES.items()},
    **{f"images/{name}.svg": draw for name, draw in load_script("draw_mechanisms").PICTURES.items()},
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make())
