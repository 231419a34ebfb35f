"""The contract test for authors of losses and the functions around them: `asyncrl test-loss`.

Run as `python -m learners.contract_test NAME [--kind loss] [--options JSON]`, and by `asyncrl.testing.check_loss`. The
function gets made batches of several responses in float64; the checks are those that the learner relies on
(`learners.algorithms.types`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.errors import EXIT_FAILED, EXIT_OK, UNREADABLE, AsyncRLError, ConfigError
from asyncrl.plugins import load_object
from learners.algorithms.aggregation import count
from learners.algorithms.registry import choose, chooser_for, divergence_for, reduction_for
from learners.algorithms.types import LossInputs, Rollouts

LENGTHS = (5, 3, 4)  # tokens of the responses of a batch
GAP = 1e-9  # allowed between two ways to compute the same in float64
NOT_A_NUMBER = float("nan")
DETACHED = "right only if the loss detaches a factor on purpose, as REINFORCE with importance weights does"


TestedKind = Literal["loss", "advantage", "correction", "aggregation", "kl"]
KINDS: tuple[TestedKind, ...] = get_args(TestedKind)


class Check(NamedTuple):
    """One line of the report."""

    verdict: Literal["ok", "note", "fails"]
    text: str
    remedy: str = ""


def make_inputs(*, seed: int = 0, spread: float = 0.3, dtype: torch.dtype = torch.float64) -> LossInputs:
    """Tokens of three responses; the first token of each is outside the mask. `spread`: of the log-ratios."""
    maker = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)

    def draw() -> Tensor:
        return torch.randn(count, generator=maker, dtype=torch.float64).to(dtype)

    rows = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    first = torch.cat([rows.new_tensor([-1]), rows[:-1]]) != rows
    proximal = draw() - 2
    return LossInputs(
        current=(proximal + spread * draw()).requires_grad_(),
        proximal=proximal,
        behaviour=proximal + 0.1 * draw(),
        advantages=draw(),
        mask=~first,
        sequences=rows,
    )


def take_row(inputs: LossInputs, row: int) -> LossInputs:
    """One response alone."""
    mine = inputs.sequences == row
    parts = {
        name: value[mine].detach().clone() for name, value in inputs._asdict().items() if isinstance(value, Tensor)
    }
    parts["current"].requires_grad_()
    return LossInputs(**{**parts, "sequences": torch.zeros_like(parts["sequences"])})


def check_loss(loss: Callable[[LossInputs], Any], *, chooses: bool = False) -> list[Check]:
    """All checks of a loss with its options bound. `chooses`: it selects tokens in the whole mini-batch."""
    inputs = make_inputs()
    found = loss(inputs)
    shaped = _shapes("loss", inputs.mask, loss=found.loss, clipped=found.clipped)
    if shaped.verdict != "ok":
        return [shaped]
    again = loss(inputs)
    alone = torch.cat([loss(take_row(inputs, row)).loss for row in range(len(LENGTHS))])
    far = [loss(make_inputs(spread=spread, dtype=torch.float32)).loss for spread in (30.0, 300.0)]
    return [
        shaped,
        _same("the same inputs give the same loss", again.loss, found.loss, "let it depend on its inputs alone"),
        Check("ok", "it selects tokens in the whole mini-batch: a response alone may give another loss")
        if chooses
        else _same(
            "a response alone gives the same as in a packed batch",
            alone,
            found.loss,
            "look at each token, or at each row of `sequences`: a batch is cut between rows",
        ),
        _outside(loss, inputs, found.loss),
        _gradient(loss, inputs),
        _finite(
            "it is finite in float32 for log-ratios of 30 and 300",
            far,
            "clamp log-ratios before exp, for example to +-20",
        ),
        _empty(loss),
    ]


def check_advantage(estimator: Callable[[Rollouts], Any]) -> list[Check]:
    """All checks of an estimator that needs rewards, mask and groups alone."""
    maker = torch.Generator().manual_seed(0)
    mask = torch.arange(6)[None, :] < torch.tensor([6, 3, 5, 2, 4, 6, 1, 6])[:, None]
    scores = torch.randn(8, generator=maker, dtype=torch.float64)
    rewards = torch.zeros(8, 6, dtype=torch.float64)
    rewards[torch.arange(8), mask.sum(1) - 1] = scores
    groups = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
    found = estimator(Rollouts(rewards, mask, groups)).advantages
    shaped = _shapes("advantage", mask, advantages=found)
    if shaped.verdict != "ok":
        return [shaped]
    order = torch.arange(8).flip(0)
    mixed = estimator(Rollouts(rewards[order], mask[order], groups[order])).advantages
    dirty = estimator(Rollouts(rewards.masked_fill(~mask, NOT_A_NUMBER), mask, groups)).advantages
    equal = estimator(Rollouts(rewards * 0, mask, groups)).advantages
    return [
        shaped,
        _same("the order of the samples does not matter", mixed, found[order], "find the members by `groups`"),
        _same("values outside the mask have no effect", dirty, found, "mask the rewards before any arithmetic"),
        _finite("it is finite where all rewards are equal", [equal], "add a small number to a deviation of 0"),
        Check("ok", "it is 0 outside the mask")
        if not bool(found[~mask].any())
        else Check("fails", "it is not 0 outside the mask", "multiply the result by the mask"),
    ]


def check_correction(correction: Callable[..., Any]) -> list[Check]:
    """All checks of a correction with its options bound."""
    inputs = make_inputs()
    given = (inputs.proximal, inputs.behaviour, inputs.mask, inputs.sequences)
    found = correction(*given)
    shaped = _shapes("correction", inputs.mask, weights=found.weights, keep=found.keep)
    if shaped.verdict != "ok":
        return [shaped]
    outside = inputs.mask.logical_not()
    dirty = correction(given[0].masked_fill(outside, NOT_A_NUMBER), *given[1:])
    proximal, behaviour = inputs.proximal.float(), inputs.behaviour.float()
    far = [correction(proximal * up, behaviour * down, *given[2:]).weights for up, down in ((100, 1), (1, 100))]
    return [
        shaped,
        _same("values outside the mask have no effect", dirty.weights, found.weights, "mask before any arithmetic"),
        _finite(
            "it is finite in float32 for large log-ratios",
            far,
            "clamp log-ratios before exp, for example to +-20",
        ),
        Check("ok", "its weights carry no gradient")
        if not found.weights.requires_grad
        else Check("fails", "its weights carry a gradient", "detach them"),
        Check("ok", "it is 0 outside the mask")
        if not bool(found.weights[outside].any())
        else Check("fails", "it is not 0 outside the mask", "multiply the weights by the mask"),
    ]


def check_aggregation(name: str) -> list[Check]:
    """All checks of an own aggregation: a piece of the batch must weigh its tokens as the whole batch does."""
    inputs = make_inputs()
    counts = count(inputs.mask, inputs.sequences)
    reduce = reduction_for(AlgorithmConfig(aggregation=name), counts)
    losses = inputs.advantages

    def total(values: Tensor, rows: Sequence[int], siblings: Tensor) -> Tensor:
        mine = torch.isin(inputs.sequences, torch.tensor(rows))
        number = torch.unique(inputs.sequences[mine], return_inverse=True)[1]
        return reduce(values[mine], inputs.mask[mine], number, siblings=siblings)

    alone = torch.zeros(1, dtype=torch.int64)
    whole = total(losses, (0, 1, 2), torch.zeros(3, dtype=torch.int64))
    split = torch.stack([total(losses, (row,), alone) for row in range(len(LENGTHS))]).sum()
    dirty = total(losses.masked_fill(~inputs.mask, NOT_A_NUMBER), (0, 1, 2), torch.zeros(3, dtype=torch.int64))
    divide = "divide by the counts of the whole batch (`denominators`), never by those of the piece"
    return [
        _same("the sum over the pieces of a batch is the loss of the batch", split, whole, divide),
        _same("values outside the mask have no effect", dirty, whole, "give finite weights"),
        _finite("it is finite", [whole], "give finite weights"),
    ]


def check_kl(name: str) -> list[Check]:
    """All checks of an own estimator of the divergence, as a term of the loss."""
    inputs = make_inputs()
    estimate = divergence_for(name)
    shaped = _shapes(
        "estimator", inputs.mask, divergence=load_object(name, code="config.extra")(inputs.current, inputs.proximal)
    )
    if shaped.verdict != "ok":
        return [shaped]
    found = estimate(inputs.current, inputs.proximal, inputs.mask)
    near, far = inputs.current.float(), inputs.proximal.float() * 300
    extremes = [estimate(near, far, inputs.mask), estimate(far, near, inputs.mask)]
    same = estimate(inputs.proximal, inputs.proximal, inputs.mask)
    moves = found.requires_grad and bool(torch.autograd.grad(found.sum(), inputs.current)[0].any())
    return [
        shaped,
        _same("it is 0 if both policies are the same", same, same * 0, "compare the two log-probs"),
        Check("ok", "it has a gradient")
        if moves
        else Check("note", "it has no gradient: it can only be used with kl.where = 'reward'"),
        _finite("it is finite in float32 for log-ratios of 300", extremes, "clamp the log-ratio before exp"),
    ]


# ---------------------------------------------------------------- single checks


def _shapes(what: str, mask: Tensor, **results: Any) -> Check:
    for name, value in results.items():
        if not isinstance(value, Tensor):
            return Check("fails", f"`{name}` is a {type(value).__name__}, not a tensor", f"return the {what}'s struct")
        if value.shape != mask.shape:
            want, got = list(mask.shape), list(value.shape)
            return Check("fails", f"`{name}` has the shape {got}, not {want}", "return a value for each token")
        if name in ("clipped", "keep") and value.dtype != torch.bool:
            return Check("fails", f"`{name}` is {value.dtype}", "return booleans")
        if value.dtype.is_floating_point and not bool(value[mask].isfinite().all()):
            return Check("fails", f"`{name}` is not finite for ordinary inputs")
    return Check("ok", f"it gives {', '.join(results)} of the shape {list(mask.shape)}, finite")


def _same(text: str, value: Tensor, wanted: Tensor, remedy: str) -> Check:
    gap = float((value.detach() - wanted.detach()).abs().max())
    return Check("ok", text) if gap <= GAP else Check("fails", f"{text}: differs by {gap:.3g}", remedy)


def _finite(text: str, values: Sequence[Tensor], remedy: str) -> Check:
    fine = all(bool(value.isfinite().all()) for value in values)
    return Check("ok", text) if fine else Check("fails", f"not so: {text}", remedy)


def _outside(loss: Callable[[LossInputs], Any], inputs: LossInputs, wanted: Tensor) -> Check:
    outside = ~inputs.mask
    fields = ("proximal", "behaviour", "advantages")
    dirty = {name: getattr(inputs, name).masked_fill(outside, NOT_A_NUMBER) for name in fields}
    current = inputs.current.detach().masked_fill(outside, NOT_A_NUMBER).requires_grad_()
    found = loss(inputs._replace(current=current, **dirty)).loss
    [slope] = torch.autograd.grad(found.sum(), current)
    text = "values outside the mask have no effect, NaN included"
    clean = not bool(found[outside].any()) and bool(slope.isfinite().all()) and not bool(slope[outside].any())
    if not clean:
        return Check("fails", f"not so: {text}", "replace them before any arithmetic: x.where(inputs.mask, 0.0)")
    return _same(text, found, wanted, "replace them before any arithmetic: x.where(inputs.mask, 0.0)")


def _gradient(loss: Callable[[LossInputs], Any], inputs: LossInputs) -> Check:
    """Its gradient against central differences."""
    [slope] = torch.autograd.grad(loss(inputs).loss.sum(), inputs.current)
    step = 1e-6

    def value(place: int, by: float) -> float:
        moved = inputs.current.detach().clone()
        moved[place] += by
        return float(loss(inputs._replace(current=moved.requires_grad_())).loss.sum().detach())

    places = range(len(slope))
    wanted = slope.new_tensor([(value(place, step) - value(place, -step)) / (2 * step) for place in places])
    gap = float((slope - wanted).abs().max())
    if gap <= 1e-5:
        return Check("ok", f"its gradient is that of finite differences (to {gap:.1g})")
    return Check("note", f"its gradient differs from finite differences by {gap:.3g}", DETACHED)


def _empty(loss: Callable[[LossInputs], Any]) -> Check:
    inputs = make_inputs()
    none = {name: value[:0] for name, value in inputs._asdict().items() if isinstance(value, Tensor)}
    none["current"] = none["current"].detach().requires_grad_()
    try:
        found = loss(LossInputs(**none)).loss
    except Exception as error:  # the author's code may raise anything
        return Check("fails", f"a piece without tokens: {type(error).__name__}: {error}", "return an empty loss")
    if found.numel() or not found.requires_grad:
        return Check(
            "fails", "a piece without tokens is not an empty loss with a gradient", "compute it from `current`"
        )
    return Check("ok", "a piece without tokens gives an empty loss that is connected to the graph")


# ---------------------------------------------------------------- command line


def check_part(name: str, kind: TestedKind = "loss", options: Mapping[str, Any] | None = None) -> list[Check]:
    """All checks of a part by its name. Raises `config.extra` and others if it cannot be loaded with these options."""
    if kind in ("aggregation", "kl") and options:
        raise ConfigError("usage", f"an own {kind} has no options", where="--options", remedy="leave them out")
    if kind == "aggregation":
        return check_aggregation(name)
    if kind == "kl":
        return check_kl(name)
    algorithm = msgspec.convert({kind: name, f"{kind}_options": dict(options or {})}, AlgorithmConfig)
    call = choose(algorithm, kind).call
    if kind == "loss":
        return check_loss(call, chooses=chooser_for(algorithm) is not None)
    return check_advantage(call) if kind == "advantage" else check_correction(call)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if nothing fails, 1 if something does, 2 if it could not be tested."""
    parser = argparse.ArgumentParser(prog="learners.contract_test", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--kind", choices=KINDS, default="loss")
    parser.add_argument("--options", default="{}")
    args = parser.parse_args(argv)
    try:
        options = msgspec.json.decode(args.options, type=dict[str, Any])
        checks = check_part(args.name, args.kind, options)
    except UNREADABLE as error:
        print(ConfigError("usage", f"no JSON object: {error}", where="--options").render(), file=sys.stderr)
        return ConfigError("usage", "").exit_code
    except AsyncRLError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    print(f"{args.kind} {args.name}" + (f" with {json.dumps(options)}" if options else ""))
    for check in checks:
        print(f"  {check.verdict:<5}  {check.text}" + (f"\n         -> {check.remedy}" if check.remedy else ""))
    return EXIT_FAILED if any(check.verdict == "fails" for check in checks) else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
