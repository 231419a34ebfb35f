"""`[data]` and `[sampling]`: the prompts, and how producers sample."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.sections.base import Count, Positive, Section, one_of_or_place

DIFFICULTY = "difficulty"
Sampler = Annotated[str, one_of_or_place("", DIFFICULTY)]


class DataConfig(Section, frozen=True):
    """`[data]`: the prompts. Column names of verl are accepted as they are."""

    path: str = ""  # .parquet, .jsonl, .json, .arrow; a pattern; a folder of `datasets`; several, separated by commas
    ratios: tuple[Positive, ...] = ()  # parts of each of path's data sets, such as [5, 3, 2]; empty: by their rows
    source: str = ""  # instead of path: 'module:name' or 'file.py:name' that returns an iterable of rows
    prompt_key: str = "prompt"  # text, a list of chat messages, or a request of OpenAI's Responses with its tools
    shuffle: bool = True  # a new order in every epoch, by run.seed
    sampler: Sampler = ""  # difficulty: by the rewards so far; or orders the rows of each epoch instead of shuffle
    max_prompt_tokens: Positive = 1024  # skip longer prompts and record the reason
    response_key: str = "response"  # engine = dataset, mode sft: the answer (or the last message of the prompt)
    chosen_key: str = "chosen"  # engine = dataset, modes dpo and reward_model: the better answer
    rejected_key: str = "rejected"  # the worse answer of the same row
    completion_key: str = "completion"  # engine = dataset, mode kto: the answer
    label_key: str = "label"  # whether the answer of the row is desirable: true or false
    epochs: Count = 0  # passes over the rows, from which learner.steps is derived; 0: learner.steps as set
    chat_template: bool = True  # render lists of messages by the tokenizer's template; plain text stays unchanged
    as_chat: bool = False  # treat plain text as a user message, so that the template renders it
    system_prompt: str = ""  # first message for prompts without a system message
    image_key: str = "images"  # column of images, for a model that sees them (docs/images.md)
    max_image_pixels: Count = 0  # larger images are scaled down to this; 0: as the model's preprocessor says

    @property
    def chosen_by_buffer(self) -> bool:
        """Whether the buffer chooses the row of each group, by the rewards so far."""
        return self.sampler == DIFFICULTY


class SamplingConfig(Section, frozen=True):
    """`[sampling]`: how producers sample."""

    group_size: Positive = 8  # samples of one prompt (GRPO's G)
    over_issue: Count = 0  # extra samples per prompt; the first group_size that arrive count, others are cancelled
    max_new_tokens: Positive = 1024  # longest response
    temperature: Annotated[float, Meta(gt=0)] = 1.0  # the learner divides its logits by it as well
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # 1: off
    top_k: Count = 0  # 0: off
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # least share of the likeliest token's probability; 0: off
    truncation: Literal["exact", "biased"] = "exact"  # log-probs of the tokens that the cut left; biased: of all tokens
    greedy_baseline: bool = False  # one more greedy sample per prompt as a baseline (ReMax), not trained

    @property
    def cut(self) -> str:
        """The settings that cut the distribution of a draw, in words; empty: none does."""
        on = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        return ", ".join(f"sampling.{name} = {getattr(self, name):g}" for name, is_on in on.items() if is_on)

    @property
    def wants_support(self) -> bool:
        """Whether engines must record the support of each draw: the tokens that the cut left."""
        return bool(self.cut) and self.truncation == "exact"

    @property
    def group_samples(self) -> int:
        """Samples of a complete group: group_size, plus 1 with greedy_baseline."""
        return self.group_size + self.greedy_baseline

    @property
    def asked_samples(self) -> int:
        """Samples of one group that producers generate: group_samples + over_issue."""
        return self.group_samples + self.over_issue
