"""`[learner.algorithm]`: names, options, combinations, presets, plugins, live tuning; the greedy sample of ReMax."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncrl.cli import main
from asyncrl.config import Config, LearnerConfig, dump, parse, presets
from asyncrl.config.rules import notes
from asyncrl.config.rules.algorithm import apply_overrides
from asyncrl.config.sections import algorithm_catalogue as algorithms
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.configure import preset_pages
from asyncrl.engine import GenRequest
from asyncrl.errors import AsyncRLError, ConfigError, ConfigErrors
from asyncrl.metrics import CATALOGUE as METRICS
from asyncrl.preflight import code, derived
from buffers.groups.failure_budget import load_filters
from buffers.groups.machine import GroupMachine
from buffers.groups.records import settings_of
from learners.algorithms import registry
from learners.algorithms.types import Estimate, LossInputs, Rollouts, TokenLoss
from learners.step.tuned_settings import apply_tuning
from producers.rollout.rollout import split_request

LEAST = 'model.path = "m"\ndata.path = "d"\n[[reward]]\nfunction = "a:b"\n'


def made(*overrides: str, text: str = "") -> Config:
    return parse(f"{text}\n{LEAST}", overrides=overrides)


def refused(*overrides: str, text: str = "") -> str:
    with pytest.raises(ConfigErrors) as caught:
        made(*overrides, text=text)
    return "; ".join(f"{error.code} {error.message} {error.where}" for error in caught.value.errors)


def key(name: str) -> str:
    return f"learner.algorithm.{name}"


# ---------------------------------------------------------------- names and options


def test_every_name_has_a_function_with_the_options_that_are_on_record() -> None:
    recorded = json.loads((Path(algorithms.__file__).parent / "algorithm_options.json").read_text())
    assert recorded == json.loads(msgspec.json.encode(registry.option_table())), "run `make docs`"
    for kind, entries in algorithms.TABLES.items():
        for name in entries:
            assert callable(registry.find_function(kind, name))


def test_a_name_that_does_not_exist_comes_with_those_that_do() -> None:
    said = refused(key("loss=gsop"))
    assert "config.type" in said and "did you mean 'gspo'" in said and "--set learner.algorithm.loss" in said


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("loss=gspo", "loss_options.clip_lo=1"), "config.unknown_key .*clip_low, clip_high; did you mean 'clip_low'"),
        (("loss=gspo", "loss_options.clip_low=small"), "config.type .*clip_low = 'small': expected float"),
        (("loss=dro",), "config.missing .*dro' needs it"),
        (("correction=mis", "correction_options.level=row"), "config.type .*level = 'row'"),
        (("loss=cispo", "loss_options.clip_low=true"), "config.type .*expected float"),
    ],
)
def test_options_are_checked_without_torch(overrides: tuple[str, ...], said: str) -> None:
    assert re.search(said, refused(*map(key, overrides)))


def test_short_forms_and_off() -> None:
    algorithm = made(key("tis_cap=off"), key("clip_low=0.1"), key("loss_options.clip_high=0.5")).learner.algorithm
    assert algorithms.effective_options(algorithm, "correction") == {"upper": None}
    assert algorithms.effective_options(algorithm, "loss") == {"clip_low": 0.1, "clip_high": 0.5}
    assert registry.choose(algorithm, "correction").options == {"upper": None}
    assert algorithms.effective_options(made(key("loss=gspo")).learner.algorithm, "loss") == {}  # not those of PPO


# ---------------------------------------------------------------- combinations


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("loss=ppo", "proximal=behaviour", "correction=tis"), "holds the whole correction"),
        (("loss=reinforce", "proximal=behaviour", "correction=tis"), "1 everywhere"),
        (("loss=aipo", "correction=icepop"), "current / behaviour itself"),
        (("loss=decoupled_ppo", "proximal=behaviour"), "there is no such pair"),
        (("advantage=vtrace", "loss=reinforce", "correction=tis"), "holds the truncated importance weight"),
        (("advantage=vtrace", "loss=ppo"), "is made for loss = 'reinforce'"),
        (("loss=vespo", "correction=tis", "correction_options.level=sequence"), "once for each of them"),
        (("loss=vespo", "correction=mis"), "level = 'sequence'"),  # its default
        (("loss=gmpo", "correction=icepop"), "would silence its whole row"),
        (("loss=gmpo", "correction=mis", "correction_options.level=token"), "would silence its whole row"),
        (("advantage=remax",), "set sampling.greedy_baseline = true"),
        (("advantage=prime", "shaping.resample=pow"), "before the model has run"),
        (("kl.where=loss", "kl.controller=adaptive"), "kl.where = 'reward'"),
        (("kl.where=reward", "shaping.resample=pow"), "before the model has run"),
        (("correction=m2po", "shaping.resample=pow"), "with correction = 'm2po' all rows"),
        (("correction_options.batch_normalize=true", "shaping.resample=pow"), "'tis' and batch_normalize all rows"),
        (("correction_options.batch_normalize=true", "proximal=loglinear"), "would count twice"),
        (("shaping.overlong_buffer=2000",), "above the limit of 1024"),
    ],
)
def test_a_combination_that_cannot_work_is_explained(overrides: tuple[str, ...], said: str) -> None:
    assert "config.conflict" in refused(*map(key, overrides)) and said in refused(*map(key, overrides))


def test_gdpo_has_a_weight_for_each_reward() -> None:
    gdpo, one, two = (
        key("advantage=gdpo"),
        key("advantage_options.weights=[1.0]"),
        key("advantage_options.weights=[1.0, 2]"),
    )
    both = LEAST + '[[reward]]\nfunction = "a:another"\n'
    (error,) = code.check_algorithm(parse(both, overrides=[gdpo, one]))
    assert error.code == "config.conflict" and error.where == "learner.algorithm.advantage_options.weights"
    assert "1 weights for 2 rewards" in error.message and "(another, b)" in error.message
    assert list(code.check_algorithm(parse(both, overrides=[gdpo, two]))) == []
    assert list(code.check_algorithm(made(gdpo, one))) == []
    assert [error.message[:23] for error in code.check_algorithm(made(gdpo, two))] == ["2 weights for 1 rewards"]
    scored = made(gdpo, two, "environment.name=gymnasium")
    assert list(code.check_algorithm(scored)) == [], "it may name parts of its reward"


def test_an_early_end_needs_a_warm_up() -> None:
    said = refused("learner.critic.critic_warmup_until=0.3", key("advantage=gae"))
    assert "config.conflict" in said and "set learner.critic.critic_warmup" in said
    assert made("learner.critic.critic_warmup_until=0.3", "learner.critic.critic_warmup=9", key("advantage=gae"))


def test_weights_that_a_row_may_have_are_taken() -> None:
    for overrides in (
        ("loss=vespo", "correction=icepop"),
        ("loss=vespo", "correction=mis", "correction_options.level=geometric"),
        ("loss=gmpo", "correction=mis"),
        ("loss=gmpo", "correction=rejection"),
        ("loss=gspo", "correction=mis"),
    ):
        assert made(*map(key, overrides))


def test_live_tuning_has_the_same_rules() -> None:
    algorithm = made(key("correction=m2po")).learner.algorithm
    with pytest.raises(ValueError, match="before the model has run"):
        apply_overrides(algorithm, {"shaping.resample": "pow"})


def test_auto_is_the_correction_that_is_right() -> None:
    def found(*overrides: str) -> str:
        return algorithms.effective_correction(made(*map(key, overrides)).learner.algorithm)

    assert found() == found("loss=ppo") == found("loss=gspo") == "tis"
    assert found("loss=ppo", "proximal=behaviour") == found("loss=aipo") == "none"
    assert found("advantage=vtrace", "loss=reinforce") == "none"


def test_surprises_are_noted() -> None:
    told = [*notes.notes(made(key("correction=none"), key("loss=gspo"), key("clip_high=0.5")))]
    assert any("biased by their lag" in note for note in told) and any("no effect on loss" in note for note in told)
    assert list(notes.notes(made())) == []
    for loss in ("loss=kl_cov", "loss=topr", "loss=dro"):
        options = [key("loss_options={beta=0.1}")] if loss == "loss=dro" else []
        (told,) = notes.notes(made(key(loss), *options))
        assert "no effect before the second mini-batch" in told
        assert list(notes.notes(made(key(loss), *options, key("minibatches=2")))) == []
    (told,) = notes.notes(made(key("kl.where=loss"), key("kl.kind=k1")))
    assert "its gradient is 0 in expectation" in told
    assert list(notes.notes(made(key("kl.where=loss"), key("kl.kind=k1+")))) == []
    (told,) = notes.notes(made("learner.process_reward.lr=1e-4"))
    assert "[learner.process_reward] has no effect" in told
    (told,) = notes.notes(made("learner.process_reward.lr=0", key("advantage=prime")))
    assert "all process rewards are 0" in told
    assert list(notes.notes(made("learner.process_reward.lr=1e-4", key("advantage=prime")))) == []
    found = {finding.name: finding.value for finding in derived.derive_findings(made())}
    assert found["algorithm"] == algorithms.explain(AlgorithmConfig())


# ---------------------------------------------------------------- presets


def test_presets_are_whole_and_read_back() -> None:
    wanted = {
        "grpo",
        "dapo",
        "dr_grpo",
        "gspo",
        "rloo",
        "remax",
        "reinforce_pp",
        "ppo",
        "cispo",
        "opo",
        "grpo_decoupled",
        "vapo",
        "luspo",
        "topr",
        "sppo",
    }
    assert wanted <= set(presets.names())
    for name in presets.names():
        named = made(text=f'learner.algorithm.preset = "{name}"')
        assert parse(dump(named)) == named == made(f"{presets.KEY}={name}")
        assert list(notes.notes(made("buffer.batch_groups=64", f"{presets.KEY}={name}"))) == [], name
        assert (presets.FOLDER / f"{name}.toml").read_text().startswith("# ")
    same = made(f"{presets.KEY}=grpo_decoupled").learner.algorithm
    default = made().learner.algorithm
    assert same == msgspec.structs.replace(
        default, preset="grpo_decoupled", correction="tis", minibatches=4, advantage_options=same.advantage_options
    )
    known = registry.options_in(registry.find_function("advantage", "grpo"))
    assert all(known[name][1] == value for name, value in same.advantage_options.items())


def test_a_preset_says_where_it_is_from_and_how_it_differs(capsys: pytest.CaptureFixture[str]) -> None:
    for name in presets.names():
        recipe = presets.load_recipe(name)
        assert recipe.paper and recipe.equation and recipe.acts in METRICS
        assert set(recipe.equals) <= set(presets.names()) - {name}
        assert preset_pages.describe_preset(name).count("differs from the paper:") == 1, "none is the paper's loop"
    assert main(["presets", "dapo"]) == 0
    said = capsys.readouterr().out
    assert "arXiv 2503.14476, equation 8" in said and "16 updates per batch" in said
    assert "learner.optim.warmup_steps = 20" in said and "- a dual clip of 10" in said
    assert main(["presets"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed[: len(presets.names())]] == presets.names()
    assert main(["presets", "dappo"]) == 2


def test_a_preset_makes_no_more_updates_than_the_batch_has_groups() -> None:
    text = 'learner.algorithm.preset = "dapo"\n'
    updates = [
        made(text=text).learner.algorithm.minibatches,
        made(text=f"{text}buffer.batch_groups = 6").learner.algorithm.minibatches,
        made("buffer.batch_groups=5", text=text).learner.algorithm.minibatches,
        made(text=f"{text}learner.algorithm.minibatches = 2").learner.algorithm.minibatches,
    ]
    assert updates == [16, 6, 5, 2]
    said = refused(key("minibatches=9"), text=f"{text}buffer.batch_groups = 6")
    assert "learner.algorithm.minibatches exceeds buffer.batch_groups" in said


def test_updates_of_few_groups_are_noted() -> None:
    (told,) = notes.notes(made(key("minibatches=8")))
    assert "an update sees 2 groups" in told and "raise batch_groups to 32" in told
    for enough in ("buffer.batch_groups=32", key("minibatches=4")):
        assert not list(notes.notes(made(key("minibatches=8"), enough)))


def test_old_samples_with_weights_of_single_tokens_are_noted() -> None:
    deep = "buffer.max_staleness=8", "buffer.pipeline_depth=max"
    (told,) = notes.notes(made(*deep))
    assert "samples are up to 8 steps old" in told and "level = 'sequence'" in told
    for remedy in (
        key('correction_options={level="sequence"}'),
        key("preset=very_stale"),
        "buffer.pipeline_depth=auto",
        "buffer.pipeline_depth=3",
        "buffer.max_staleness=3",
    ):
        assert not list(notes.notes(made(*deep, remedy)))


def test_a_clip_that_cannot_act_is_noted_with_the_remedy() -> None:
    for loss, word in (("ppo", "clip"), ("gspo", "clip"), ("sapo", "gate"), ("dppo_tv", "trust region")):
        (told,) = (note for note in notes.notes(made(key(f"loss={loss}"))) if "cannot act" in note)
        assert f"its {word} cannot act" in told and "clip_against = 'behaviour'" in told
        for remedy in ("minibatches=2", "clip_against=behaviour"):
            assert not [note for note in notes.notes(made(key(f"loss={loss}"), key(remedy))) if "cannot act" in note]
    for fresh in ("buffer.max_staleness=0", "buffer.pipeline_depth=0"):
        for measured in ("clip_against=behaviour", "preset=bypass"):
            chosen = key("loss=ppo"), key(measured)
            (told,) = (note for note in notes.notes(made(*chosen, fresh)) if "cannot act" in note)
            assert "set minibatches above 1" in told and "clip_against" not in told
            assert not [note for note in notes.notes(made(*chosen)) if "cannot act" in note]
    assert not [note for note in notes.notes(made(key("loss=reinforce"))) if "cannot act" in note]
    assert "has no limit" in refused(key("loss=reinforce"), key("clip_against=behaviour"))
    assert "has no limit" in refused(key("loss=clip_cov"), key("clip_against=behaviour"))
    steep = key("kl.where=reward"), key("kl.controller=adaptive"), "buffer.batch_groups=64", "sampling.group_size=8"
    assert "makes it negative" in refused(*steep, key("kl.horizon=102"))
    assert made(*steep, key("kl.horizon=1000"))
    late = key("correction=icepop"), key("denominator=kept"), key("proximal=loglinear")
    assert "counts the tokens that stay before the loss" in refused(*late)
    bypass = key("loss=ppo"), key("proximal=behaviour"), key("correction=none"), key("clip_against=behaviour")
    assert "compares with the behaviour policy already" in refused(*bypass)


def test_the_file_wins_over_its_preset_and_the_command_over_the_file() -> None:
    mine = 'learner.algorithm.preset = "dapo"\nlearner.algorithm.clip_high = 0.5\nbuffer.filters = []'
    config = made(text=mine)
    assert config.learner.algorithm.clip_high == 0.5 and config.buffer.filters == ()
    assert config.learner.algorithm.loss_options == {"dual_clip": 10.0}
    ordered = made(
        f"{presets.KEY}=dapo", key("clip_low=0.1"), text="learner.algorithm.clip_high = 0.5"
    ).learner.algorithm
    assert (ordered.clip_low, ordered.clip_high) == (0.1, 0.28)


def test_another_loss_leaves_the_options_of_the_preset_behind() -> None:
    for config in (
        made(text='learner.algorithm.preset = "dapo"\nlearner.algorithm.loss = "gspo"'),
        made(key("loss=gspo"), text='learner.algorithm.preset = "dapo"'),
        made(f"{presets.KEY}=dapo", key("loss=gspo")),
    ):
        assert config.learner.algorithm.loss_options == {} and config.learner.algorithm.loss == "gspo"
        assert parse(dump(config)) == config


def test_a_preset_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text("[learner.algorithm]\nadvantage = 'rloo'\n[learner.optim]\nlr = 0.5\n")
    assert made(f"{presets.KEY}={own}").learner.optim.lr == 0.5
    own.write_text("[learner.algorithm]\nadvantge = 'rloo'\n")
    said = refused(f"{presets.KEY}={own}")
    assert (
        "learner.algorithm.advantge" in said
        and "did you mean learner.algorithm.advantage?" in said
        and "preset" in said
    )
    assert "config.preset" in refused(f"{presets.KEY}=dappo") and "did you mean 'dapo'" in refused(
        f"{presets.KEY}=dappo"
    )


def test_the_command_line_takes_a_preset() -> None:
    from asyncrl.cli import parser

    args = parser().parse_args(["check", "a.toml", "--set", "learner.steps=2", "--preset", "dapo"])
    assert args.overrides == ["learner.steps=2", "learner.algorithm.preset=dapo"]


# ---------------------------------------------------------------- plugins


def mine(rollouts: Rollouts, *, scale: float = 1.0) -> Estimate:
    return Estimate(rollouts.rewards * scale)


def my_loss(inputs: LossInputs, *, power: int) -> TokenLoss:
    return TokenLoss(-inputs.advantages * inputs.current * power, inputs.mask & False)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "asyncrl.advantages": [EntryPoint("mine", "test_algorithm_settings:mine", "asyncrl.advantages")],
        "asyncrl.losses": [EntryPoint("my_loss", "test_algorithm_settings:my_loss", "asyncrl.losses")],
    }

    def points(*, group: str, name: str | None = None) -> Any:
        return [point for point in found.get(group, []) if name in (None, point.name)]

    monkeypatch.setattr(algorithms, "entry_points", points)
    monkeypatch.setattr(registry, "entry_points", points)


@pytest.mark.usefixtures("plugins")
def test_a_package_of_the_user_adds_names() -> None:
    algorithm = made(
        key("advantage=mine"), key("advantage_options.scale=3"), key("loss=my_loss"), key("loss_options.power=2")
    ).learner.algorithm
    chosen = registry.choose(algorithm, "advantage")
    assert chosen.function.__name__ == "mine" and chosen.options == {"scale": 3.0}
    assert registry.choose(algorithm, "loss").options == {"power": 2}
    assert registry.needs_for(algorithm) == () and registry.chooser_for(algorithm) is None
    for wrong, reason in (
        ({"advantage_options": {"scle": 1}}, "config.unknown_key"),
        ({"advantage_options": {"scale": "x"}}, "config.type"),
    ):
        with pytest.raises(ConfigError) as caught:
            registry.choose(msgspec.structs.replace(algorithm, **wrong), "advantage")
        assert caught.value.code == reason
    with pytest.raises(ConfigError) as caught:
        registry.choose(msgspec.structs.replace(algorithm, loss_options={}), "loss")
    assert caught.value.code == "config.missing"


@pytest.mark.long
def test_check_looks_at_plugins_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "plug-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[asyncrl.advantages]\nplugged = plug_of_mine:plugged\n")
    (tmp_path / "plug_of_mine.py").write_text("def plugged(rollouts, *, scale: float = 1.0):\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert list(code.check_algorithm(made(key("advantage=plugged")))) == []
    (error,) = code.check_algorithm(made(key("advantage=plugged"), key("advantage_options.scle=1")))
    assert error.code == "config.unknown_key" and "scale" in error.message
    (tmp_path / "plug_of_mine.py").write_text("raise RuntimeError('broken')\n")
    assert [error.code for error in code.check_algorithm(made(key("advantage=plugged")))] == ["config.extra"]


def test_settings_are_known_without_torch() -> None:
    code = f"import sys; from asyncrl.config import parse; parse({LEAST!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


# ---------------------------------------------------------------- live tuning


def test_nested_settings_and_options_are_tuned() -> None:
    text = json.dumps({key("kl.coeff"): 0.5, key("loss_options.dual_clip"): 4, key("tis_cap"): 1.5})
    algorithm = apply_tuning(LearnerConfig(), text).algorithm
    assert algorithm.kl.coeff == 0.5 and algorithm.loss_options == {"dual_clip": 4} and algorithm.tis_cap == 1.5
    assert apply_tuning(LearnerConfig(), "").algorithm == AlgorithmConfig()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("loss_options.clip_lo", 1, "did you mean 'clip_low'"),
        ("kl.coeffs", 1, "no setting"),
        ("preset", "dapo", "no setting"),
        ("correction", "tsi", "did you mean 'tis'"),
        ("advantage", "gae", "not started with: critic"),
        ("advantage", "prime", "not started with: process"),
        ("kl.coeff", -1.0, ">= 0"),
        ("proximal", "behaviour", "there is no such pair"),
    ],
)
def test_what_cannot_be_tuned_is_refused_by_learner_and_buffer(name: str, value: Any, said: str) -> None:
    text = msgspec.json.encode({key(name): value}).decode()
    with pytest.raises(AsyncRLError, match=r".*") as caught:
        apply_tuning(LearnerConfig(), text)
    assert caught.value.code == "tune.refused" and said in caught.value.message
    with pytest.raises(AsyncRLError) as caught:
        GroupMachine(settings_of(made())).tune({key(name): value}, author="me@here", now=0.0)
    assert caught.value.code == "tune.refused"


def test_the_buffer_tells_what_was_before() -> None:
    groups = GroupMachine(settings_of(made()))
    _, changed, _ = groups.tune({key("kl.coeff"): 1, key("loss_options.dual_clip"): 3.0}, author="me@here", now=0.0)
    assert changed == {key("kl.coeff"): (0.001, 1.0), key("loss_options.dual_clip"): (None, 3.0)}
    assert json.loads(groups.live.tuning.learner_overrides()) == {
        key("kl.coeff"): 1.0,
        key("loss_options.dual_clip"): 3.0,
    }
    groups.undo_tune(0, author="me@here", now=1.0)
    assert groups.live.tuning.learner_overrides() == ""


# ---------------------------------------------------------------- producers and buffer


def test_the_greedy_sample_is_asked_for_by_itself() -> None:
    config = made("sampling.greedy_baseline=true", "sampling.group_size=4")
    assert config.sampling.asked_samples == config.sampling.group_samples == settings_of(config).group_size == 5
    request = GenRequest("1:1", np.zeros(2, np.int32), (0, 2, 4), 7, 16, top_k=0)
    sampled, greedy = split_request(request, config.sampling)
    assert sampled.indices == (0, 2) and sampled.top_k == 0
    assert greedy.indices == (4,) and greedy.top_k == 1 and greedy.id == request.id and greedy.seed == request.seed
    assert split_request(request, made().sampling) == [request]
    assert "set sampling.over_issue = 0" in refused("sampling.greedy_baseline=true", "sampling.over_issue=2")


def test_the_accuracy_band_is_a_filter_of_the_buffer() -> None:
    ((name, filter_of),) = load_filters(made("buffer.filters=['accuracy_band']").buffer.filters)
    assert name == "accuracy_band" and filter_of(rewards=[1.0, 0.0]) == "" and "outside" in filter_of(rewards=[1.0])


GSPO = 'learner.algorithm.loss = "gspo"\nlearner.algorithm.loss_options = { clip_low = 3e-4 }\n'


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        (["learner.algorithm.loss=cispo"], {}),
        (["learner.algorithm.loss=gspo"], {"clip_low": 3e-4}),
        (["learner.algorithm.loss=cispo", "learner.algorithm.loss_options.clip_high=2.0"], {"clip_high": 2.0}),
        (["learner.algorithm.advantage=opo"], {"clip_low": 3e-4}),
    ],
)
def test_options_of_a_choice_go_with_it(overrides: list[str], options: dict[str, float]) -> None:
    found = made(*overrides, text=GSPO).learner.algorithm.loss_options
    assert {name: found[name] for name in options} == options
    assert ("clip_low" in found) == ("loss=cispo" not in overrides[0] or len(overrides) > 1)


def test_auto_and_tis_are_the_same_correction() -> None:
    text = 'learner.algorithm.correction = "auto"\nlearner.algorithm.correction_options = { upper = 3.0 }\n'
    assert made("learner.algorithm.correction=tis", text=text).learner.algorithm.correction_options == {"upper": 3.0}
    assert made("learner.algorithm.correction=icepop", text=text).learner.algorithm.correction_options == {}


def test_derived_numbers_of_a_resolved_file_follow_their_source() -> None:
    resolved = dump(made("sampling.max_new_tokens=512", "learner.algorithm.shaping.overlong_share=0.25"))
    again = parse(resolved, overrides=["sampling.max_new_tokens=1000"]).learner.algorithm
    assert (again.shaping.overlong_max, again.shaping.overlong_buffer) == (1000, 250)
    assert again.loss_scale_factor == 1000
    own = dump(made("learner.algorithm.shaping.overlong_max=300", "learner.algorithm.loss_scale_factor=7"))
    kept = parse(own, overrides=["sampling.max_new_tokens=1000"]).learner.algorithm
    assert (kept.shaping.overlong_max, kept.loss_scale_factor) == (300, 7.0)
