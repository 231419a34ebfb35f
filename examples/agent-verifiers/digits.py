"""A taskset of verifiers 0.4 that a tiny model can learn: answer in digits below 5."""

import verifiers.v1 as vf

__all__ = ["DigitsTaskset"]
WANTED = set("01234")


class DigitsData(vf.TaskData):
    """Nothing but the prompt."""


class DigitsTask(vf.Task[DigitsData]):
    """The reward is the share of wanted letters."""

    @vf.reward(weight=1.0)
    async def wanted(self, trace: vf.Trace) -> float:
        text = trace.last_reply or ""
        return sum(letter in WANTED for letter in text) / max(1, len(text))


class DigitsConfig(vf.TasksetConfig):
    num_tasks: int = 64


class DigitsTaskset(vf.Taskset[DigitsTask, DigitsConfig]):
    def load(self) -> list[DigitsTask]:
        return [DigitsTask(DigitsData(prompt=f"{n}+"), self.config.task) for n in range(self.config.num_tasks)]
