"""The policy as a module from packed rows to log-probs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from asyncrl.config.model_facts import HEAD_CAP, HEAD_SCALES, find_head_scale
from asyncrl.errors import ConfigError
from asyncrl.images.forward import Seen, body_arguments, stray_placeholders
from asyncrl.runtime.routers import Routers
from learners.models.logprobs import (
    TokenNumbers,
    chunked_logprobs,
    gather_whole,
    split_logprobs,
    token_numbers,
)
from learners.models.sequence_parallel import Split, hidden_states_at
from learners.models.support import Supports
from learners.models.top_logprobs import top_logprobs
from learners.models.vocabulary import vocabulary_split


def check_head(config: Any) -> None:
    """Raise `config.model` if the model scales its logits after the head, which this module does not reproduce."""
    config = config.get_text_config()
    if scale := find_head_scale({name: getattr(config, name, None) for name in HEAD_SCALES}):
        raise ConfigError("config.model", f"{config.model_type}: {scale} is not supported by the learner")


class PolicyModel(nn.Module):
    """A causal language model of transformers as a function from packed rows to log-probs.

    Tied embeddings need no special treatment: the head's weight is read from its module.
    """

    def __init__(self, model: Any, *, temperature: float = 1.0, chunk_tokens: int = 1024) -> None:
        super().__init__()
        check_head(model.config)
        self.model: Any = model
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.cap: float | None = getattr(model.config.get_text_config(), HEAD_CAP, None)
        self.routers: Routers | None = None  # that replay choices
        self.split: Split | None = None  # rows are split over ranks (`learners.models.sequence_parallel`)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        positions: Tensor,
        targets: Tensor,
        *,
        whole: bool = False,
        squares: bool = False,
        support: Supports | None = None,
        seen: Seen | None = None,
        top_ids: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> tuple[Tensor, ...] | TokenNumbers:
        """Return log-probs `[N]` and entropies `[N]` of `targets` `[N]`, each predicted at `positions` `[N]`.

        Args:
            input_ids: int64 `[R, W]`; one packed row, or rows with one sequence each.
            position_ids: int64 `[R, W]`, starting at 0 in every sequence; of a model with M-RoPE `[4, R, W]`.
            positions: index into the flattened `[R * W]` of the token that predicts the target.
            targets: token ids.
            whole: compute full logits by the model's own forward (for the check at the start).
            squares: return `TokenNumbers` with sums of squares, without gradient.
            support: what each target was drawn from; ignored by `whole`.
            seen: images, of a vision-language model.
            experts: int16 `[R * W, layers * chosen]` that `routers` replay, see `asyncrl.runtime.routers`.
            top_ids: `[N, K]`; return their log-probs `[N, K]` as a third tensor. Not with split rows or heads.
        """
        body = self.model.base_model
        if self.routers is not None:
            self.routers.give(experts)
        if whole:
            with self.split.disable() if self.split is not None else nullcontext(), stray_placeholders(body, seen):
                given = {"input_ids": input_ids, "position_ids": position_ids, **body_arguments(body, seen)}
                logits = self.model(**given, use_cache=False).logits
            logs = (logits.flatten(0, 1)[positions].float() / self.temperature).log_softmax(-1)
            return logs.gather(-1, targets[:, None]).squeeze(-1), -(logs.exp() * logs).sum(-1)
        with stray_placeholders(body, seen):
            images = body_arguments(body, seen)
            states = hidden_states_at(body, input_ids, position_ids, positions, split=self.split, images=images)
        head, hidden, targets = self.model.get_output_embeddings(), states.hidden, states.select(targets)
        if support is not None and states.mine is not None:
            support = support.select(states.mine)
        split, bias = vocabulary_split(head.weight), getattr(head, "bias", None)
        if split is not None and bias is None:
            rows = head.weight.to_local(grad_placements=head.weight.placements)
            found = split_logprobs(
                hidden,
                rows,
                targets,
                split,
                temperature=self.temperature,
                chunk_tokens=self.chunk_tokens,
                squares=squares,
                support=support,
                cap=self.cap,
            )
            whole_row = [states.whole(part) for part in found if part is not None]
            return TokenNumbers(*whole_row) if squares else tuple(whole_row)
        weight = gather_whole(head.weight)
        options: dict[str, Any] = {
            "bias": bias,
            "temperature": self.temperature,
            "chunk_tokens": self.chunk_tokens,
            "support": support,
            "cap": self.cap,
        }
        if squares:
            numbers = token_numbers(hidden, weight, targets, squares=True, **options)
            return TokenNumbers(*(states.whole(part) for part in numbers if part is not None))
        logprobs, entropy = chunked_logprobs(hidden, weight, targets, **options)
        if top_ids is not None:
            del options["support"]
            return logprobs, entropy, top_logprobs(hidden, weight, top_ids, **options)
        return states.whole(logprobs), states.whole(entropy)
