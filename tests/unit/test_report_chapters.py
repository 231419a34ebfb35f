"""Chapters of the report against the files they are made from, and the page that compares runs."""

from __future__ import annotations

import base64
import html
import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from synthetic_run import START, write_run
from test_report import parsed

from asyncrl.cli import main
from asyncrl.images.folder import ImageFolder
from asyncrl.report import write_report
from asyncrl.report.data import load_run
from asyncrl.report.samples import SHOWN, answer, gaps, newest
from asyncrl.report.svg import SMOOTHED_FROM, Line, line_chart, smooth
from asyncrl.report.svg_time import Share, flow
from asyncrl.runtime.run_dir import RunDir


def words_of(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<(style|script)>.*?</\1>", "", text, flags=re.DOTALL)))


def charts(text: str) -> dict[str, dict[str, Any]]:
    """The charts of a page by the names of their lines."""
    found = [json.loads(html.unescape(one)) for one in re.findall(r"data-chart='([^']*)'", text)]
    return {", ".join(line["name"] for line in chart["lines"]): chart for chart in found}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, str]:
    run = write_run(tmp_path_factory.mktemp("report") / "run")
    return run, write_report(run).read_text()


def test_curves_hold_the_numbers_of_the_files(made: tuple[RunDir, str]) -> None:
    run, text = made
    lines = [json.loads(line) for line in (run.metrics / "learner.jsonl").read_text().splitlines()]
    for chart, key in (("reward", "reward_mean"), ("policy loss", "loss"), ("tokens/s", "tokens_per_s")):
        points = charts(text)[chart]["lines"][0]["points"]
        assert points == [[line["step"], float(f"{line[key]:.6g}")] for line in lines], chart
    rounds = [json.loads(line) for line in (run.metrics / "weightsync.jsonl").read_text().splitlines()]
    drawn = charts(text)["round, s"]["lines"][0]["points"]
    assert drawn == [[line["version"], float(f"{line['round_s']:.6g}")] for line in rounds]


def test_words_hold_the_numbers_of_the_audit(made: tuple[RunDir, str]) -> None:
    run, text = made
    data, words = load_run(run), words_of(text)
    early, late = data.reward_ends()
    for said in (
        f"{early:.3f} → {late:.3f}",
        "issued 121",
        "trained 120 (99.2%)",
        "dropped: late 1 (0.8%)",
        "122 deliveries with the right digest",
        "60 / 60",
        f"{data.audit.lag_mean:.2f}",
    ):
        assert said in words, said
    assert charts(text)["median lag, 90 %, bound"]["lines"][2]["points"][-1] == [60, 2]


def test_recoveries_have_their_times(made: tuple[RunDir, str]) -> None:
    run, text = made
    one = load_run(run).recoveries[0]
    assert (one.name, one.code, one.t) == ("producer-1", 137, START + 30)
    assert "Recoveries" in words_of(text) and "1 process ended with an error" in words_of(text)
    assert re.search(r'href="#faults" class=bad', text)


def test_every_chapter_has_an_entry(made: tuple[RunDir, str]) -> None:
    _, text = made
    entries = re.findall(r'<a href="#(\w+)"', text)
    assert entries == ["top", *re.findall(r'<h2 id="(\w+)"', text)]
    assert "evaluation" not in entries, "nothing was evaluated"
    assert '<meta http-equiv="Content-Security-Policy" content="default-src &#x27;none&#x27;' in text or (
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'\"" in text
    )


def test_a_lane_per_process_and_marks_of_its_ends(made: tuple[RunDir, str]) -> None:
    _, text = made
    lanes = text[text.index("Work over time") : text.index("Queue</h3>")]
    assert set(re.findall(r'<text class="tick end"[^>]*>([^<]+)<', lanes)) == {
        "learner",
        "producer-0",
        "producer-1",
        "reward-0",
    }
    assert "producer-1 ended with code 137" in lanes
    assert len(re.findall(r"learner at [\d.]+ s: training \d+%", lanes)) > 50


def test_a_large_run_stays_a_small_file(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path / "run", steps=1500)).read_text()
    assert len(text) < 1_200_000
    assert max(len(line["points"]) for chart in charts(text).values() for line in chart["lines"]) <= 400


# ---------------------------------------------------------------- samples


SAMPLE = {
    "step": 1,
    "group": 2,
    "index": 0,
    "length": 4,
    "tokens": ["<b>", "4", "b", "?"],
    "engine": [-0.5, -1.0, None, -0.001],
    "learner": [-0.5, -1.3, None, -3.0],
}


def test_tokens_are_coloured_by_their_gap_and_escaped() -> None:
    assert gaps(SAMPLE) == [0.0, pytest.approx(0.3), None, pytest.approx(2.999)]
    text = answer(SAMPLE)
    assert text == (
        '&lt;b&gt;<span class="g3" title="engine -1, learner -1.3">4</span><span class="env">b</span>'
        '<span class="g4" title="engine -0.001, learner -3">?</span>'
    )
    assert answer({**SAMPLE, "length": 9}).endswith("… 9 tokens</span>")
    assert answer({**SAMPLE, "learner": []}) == '&lt;b&gt;4<span class="env">b</span>?'
    assert answer({"response": "<i>"}) == "&lt;i&gt;"


def test_of_a_step_trained_again_the_last_samples_are_shown_and_none_of_the_steps_after_it() -> None:
    lines = [
        {**SAMPLE, "reward": 0.0}, {**SAMPLE, "group": 8}, {**SAMPLE, "step": 2}, {**SAMPLE, "reward": 1.0},
        {**SAMPLE, "group": 9}, {**SAMPLE, "step": 2, "reward": 0.5}, {**SAMPLE, "step": 2, "reward": 0.75},
    ]  # fmt: skip
    assert [(line["step"], line.get("reward")) for line in newest(lines[:5])] == [(1, 1.0), (1, None)]
    assert [(line["step"], line.get("reward")) for line in newest(lines)] == [(1, 1.0), (1, None), (2, 0.75)]


def test_what_a_model_says_stays_words(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=5)
    evil = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\"'"
    lines = [
        {
            "step": 5,
            "group": number,
            "index": number,
            "reward": 1.0,
            "lag": evil,
            "prompt": evil,
            "response": evil,
            "parts": {evil: 1.0, "b": 0.0},
            "tokens": [evil],
            "engine": [-1.0],
            "learner": [-2.0],
            "length": 1,
        }
        for number in range(SHOWN + 9)
    ]
    run.samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (run.logs / "launch.jsonl").open("a") as file:
        file.write(json.dumps({"t": START, "event": "exit", "name": evil, "role": evil, "code": 3}) + "\n")
    with (run.metrics / "roles.jsonl").open("a") as file:
        file.write(json.dumps({"t": START + 3, "name": evil, "role": "producer", "busy_share": 0.5}) + "\n")
    text = write_report(run).read_text()
    tree = parsed(text)
    assert tree.tags.count("script") == 1 and "img" not in tree.tags
    assert "<img" not in text and "alert(1)</script>" not in text


# ---------------------------------------------------------------- drawings


def test_long_lines_are_smoothed_and_short_ones_are_not() -> None:
    def drawn(count: int) -> str:
        return line_chart([Line("a", [(n, float(n % 2)) for n in range(count)])], smooth=True)

    assert "data-line" not in drawn(SMOOTHED_FROM - 1) and 'data-line="0"' in drawn(SMOOTHED_FROM)
    assert smooth([(0, 4.0), (1, 0.0)], 0.5) == [(0, 4.0), (1, pytest.approx(4 / 3))]


def test_ribbons_are_as_thick_as_their_parts() -> None:
    text = flow("issued", [Share("trained", 75, "s3"), Share("dropped", 25, "s2"), Share("dead", 0, "s6")])
    heights = [float(one) for one in re.findall(r'class="bar"[^>]* height="([\d.]+)"', text)]
    assert heights == [90.0, 30.0] and "dead" not in text
    assert "nothing was issued" in flow("issued", [])


# ---------------------------------------------------------------- comparison


def test_a_comparison_tells_runs_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write_run(tmp_path / "a", steps=30, seed=1), write_run(tmp_path / "b", steps=40, seed=2)
    out = tmp_path / "both.html"
    assert main(["report", str(first.root), str(second.root), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    text = out.read_text()
    parsed(text)
    words = words_of(text)
    assert "synthetic <run> (1)" in words and "synthetic <run> (2)" in words
    late = [load_run(run).reward_ends()[1] for run in (first, second)]
    row = re.search(r"reward, last 5 steps</td>(.*?)</tr>", text)
    assert row is not None and [float(one) for one in re.findall(r">([\d.]+)<", row[1])] == [round(x, 3) for x in late]
    settings = text[text.index('id="settings"') :]
    assert "learner.steps" in settings and "buffer.max_staleness" not in settings
    names = [line["name"] for line in charts(text)["synthetic <run> (1), synthetic <run> (2)"]["lines"]]
    assert len(names) == 2 and len(text) < 400_000


def test_a_comparison_with_an_empty_run(tmp_path: Path) -> None:
    from asyncrl.report import write_comparison

    good, empty = write_run(tmp_path / "a", steps=5), RunDir(tmp_path / "empty").create()
    text = write_comparison([good, empty], out=tmp_path / "c.html").read_text()
    parsed(text)
    assert "a config.toml cannot be read" in text


def test_images_of_a_prompt_are_thumbnails_in_the_page(tmp_path: Path) -> None:
    """At most 96 pixels, decoded and encoded again; one that is gone is named. Nothing is loaded from elsewhere."""
    run = write_run(tmp_path / "run", steps=5)
    buffer = BytesIO()
    Image.new("RGB", (400, 200), (9, 80, 200)).save(buffer, "JPEG")
    digest = ImageFolder(run.images).put(buffer.getvalue())
    line = {**SAMPLE, "step": 5, "prompt": "who?", "response": "4", "images": [digest, "0" * 64]}
    line["shown"] = ["1" * 64]
    run.samples.write_text(json.dumps(line) + "\n")
    text = write_report(run).read_text()
    [source] = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="image 400x200 ' + digest[:8] + '"', text)
    small = Image.open(BytesIO(base64.b64decode(source)))
    assert small.size == (96, 48) and abs(small.getpixel((5, 5))[2] - 200) < 12
    assert "image: 11111111 is missing" in text[text.index("who?") :], "those of later turns stand at the response"
    assert "image: 00000000 is missing" in text and "img-src data:" in text and "http" not in source
