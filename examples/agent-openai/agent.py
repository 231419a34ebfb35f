"""An agent without training code: the plain OpenAI client, two turns, and its own score.

A producer starts it (`environment.agent.command`, `sessions` above 1). It reads one line of JSON per session from
standard input and writes one line with the reward to standard output. The task: answer twice in digits below 5.
"""

import json
import sys

from openai import OpenAI

WANTED = set("01234")


def play(client: OpenAI, job: dict) -> float:
    """Play one session and return its reward: the share of wanted letters."""
    messages = [{"role": "user", "content": job["row"]["prompt"]}]
    shares = []
    for follow_up in ("+", ""):
        made = client.chat.completions.create(model=job["model"], messages=messages, max_tokens=job["row"]["letters"])
        text = made.choices[0].message.content or ""
        shares.append(sum(letter in WANTED for letter in text) / max(1, len(text)))
        messages += [made.choices[0].message, {"role": "user", "content": follow_up}]
    return sum(shares) / len(shares)


def main() -> None:
    """Play sessions until standard input ends."""
    client = None
    for line in sys.stdin:
        job = json.loads(line)
        client = client or OpenAI(base_url=job["base_url"], api_key=job["api_key"])
        print(play(client.with_options(api_key=job["api_key"]), job), flush=True)


if __name__ == "__main__":
    main()
