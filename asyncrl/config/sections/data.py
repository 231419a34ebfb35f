"""`[data]` and `[sampling]`: the prompts, and how producers sample."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncrl.config.sections.base import Count, Positive, Section


class DataConfig(Section, frozen=True):
    """`[data]`: the prompts. Column names of verl are accepted as they are."""

    path: str = ""  # .parquet, .jsonl, .json, .arrow; a pattern; what `datasets` saved; several are joined by commas
    source: str = ""  # instead of path: 'module:function' that returns an iterable of rows
    prompt_key: str = "prompt"  # text, or a list of chat messages
    shuffle: bool = True  # a new order in every epoch, by run.seed
    max_prompt_tokens: Positive = 1024  # longer prompts are set aside with the reason
    response_key: str = "response"  # engine = dataset, mode sft: the answer (or the last message of the prompt)
    chosen_key: str = "chosen"  # engine = dataset, modes dpo and reward_model: the better answer
    rejected_key: str = "rejected"  # the worse answer of the same row
    epochs: Count = 0  # passes over the rows: learner.steps is derived from it; 0: learner.steps as set
    chat_template: bool = True  # render lists of messages by the tokenizer's template; plain text is encoded as it is
    as_chat: bool = False  # take a plain text for a message of the user, so that the template renders it
    system_prompt: str = ""  # a first message for prompts that have none of the role system


class SamplingConfig(Section, frozen=True):
    """`[sampling]`: how producers sample."""

    group_size: Positive = 8  # samples of one prompt (GRPO's G)
    over_issue: Count = 0  # more samples asked for; the first group_size that arrive count, the rest is cancelled
    max_new_tokens: Positive = 1024  # longest response
    temperature: Annotated[float, Meta(gt=0)] = 1.0  # the learner divides its logits by it too
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # 1: off
    top_k: Count = 0  # 0: off
    greedy_baseline: bool = False  # one more sample per prompt, greedy: a baseline (ReMax), not trained

    @property
    def group_samples(self) -> int:
        """group_size, and 1 with greedy_baseline: samples of a complete group."""
        return self.group_size + self.greedy_baseline

    @property
    def asked_samples(self) -> int:
        """group_samples + over_issue: samples of one group that producers are asked for."""
        return self.group_samples + self.over_issue
