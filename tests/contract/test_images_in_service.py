"""Images between real clients and a real buffer service: stored once, fetched by digest, compared with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from buffer_lab import ROOT, Make, Producer, Service, claim, history, learner, sample
from PIL import Image
from proxy import Link, Proxies, free_port
from vision_models import vision_folder

from asyncrl import wire
from asyncrl.config import parse
from asyncrl.errors import WorkError
from asyncrl.images.digests import image_digest
from buffers.client import learner as learner_client
from buffers.client import producer as producer_client
from buffers.client import reward as reward_client
from buffers.client.learner import LearnerClient
from buffers.client.producer import ProducerClient
from buffers.client.reward import RewardClient
from producers.engines.dataset import data_digest


def noise(seed: int, side: int = 320) -> bytes:
    """About 300 KB: the services of these tests take messages of 1 MiB."""
    buffer = BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (side, side, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


IMAGES = {image_digest(data): data for data in map(noise, range(4))}
HEX = list(IMAGES)


@pytest.fixture(params=["same host", "remote"])
def remote(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the clients do not see the folder of the run."""
    if request.param == "remote":
        for module in (producer_client, learner_client, reward_client):
            monkeypatch.setattr(module, "shared_folder", lambda *_: None)
    return bool(request.param == "remote")


@pytest.fixture
def service(make: Make) -> Iterator[Service]:
    yield make().start()


async def send(address: str, rows: list[list[str]], rewards: bool = True) -> ProducerClient:
    """Answer groups 0, 1, ... with rows of these images; every image is offered twice."""
    producer = Producer(address)
    await producer.client.hello("model")
    for digests in rows:
        [lease] = (await producer.lease(count=1)).leases
        images = {digest: IMAGES[digest] for digest in digests}
        await producer.client.store_images(images)
        await producer.client.store_images(images)
        samples = [sample(index) for index in lease.missing]
        await producer.client.submit(
            lease,
            prompt_ids=np.array([7], np.int32),
            samples=samples,
            digests={0: "d0"},
            row={"images": digests, "ground_truth": ""},
            rewards={item.index: float(item.index) for item in samples} if rewards else {},
        )
    return producer.client


def produce(address: str, rows: list[list[str]], rewards: bool = True) -> None:
    async def work() -> None:
        (await send(address, rows, rewards)).close()

    asyncio.run(work())


def count_asked(client: Any, monkeypatch: pytest.MonkeyPatch) -> list[wire.FetchImages]:
    """The requests for images that a client sends from now on."""
    asked: list[wire.FetchImages] = []
    ask = client._ask

    def watch(message: wire.Message, *args: Any, **more: Any) -> Any:
        asked.extend([message] if isinstance(message, wire.FetchImages) else [])
        return ask(message, *args, **more)

    monkeypatch.setattr(client, "_ask", watch)
    return asked


def test_a_claimed_batch_has_the_images_of_its_rows(
    service: Service, remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = learner(service.address)
    produce(service.address, [HEX[:3], [HEX[0], HEX[3]], [HEX[3]], []])
    stored = {path.name: path.read_bytes() for path in service.run.images.rglob("*") if path.is_file()}
    assert stored == IMAGES
    sent = service.status()["counters"].get("image_bytes", 0)
    assert sent == (sum(map(len, IMAGES.values())) if remote else 0), "each image crosses the socket once, or never"
    asked = count_asked(client, monkeypatch)
    batch = claim(client, 1)
    assert batch.images == IMAGES and not batch.invalid
    assert len(asked) == (4 if remote else 0), "300 KB each, half of 1 MiB in an answer"
    client.commit(step=1, version=1, digest="d1")
    again = claim(client, 2)
    assert again.images == {HEX[3]: IMAGES[HEX[3]]} and len(asked) == (4 if remote else 0), "what was seen is kept"
    client.close()


def test_an_image_that_vanished_is_stored_again(service: Service) -> None:
    async def work() -> list[bool]:
        producer = Producer(service.address)
        await producer.client.hello("model")
        found = []
        for _ in range(2):
            await producer.client.store_images({HEX[0]: IMAGES[HEX[0]]})
            [file] = service.run.images.glob(f"??/{HEX[0]}")
            found.append(file.read_bytes() == IMAGES[HEX[0]])
            file.unlink()
        producer.client.close()
        return found

    assert asyncio.run(work()) == [True, True]


SAMPLES = 64  # of a prompt
SUBMITS = 4


@pytest.fixture
def proxies() -> Iterator[Proxies]:
    made = Proxies()
    yield made
    made.close()


def resend_after(client: Any, seconds: float) -> None:
    """When a request without an answer is sent again: late, because a busy machine may be silent for seconds."""
    client._requester._resend_s = seconds


def through(proxies: Proxies, port: int) -> tuple[Link, dict[str, bytearray]]:
    """A link to the service, and what crosses it in both ways."""
    link = proxies.link(port)
    return link, {way: link.record(way) for way in ("up", "down")}


def assert_once(crossed: dict[str, bytearray], way: str, images: list[str]) -> None:
    """These images crossed this way once, others and the other way never, in no encoding."""
    for name, data in crossed.items():
        found = {digest: bytes(data).count(IMAGES[digest]) for digest in HEX}
        assert found == {digest: int(name == way and digest in images) for digest in HEX}
        rest = len(data) - sum(len(IMAGES[digest]) for digest, count in found.items() if count)
        assert rest < min(map(len, IMAGES.values())), "nor as base64 in a row"


async def make_groups(address: str, name: str, rows: list[list[str]]) -> None:
    """Groups of 64 samples in 4 submits, all at once, as a producer does it on a host without the folder."""
    producer = Producer(address, name)
    resend_after(producer.client, 100)
    await producer.client.hello("model")
    leases: list[wire.Lease] = []
    while len(leases) < len(rows):
        leases += (await producer.lease(count=len(rows) - len(leases), wait_s=8.0)).leases

    async def group(lease: wire.Lease, digests: list[str]) -> None:
        await producer.client.store_images({digest: IMAGES[digest] for digest in digests})
        size = SAMPLES // SUBMITS
        for start in range(0, SAMPLES, size):
            samples = [sample(index) for index in lease.missing[start : start + size]]
            reply = await producer.client.submit(
                lease,
                prompt_ids=np.array([7], np.int32),
                samples=samples,
                digests={0: "d0"},
                row={"images": digests, "ground_truth": ""},
            )
            assert len(reply.accepted) == size

    await asyncio.gather(*map(group, leases, rows))
    producer.client.close()


async def score(address: str, samples: int) -> None:
    """A reward worker that looks at the images of every sample."""
    worker = RewardClient(address, name="r0", timeout_s=60)
    resend_after(worker, 100)
    await worker.hello()
    while samples:
        tasks, _ = await worker.work(max_samples=24, wait_s=8.0)
        images, problems = await worker.images(digest for task in tasks for digest in task.row["images"])
        assert tasks and images and not problems
        scores = [wire.Score(task.item.group, task.item.index, task.item.token, 1.0) for task in tasks]
        await worker.submit(scores)
        samples -= len(tasks)
    worker.close()


def test_each_image_crosses_each_socket_once(make: Make, proxies: Proxies) -> None:
    """Two producers, a reward worker and a learner on other hosts; two images per prompt, which prompts share."""
    port = free_port()
    service = make(
        sampling__group_size=str(SAMPLES), network__buffer=f"tcp://127.0.0.1:{port}", buffer__lease_timeout_s="200"
    ).start()
    (service.run.segments / "nonce").unlink()  # by it clients know that they see the folder
    link, at_learner = through(proxies, port)
    client = learner(link.address)
    resend_after(client, 100)
    a, b, c, d = HEX
    for name, rows in {"p0": [[a, b], [a, c]], "p1": [[b, a], [b, d]]}.items():
        link, crossed = through(proxies, port)
        asyncio.run(make_groups(link.address, name, rows))
        assert_once(crossed, "up", [digest for row in rows for digest in row])
    link, crossed = through(proxies, port)
    asyncio.run(score(link.address, 4 * SAMPLES))
    assert_once(crossed, "down", HEX)
    for step in (1, 2):
        batch = claim(client, step)
        assert len(batch.groups) == 2 and not batch.invalid
        client.commit(step=step, version=step, digest=f"d{step}")
    assert_once(at_learner, "down", HEX)
    client.close()


def test_a_slow_connection_carries_an_image_once(make: Make, proxies: Proxies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent again before it could arrive, a large image would never get through."""
    monkeypatch.setattr(producer_client, "SLOWEST", 1 << 12)
    port = free_port()
    service = make(network__buffer=f"tcp://127.0.0.1:{port}").start()
    (service.run.segments / "nonce").unlink()

    async def work() -> None:
        (up, stored), (down, fetched) = through(proxies, port), through(proxies, port)
        producer = ProducerClient(up.address, name="p0", timeout_s=60)
        worker = RewardClient(down.address, name="r0", timeout_s=60)
        for client, link in ((producer, up), (worker, down)):
            await client.hello("model")
            resend_after(client, 0.3)
            link.delay_s = 0.5
        await producer.store_images({HEX[0]: IMAGES[HEX[0]]})
        assert_once(stored, "up", HEX[:1])
        assert (await worker.images(HEX[:1]))[0]
        assert_once(fetched, "down", HEX[:1])
        producer.close()
        worker.close()

    asyncio.run(work())


def test_an_image_that_is_gone_or_changed_sets_its_group_aside(service: Service, remote: bool) -> None:
    client = learner(service.address)
    produce(service.address, [[HEX[0]], [HEX[1]], [HEX[2]], [HEX[3]]])
    (service.run.images / HEX[0][:2] / HEX[0]).unlink()
    (service.run.images / HEX[3][:2] / HEX[3]).write_bytes(noise(9))
    first = claim(client, 1)
    assert [group.group for group in first.groups] == [1] and list(first.images) == [HEX[1]]
    assert list(first.invalid) == [0] and "missing" in first.invalid[0]
    client.quarantine(step=1, groups=[0], reason=first.invalid[0])
    client.commit(step=1, version=1, digest="d1")
    second = claim(client, 2)
    assert [group.group for group in second.groups] == [2] and "changed" in second.invalid[3]
    client.close()


async def show(address: str, shown: list[str], rewards: bool = True) -> ProducerClient:
    """Answer group 0: the environment showed sample 0 the first of these images, each later sample the next ones."""
    producer = Producer(address)
    await producer.client.hello("model")
    [lease] = (await producer.lease(count=1)).leases
    await producer.client.store_images({digest: IMAGES[digest] for digest in shown})
    samples = [sample(index) for index in lease.missing]
    await producer.client.submit(
        lease,
        prompt_ids=np.array([7], np.int32),
        samples=samples,
        digests={0: "d0"},
        row={"images": HEX[:1], "ground_truth": ""},
        rewards=dict.fromkeys(lease.missing, 1.0) if rewards else {},
        masks={index: np.array([1, 0, 1], np.uint8) for index in lease.missing},
        images={index: ((1, shown[index]),) for index in lease.missing},
    )
    return producer.client


def test_images_of_later_turns_come_with_batch_and_reward_work(make: Make, remote: bool) -> None:
    """Those of the samples next to those of the row; one that is gone sets the group aside."""
    service = make(sampling__group_size="2", buffer__batch_groups="1", environment__name="chat").start()

    async def work() -> None:
        producer = await show(service.address, HEX[:3], rewards=False)
        worker = RewardClient(service.address, name="r0", timeout_s=60)
        await worker.hello()
        tasks, _ = await worker.work(max_samples=8, wait_s=8.0)
        assert {task.item.index: task.item.images for task in tasks} == {0: (HEX[0],), 1: (HEX[1],)}
        scores = [wire.Score(one.item.group, one.item.index, one.item.token, float(one.item.index)) for one in tasks]
        await worker.submit(scores, (), reward_version="v")
        worker.close()
        producer.close()

    client = learner(service.address)
    asyncio.run(work())
    batch = claim(client, 1)
    assert batch.images == {digest: IMAGES[digest] for digest in HEX[:2]}
    assert [one.images for one in batch.groups[0].samples] == [((1, HEX[0]),), ((1, HEX[1]),)]
    client.commit(step=1, version=1, digest="d1")
    (service.run.images / HEX[3][:2]).mkdir(exist_ok=True)
    asyncio.run(show(service.address, [HEX[0], HEX[3]])).close()
    (service.run.images / HEX[3][:2] / HEX[3]).unlink()
    second = claim(client, 2)
    assert not second.groups and "missing" in second.invalid[1]
    client.close()


def test_reward_workers_get_images_by_digest(service: Service, remote: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        producer = await send(service.address, [HEX[:2]], rewards=False)
        worker = RewardClient(service.address, name="r0", timeout_s=60)
        await worker.hello()
        tasks, _ = await worker.work(max_samples=8, wait_s=8.0)
        assert tasks and all(task.row["images"] == HEX[:2] for task in tasks)
        asked = count_asked(worker, monkeypatch)
        for _ in range(2):
            images, problems = await worker.images([*HEX[:2], *HEX[:2]])
            assert images == {digest: IMAGES[digest] for digest in HEX[:2]} and not problems
        assert len(asked) == (2 if remote else 0)
        images, problems = await worker.images([HEX[2], "nothing", HEX[0]])
        assert list(images) == [HEX[0]] and "missing" in problems[HEX[2]] and "no digest" in problems["nothing"]
        worker.close()
        producer.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("named", "data", "words"),
    [
        ("0" * 64, noise(0), "do not match"),
        ("../../x", noise(0), "do not match"),
        ("", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no reader of PNG"),
        ("", noise(0)[:30], "no reader of PNG"),
    ],
)
def test_the_service_takes_images_alone(service: Service, named: str, data: bytes, words: str) -> None:
    """A process of another host may send anything; what came with it is not stored either."""

    async def work() -> None:
        producer = ProducerClient(service.address, name="p0", timeout_s=60)
        await producer.hello("model")
        message = wire.StoreImages("p0", (HEX[0], named or image_digest(data)))
        with pytest.raises(WorkError, match=words) as refused:
            await producer._ask(message, (IMAGES[HEX[0]], data))
        assert refused.value.code == "image.invalid"
        producer.close()

    asyncio.run(work())
    assert not service.run.images.exists() or not any(service.run.images.rglob("*"))


def test_an_image_beyond_a_message_is_refused_by_its_size(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_client, "shared_folder", lambda *_: None)

    async def work() -> None:
        producer = ProducerClient(service.address, name="p0", max_bytes=1 << 20, timeout_s=60)
        await producer.hello("model")
        large = noise(5, side=640)
        with pytest.raises(WorkError, match="max_message_bytes") as refused:
            await producer.store_images({image_digest(large): large})
        assert refused.value.code == "image.invalid"
        producer.close()

    asyncio.run(work())


@pytest.mark.long
def test_a_producer_stores_images_before_its_samples(tmp_path: Path) -> None:
    """A real process that streams a data set in verl's form; a bad image sets its row aside with the reason."""
    model = vision_folder("qwen2_5_vl")
    rows = [
        {
            "prompt": [{"role": "user", "content": "<image>what colour?"}],
            "images": [{"bytes": data, "path": None}],
            "response": "red",
        }
        for data in (IMAGES[HEX[0]], b"<svg/>", IMAGES[HEX[1]], IMAGES[HEX[0]])
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    config = parse(
        f"""
        model.path = "{model}"
        data.path = "{tmp_path}/rows.parquet"
        data.shuffle = false
        data.max_image_pixels = 4096
        learner.mode = "sft"
        learner.steps = 4
        producers.engine = "dataset"
        sampling.group_size = 1
        buffer.batch_groups = 2
        buffer.store = "sqlite"
        run.dir = "{tmp_path}/run"
        """
    )
    service = Service(config).start()
    words = [sys.executable, "-m", "producers.main", "--config", str(service.run.config), "--name", "producer-0"]
    client = LearnerClient(service.address, name="learner", timeout_s=60)
    with (tmp_path / "producer.log").open("wb") as log:
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
    try:
        client.hello()
        client.register(step=0, ledger="", digests={0: data_digest(config)})
        batch = claim(client, 1, wait_s=60.0)
    finally:
        process.terminate()
        assert process.wait(60) == 0, (tmp_path / "producer.log").read_text()
        service.stop()
        client.close()
    named = {0: HEX[0], 2: HEX[1], 3: HEX[0]}  # row -> its image
    assert len(batch.groups) == 2 and not batch.invalid
    for group in batch.groups:
        digest = named[group.group % 4]
        assert group.row["images"] == [digest] and batch.images[digest] == IMAGES[digest]
    assert {path.name for path in service.run.images.rglob("*") if path.is_file()} <= set(HEX[:2])
    dead = {line["g"]: line["detail"] for line in history(service, "dead")}
    assert dead[1].startswith("image: no reader of PNG") and all(group % 4 == 1 for group in dead)


def test_an_answer_that_brings_nothing_on_ends_the_search() -> None:
    """A service that answers without an image, with another one, or with none of those asked for."""
    for answer, payloads in (
        (wire.Images(()), ()),
        (wire.Images((HEX[0],)), ()),
        (wire.Images((HEX[0],)), (IMAGES[HEX[1]],)),
        (wire.Images((HEX[1],)), (IMAGES[HEX[1]],)),
    ):
        search = LearnerClient("ipc:///tmp/none", name="learner")._images.search([HEX[0]])
        search.take_answer(wire.Packet(answer, payloads))
        assert not search.wanted and not search.images and search.problems[HEX[0]].startswith("image: ")
