"""`[trackers]`: what contradicts itself, secrets that must not stand in the file, what is missing at the start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.config import Config, parse
from asyncrl.config.sections.tracker import secret_of
from asyncrl.errors import ConfigErrors
from asyncrl.metrics import CATALOGUE
from asyncrl.metrics.pages import LAYOUT, PAGES, metric_page, metric_tag
from asyncrl.preflight.machine import check_trackers
from learners.trackers.tensorboard import layout

LEAST = 'model.path = "m"\ndata.path = "d"\n[[reward]]\nfunction = "a:b"\n[trackers]\n'


def config(text: str) -> Config:
    return parse(LEAST + text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('use = ["wandb", "wandb"]', "names one twice"),
        ('use = ["tensorboard"]', "set log.tensorboard"),
        ('use = ["prometheus"]', "set trackers.prometheus_port"),
        ('use = ["../x"]', "is not one of"),
        ('options = {wandb = {entity = "e"}}', "not in trackers.use"),
        ('key_file = {wandb = "f"}', "not in trackers.use"),
        ('use = ["wandb"]\noptions = {wandb = {api_key = "x"}}', "wandb.api_key looks like a secret"),
        ('use = ["mlflow"]\noptions = {mlflow = {deep = {Password = "x"}}}', "set MLFLOW_TRACKING_TOKEN or"),
        ("prometheus_port = 70000", "65535"),
        ('prometheus_host = "0.0.0.0"', "trackers.prometheus_port = 0"),
        ('prometheus_key_file = "f"', "trackers.prometheus_port = 0"),
        ("every_s = 0", "0"),
    ],
)
def test_contradictions(text: str, words: str) -> None:
    with pytest.raises(ConfigErrors) as found:
        config(text)
    assert words in str(found.value.render())


def test_a_single_tracker_is_as_good_as_a_list() -> None:
    assert config('use = "wandb"\noptions = {wandb = {entity = "team", tags = ["a"]}}').trackers.use == ("wandb",)


def test_what_is_missing_is_said_before_the_start(tmp_path: Path) -> None:
    empty, open_to_all, good = (tmp_path / name for name in ("empty", "open", "good"))
    empty.write_text("\n")
    for path in (open_to_all, good):
        path.write_text(" key \n")
    open_to_all.chmod(0o644)
    good.chmod(0o600)

    def wrong(name: str, path: Path) -> list[str]:
        return [
            error.message for error in check_trackers(config(f'use = ["{name}"]\nkey_file = {{{name} = "{path}"}}'))
        ]

    assert any("is not known: one of mlflow, swanlab, trackio, wandb" in text for text in wrong("nope", good))
    assert any("No such file" in text for text in wrong("wandb", tmp_path / "none"))
    assert any("is empty" in text for text in wrong("wandb", empty))
    assert any("others may read it" in text for text in wrong("wandb", open_to_all))
    assert not [text for text in wrong("wandb", good) if "file" in text]
    assert secret_of(config(f'use = ["wandb"]\nkey_file = {{wandb = "{good}"}}').trackers, "wandb") == "key"


def test_a_metrics_page_beyond_loopback_needs_a_key_before_the_start(tmp_path: Path) -> None:
    def errors(text: str) -> list[tuple[str, str]]:
        found = check_trackers(config(f'prometheus_port = 9464\nprometheus_host = "0.0.0.0"\n{text}'))
        return [(error.code, error.where.partition(" ")[0]) for error in found if error.code != "net.port_in_use"]

    assert errors("") == [("config.network", "trackers.prometheus_host")]
    key = tmp_path / "key"
    line = f'prometheus_key_file = "{key}"'
    assert errors(line) == [("config.file", "trackers.prometheus_key_file")]
    key.write_text("correct-horse-battery\n")
    key.chmod(0o600)
    assert errors(line) == []
    pem = f'prometheus_cert_file = "{key}"'
    assert errors(f"{line}\n{pem}") == [("config.type", "trackers.prometheus_cert_file")]


def test_pages_and_the_layout_agree() -> None:
    assert {metric_page(name) for name in CATALOGUE} == set(PAGES) == set(LAYOUT)
    for page, charts in LAYOUT.items():
        for names in charts.values():
            assert set(names) <= set(CATALOGUE) and {metric_page(name) for name in names} == {page}
    pattern = layout()["health"]["staleness (steps)"][1]
    assert [
        tag for tag in (metric_tag("lag_mean"), "health/lag_mean2") if any(re.search(one, tag) for one in pattern)
    ] == ["health/lag_mean"]  # type: ignore[union-attr]


def test_tensorboard_draws_the_four_pages(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.plugins.custom_scalar import layout_pb2

    from asyncrl.plugins import TrackerRun, find

    tracker = find("asyncrl.trackers", "tensorboard")(TrackerRun("p", "r", "", tmp_path))
    tracker.log({"lag_mean": 1.5, "dropped": 2, "loss": float("nan"), "step": 3}, step=3)
    tracker.close()
    [path] = tmp_path.glob("events*")
    values = {}
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            values[value.tag] = value
    pages = layout_pb2.Layout.FromString(values["custom_scalars__config__"].tensor.string_val[0])
    assert [page.title for page in pages.category] == list(PAGES)
    assert values.keys() == {"custom_scalars__config__", "health/lag_mean", "faults/dropped"}
