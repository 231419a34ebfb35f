"""The reward worker in JavaScript against a real buffer service: `make test-node` installs its packages first."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from buffer_lab import ROOT, Make, Producer, claim, learner, sample
from test_reward_worker import CHARACTERS, IDS, ids_of
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from asyncrl.engine import GenDelta

EXAMPLE = ROOT / "examples" / "reward-worker-js"
LIMIT_S = 60.0
pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH"),
    pytest.mark.skipif(not (EXAMPLE / "node_modules").exists(), reason="npm ci has not run there: make test-node"),
]
ANSWERS = ("right", "wrong", "raise")
REWARD = """
export async function reward(sample) {
  if (sample.response === "raise") throw new Error("on purpose");
  return { score: Number(sample.response === sample.truth), length: sample.responseIds.length };
}
"""


def model_folder(path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"}))
    assert len(CHARACTERS) + 3 == len(IDS)
    return path


def answered(index: int, text: str) -> GenDelta:
    ids = np.append(ids_of(text), 2).astype(np.int32)
    found = sample(index, tokens=len(ids))
    return GenDelta(found.id, index, ids, found.logprobs, found.runs, "stop")


async def produce(address: str, groups: int) -> list[int]:
    """Unscored groups: one sample is right, one wrong; the reward of every sample of the last group raises."""
    producer = Producer(address)
    await producer.client.hello("model")
    done: list[int] = []
    try:
        while len(done) < groups:
            leases = await producer.lease(0, groups - len(done), wait_s=8.0)
            assert leases.leases, leases.reason
            for lease in leases.leases:
                texts = ["raise"] * 2 if len(done) == groups - 1 else ["right", "wrong"]
                reply = await producer.client.submit(
                    lease,
                    prompt_ids=ids_of("what"),
                    samples=[answered(i, texts[i]) for i in lease.missing],
                    digests={0: "d0"},
                    row={"prompt": "what", "reward_model": {"ground_truth": "right"}},
                )
                assert reply.accepted == lease.missing, reply
                done.append(lease.group)
    finally:
        producer.client.close()
    return done


def start(address: str, tmp_path: Path) -> subprocess.Popen[str]:
    (tmp_path / "reward.mjs").write_text(REWARD)
    return subprocess.Popen(
        [
            "node",
            str(EXAMPLE / "worker.mjs"),
            "--connect",
            address,
            "--model",
            str(model_folder(tmp_path / "model")),
            "--reward",
            str(tmp_path / "reward.mjs"),
            "--samples",
            "3",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_it_leases_scores_and_submits(make: Make, tmp_path: Path) -> None:
    service = make("sqlite", sampling__group_size="2", buffer__batch_groups="2").start()
    trainer = learner(service.address)
    groups = asyncio.run(produce(service.address, 3))
    worker = start(service.address, tmp_path)
    try:
        batch = claim(trainer, 1, wait_s=LIMIT_S)
        assert [group.group for group in batch.groups] == groups[:2]
        for group in batch.groups:
            rewards = {item.index: item.reward for item in group.samples}
            assert rewards == {0: 1.0, 1: 0.0}
            assert group.samples[0].parts == {"javascript": 1.0, "length": 6.0}
        worker.send_signal(signal.SIGTERM)
        output, _ = worker.communicate(timeout=LIMIT_S)
    finally:
        worker.kill()
        worker.wait(60)
        trainer.close()
    assert worker.returncode == 0, output
    assert f"group {groups[2]} sample 0: raised: on purpose" in output, output


def test_the_vectors_hold_in_javascript() -> None:
    found = subprocess.run(
        ["node", "--test", "vectors.test.mjs"],
        cwd=EXAMPLE,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert found.returncode == 0 and "# fail 0" in found.stdout and "# pass 7" in found.stdout, found.stdout
