"""An agent that knows nothing of training: the OpenAI client as it is, two turns, a score of its own.

Started by a producer (`environment.agent.command`, `sessions` above 1): a line of JSON on standard input for every
session, a line with the reward on standard output. The task: answer in digits below 5, twice.
"""

import json
import sys

from openai import OpenAI

WANTED = set("01234")


def play(client: OpenAI, job: dict) -> float:
    """One session; its reward: the share of letters that are wanted."""
    messages = [{"role": "user", "content": job["row"]["prompt"]}]
    shares = []
    for follow_up in ("+", ""):
        made = client.chat.completions.create(model=job["model"], messages=messages, max_tokens=job["row"]["letters"])
        text = made.choices[0].message.content or ""
        shares.append(sum(letter in WANTED for letter in text) / max(1, len(text)))
        messages += [made.choices[0].message, {"role": "user", "content": follow_up}]
    return sum(shares) / len(shares)


def main() -> None:
    """Session after session, until standard input ends."""
    client = None
    for line in sys.stdin:
        job = json.loads(line)
        client = client or OpenAI(base_url=job["base_url"], api_key=job["api_key"])
        print(play(client.with_options(api_key=job["api_key"]), job), flush=True)


if __name__ == "__main__":
    main()
