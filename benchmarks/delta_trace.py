"""A real training trace in bf16 for `bench_delta.py`: what changes in the weights from step to step.

GRPO on the demo's task by the learner's own parts: `learners.backends.fsdp2.backend` on one rank
with fp32 master weights and optimizer states, `learners.batch.assembly.assemble` and
`learners.step.update.train_step`, bf16 on the
wire. The generator is transformers' own `generate` on a bf16 model that is fed by deltas alone: after every step it
takes the decoded bytes, whose digest is compared with that of the learner's weights. Nothing runs beside anything else,
so every batch is on-policy; prompts are new in every step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl import config as configuration
from asyncrl.demo import tasks
from asyncrl.demo.demo import quickstart, task_settings
from asyncrl.wire.batch_arrays import ClaimedBatch, GroupData, SampleData
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.batch import assembly as batches
from learners.gang.gang import Gang
from learners.step.update import train_step
from weightsync.encoding import delta
from weightsync.plan.buckets import ITEM_BYTES, Plan, TensorSpec, group_by_bucket, plan_buckets
from weightsync.plan.digest import bucket_digest

Reward = Callable[[str, str], float]  # of (answer, ground truth)


class Trace(msgspec.Struct, frozen=True):
    """One run: its learning rate and its size."""

    lr: float
    steps: int = 50
    prompts: int = 16
    samples: int = 8
    new_tokens: int = 112
    seed: int = 0


def task_reward(task: str) -> Reward:
    """The demo's own reward."""
    function = tasks.add_reward if task == "add" else tasks.running_sum_reward
    return lambda answer, truth: function(task, answer, truth)


def settings(task: str, model: Path, trace: Trace) -> configuration.Config:
    """The quickstart's settings, in bf16."""
    return configuration.load(
        quickstart(),
        [
            *task_settings(task),
            f"model.path={model}",
            "model.dtype=bfloat16",
            f"learner.optim.lr={trace.lr}",
            f"sampling.max_new_tokens={trace.new_tokens}",
            f"learner.steps={trace.steps}",
        ],
    )


class Generator:
    """A bf16 model that changes by deltas alone."""

    def __init__(self, model: Path, plan: Plan, buckets: list[np.ndarray], *, seed: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.held = [bucket.copy() for bucket in buckets]
        self._plan = plan
        self._groups = group_by_bucket(plan.tensors, len(plan.bucket_bytes))
        self._random = torch.manual_seed(seed)
        self._load()

    def take(self, blobs: list[bytes], wanted: list[np.ndarray]) -> float:
        """Apply the deltas of a step; the seconds that took. The weights must be the learner's, bit for bit."""
        began = time.perf_counter()
        for blob, held, group in zip(blobs, self.held, self._groups, strict=True):
            delta.decode(blob, memoryview(held), group)
        spent = time.perf_counter() - began
        for held, new, group in zip(self.held, wanted, self._groups, strict=True):
            assert bucket_digest(group, held.data) == bucket_digest(group, new.data)
        self._load()
        return spent

    def _load(self) -> None:
        parameters = dict(self.model.named_parameters())
        for tensor in self._plan.tensors:
            data = torch.from_numpy(self.held[tensor.bucket][tensor.offset : tensor.offset + tensor.nbytes])
            parameters[tensor.name].data.copy_(data.view(torch.bfloat16).reshape(tensor.shape))

    @torch.no_grad()
    def batch(self, rows: list[Mapping[str, Any]], trace: Trace, *, step: int, reward: Reward) -> ClaimedBatch:
        """One group per row."""
        texts = [row["prompt"] for row in rows for _ in range(trace.samples)]
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        made = self.model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=trace.new_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = made.sequences[:, inputs["input_ids"].shape[1] :]
        logprobs = torch.stack([torch.log_softmax(logits.float(), -1) for logits in made.logits], 1)
        logprobs = logprobs.gather(2, new.unsqueeze(2)).squeeze(2)
        groups = []
        for number, row in enumerate(rows):
            at = range(number * trace.samples, (number + 1) * trace.samples)
            truth = row["reward_model"]["ground_truth"]
            samples = [self._sample(i, new[k], logprobs[k], truth, reward) for i, k in enumerate(at)]
            prompt = np.asarray(self.tokenizer(row["prompt"], add_special_tokens=False)["input_ids"], dtype=np.int32)
            groups.append(GroupData(step * len(rows) + number, 4, {}, prompt, tuple(samples), {}))
        return ClaimedBatch(step, step - 1, False, tuple(groups), {})

    def _sample(self, index: int, ids: torch.Tensor, logprobs: torch.Tensor, truth: str, reward: Reward) -> SampleData:
        ends = (ids == self.tokenizer.eos_token_id).nonzero()
        length = int(ends[0]) + 1 if len(ends) else len(ids)
        text = self.tokenizer.decode(ids[:length], skip_special_tokens=True)
        return SampleData(
            index,
            ids[:length].numpy().astype(np.int32),
            logprobs[:length].clamp(max=0.0).numpy(),
            None,
            ((0, length),),
            "stop" if len(ends) else "length",
            reward(text, truth),
            {},
            {},
        )


def staged(backend: FSDP2Backend, plan: Plan) -> list[np.ndarray]:
    """The weights as they leave, in the plan's buckets."""
    buckets = [np.zeros(size, dtype=np.uint8) for size in plan.bucket_bytes]
    for tensor, (name, data) in zip(plan.tensors, backend.iter_hf_weights(), strict=True):
        assert tensor.name == name
        buckets[tensor.bucket][tensor.offset : tensor.offset + tensor.nbytes] = data
    return buckets


def changed_elements(old: list[np.ndarray], new: list[np.ndarray], plan: Plan) -> int:
    """Elements whose bits differ, counted without the encoder."""
    total = 0
    for tensor in plan.tensors:
        part = slice(tensor.offset, tensor.offset + tensor.nbytes)
        kind = f"<u{ITEM_BYTES[tensor.dtype]}"
        total += int((old[tensor.bucket][part].view(kind) != new[tensor.bucket][part].view(kind)).sum())
    return total


def run(task: str, model: Path, trace: Trace, gang: Gang, reward: Reward) -> dict[str, Any]:
    """Train; what every step would have cost on the way."""
    config = settings(task, model, trace)
    torch.manual_seed(trace.seed)
    backend = FSDP2Backend(config, gang)
    specs = [TensorSpec(spec.name, spec.dtype, spec.shape) for spec in backend.weight_specs()]
    plan = plan_buckets(specs, bucket_bytes=config.weightsync.bucket_bytes)
    groups = group_by_bucket(plan.tensors, len(plan.bucket_bytes))
    elements = sum(tensor.nbytes // ITEM_BYTES[tensor.dtype] for tensor in plan.tensors)
    old = staged(backend, plan)
    generator = Generator(model, plan, old, seed=trace.seed)
    rows = tasks.prompt_rows(task, trace.steps * trace.prompts, trace.seed)
    share, changed, encode_s, decode_s, rewards = [], [], [], [], []
    for step in range(1, trace.steps + 1):
        asked = rows[(step - 1) * trace.prompts : step * trace.prompts]
        batch = generator.batch(asked, trace, step=step, reward=reward)
        rewards.append(statistics.fmean(sample.reward for group in batch.groups for sample in group.samples))
        learner = config.learner
        found = batches.assemble(batch, algorithm=learner.algorithm, ranks=1, max_tokens=learner.micro_batch_tokens)
        result = train_step(found.shares[0], backend=backend, gang=gang, config=learner, step=step)
        assert not result.broken, result.broken
        new = staged(backend, plan)
        began = time.perf_counter()
        blobs = [delta.encode(*row) for row in zip(old, new, groups, strict=True)]
        encode_s.append(time.perf_counter() - began)
        decode_s.append(generator.take(blobs, new))
        share.append(sum(map(len, blobs)) / plan.nbytes)
        changed.append(changed_elements(old, new, plan) / elements)
        old = new
    return {
        "lr": trace.lr,
        "steps": trace.steps,
        "weights_bytes": plan.nbytes,
        "elements": elements,
        "share_of_full": summary(share),
        "changed_elements": summary(changed),
        "bytes_per_changed_element": round(sum(share) * plan.nbytes / max(1.0, sum(changed) * elements), 3),
        "encode_ms": summary([1e3 * s for s in encode_s]),
        "decode_ms": summary([1e3 * s for s in decode_s]),
        "encode_gb_per_s": round(plan.nbytes / statistics.median(encode_s) / 1e9, 3),
        "decode_gb_per_s": round(plan.nbytes / statistics.median(decode_s) / 1e9, 3),
        "reward_first_5": round(statistics.fmean(rewards[:5]), 3),
        "reward_last_5": round(statistics.fmean(rewards[-5:]), 3),
    }


def summary(values: list[float]) -> dict[str, float]:
    """Mean, median and largest."""
    found = {"mean": statistics.fmean(values), "median": statistics.median(values), "max": max(values)}
    return {name: float(f"{value:.4g}") for name, value in found.items()}
