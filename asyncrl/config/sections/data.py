"""`[model]`, `[data]`, `[sampling]` and `[evaluation]`: the policy, the prompts, and how producers sample.

Example: `evaluation.path = "data/aime24.parquet"`, `every = 20`, `samples = 32`, `temperature = 0.6`: mean@32, best@n,
maj@32 and pass@n after every 20 steps.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.sections.base import Count, Positive, Seconds, Section


class DataConfig(Section, frozen=True):
    """`[data]`: the prompts. Column names of verl are accepted as they are."""

    path: str = ""  # .parquet, .jsonl, .json, .arrow; a pattern; a folder of `datasets`; several, separated by commas
    source: str = ""  # instead of path: 'module:function' that returns an iterable of rows
    prompt_key: str = "prompt"  # text, or a list of chat messages
    shuffle: bool = True  # a new order in every epoch, by run.seed
    max_prompt_tokens: Positive = 1024  # skip longer prompts and record the reason
    response_key: str = "response"  # engine = dataset, mode sft: the answer (or the last message of the prompt)
    chosen_key: str = "chosen"  # engine = dataset, modes dpo and reward_model: the better answer
    rejected_key: str = "rejected"  # the worse answer of the same row
    epochs: Count = 0  # passes over the rows, from which learner.steps is derived; 0: learner.steps as set
    chat_template: bool = True  # render lists of messages by the tokenizer's template; plain text stays unchanged
    as_chat: bool = False  # treat plain text as a user message, so that the template renders it
    system_prompt: str = ""  # first message for prompts without a system message


class SamplingConfig(Section, frozen=True):
    """`[sampling]`: how producers sample."""

    group_size: Positive = 8  # samples of one prompt (GRPO's G)
    over_issue: Count = 0  # extra samples per prompt; the first group_size that arrive count, others are cancelled
    max_new_tokens: Positive = 1024  # longest response
    temperature: Annotated[float, Meta(gt=0)] = 1.0  # the learner divides its logits by it as well
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # 1: off
    top_k: Count = 0  # 0: off
    greedy_baseline: bool = False  # one more greedy sample per prompt as a baseline (ReMax), not trained

    @property
    def group_samples(self) -> int:
        """Samples of a complete group: group_size, plus 1 with greedy_baseline."""
        return self.group_size + self.greedy_baseline

    @property
    def asked_samples(self) -> int:
        """Samples of one group that producers generate: group_samples + over_issue."""
        return self.group_samples + self.over_issue


class ModelConfig(Section, frozen=True):
    """`[model]`: the policy, a folder in Hugging Face format."""

    path: str  # folder with config.json, weights and tokenizer
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # dtype of training compute and of generation
    trust_remote_code: bool = False  # run code that is part of the model folder
    attn_implementation: str = "auto"  # auto: flash_attention_2 if installed, else sdpa per sequence; varlen: torch's


class EvaluationConfig(Section, frozen=True):
    """`[evaluation]`: held-out prompts, sampled and scored by the same workers, never trained."""

    path: str = ""  # like data.path; [data] names the columns
    source: str = ""  # like data.source; neither: no evaluation
    every: Count = 0  # learner steps between evaluations; 0: none by step
    at_start: bool = False  # evaluate the start weights
    at_end: bool = True  # evaluate the last step's weights; the run waits for it, up to timeout_s
    samples: Positive = 1  # samples per prompt: k of mean@k, best@k, maj@k and pass@k
    temperature: Annotated[float, Meta(ge=0)] = 0.0  # 0: greedy
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # 1: off
    top_k: Count = 0  # 0: off
    max_new_tokens: Count = 0  # longest response; 0: sampling.max_new_tokens
    max_prompts: Count = 0  # use only the first rows; 0: all
    timeout_s: Seconds = 600.0  # time limit of one evaluation; missing prompts are counted with their reason
    share: Annotated[float, Meta(gt=0, le=1)] = 0.25  # a producer may hold this share of its training work in addition

    @property
    def enabled(self) -> bool:
        """Whether there is anything to evaluate."""
        return bool(self.path or self.source) and bool(self.every or self.at_start or self.at_end)

    def held_groups(self, *, training_samples: int) -> int:
        """Evaluation prompts that a producer may hold in addition to its training samples; at least 1."""
        return max(1, int(self.share * training_samples) // self.samples)
