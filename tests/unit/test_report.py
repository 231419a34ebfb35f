"""The report of a synthetic run: complete, self-contained, escaped."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from synthetic_run import check_names, write_run

from asyncrl.launcher.progress import step_text
from asyncrl.metrics import drop_repeated_steps
from asyncrl.process_plan.plan import Outcome
from asyncrl.report import write_report
from asyncrl.report.data import ENDS, load_run, summary
from asyncrl.report.svg import Line, bar_chart, line_chart, short, stacked_chart, thin, ticks
from asyncrl.report.svg_time import Lane, Share, flow, lanes
from asyncrl.runtime.run_dir import RunDir

VOID = {"meta", "br", "input"}  # drawings close theirs themselves


class Tree(HTMLParser):
    """Checks that elements are closed in order; collects tags and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parsed(text: str) -> Tree:
    tree = Tree()
    tree.feed(text)
    assert tree.open == []
    return tree


def test_report_is_whole_and_self_contained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    check_names(run)
    path = write_report(run)
    assert path == run.report
    text = path.read_text()
    tree = parsed(text)
    assert {link[:1] for link in tree.links} == {"#"} and "@import" not in text and "url(" not in text
    assert {link[1:] for link in tree.links} <= set(re.findall(r'id="(\w+)"', text))
    assert not re.search(r"https?://", text)
    assert tree.tags.count("script") == 1  # ours: the model's words stay words
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text
    assert "synthetic &lt;run&gt;" in text
    words = " ".join(tree.texts)
    for title in (
        "Reward",
        "Staleness by step",
        "Work over time",
        "Queue",
        "Weight sync",
        "Ledger",
        "Processes",
        "Faults and restarts",
        "Samples",
        "Configuration",
        "Versions",
    ):
        assert title in words, title
    assert "complete" in words and "nothing lost" in words
    assert tree.tags.count("svg") >= 12
    assert len(text) < 400_000
    assert "212" in words and "MFU 0.250 (0.125 of whole steps)" in words


def test_the_parts_of_a_step_are_one_bar(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path / "run")).read_text()
    card = text[text.index("Where the learner's time went".replace("'", "&#x27;")) :]
    bar = card[card.index("<svg") : card.index("</svg>")]
    widths = [float(width) for width in re.findall(r'width="([\d.]+)"', bar)]
    assert len(widths) == 8 and abs(sum(widths) - 1000) < 0.1 and max(widths) == widths[4]
    shares = [float(share) for share in re.findall(r" ([\d.]+)%</span>", card[: card.index("<svg")])]
    assert len(shares) == 8 and abs(sum(shares) - 100) < 0.5


def test_charts_carry_their_values(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path / "run", steps=12)).read_text()
    charts = [json.loads(found.replace("&quot;", '"')) for found in re.findall(r"data-chart='([^']*)'", text)]
    rewards = next(chart for chart in charts if chart["lines"][0]["name"] == "reward")
    assert [point[0] for point in rewards["lines"][0]["points"]] == list(range(1, 13))


def test_changed_settings_are_marked(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path / "run")).read_text()
    assert '<td class="changed">buffer.batch_groups</td>' in text
    assert '<td class="changed">buffer.on_late</td>' not in text


def test_violations_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lines = run.history.read_bytes().splitlines(keepends=True)
    run.history.write_bytes(b"".join(line for line in lines if b'"drop"' not in line))
    text = write_report(run).read_text()
    assert "violations" in text and "lost:" in text and "verdict bad" in text


def test_empty_folder_still_gives_a_page(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "empty").create()
    parsed(write_report(run, out=tmp_path / "page.html").read_text())


def test_summary_states_the_numbers(tmp_path: Path) -> None:
    data = load_run(write_run(tmp_path / "run"))
    text = "\n".join(summary(data, Outcome(code=0, reason="done", wall_s=71.5, restarts={"producer-1": 1})))
    assert "71.5 s, step 60 of 60; restarts: producer-1 1" in text
    assert "issued 121 = trained 120 + dropped 1" in text and "audit     OK" in text
    assert "122 deliveries acknowledged with the right digest, 0 with another" in text


def test_the_end_of_a_run_that_learned_nothing_says_why(tmp_path: Path) -> None:
    data, outcome = load_run(write_run(tmp_path / "run")), Outcome(code=0, reason="done", wall_s=1.0)
    assert not any(line.startswith("hint") for line in summary(data, outcome))
    for line in data.steps[-ENDS:]:
        line |= {"zero_advantage_share": 1.0, "truncated_share": 0.5}
    (hint,) = [line for line in summary(data, outcome) if line.startswith("hint")]
    assert "100% of the last groups have one reward" in hint and "50% of the last samples are cut" in hint


def test_a_worker_that_was_given_up_is_named_everywhere(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=5)
    run.result.write_text('{"done": true, "code": 0, "reason": "done", "given_up": {"producer-1": 137}}')
    with (run.logs / "launch.jsonl").open("a") as file:
        file.write('{"t": 1760000031, "event": "given up", "name": "producer-1", "role": "producer", "code": 137}\n')
    page = write_report(run).read_text()
    assert "went on without producer-1 (code 137)" in page and ">given up<" in page
    outcome = Outcome(code=0, reason="done", wall_s=1.0, given_up={"producer-1": 137})
    assert "given up  producer-1 (code 137): the run went on without" in summary(load_run(run), outcome)


def test_deliveries_are_told_apart(tmp_path: Path) -> None:
    data = load_run(write_run(tmp_path / "run", steps=3))
    data.rounds = [{"digest": "a", "members": {"x": "a", "y": "holds digest b, not a", "z": "no answer within 30 s"}}]
    assert data.deliveries() == (1, 1, 1)


def test_steps_trained_again_replace_the_first_time() -> None:
    lines = [{"step": step, "x": x} for step, x in ((1, 1), (2, 2), (3, 3), (2, 4), (3, 5))]
    assert [line["x"] for line in drop_repeated_steps([*lines, {"no": "step"}])] == [1, 4, 5]


def test_drawings() -> None:
    assert ticks(0, 1) == [0, 0.5, 1.0] or len(ticks(0, 1)) in range(3, 7)
    assert ticks(3, 3) == [3]
    assert short(12345) == "12.3k" and short(0.00012) == "1.2e-04" and short(0) == "0"
    assert len(thin([(n, n) for n in range(10_000)])) == 400
    for text in (
        line_chart([Line("a", [(1, 1.0)])]),
        line_chart([Line("a<b", [(1, 0.0), (2, 0.0)])]),
        stacked_chart([Line("a", [(0, 1), (1, 2)]), Line("b", [(0, 1), (1, 0)])]),
        bar_chart([("0", 3), ("1", 0)], mark=1, mark_text="bound"),
        lanes([Lane("p<", [(0, 1, [(0.5, "s1")])], [(1, "s6", "x<y")], ["a&b"])], start=0, end=2),
        flow("issued", [Share("trained", 5, "s3"), Share("dropped: <late>", 0, "s2")]),
    ):
        parsed(text)
        assert "nan" not in text
    assert "nothing was measured" in line_chart([]) and "nothing was measured" in bar_chart([])


@pytest.mark.parametrize(("mode", "names"), [("sft", ["loss"]), ("dpo", ["pairs", "margin"])])
def test_the_end_of_a_run_on_given_rows_has_its_own_figures(tmp_path: Path, mode: str, names: list[str]) -> None:
    data = load_run(write_run(tmp_path / "run"))
    assert data.config is not None
    learner = msgspec.structs.replace(data.config.learner, mode=mode)
    producers = msgspec.structs.replace(data.config.producers, engine="dataset")
    data.config = msgspec.structs.replace(data.config, learner=learner, producers=producers)
    for number, line in enumerate(data.steps):
        line |= {"loss": 2.0 - number / 60, "pair_accuracy": number / 60, "score_margin": number / 30}
    lines = summary(data, Outcome(code=0, reason="done", wall_s=1.0))
    shown = [line.split()[0] for line in lines]
    assert [name for name in shown if name in ("reward", "loss", "pairs", "margin", "lag", "weights")] == names
    ends = {"loss": "1.967 -> 1.050", "pairs": "0.033 -> 0.950"}
    assert any(line.startswith(names[0]) and ends[names[0]] in line for line in lines)
    assert f"{names[0]} 0.500" in step_text({"step": 3, "loss": 0.5, "pair_accuracy": 0.5}, steps=9, mode=mode)
