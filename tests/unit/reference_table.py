"""From the id of a function in a case file to a call of ours: `(params, inputs) -> outputs by name`.

A row returns at least the outputs that the case expects, gradients included; shapes
are compared after reshaping to the expected one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from reference_inputs import MASKS, Inputs
from torch import Tensor

from learners.algorithms import (
    advantages,
    aggregation,
    corrections,
    filters,
    gae,
    kl,
    losses,
    metrics,
    passk,
    preference,
    prime,
    rejection,
    rewards,
    staleness,
    supervised,
    tensors,
    values,
)
from learners.algorithms.types import Estimate, LossInputs, Rollouts, TokenLoss
from learners.models.logprobs import chunked_logprobs

Params = Mapping[str, Any]
Row = Callable[[Params, Inputs], Mapping[str, Any]]


# ================================================================ estimators, rewards, filters


def rollouts_of(inputs: Inputs, **more: Tensor | None) -> Rollouts:
    """The batch of an estimator; without groups in the case all rows are one group."""
    mask = inputs.mask()
    groups = inputs.groups() if "index" in inputs else torch.zeros(mask.shape[0], dtype=torch.int64)
    rewards = inputs.real("token_level_rewards") if "token_level_rewards" in inputs else torch.zeros(mask.shape)
    return Rollouts(rewards.to(inputs.dtype), mask, groups, **more)


def estimator(function: Callable[..., Estimate], **fields: str) -> Row:
    """A row for an estimator: options as the case has them, `fields` from field of `Rollouts` to input."""

    def row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
        found = {field: inputs.maybe(name) for field, name in fields.items()}
        return function(rollouts_of(inputs, **found), **params)._asdict()

    return row


def grpo_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    return advantages.grpo(rollouts_of(inputs), **{"singleton": "score", **params})._asdict()


def gdpo_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    rollouts = rollouts_of(inputs, parts=inputs.rows("reward_dims"))
    return advantages.gdpo(rollouts, **{"singleton": "score", **params})._asdict()


def length_adaptive_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    rollouts = rollouts_of(inputs, values=inputs.real("values"), bootstrap=inputs.maybe("bootstrap_value"))
    lambdas = gae.adaptive_lambdas(rollouts.mask, alpha=params["alpha"])
    return {"lam_actor": lambdas, **gae.gae_length_adaptive(rollouts, **params)._asdict()}


def vtrace_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    rollouts = rollouts_of(
        inputs,
        values=inputs.real("values"),
        bootstrap=inputs.maybe("bootstrap_value"),
        proximal=inputs.real("target_log_prob"),
        behaviour=inputs.real("behav_log_prob"),
    )
    found = gae.vtrace(rollouts, **params)
    return {"advantages": found.advantages, "value_targets": found.returns}


def token_baseline_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    """The importance weights of a case are given: the behaviour policy is the one that has them."""
    proximal, behaviour = inputs.real("old_log_prob"), None
    if "is_weights" in inputs:
        behaviour = proximal - inputs.real("is_weights").log()
    rollouts = rollouts_of(inputs, proximal=proximal, behaviour=behaviour, square_sums=inputs.real("sum_pi_squared"))
    return advantages.optimal_token_baseline(rollouts, off_policy=behaviour is not None, **params)._asdict()


def prime_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    mask = inputs.mask()
    rollouts = rollouts_of(inputs, process=inputs.real("token_scores"))
    placed = tensors.place_outcomes(inputs.rows("acc"), mask)
    return prime.prime(rollouts._replace(rewards=placed), **params)._asdict()


def controller_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    coeff, values = params["init"], []
    for measured, count in inputs["kl_and_nsteps"]:
        coeff = rewards.next_kl_coeff(coeff, measured, count, target=params["target"], horizon=params["horizon"])
        values.append(coeff)
    return {"values": values}


def kl_penalty_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    found = rewards.kl_penalty(
        inputs.real("token_level_scores"),
        inputs.real("old_log_prob"),
        inputs.real("ref_log_prob"),
        inputs.mask(),
        coeff=params["coef"],
        kind=params["kind"],
    )
    return {"token_level_rewards": found.rewards, "current_kl": found.kl}


def overlong_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    return {
        "penalty": [
            rewards.overlong_penalty(torch.tensor([length]), max_len=limit, buffer_len=buffer, factor=factor)[0]
            for length, limit, buffer, factor in inputs["length_maxlen_buffer_factor"]
        ]
    }


ESTIMATORS: dict[str, Row] = {
    "adv.gae": estimator(gae.gae, values="values", bootstrap="bootstrap_value"),
    "adv.gae_decoupled": estimator(gae.gae_decoupled, values="values", bootstrap="bootstrap_value"),
    "adv.gae_length_adaptive": length_adaptive_row,
    "adv.gdpo": gdpo_row,
    "adv.gpg": estimator(advantages.gpg),
    "adv.grpo": grpo_row,
    "adv.grpo_passk": estimator(advantages.grpo_passk),
    "adv.opo": estimator(advantages.opo),
    "adv.optimal_token_baseline": token_baseline_row,
    "adv.passk_training": lambda params, inputs: {
        "advantages": passk.passk_advantages(inputs.rows("correct"), inputs.groups(), **params)
    },
    "adv.reinforce_plus_plus": estimator(advantages.reinforce_plus_plus),
    "adv.reinforce_plus_plus_baseline": estimator(advantages.reinforce_plus_plus_baseline),
    "adv.remax": estimator(advantages.remax, baselines="reward_baselines"),
    "adv.rloo": estimator(advantages.rloo),
    "adv.vtrace": vtrace_row,
    "filter.accuracy_band": lambda params, inputs: {
        "keep": filters.accuracy_band(inputs.rows("metric"), inputs.groups(), **params)
    },
    "filter.group_std": lambda params, inputs: {
        "keep": filters.group_std(inputs.rows("metric"), inputs.groups(), **params)
    },
    "filter.pf_ppo_probs": lambda params, inputs: {
        "probs": filters.pf_ppo_probs(inputs.rows("scores"), method=params["method"], power=params["pow"])
    },
    "kl.adaptive_controller": controller_row,
    "metric.pass_at_k": lambda _, inputs: {"pass_at_k": [passk.pass_at_k(*counts) for counts in inputs["n_c_k"]]},
    "prime.advantage": prime_row,
    "prime.ce_loss": lambda params, inputs: {
        "loss": prime.ce_loss(inputs.real("q"), inputs.rows("acc"), inputs.mask(), **params)
    },
    "prime.token_scores": lambda params, inputs: prime.token_scores(
        inputs.real("rm_log_prob"), inputs.real("ref_log_prob"), inputs.mask(), **params
    )._asdict(),
    "reward.kl_penalty": kl_penalty_row,
    "reward.overlong_penalty": overlong_row,
    "reward.pkpo_binary": lambda params, inputs: {
        "rewards": passk.pkpo_binary(inputs.rows("correct"), inputs.groups(), **params)
    },
    "stats.masked_whiten": lambda params, inputs: {
        "out": tensors.masked_whiten(inputs.real("values"), inputs.mask(), **params)
    },
}


# ================================================================ losses, values, preferences, aggregation


def piece_of(
    found: Tensor, params: Params, *, mask: Tensor, counts: aggregation.Denominators, ranks: int = 1
) -> Tensor:
    """The share of some rows `[S, T]`; without a scale factor it is the padded width."""
    numbers = torch.arange(mask.shape[0])[:, None].expand(mask.shape).flatten()
    return aggregation.aggregate(
        found.flatten(),
        mask.flatten(),
        numbers,
        mode=params.get("mode") or params["agg"],
        denominators=counts,
        loss_scale_factor=params.get("loss_scale_factor") or mask.shape[1],
        ranks=ranks,
    )


def whole(found: Tensor, params: Params, inputs: Inputs) -> Tensor:
    """The loss of the whole batch."""
    mask = inputs.mask()
    counts = aggregation.count(mask.flatten(), inputs.sequences())
    return piece_of(found, params, mask=mask, counts=counts)


def loss_inputs(inputs: Inputs) -> LossInputs:
    """Those of a loss: a policy that the case does not have is NaN."""
    current = inputs.flat("log_prob").requires_grad_()
    others = (
        inputs.flat(name) if name in inputs else torch.full_like(current.detach(), torch.nan)
        for name in ("old_log_prob", "behav_log_prob")
    )
    return LossInputs(current, *others, inputs.flat("advantages"), inputs.mask().flatten(), inputs.sequences())


def loss_row(function: Callable[..., TokenLoss], agg: str | None = None, **names: str) -> Row:
    """A row for a policy loss: `names` from a parameter of the case to our option; `agg`: the only way it has."""

    def row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
        seen = loss_inputs(inputs)
        options = {names.get(name, name): value for name, value in params.items() if name != "agg"}
        found = function(seen, **options)
        loss = whole(found.loss, {"agg": agg or params["agg"]}, inputs)
        loss.backward()
        return {
            "loss": loss,
            "grad_log_prob": seen.current.grad,
            "selected": found.clipped,
            "clipfrac": tensors.masked_mean(found.clipped, seen.mask),
            "approx_kl": tensors.masked_mean(losses.approx_kl(seen), seen.mask),
            **(
                {}
                if found.dual_clipped is None
                else {"clipfrac_lower": tensors.masked_mean(found.dual_clipped, seen.mask)}
            ),
        }

    return row


def clip_cov_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    """`clipped` of the loss holds PPO's too; the chosen tokens are asked for by themselves."""
    names = {"clip_cov_ratio": "ratio", "clip_cov_lb": "lower", "clip_cov_ub": "upper"}
    options = {names.get(name, name): value for name, value in params.items() if name != "agg"}
    chosen = losses.choose_clip_cov(loss_inputs(inputs), **options)
    return {**loss_row(losses.clip_cov, **names)(params, inputs), "selected": chosen}


def aggregate_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    return {"out": whole(inputs.real("loss"), params, inputs)}


def distributed_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    found, mask, ranks = inputs.real("loss"), inputs.mask(), inputs["rank_microbatch_rows"]
    counts = aggregation.Denominators(int(params["batch_num_tokens"]), int(params["global_batch_size"]))
    pieces = [
        [piece_of(found[rows], params, mask=mask[rows], counts=counts, ranks=params["dp_size"]) for rows in of_rank]
        for of_rank in ranks
    ]
    return {"piece_losses": pieces, "mean_over_ranks_of_sum_over_microbatches": sum(map(sum, pieces)) / len(pieces)}


def value_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    predictions, mask = inputs.real("vpreds").requires_grad_(), inputs.mask()
    found = values.value_loss(
        predictions, inputs.real("values"), inputs.real("returns"), mask, cliprange=params["cliprange"]
    )
    loss = whole(found.loss, params, inputs)
    loss.backward()
    return {"loss": loss, "grad_vpreds": predictions.grad, "clipfrac": tensors.masked_mean(found.clipped, mask)}


def from_logits(params: Params, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of the logits: the hidden states of a head that is the identity."""
    logits = inputs.rows("logits")
    ids = inputs.whole("token_ids") if "token_ids" in inputs else torch.zeros(logits.shape[:-1], dtype=torch.int64)
    head = torch.eye(logits.shape[-1], dtype=logits.dtype)
    return chunked_logprobs(
        logits.flatten(0, -2), head, ids.flatten(), temperature=params.get("temperature", 1.0), chunk_tokens=4
    )


def positive_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    log_probs, mask = inputs.flat("log_prob").requires_grad_(), inputs.mask().flatten()
    right = inputs.per_token("correct") > 0
    loss = supervised.positive_lm(log_probs, mask, right, tokens=int((mask & right).sum()), coeff=params["mu"])
    loss.backward()
    return {"loss": loss, "grad_log_prob": log_probs.grad}


def sft_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    mask = supervised.next_token_mask(inputs.mask("loss_mask_unshifted"))
    log_probs = torch.where(mask, inputs.rows("log_prob_next_token"), torch.nan)
    counts = aggregation.Denominators(int(mask.sum()), int(mask.any(-1).sum()))
    return {"loss": piece_of(supervised.sft(log_probs, mask), {"agg": "token-mean"}, mask=mask, counts=counts)}


def of_pairs(found: preference.PairLoss, chosen: Tensor, rejected: Tensor) -> Mapping[str, Any]:
    """Mean over the pairs, and gradients."""
    loss = found.loss.mean()
    loss.backward()
    return {
        "loss": loss,
        "grad_chosen": chosen.grad,
        "grad_rejected": rejected.grad,
        "reward_chosen": found.reward_chosen,
        "reward_rejected": found.reward_rejected,
        "accuracy": found.correct.double().mean(),
    }


def dpo_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    chosen, rejected = (inputs.rows(f"policy_{which}").requires_grad_() for which in ("chosen", "rejected"))
    given = () if params["reference_free"] else (inputs.rows("ref_chosen"), inputs.rows("ref_rejected"))
    options = {name: params[name] for name in ("beta", "kind", "label_smoothing")}
    if "len_chosen" in inputs:
        options |= {"chosen_lengths": inputs.rows("len_chosen"), "rejected_lengths": inputs.rows("len_rejected")}
    return of_pairs(preference.dpo(chosen, rejected, *given, **options), chosen, rejected)


def bradley_terry_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    chosen, rejected = (inputs.rows(f"reward_{which}").requires_grad_() for which in ("chosen", "rejected"))
    margin = inputs.rows("margin") if "margin" in inputs else None
    found = preference.bradley_terry(chosen, rejected, margin=margin, center_coeff=params["center_coef"] or 0.0)
    return of_pairs(found, chosen, rejected)


def sppo_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    current, mask = inputs.flat("log_prob").requires_grad_(), inputs.mask()
    scores = inputs.rows("winrate" if "winrate" in inputs else "rewards")
    targets = preference.sppo_targets(scores, target=params["target"], softmean_beta=params["softmean_beta"])
    rows = preference.sppo(
        current, inputs.flat("old_log_prob"), mask.flatten(), inputs.sequences(), targets, eta=params["eta"]
    )
    loss = rows.sum() / mask.any(-1).sum()
    loss.backward()
    return {"loss": loss, "grad_log_prob": current.grad}


_COV = {"kl_cov_ratio": "ratio", "ppo_kl_coef": "coeff"}
LOSSES: dict[str, Row] = {
    "agg.loss": aggregate_row,
    "agg.loss_distributed": distributed_row,
    "loss.entropy": lambda params, inputs: {
        "entropy_loss": whole(from_logits(params, inputs)[1].reshape(inputs.mask().shape), params, inputs)
    },
    "loss.positive_lm": positive_row,
    "policy.aipo": loss_row(losses.aipo),
    "policy.cispo": loss_row(losses.cispo),
    "policy.clip_cov": clip_cov_row,
    "policy.dppo_kl": loss_row(losses.dppo_kl, clip_c="ratio_cap"),
    "policy.dppo_tv": loss_row(losses.dppo_tv, clip_c="ratio_cap"),
    "policy.dro": loss_row(losses.dro),
    "policy.gmpo": loss_row(losses.gmpo, agg="seq-mean-token-mean"),
    "policy.gspo": loss_row(losses.gspo),
    "policy.kl_cov": loss_row(losses.kl_cov, **_COV),
    "policy.ppo": loss_row(losses.ppo, clip_c="dual_clip"),
    "policy.reinforce": loss_row(losses.reinforce),
    "policy.sapo": loss_row(losses.sapo),
    "policy.vespo": loss_row(losses.vespo),
    "pref.dpo": dpo_row,
    "pref.online_pairs": lambda _, inputs: {
        "chosen": preference.online_pairs(inputs.rows("scores_interleaved")).chosen
    },
    "pref.softmean": lambda params, inputs: {"out": preference.softmean(inputs.rows("x"), **params)},
    "pref.sppo": sppo_row,
    "rm.bradley_terry": bradley_terry_row,
    "sft.loss": sft_row,
    "stats.entropy_from_logits": lambda params, inputs: {"entropy": from_logits(params, inputs)[1]},
    "stats.token_logprobs": lambda params, inputs: {"log_probs": from_logits(params, inputs)[0]},
    "value.clipped_loss": value_row,
}


# ================================================================ corrections, KL, bookkeeping


def train_and_rollout(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Proximal, behaviour, mask and row numbers, all `[N]`."""
    names = ("train_log_prob", "rollout_log_prob")
    proximal, behaviour = (inputs.flat(name) for name in names)
    return proximal, behaviour, inputs.mask().flatten(), inputs.sequences()


def reduced(values: Tensor, params: Params, inputs: Inputs) -> Tensor:
    """The whole batch as one piece."""
    mask = inputs.mask()
    counts = aggregation.Denominators(int(mask.sum()), int(mask.any(-1).sum()))
    return aggregation.aggregate(values, mask.flatten(), inputs.sequences(), mode=params["agg"], denominators=counts)


def decoupled_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    current = inputs.flat("log_prob").requires_grad_()
    proximal, behaviour = inputs.flat("prox_log_prob"), inputs.flat("behav_log_prob")
    mask, sequences = inputs.mask().flatten(), inputs.sequences()
    low = params["cap_low"] or 0.0
    if params["action"] == "truncate":
        correction = corrections.tis(proximal, behaviour, mask, sequences, upper=params["cap"], floor=low)
    else:
        correction = corrections.icepop(proximal, behaviour, mask, sequences, upper=params["cap"], lower=low)
    seen = LossInputs(current, proximal, behaviour, inputs.flat("advantages"), mask, sequences, correction.weights)
    found = losses.ppo(seen, clip_low=params["clip_low"], clip_high=params["clip_high"], dual_clip=params["clip_c"])
    loss = reduced(found.loss, params, inputs)
    loss.backward()
    return {"loss": loss, "grad_log_prob": current.grad, "behav_weight": correction.weights}


def weights_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    return {"weights": corrections.is_weights(*train_and_rollout(inputs), **params)}


def rejection_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    return {"mask": rejection.rejection_mask(*train_and_rollout(inputs), **params)}


def sequence_mask_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    mask = inputs.mask()
    keep = rejection.sequence_mask(
        inputs.flat("log_prob"),
        inputs.flat("behav_log_prob"),
        inputs.per_token("seq_advantages"),
        mask.flatten(),
        inputs.sequences(),
        delta=params["delta"],
    )
    return {"keep": (keep.reshape(mask.shape) == mask).all(-1)}


def m2po_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    found = corrections.m2po(
        inputs.flat("prox_log_prob"),
        inputs.flat("behav_log_prob"),
        inputs.mask().flatten(),
        inputs.sequences(),
        threshold=params["threshold"],
    )
    return {"mask": found.keep}


def offpolicy_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    seen = train_and_rollout(inputs)
    lags = torch.zeros(inputs.mask().shape[0], dtype=torch.int64)
    found = metrics.table_metrics(metrics.correction_table(*seen, lags=lags))
    names = {
        "k3_kl": "kl_behaviour",
        "train_ppl": "proximal_ppl",
        "rollout_ppl": "behaviour_ppl",
        "ess_token": "ess_ratio",
    }
    return {**found, **{theirs: found[ours] for theirs, ours in names.items()}}


def ess_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    share = metrics.ess_fraction(inputs.real("seq_weights"))
    return {"ess_fraction": share, "sqrt_lr_scale": metrics.step_scale(float(share))}


def loglinear_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    found = corrections.prox_loglinear(
        inputs.flat("behav_log_prob"),
        inputs.flat("log_prob"),
        inputs.whole("versions").flatten(),
        inputs.mask().flatten(),
        **params,
    )
    return {"prox_log_prob": found}


def kl_loss_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    current, mask = inputs.flat("log_prob").requires_grad_(), inputs.mask().flatten()
    if "old_log_prob" in inputs:
        values = kl.kl_importance_weighted(current, inputs.flat("old_log_prob"), inputs.flat("ref_log_prob"), mask)
    else:
        values = kl.kl_estimate(current, inputs.flat("ref_log_prob"), mask, kind=params["kind"])
    loss = params.get("coef", 1.0) * reduced(values, params, inputs)
    loss.backward()
    return {"loss": loss, "grad_log_prob": current.grad}


def kl_values_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    pair = inputs.real("log_prob"), inputs.real("ref_log_prob")
    mask = inputs.mask() if any(name in inputs for name in MASKS) else None
    return {kind: kl.kl_estimate(*pair, mask, kind=kind) for kind in kl.KINDS}


def capacity_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    names = ("max_staleness", "version", "batch_size", "max_concurrent", "accepted", "running")
    rows = inputs["maxstale_version_batch_maxconc_accepted_running"]
    return {"capacity": [staleness.capacity(**dict(zip(names, row, strict=True))) for row in rows]}


def staleness_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    found = []
    for versions, current in inputs["token_versions_and_current"]:
        tokens = torch.tensor(versions)
        ages = staleness.staleness(tokens, tokens >= 0, torch.zeros_like(tokens), current_version=current)
        found.append((ages.newest, ages.oldest, ages.span))
    return {
        name: list(column) for name, column in zip(("newest", "oldest", "span"), zip(*found, strict=True), strict=True)
    }


def staleness_weight_row(params: Params, inputs: Inputs) -> Mapping[str, Any]:
    return {"weights": staleness.staleness_weights(inputs.real("lag"), **params)}


CORRECTIONS: dict[str, Row] = {
    "offpolicy.decoupled_ppo": decoupled_row,
    "offpolicy.is_weights": weights_row,
    "offpolicy.rejection_mask": rejection_row,
    "offpolicy.sequence_mask": sequence_mask_row,
    "offpolicy.m2po_mask": m2po_row,
    "offpolicy.metrics": offpolicy_row,
    "offpolicy.ess": ess_row,
    "offpolicy.prox_loglinear": loglinear_row,
    "kl.loss": kl_loss_row,
    "kl.loss_importance_weighted": kl_loss_row,
    "kl.estimate": kl_values_row,
    "async.capacity": capacity_row,
    "async.staleness": staleness_row,
    "async.staleness_weight": staleness_weight_row,
}


FUNCTIONS: dict[str, Row] = {**ESTIMATORS, **LOSSES, **CORRECTIONS}
