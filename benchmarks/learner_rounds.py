"""A training step as bench_learner.py drives it: one process for each way, one JSON line in and out per step.

First line in: the setting with `way`; out: {"ready": resident bytes, "version": of TRL or transformers}. Then batches:
{"groups": [{"prompt": [ids], "responses": [[ids], ...], "rewards": [..]}, ...]}; out: {"seconds", "cpu": seconds of the
processor, "grad_norm", "peak": the most bytes resident meanwhile}. Ways:

- ours: `learners.step.resilient_step.StepRunner` on the FSDP2 backend, from a claimed batch to the updated weights;
- minimal: what one writes by hand in 60 lines, for one process and one loss: packed rows, full logits, AdamW;
- trl: `GRPOTrainer.train()` of TRL, in the Python of its own environment, fed by `rollout_func`: from its padded
  batch to the updated weights.
All train GRPO with advantages normalised by group, a clipped ratio, the mean over all tokens, float32, AdamW.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from children import Answers, forget_peak, resident  # noqa: E402, RUF100

CLIP = (0.8, 1.28)


class Ours:
    """The learner's step, as its loop makes it."""

    def __init__(self, given: dict[str, Any]) -> None:
        from bench_packing import Setting, make_config

        from learners.backends.fsdp2.backend import FSDP2Backend
        from learners.gang.gang import Gang
        from learners.step.resilient_step import StepRunner

        setting = Setting(cap=given["cap"], budget=given["budget"])
        # The others know of no behaviour policy.
        config = make_config(Path(given["model"]), setting, ["learner.algorithm.correction=none", *given["overrides"]])
        gang = Gang.join(config)
        backend = FSDP2Backend(config, gang)
        backend.self_check()
        self.trial = StepRunner(config.learner, gang=gang, backend=backend, say=str, quarantine=lambda *_: None)
        self.step = 0

    def take(self, groups: list[dict[str, Any]]) -> Any:
        """What a claim brings."""
        import numpy as np

        from asyncrl.wire.batch_arrays import ClaimedBatch, GroupData, SampleData

        def sample(index: int, ids: list[int], reward: float) -> SampleData:
            response = np.array(ids, np.int32)
            behaviour = np.full(response.size, -1, np.float32)
            return SampleData(index, response, behaviour, None, ((0, response.size),), "stop", reward, {}, {})

        self.step += 1
        return ClaimedBatch(
            self.step,
            0,
            False,
            tuple(
                GroupData(
                    number,
                    4,
                    {},
                    np.array(group["prompt"], np.int32),
                    tuple(
                        sample(index, *pair)
                        for index, pair in enumerate(zip(group["responses"], group["rewards"], strict=True))
                    ),
                    {},
                )
                for number, group in enumerate(groups)
            ),
            {},
        )

    def train(self, batch: Any) -> float:
        """One step; the norm of its gradient."""
        batch, shares = self.trial.cut(batch)
        result, _ = self.trial.train(shares[0], step=self.step, batch=batch)
        assert not result.broken and not result.skipped, result
        return result.metrics["grad_norm"]


class Minimal:
    """By hand."""

    def __init__(self, given: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from learners.models.attention import install

        self.budget = given["budget"]
        self.model: Any = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
        install(self.model)  # attention by sequence: nobody would write it slower by hand
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)

    def take(self, groups: list[dict[str, Any]]) -> Any:
        """Prompt, response and reward of each sample, by group."""
        import numpy as np

        return [
            (np.array(group["prompt"]), [np.array(ids) for ids in group["responses"]], np.array(group["rewards"]))
            for group in groups
        ]

    def train(self, batch: Any) -> float:
        """One step; the norm of its gradient."""
        import numpy as np
        import torch

        samples, tokens = [], 0
        for prompt, responses, rewards in batch:
            advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            for response, advantage in zip(responses, advantages, strict=True):
                samples.append((np.concatenate((prompt, response)), prompt.size, advantage))
                tokens += response.size
        for row in self.rows(samples):
            ids = torch.from_numpy(np.concatenate([ids for ids, _, _ in row]))
            places = torch.cat([torch.arange(ids.size) for ids, _, _ in row])
            start, where, advantages = 0, [], []
            for one, prompt_tokens, advantage in row:
                where.append(torch.arange(start + prompt_tokens - 1, start + one.size - 1))
                advantages.append(torch.full((one.size - prompt_tokens,), advantage, dtype=torch.float32))
                start += one.size
            at, gain = torch.cat(where), torch.cat(advantages)
            hidden = self.model.model(input_ids=ids[None], position_ids=places[None], use_cache=False)
            logits = self.model.lm_head(hidden.last_hidden_state[0, at])
            logprobs = logits.log_softmax(-1).gather(-1, ids[at + 1, None]).squeeze(-1)
            ratio = (logprobs - logprobs.detach()).exp()
            (-torch.minimum(ratio * gain, ratio.clamp(*CLIP) * gain).sum() / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def rows(self, samples: list[Any]) -> list[list[Any]]:
        """First fit, the longest first."""
        rows: list[list[Any]] = []
        for sample in sorted(samples, key=lambda one: -one[0].size):
            for row in rows:
                if sum(one[0].size for one in row) + sample[0].size <= self.budget:
                    row.append(sample)
                    break
            else:
                rows.append([sample])
        return rows


def serve(given: dict[str, Any], answers: Answers) -> None:
    """`ours` and `minimal`."""
    import transformers

    way = {"ours": Ours, "minimal": Minimal}[given["way"]](given)
    answers.say({"ready": resident("VmRSS"), "version": transformers.__version__})
    while (line := answers.hear()) is not None:
        batch = way.take(line["groups"])
        forget_peak()
        wall, cpu = time.perf_counter(), time.process_time()
        norm = way.train(batch)
        answers.say(
            {
                "seconds": time.perf_counter() - wall,
                "cpu": time.process_time() - cpu,
                "grad_norm": norm,
                "peak": resident("VmHWM"),
            }
        )


def trl_settings(given: dict[str, Any], out: str) -> Any:
    """TRL's configuration for the loss and the update of the other ways."""
    from trl import GRPOConfig

    samples = given["groups"] * given["samples"]
    return GRPOConfig(
        out,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        learning_rate=1e-6,
        beta=0.0,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        loss_type="dapo",
        epsilon_high=0.28,
        per_device_train_batch_size=given["trl_rows"],
        num_generations=given["samples"],
        gradient_accumulation_steps=samples // given["trl_rows"],
        max_completion_length=given["cap"],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        max_steps=1000,
        model_init_kwargs={"dtype": "float32"},
    )


def serve_trl(given: dict[str, Any], answers: Answers) -> None:
    """The trainer's own loop; it asks for the next batch as it would for generation."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer, __version__

    now: dict[str, Any] = {}

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        if "seconds" in now:
            answers.say({name: now.pop(name) for name in ("seconds", "cpu", "grad_norm", "peak")})
        line = answers.hear()
        if line is None:
            raise KeyboardInterrupt
        flat = [
            (group["prompt"], ids, reward)
            for group in line["groups"]
            for ids, reward in zip(group["responses"], group["rewards"], strict=True)
        ]
        assert len(flat) == len(prompts)
        now["rewards"] = [reward for _, _, reward in flat]
        return {
            "prompt_ids": [prompt for prompt, _, _ in flat],
            "completion_ids": [ids for _, ids, _ in flat],
            "logprobs": None,
        }

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            forget_peak()
            now["wall"], now["cpu"] = time.perf_counter(), time.process_time()
            return batch

    class Stop(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            now["seconds"] = time.perf_counter() - now.pop("wall")
            now["cpu"] = time.process_time() - now["cpu"]
            now["peak"] = resident("VmHWM")

        def on_log(self, *given: Any, logs: dict[str, Any], **_: Any) -> None:
            now["grad_norm"] = logs.get("grad_norm")

    with tempfile.TemporaryDirectory() as out:
        trainer = Timed(
            given["model"],
            reward_funcs=lambda completions, **_: now["rewards"],
            processing_class=AutoTokenizer.from_pretrained(given["model"]),
            train_dataset=Dataset.from_dict({"prompt": ["1"] * 10_000}),
            rollout_func=rollout,
            callbacks=[Stop()],
            args=trl_settings(given, out),
        )
        answers.say({"ready": resident("VmRSS"), "version": __version__})
        try:
            trainer.train()
        except KeyboardInterrupt:
            return


def main() -> None:
    """Serve until the input ends."""
    import torch

    answers = Answers()
    given = answers.hear()
    torch.set_num_threads(given["threads"])
    (serve_trl if given["way"] == "trl" else serve)(given, answers)


if __name__ == "__main__":
    main()
