"""A language model with a scalar head: the reward model of `learner.mode = "reward_model"`, with the signature of
`PolicyModel`.

Guarantees:
1. the head is transformers' own (`AutoModelForSequenceClassification`, one label): the export loads there unchanged;
2. without a head in the model folder it starts as normal noise of width 1 / (H + 1) from `run.seed`, equal on every
   rank;
3. scores are float32, from the hidden state AT the target token, not before it: the score of an answer is that of its
   last token, the end of sequence included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.errors import ConfigError
from asyncrl.runtime.model_folder import load_model
from learners.models.sequence_parallel import Split, hidden_states_at


class ScoreModel(nn.Module):
    """A sequence classifier of transformers as a function from packed rows to scores."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model
        self.split: Split | None = None  # rows are split over ranks (`learners.models.sequence_parallel`)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, positions: Tensor, targets: Tensor, *, whole: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the score at each target `[N]`, and zeros `[N]` in place of entropies.

        Args:
            input_ids: int64 `[R, W]`; one packed row, or rows with one sequence each.
            position_ids: int64 `[R, W]`, starting at 0 in every sequence.
            positions: index into the flattened `[R * W]` of the token before the target.
            targets: token ids; only their number counts.
            whole: no effect: there are no logits.
        """
        states = hidden_states_at(self.model.base_model, input_ids, position_ids, positions + 1, split=self.split)
        weight = self.model.score.weight
        wide = torch.float64 if states.hidden.dtype == torch.float64 else torch.float32
        scores = states.whole(states.hidden.to(wide) @ weight[0].to(wide))
        return scores, torch.zeros_like(scores)


def load_scorer(path: str, *, seed: int, trust_remote_code: bool, **options: Any) -> Any:
    """Return the classifier of a model folder with one label; create the head if the folder has none.

    Raises:
        ConfigError: the architecture has no such classifier.
        OSError, ValueError: the folder cannot be read.
    """
    model, found = load_model(
        path, "classifier", trust_remote_code=trust_remote_code, num_labels=1, output_loading_info=True, **options
    )
    head = scalar_head(model, path)
    if any("score" in name for name in found["missing_keys"]):
        with torch.no_grad():
            head.weight.copy_(new_head(model, seed))
    model.config.architectures = [type(model).__name__]
    return model


def scalar_head(model: Any, path: str) -> nn.Linear:
    """Return the head of a classifier.

    Raises:
        ConfigError: it has no linear head without bias.
    """
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ConfigError("config.model", f"{type(model).__name__} has no linear head named score", where=path)
    return head


def new_head(model: Any, seed: int) -> Tensor:
    """Return the weight `[1, H]` of a new head."""
    weight = torch.empty(model.score.weight.shape, dtype=model.score.weight.dtype)
    generator = torch.Generator().manual_seed(seed)
    return weight.normal_(0.0, 1.0 / (weight.shape[1] + 1), generator=generator)
