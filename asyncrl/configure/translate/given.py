"""Settings of another trainer while they are translated: which are left, under which name they were given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from asyncrl.config.suggestions import translation_table

Values = dict[str, Any]
ENGINE_ARGS = "producers.engine_args"
#: Arguments of vLLM that are no engine_args here, and why.
NO_ENGINE_ARGS = {
    "model": "it is model.path",
    "dtype": "see producers.dtype",
    "max_num_seqs": "see producers.slots",
    "max_model_len": "it follows from data.max_prompt_tokens and sampling.max_new_tokens",
    "trust_remote_code": "see model.trust_remote_code",
    "data_parallel_size": "see producers.count",
    "enable_lora": "it follows from learner.lora.rank",
    "weight_transfer_config": "see [weightsync]",
    "worker_extension_cls": "the engine has its own",
    "logprobs_mode": "the engine chooses it",
    "max_logprobs": "the engine chooses it",
    "generation_config": "sampling is set in [sampling]",
    "swap_space": "vLLM has no such argument any more",
}


class Given:
    """Settings of another trainer; `left` are those that were not used yet, by their newest names."""

    def __init__(self, trainer: str, given: Mapping[str, Any]) -> None:
        names = translation_table()[trainer].get("older", {})
        self.called: dict[str, str] = {}
        self.left: Values = {}
        self.settings: Values = {}
        self.notes: list[str] = []
        for key, value in given.items():
            newest = names.get(key, key)
            if newest in self.left:
                self.note(newest, self.left[newest], f"{key} = {value!r} has the same meaning and comes later")
            self.called[newest] = key
            self.left[newest] = value

    def take(self, key: str, default: Any = None) -> Any:
        """Remove and return a value; the default if it is not set."""
        value = self.left.pop(key, None)
        return default if value is None else value

    def number(self, key: str, default: float = 0) -> float:
        """Return a number and keep it."""
        value = self.left.get(key)
        return value if isinstance(value, int | float) else default

    def whole(self, key: str, default: int = 0) -> int:
        """Remove and return a whole number; a note, and the default, if it is another value."""
        value = self.take(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        self.note(key, value, "no number")
        return default

    def take_table(self, prefix: str) -> Values:
        """Remove and return all values of a table, without their prefix."""
        return {
            key.removeprefix(prefix): value
            for key in list(self.left)
            if key.startswith(prefix) and (value := self.take(key)) is not None
        }

    def note(self, key: str, value: Any, why: str) -> None:
        """Note a value that is left out."""
        self.notes.append(f"{self.called.get(key, key)} = {value!r}: {why}")

    def unused(self, keys: Iterable[str], why: str) -> None:
        """Take values that have no effect here, with a note for each that is set."""
        for key in keys:
            value = self.take(key)
            if value is not None:
                self.note(key, value, why)

    def betas(self, key: str, section: str) -> None:
        """Take a pair of Adam's betas."""
        betas = self.take(key)
        if isinstance(betas, list | tuple) and len(betas) == 2:
            self.settings |= {f"{section}.beta1": betas[0], f"{section}.beta2": betas[1]}
        elif betas is not None:
            self.note(key, betas, "no pair of numbers")

    def warmup(self, key: str, section: str = "learner.optim", steps: float = 0) -> None:
        """Take the share of the steps over which the learning rate grows. `steps`: of the run; 0: not known."""
        share = self.take(key, 0)
        if isinstance(share, int | float) and share and steps > 0:
            self.settings.setdefault(f"{section}.warmup_steps", round(share * steps))
        elif share:
            self.note(key, share, f"set {section}.warmup_steps")

    def minibatches(self, whole: float, part: float, names: str) -> None:
        """Derive `learner.algorithm.minibatches` from a batch size and a mini-batch size."""
        if not whole or not part or whole == part:
            return
        if not isinstance(part, int | float) or whole % part:
            self.notes.append(f"{names}: {whole} / {part} is no whole number of mini-batches")
        else:
            self.settings["learner.algorithm.minibatches"] = int(whole // part)

    def trackers(self, names: Any) -> None:
        """Destinations of metrics that are known here; the files and TensorBoard are always written."""
        known = [
            name
            for name in ([names] if isinstance(names, str) else names if isinstance(names, list) else ())
            if name in ("wandb", "mlflow", "swanlab", "trackio")
        ]
        if known:
            self.settings["trackers.use"] = [*self.settings.get("trackers.use", ()), *known]

    def both_clips(self, key: str) -> None:
        """One clip for both sides."""
        both = self.take(key)
        if both is not None:
            self.settings |= {"learner.algorithm.clip_low": both, "learner.algorithm.clip_high": both}

    def options(self, key: str, values: Mapping[str, Any]) -> None:
        """Add to a table of options, such as `producers.engine_args`; None: not set."""
        given = {name: value for name, value in values.items() if value is not None}
        for name in NO_ENGINE_ARGS.keys() & given.keys() if key == ENGINE_ARGS else ():
            theirs = next((one for one in self.called.values() if one.replace("-", "_").endswith(name)), name)
            self.notes.append(f"{theirs} = {given.pop(name)!r}: {NO_ENGINE_ARGS[name]}")
        if given:
            self.settings[key] = {**self.settings.get(key, {}), **given}

    def bypass(self) -> None:
        """Take the sampling policy for the proximal one: no further weights, and no extra pass."""
        self.settings["learner.algorithm.proximal"] = "behaviour"
        self.settings.setdefault("learner.algorithm.loss", "ppo")
        self.settings["learner.algorithm.correction"] = "none"
        self.settings.pop("learner.algorithm.correction_options", None)
