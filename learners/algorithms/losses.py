"""Policy losses per token, by name; they are minimized after aggregation.

All have the signature `name(inputs: LossInputs, *, options) -> TokenLoss` on flat tokens, `[N]`. Guarantees:
1. the loss and its gradient are 0 outside the mask, even for NaN inputs: values are masked before any arithmetic;
2. only the current log-probs get a gradient, not advantages, weights, proximal or behaviour log-probs;
3. without tokens the loss is empty but connected to the autograd graph, so that every rank runs its collectives;
4. float32 or wider; log-ratios are clamped to +-20 before `exp` (GSPO: the row's log-ratio to at most 10);
5. the loss includes the weights of the correction: as a factor, in GMPO as their geometric mean over the row, in VESPO
inside the row's ratio;
6. a loss that needs the whole mini-batch has a function `choose_<name>`; all others depend on one sequence at most, so
results do not depend on ranks and micro-batches.

Decoupled PPO is `ppo` with the weights of a correction. SAPO and GMPO are defined for seq-mean-token-mean.
Example: current -1.0, proximal -1.5 and advantage 2 give the ratio 1.6487. `ppo` with clip_high 0.2 gives -2.4,
clipped, with gradient 0; `cispo` gives -2.4 * -1.0 = 2.4 with gradient -2.4; `reinforce` gives 2 with gradient -2.
"""

from __future__ import annotations

from learners.algorithms.covariance_losses import choose_clip_cov, choose_kl_cov, clip_cov, kl_cov
from learners.algorithms.loss_terms import approx_kl
from learners.algorithms.sequence_losses import gmpo, gspo, sppo, topr, vespo
from learners.algorithms.token_losses import aipo, cispo, dppo_kl, dppo_tv, dro, ppo, reinforce, sapo
from learners.algorithms.types import LossInputs, TokenLoss

__all__ = [
    "LossInputs",
    "TokenLoss",
    "aipo",
    "approx_kl",
    "choose_clip_cov",
    "choose_kl_cov",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "gmpo",
    "gspo",
    "kl_cov",
    "ppo",
    "reinforce",
    "sapo",
    "sppo",
    "topr",
    "vespo",
]
