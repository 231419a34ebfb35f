"""Learning from teachers: divergences against closed forms, the expected gradient on a policy that can be enumerated,
log-probs of several tokens at once, the way of the arrays to the learner, and the rules of the settings.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from bare_config import BARE
from made_batches import a_batch, a_group, a_sample
from step_lab import lab_batch, lab_config, run_steps

from asyncrl.config import AlgorithmConfig, parse
from asyncrl.config.judges import judges_for, list_judges, teacher_of
from asyncrl.config.sections.teacher import DistillationConfig
from asyncrl.errors import ConfigError, ConfigErrors
from asyncrl.preflight.derived import what_starts
from asyncrl.process_plan.plan import only_judges, process_names
from asyncrl.wire.batch_arrays import Teaching
from learners.algorithms.aggregation import Denominators
from learners.algorithms.kl import top_jsd
from learners.backends.base import Micro, to_device
from learners.batch.assembly import assemble, unusable
from learners.batch.micro_batches import decode_share, encode_share
from learners.models.top_logprobs import top_logprobs
from learners.step.teaching import read_teacher
from learners.step.update import Terms, loss_function

VOCABULARY = 6
GENERATOR = torch.Generator().manual_seed(3)


def random_logs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, VOCABULARY, generator=GENERATOR, dtype=torch.float64).mul(2).log_softmax(-1)


def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first.exp() * (first - second)).sum(-1)


# ---------------------------------------------------------------- divergences


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_with_all_tokens_but_one_the_divergence_is_exact(beta: float) -> None:
    policy, teacher = random_logs(5), random_logs(5)
    found = top_jsd(policy[:, :-1], teacher[:, :-1], beta=beta)
    if beta in (0.0, 1.0):
        expected = kl(teacher, policy) if beta == 0 else kl(policy, teacher)
    else:
        middle = (beta * teacher.exp() + (1 - beta) * policy.exp()).log()
        expected = beta * kl(teacher, middle) + (1 - beta) * kl(policy, middle)
    assert torch.allclose(found, expected, atol=1e-9)


def test_the_rest_counts_as_one_token() -> None:
    policy, teacher = random_logs(4), random_logs(4)
    ids = teacher.topk(2).indices
    few = top_jsd(policy.gather(-1, ids), teacher.gather(-1, ids))
    assert (few >= 0).all() and (few <= kl(teacher, policy) + 1e-9).all(), "fewer tokens hide a part of it"
    same = top_jsd(teacher.gather(-1, ids), teacher.gather(-1, ids), beta=0.5)
    assert torch.allclose(same, torch.zeros(4, dtype=torch.float64), atol=1e-9)


def test_a_certain_teacher_gives_a_finite_gradient() -> None:
    policy = torch.zeros(1, 2, requires_grad=True)
    logs = policy.log_softmax(-1)
    value = top_jsd(logs, torch.tensor([[0.0, -1000.0]]), beta=0.3).sum()
    value.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(value) and policy.grad is not None and torch.isfinite(policy.grad).all()


# ---------------------------------------------------------------- the loss


def micro(tokens: torch.Tensor, behaviour: torch.Tensor, **more: Any) -> Micro:
    """Samples of one token each."""
    count = tokens.numel()
    whole = torch.arange(count)
    ones = torch.ones(count)
    return Micro(
        tokens[None], whole[None], whole, tokens, whole, behaviour, ones.bool(), 0 * ones, 0 * whole, ones,
        ones.bool(), 0 * whole, **more,
    )  # fmt: skip


def expected_gradient(settings: DistillationConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the policy's logits, as the mean over all tokens by their probability; and the divergence's."""
    logits = random_logs(1)[0].clone().requires_grad_()
    teacher = random_logs(1)[0]
    gradient = torch.zeros(VOCABULARY, dtype=torch.float64)
    algorithm = AlgorithmConfig(loss="reinforce", correction="none", aggregation="token-mean")
    chances = logits.detach().softmax(-1)
    for token in range(VOCABULARY):
        logs = logits.log_softmax(-1)
        one = torch.tensor([token])
        given = micro(one, logs.detach()[one].float(), teacher=teacher[one])
        loss = loss_function(algorithm, Denominators(1, 1), Terms(distillation=settings))
        value, _ = loss(logs[one], torch.zeros(1, dtype=torch.float64), given, 0)
        (mine,) = torch.autograd.grad(value, logits)
        gradient += chances[token] * mine
    (closed,) = torch.autograd.grad(kl(logits.log_softmax(-1), teacher), logits)
    return gradient, closed


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_expected_gradient_is_that_of_the_reverse_kl(estimator: Any) -> None:
    found, closed = expected_gradient(DistillationConfig(estimator=estimator, coeff=0.5))
    assert float((found - 0.5 * closed).abs().max()) < 1e-9 and float(closed.abs().max()) > 0.1


def test_tokens_without_a_teacher_and_masked_ones_get_nothing() -> None:
    tokens, logs = torch.arange(4), torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    teacher = torch.tensor([-0.5, float("nan"), -0.5, -0.5])
    given = micro(tokens, logs.detach(), teacher=teacher)._replace(mask=torch.tensor([True, True, True, False]))
    found = read_teacher(DistillationConfig(), given, logs, logs.detach())
    assert found is not None and found.advantages.tolist() == [0.5, 0.0, 0.0, 0.0]
    assert (float(found.sums["teacher_kl_sum"]), int(found.sums["teacher_tokens"])) == (-0.5, 2)
    assert read_teacher(DistillationConfig(), micro(tokens, logs.detach()), logs, logs.detach()) is None


def test_the_divergence_on_likely_tokens_is_added_beside_the_reward() -> None:
    policy, teacher = random_logs(3).float().requires_grad_(), random_logs(3).float()
    ids = teacher.topk(4).indices
    tokens = torch.tensor([0, 1, 2])
    current = policy.gather(-1, ids)
    mine = policy[torch.arange(3), tokens]
    given = micro(tokens, mine.detach(), teacher=teacher[torch.arange(3), tokens])._replace(
        top_ids=ids, top_logprobs=teacher.gather(-1, ids), top_current=current, advantages=torch.ones(3)
    )
    algorithm = AlgorithmConfig(loss="reinforce", correction="none", aggregation="token-mean")
    settings = DistillationConfig(loss="jsd", beta=0.5, coeff=0.25)
    value, sums = loss_function(algorithm, Denominators(3, 3), Terms(distillation=settings))(
        mine, torch.zeros(3), given, 0
    )
    alone, _ = loss_function(algorithm, Denominators(3, 3))(mine, torch.zeros(3), given._replace(teacher=None), 0)
    expected = top_jsd(current, teacher.gather(-1, ids), beta=0.5)
    assert torch.allclose(value - alone, 0.25 * expected.mean())
    assert torch.allclose(sums["teacher_jsd_sum"], expected.sum())


@pytest.mark.parametrize("cap", [None, 3.0])
def test_log_probs_of_several_tokens_and_their_gradient(cap: float | None) -> None:
    hidden = torch.randn(7, 5, generator=GENERATOR, requires_grad=True)
    weight = torch.randn(VOCABULARY, 5, generator=GENERATOR, requires_grad=True)
    bias = torch.randn(VOCABULARY, generator=GENERATOR, requires_grad=True)
    ids = torch.randint(0, VOCABULARY, (7, 3), generator=GENERATOR)
    up = torch.randn(7, 3, generator=GENERATOR)
    logits = hidden @ weight.T + bias
    logits = logits if cap is None else cap * (logits / cap).tanh()
    whole = (logits / 0.7).log_softmax(-1).gather(-1, ids)
    parts = top_logprobs(hidden, weight, ids, bias=bias, temperature=0.7, chunk_tokens=3, cap=cap)
    assert torch.allclose(parts, whole, atol=1e-6)
    for one, other in zip(
        torch.autograd.grad(parts, (hidden, weight, bias), up),
        torch.autograd.grad(whole, (hidden, weight, bias), up),
        strict=True,
    ):
        assert torch.allclose(one, other, atol=1e-5)
    nothing = top_logprobs(hidden[:0], weight, ids[:0])
    assert nothing.shape == (0, 3)
    nothing.sum().backward()  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- the way to the learner


def taught(index: int, response: list[int], *, top: int = 0) -> Any:
    logs = np.linspace(-1, -0.1, len(response)).astype(np.float32)
    ids = np.arange(len(response) * top, dtype=np.int32).reshape(len(response), top) if top else None
    more = None if ids is None else -ids.astype(np.float32) - 1
    teaching = Teaching("big", "v", logs, ids, more)
    return msgspec.structs.replace(a_sample(index, response), teaching=teaching)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("top", [0, 2])
def test_arrays_of_a_teacher_reach_the_tokens_that_they_are_about(packing: bool, top: int) -> None:
    samples = [taught(0, [5, 6, 7], top=top), a_sample(1, [8, 9]), taught(2, [4], top=top)]
    batch = a_batch(1, 0, [a_group(0, [1, 2], samples)])
    config = parse(BARE).learner.algorithm
    step = assemble(batch, algorithm=config, ranks=2, max_tokens=8, packing=packing)
    found: dict[tuple[int, ...], tuple[list[float], Any]] = {}
    for share in step.shares:
        for part in decode_share(encode_share(share)):
            for piece in part.micro:
                tensors = to_device(piece, torch.device("cpu"))
                for number in range(piece.samples.size):
                    mine = tensors.sequences == number
                    said = None if tensors.teacher is None else tensors.teacher[mine]
                    key = tuple(tensors.targets[mine].tolist())
                    found[key] = (said, None if tensors.top_ids is None else tensors.top_ids[mine])  # type: ignore
    assert found.keys() == {(5, 6, 7), (8, 9), (4,)}
    assert found[5, 6, 7][0].tolist() == pytest.approx([-1, -0.55, -0.1])  # type: ignore[attr-defined]
    assert found[8, 9][0] is None or found[8, 9][0].isnan().all()  # type: ignore[attr-defined]
    if top:
        assert found[5, 6, 7][1].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_ranks_without_a_taught_row_take_part_in_the_sums() -> None:
    """A teacher of one data source: other ranks have none of its rows."""
    batch = lab_batch(1)
    first, *rest = batch.groups[0].samples
    length = first.response.size
    told = Teaching("big", "v", np.full(length, -0.7, np.float32), None, None)
    samples = (msgspec.structs.replace(first, teaching=told, mask=np.ones(length, np.uint8)), *rest)
    batch = msgspec.structs.replace(
        batch, groups=(msgspec.structs.replace(batch.groups[0], samples=samples), *batch.groups[1:])
    )
    alone, several = (run_steps(lab_config(TEACHER), [batch], ranks=ranks) for ranks in (1, 3))
    assert alone.metrics[0]["teacher_kl"] == pytest.approx(several.metrics[0]["teacher_kl"], rel=1e-9)
    assert all(torch.allclose(*pair) for pair in zip(alone.parameters, several.parameters, strict=True))


def test_a_sample_without_its_teacher_is_not_trained() -> None:
    group = a_group(0, [1, 2], [taught(0, [5, 6]), a_sample(1, [7])])
    assert unusable(group, max_tokens=64, teacher="big") == "teacher: big has told nothing about sample 1"
    assert "teacher: other" in unusable(group, max_tokens=64, teacher="other")
    assert unusable(group, max_tokens=64) == ""
    group = a_group(0, [1, 2], [taught(0, [5, 6], top=30)])
    assert unusable(group, max_tokens=64, vocabulary=20, teacher="big").startswith("vocabulary")


# ---------------------------------------------------------------- settings

TEACHER = 'teacher=[{name="big", model="t"}]'
TWO = 'teacher=[{name="maths", model="m", data_sources=["math"]}, {name="coder", model="c", data_sources=["code"]}]'


def test_teachers_are_asked_by_data_source() -> None:
    config = parse(BARE, overrides=[TWO])
    assert [judge.display_name for judge in list_judges(config)] == ["default", "maths", "coder"]
    assert [teacher_of(config, source) for source in ("math", "code", "other")] == ["maths", "coder", ""]
    rules = [(judge.name, judge.data_sources) for judge in list_judges(config)]
    assert judges_for("math", rules) == ("", "maths") and judges_for("other", rules) == ("",)
    alone = parse(BARE, overrides=[TEACHER, "reward=[]"])
    assert [judge.name for judge in list_judges(alone)] == ["big"], "no reward is needed beside a teacher"


def test_teachers_are_started_alone_or_with_the_reward_workers() -> None:
    config = parse(BARE, overrides=[TWO])
    assert only_judges(config, "teachers", "") == ("maths", "coder") and only_judges(config, "rewards", "") is None
    assert what_starts(config, ["reward"]) == "1 reward worker, 1 teacher (maths), 1 teacher (coder) = 3 processes"
    assert what_starts(config, ["reward"], ("coder",)) == "1 teacher (coder) = 1 process"
    assert process_names("reward", config) == ["reward-0", "teacher-maths-0", "teacher-coder-0"]
    with pytest.raises(ConfigError, match="no teachers"):
        only_judges(parse(BARE), "teachers", "")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (('teacher=[{name="default", model="t"}]',), "no judge or other teacher has it"),
        (('teacher=[{name="a b", model="t"}]',), "no judge or other teacher has it"),
        (('teacher=[{name="a", model="t"}, {name="b", model="u"}]',), "a row has one teacher"),
        (
            ('teacher=[{name="a", model="t"}, {name="a", model="u", data_sources=["x"]}]',),
            "no judge or other teacher has it",
        ),
        (('teacher=[{name="a", model="t", url="ftp://x"}]',), "is not http://"),
        (('teacher=[{name="a", model="t", url="http://u:p@x"}]',), "a secret in the address"),
        (('teacher=[{name="a", model="t", api_key_env="K"}]',), "are for a server"),
        (('teacher=[{name="a", model="t", url="http://x"}]', "sampling.temperature=0.7"), "log-probs at temperature 1"),
        (
            ('teacher=[{name="a", model="t", url="http://x", api="openai"}]', "learner.distillation.loss=jsd"),
            "names no token ids",
        ),
        ((TEACHER, "sampling.top_p=0.9"), "sample without a cut"),
        ((TEACHER, "reward=[]", 'buffer.filters=["zero_variance"]'), "drops every group"),
        ((TEACHER, "reward=[]", "evaluation.path=e.jsonl", "evaluation.every=2"), "an evaluation measures a reward"),
        ((TEACHER, "reward=[]", "environment.name=multi_turn"), "scores its samples itself"),
        ((TEACHER, "learner.distillation.loss=jsd", "learner.backend=megatron"), "log-probs of sampled tokens alone"),
        (
            (TEACHER, "learner.distillation.loss=jsd", "learner.ranks=2", "learner.parallel.tensor=2"),
            "with learner.parallel.tensor > 1",
        ),
    ],
)
def test_contradictions(settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        parse(BARE, overrides=list(settings))
    assert any(words in error.message for error in caught.value.errors), caught.value.errors
