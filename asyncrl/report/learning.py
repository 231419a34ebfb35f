"""The chapter on learning: rewards, and metrics of the algorithm."""

from __future__ import annotations

from html import escape

from asyncrl.report.data import RunData
from asyncrl.report.html import card
from asyncrl.report.svg import Line, legend, line_chart

SMALL = (
    ("loss", "policy loss"), ("grad_norm", "gradient norm"), ("entropy", "entropy, nats"),
    ("ess", "effective sample size"), ("kl_behaviour", "KL to the behaviour policy"),
    ("clip_share", "clipped tokens, share"), ("response_length_mean", "response length, tokens"),
    ("truncated_share", "samples cut at the length limit, share"),
    ("zero_advantage_share", "groups without a signal, share"), ("logprob_gap_mean", "gap of log-probs, nats"),
    ("value_loss", "value loss of the critic"), ("explained_variance", "explained variance of the critic"),
    ("kl_reference", "KL to the reference"), ("pair_accuracy", "pairs ranked right, share"), ("lr", "learning rate"),
)  # fmt: skip
PART_COLOURS = ("s2", "s3", "s5", "s4", "s8", "s6")


def learning(data: RunData) -> str:
    """Reward with its spread, its parts, and the small multiples."""
    spread = {float(line["step"]): float(line.get("reward_std", 0.0)) for line in data.steps}
    rewards = data.values("reward_mean")
    band = [(y - spread.get(x, 0.0), y + spread.get(x, 0.0)) for x, y in rewards]
    names = sorted({name for line in data.steps for name in line if name.startswith("reward/")})
    lines = [Line("reward", rewards, "s1", band)]
    if len(names) > 1:
        lines += [
            Line(name.removeprefix("reward/"), data.values(name), colour)
            for name, colour in zip(names, PART_COLOURS, strict=False)
        ]
    curve = line_chart(lines, width=1000, height=260, smooth=True)
    note = "mean of the batch by step; the band is one standard deviation of its samples"
    reward = card("Reward", (legend(lines) if len(lines) > 1 else "") + curve, note=note, wide=True)
    small = "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f"{line_chart([Line(title, data.values(key), 's1')], width=320, height=150, x_label='', smooth=True)}</figure>"
        for key, title in SMALL
        if _moves(data, key)
    )
    return reward + (card("Training", f'<div class="small">{small}</div>', wide=True) if small else "")


def _moves(data: RunData, key: str) -> bool:
    """Whether a curve is worth showing: not constant 0, and not a constant learning rate."""
    values = {value for _, value in data.values(key)}
    return any(values) and (key != "lr" or len(values) > 1)
